"""Pictures of a report: bars of the ratios to XLA, and every speed under the roofline."""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench import study
from bench.claims import Claim, spread
from bench.report import MODES, Mode, Report, ratios_of


def ratio_bars(report: Report) -> bytes:
    """Returns a PNG with a bar for each peer's ratio to XLA on each case."""
    figure, axes = _axes(len(MODES), height=4.2)
    for axis, mode in zip(axes, MODES, strict=True):
        _bars(axis, report, mode)
    axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, 1.25), ncols=6, frameon=False)
    return _png(figure)


def roofline(report: Report) -> bytes:
    """Returns a PNG with each peer's speed over the operations per byte of the case."""
    figure, axes = _axes(1, height=5.5)
    axis = axes[0]
    for peer in _peers(report):
        rows = [row for row in report.rows if row.peer == peer and row.timing("burst")]
        axis.scatter(
            [row.flops / row.bytes for row in rows],
            [(row.flops_per_second("burst") or 0) / 1e12 for row in rows],
            s=18,
            label=peer,
        )
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s, burst")
    # The roofs are drawn over what the points span.
    low, high = axis.get_xlim()
    for dtype, speeds in report.limits.flops_per_second.items():
        roof = speeds["burst"] / 1e12
        axis.axhline(roof, linewidth=0.8, linestyle="--", color="grey")
        axis.annotate(f"{dtype} limit", (low, roof), fontsize=8, va="bottom")
    if report.limits.bytes_per_second:
        slope = report.limits.bytes_per_second / 1e12
        ends = (low, min(high, 3000 / slope))
        axis.plot(ends, [x * slope for x in ends], linewidth=0.8, linestyle="--", color="grey")
    axis.set_xlim(low, high)
    axis.legend(frameon=False)
    axis.set_title(str(report.environment["device"]))
    return _png(figure)


def _bars(axis: Any, report: Report, mode: Mode) -> None:
    peers = [peer for peer in _peers(report) if peer != "xla"]
    cases = list(dict.fromkeys(row.case for row in report.rows))
    width = 0.8 / max(1, len(peers))
    lowest = 1.0
    for place, peer in enumerate(peers):
        ratios = ratios_of(report.rows, peer, mode)
        at = [
            i + (place - (len(peers) - 1) / 2) * width
            for i, case in enumerate(cases)
            if case in ratios
        ]
        heights = [ratios[case] for case in cases if case in ratios]
        lowest = min([lowest, *heights])
        axis.bar(at, heights, width, label=peer)
    axis.axhline(1.0, linewidth=0.8, color="black")
    axis.set_ylim(bottom=max(0.0, min(0.8, lowest - 0.05)))
    axis.set_ylabel(f"x XLA, {mode}")
    axis.set_xticks(range(len(cases)), cases, rotation=20, ha="right", fontsize=7)


def _peers(report: Report) -> list[str]:
    return list(dict.fromkeys(row.peer for row in report.rows))


def _axes(rows: int, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    # Not through pyplot, which would look for a display and keep every figure.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, rows * height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.ravel())


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def orders(records: Iterable[Mapping[str, str]], heading: str) -> bytes:
    """Returns a PNG that shows the speed of each order of a study over the traffic it causes.

    Args:
        records: The rows of the study's CSV; orders that are computed on-line are left out.
        heading: The product, and the GPU.
    """
    tables: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for record in records:
        if record["how"] == "offline" and record["burst_ratio"]:
            tables.setdefault((record["persistence"], record["cluster"]), []).append(record)
    columns = len({cluster for _, cluster in tables})
    figure, axes = _axes(-(-len(tables) // columns), height=3.4, columns=columns)
    for axis, ((persistence, cluster), table) in zip(axes, tables.items(), strict=False):
        words = {"none": "not persistent"}.get(persistence, f"persistent, {persistence}")
        axis.set_title(f"{words}, cluster {cluster}", fontsize=10)
        _order_dots(axis, table)
    for axis in axes[-columns:]:
        axis.set_xlabel("predicted traffic, GB through the L2 (from DRAM counted three times)")
    tile = next(iter(tables.values()))[0]["tile"]
    figure.suptitle(
        f"{heading}, tiles of {tile}: speed over predicted traffic\n"
        "full dots: burst; rings: sustained; 1 is XLA's product in the same run"
    )
    return _png(figure)


def _order_dots(axis: Any, table: Sequence[Mapping[str, str]]) -> None:
    """Draws a dot and a ring for each order, and its name on the right at the height of the dot."""
    spots = sorted(
        (float(record["burst_ratio"]), _traffic(record) / 1e9, record["order"]) for record in table
    )
    ratios, costs, names = zip(*spots, strict=True)
    axis.scatter(costs, ratios, s=22, color="C0", zorder=3)
    sustained = [
        (_traffic(r) / 1e9, float(r["sustained_ratio"])) for r in table if r["sustained_ratio"]
    ]
    axis.scatter(*zip(*sustained, strict=True), s=22, facecolor="none", edgecolor="C1", zorder=2)
    axis.set_ylabel("x XLA")
    axis.margins(y=0.1)
    low, high = axis.get_ylim()
    line = (high - low) / 12
    at = low - line
    for ratio, cost, name in zip(ratios, costs, names, strict=True):
        at = max(at + line, min(ratio, high - line * (len(names) - names.index(name))))
        axis.annotate(
            name,
            (cost, ratio),
            xytext=(1.03, at),
            textcoords=("axes fraction", "data"),
            fontsize=8,
            va="center",
            arrowprops={"arrowstyle": "-", "color": "0.75", "linewidth": 0.6},
        )


def _traffic(record: Mapping[str, str]) -> float:
    return study.traffic_cost(
        float(record["model_l2_sectors"]), float(record["model_dram_read_bytes"])
    )


def claims(found: Sequence[Claim], heading: str) -> bytes:
    """Returns a PNG with a line for each claim: a dot for each case, and its ratio to the peer.

    Args:
        found: The claims, the first at the top.
        heading: The GPU and the conditions.
    """
    figure, (axis,) = _axes(1, height=5.6)
    both = next(place for place, claim in enumerate(found) if claim.burst and claim.sustained)
    for place, claim in enumerate(found):
        for mode, style in (("burst", "o"), ("sustained", "|")):
            ratios = list(getattr(claim, mode).values())
            axis.plot(
                ratios,
                [place] * len(ratios),
                style,
                color="tab:blue" if mode == "burst" else "tab:orange",
                alpha=0.6,
                markersize=6 if mode == "burst" else 11,
                label=mode if place == both else None,
            )
        words = spread(claim.burst or claim.sustained)
        axis.annotate(words, (1.01, place), xycoords=("axes fraction", "data"), va="center")
    names = [f"{claim.product}\nbeside {claim.peer}".replace("`", "") for claim in found]
    axis.set_yticks(range(len(found)), names, fontsize=8)
    axis.invert_yaxis()
    axis.axvline(1.0, linewidth=0.8, color="black")
    axis.set(xscale="log", xlabel="times as fast as the peer (logarithmic)")
    ticks = (1, 1.5, 2, 3, 5, 10, 30, 100)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.grid(axis="x", linewidth=0.4)
    axis.minorticks_off()
    axis.legend(loc="lower right", frameon=False)
    figure.suptitle(heading)
    return _png(figure)
