"""Pictures of a report: bars of the ratios to XLA, and every speed under the roofline."""

import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench import study
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


def _axes(
    rows: int, height: float, columns: int = 1, widths: Sequence[float] | None = None
) -> tuple[Any, list[Any]]:
    # Not through pyplot, which would look for a display and keep every figure.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, rows * height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, width_ratios=widths)
    return figure, list(axes.ravel())


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def orders(records: Iterable[Mapping[str, str]], heading: str) -> bytes:
    """Returns a PNG that shows the speed of each order of a study over the traffic it causes.

    Args:
        records: The rows of the study's CSV; orders that are computed on-line are left out.
        heading: What was multiplied, and on what.
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


@dataclasses.dataclass(frozen=True)
class Panel:
    """One panel of a summary.

    Attributes:
        title: What its products have in common.
        records: The rows of a benchmark's CSV.
        cases: What each case is called, in the order in which they are shown.
        peers: What each peer is called; XLA is the line at 1, from which bars go up or down.
    """

    title: str
    records: Sequence[Mapping[str, str]]
    cases: Mapping[str, str]
    peers: Mapping[str, str]


def summary(panels: Sequence[Panel], heading: str) -> bytes:
    """Returns a PNG with the ratios to XLA of a few products, burst above sustained, quartiles too.

    Args:
        panels: What is shown side by side, each on a scale of its own.
        heading: What was multiplied, and on what.
    """
    figure, axes = _axes(
        len(MODES),
        height=2.9,
        columns=len(panels),
        widths=[len(p.cases) * max(2, len(p.peers)) for p in panels],
    )
    for row, mode in enumerate(MODES):
        for column, panel in enumerate(panels):
            axis = axes[row * len(panels) + column]
            if row == 0:
                axis.set_title(panel.title, fontsize=10)
            else:
                axis.sharey(axes[column])
            _panel(axis, panel, mode)
            if column == 0:
                axis.set_ylabel(f"{mode}, times as fast as XLA")
    axes[0].legend(loc="lower left", frameon=False, fontsize=8)
    figure.suptitle(heading)
    return _png(figure)


def _panel(axis: Any, panel: Panel, mode: Mode) -> None:
    found = {(record["case"], record["peer"]): record for record in panel.records}
    width = 0.8 / len(panel.peers)
    for place, (peer, label) in enumerate(panel.peers.items()):
        rows = [found[case, peer] for case in panel.cases]
        middle, low, high = (
            [float(row[f"{mode}_ratio{end}"]) for row in rows] for end in ("", "_low", "_high")
        )
        at = [i + (place - (len(panel.peers) - 1) / 2) * width for i in range(len(rows))]
        spread = [
            [m - x for m, x in zip(middle, low, strict=True)],
            [x - m for m, x in zip(middle, high, strict=True)],
        ]
        heights = [ratio - 1 for ratio in middle]
        axis.bar(
            at, heights, width * 0.92, 1, yerr=spread, label=label, error_kw={"linewidth": 0.8}
        )
        if place == 0:
            for x, y, top in zip(at, middle, high, strict=True):
                axis.annotate(f"{y:.2f}", (x, top), ha="center", va="bottom", fontsize=8)
    axis.axhline(1.0, linewidth=0.8, color="black")
    axis.margins(y=0.14)
    axis.set_xticks(range(len(panel.cases)), list(panel.cases.values()), fontsize=8)
