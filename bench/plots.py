"""Pictures of a report: bars of the ratios to XLA, and every speed under the roofline."""

import io
from collections.abc import Sequence
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


def _axes(rows: int, height: float) -> tuple[Any, list[Any]]:
    # Not through pyplot, which would look for a display and keep every figure.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, rows * height), layout="constrained")
    return figure, [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def orders(rows: Sequence[study.Row]) -> bytes:
    """Returns a PNG that shows the speed of each order of a study over the traffic it causes."""
    tables = study.tables(rows)
    figure, axes = _axes(len(MODES), height=4.2)
    for axis, mode in zip(axes, MODES, strict=True):
        for (persistence, cluster), table in tables.items():
            timed = [row for row in table if row.result and getattr(row.result, mode)]
            axis.scatter(
                [study.traffic_cost(row.prediction) / 1e9 for row in timed],
                [getattr(row.result, mode).ratio.median for row in timed],
                s=16,
                label=f"{persistence}, {cluster[0]}x{cluster[1]}",
            )
        axis.set_ylabel(f"x XLA, {mode}")
    axes[-1].set_xlabel("predicted cost of the traffic, GB of L2 bytes")
    axes[0].legend(frameon=False, ncols=3, fontsize=8)
    return _png(figure)
