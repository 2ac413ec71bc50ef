"""What a benchmark found: a table, CSV, JSON; and two runs compared."""

import csv
import dataclasses
import io
import json
import pathlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from bench.command import WIDTH, RequestError
from pallas_gemm.computer import user_folder
from pallas_gemm.tuning.measure import Result, Spread, Timing

Status = Literal["ok", "refused", "failed", "wrong"]
Mode = Literal["burst", "sustained"]
MODES: tuple[Mode, ...] = ("burst", "sustained")

_PEER = 15
_MODE = 9


@dataclasses.dataclass(frozen=True)
class Row:
    """One peer on one case.

    Attributes:
        case: Name of the case.
        source: Where the case comes from.
        peer: Name of the peer.
        status: Whether it was timed, and if not, why: it refused the case, broke, or was wrong.
        note: Which candidate was taken, or the reason.
        flops: Operations of a call.
        bytes: The fewest bytes that a call can move.
        error: Largest error of a tile in units of XLA's, if the result was looked at.
        result: The measurement, if it was timed.
    """

    case: str
    source: str
    peer: str
    status: Status
    note: str
    flops: int
    bytes: int
    error: float | None = None
    result: Result | None = None

    def timing(self, mode: Mode) -> Timing | None:
        """Returns what was measured in one mode, or None."""
        return getattr(self.result, mode) if self.result else None

    def flops_per_second(self, mode: Mode) -> float | None:
        """Returns the speed in one mode, or None."""
        timing = self.timing(mode)
        return self.flops / timing.seconds.median if timing else None


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of the chip, measured in the same run.

    Attributes:
        flops_per_second: By dtype and mode, of a kernel that only issues WGMMA.
        bytes_per_second: The speed of a copy, read and written bytes together; None if not
            measured.
    """

    flops_per_second: Mapping[str, Mapping[str, float]]
    bytes_per_second: float | None = None

    def share(self, row: Row, mode: Mode) -> float | None:
        """Returns what part of the limit of its dtype a row reaches, or None."""
        limit = self.flops_per_second.get(dtype_of(row.case), {}).get(mode)
        speed = row.flops_per_second(mode)
        return speed / limit if limit and speed else None


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that a run found.

    Attributes:
        environment: Device, versions, settings: what a reader needs to judge the figures.
        limits: The limits of the chip.
        rows: In the order in which they were measured.
    """

    environment: Mapping[str, Any]
    limits: Limits
    rows: Sequence[Row]


def dtype_of(case: str) -> str:
    """Returns the dtype in the name of a case."""
    from bench.shapes import parse

    return parse(case).dtype


def opening(environment: Mapping[str, Any], limits: Limits) -> str:
    """Returns what stands above the table: the device, and what it can do at most."""
    lines = [
        f"{environment['device']}, driver {environment['driver']}, operands"
        f" {environment['operands']}"
    ]
    for dtype, speeds in limits.flops_per_second.items():
        figures = ", ".join(f"{speeds[mode] / 1e12:.0f} {mode}" for mode in MODES)
        lines.append(f"limit of the tensor cores in {dtype}, TFLOP/s: {figures}")
    if limits.bytes_per_second:
        lines.append(f"limit of the memory, TB/s: {limits.bytes_per_second / 1e12:.2f}")
    return "\n".join(lines)


def header() -> str:
    """Returns the two lines above the table."""
    names = (
        f"{'peer':{_PEER}} {'mode':{_MODE}} {'us':>8} {'+-%':>4} {'TF/s':>6} {'x XLA':>6}"
        f" {'+-%':>4} {'lim%':>4} {'MHz':>5} {'mJ':>8}"
    )
    return f"{names}\n{'-' * len(names)}"


def case_line(row: Row) -> str:
    """Returns the line above the rows of a case."""
    line = f"{row.case}  {row.source}".rstrip()
    return line[:WIDTH]


def row_lines(row: Row, limits: Limits) -> list[str]:
    """Returns what the table says of a row: a line for each mode, and its note."""
    if row.result is None:
        return [f"{row.peer:{_PEER}} {row.status}: {row.note}"[:WIDTH].rstrip()]
    # A name that is too long has a line of its own.
    lines, name = ([], row.peer) if len(row.peer) <= _PEER else ([row.peer[:WIDTH]], "")
    for mode in MODES:
        timing = row.timing(mode)
        if timing is not None:
            lines.append(f"{name:{_PEER}} {mode:{_MODE}} {_figures(row, mode, timing, limits)}")
            name = ""
    if row.note:
        lines.append(f"{'':{_PEER}} {row.note}"[:WIDTH])
    return lines


def summary_lines(rows: Sequence[Row]) -> list[str]:
    """Returns, for each peer and mode, the geometric mean and the worst ratio to XLA."""
    lines = [f"{'x XLA':10} {'mode':{_MODE}} {'mean':>6} {'worst':>6} {'cases':>5}  worst at"]
    for peer in dict.fromkeys(row.peer for row in rows if row.peer != "xla"):
        for mode in MODES:
            ratios = ratios_of(rows, peer, mode)
            if not ratios:
                continue
            worst = min(ratios, key=lambda case: ratios[case])
            mean = statistics.geometric_mean(list(ratios.values()))
            figures = f"{mean:6.3f} {ratios[worst]:6.3f} {len(ratios):5}"
            lines.append(f"{peer:10} {mode:{_MODE}} {figures}  {worst}")
    return lines if len(lines) > 1 else []


def ratios_of(rows: Sequence[Row], peer: str, mode: Mode) -> dict[str, float]:
    """Returns a peer's ratios to XLA by case, where both were timed."""
    timed = {row.case: row.timing(mode) for row in rows if row.peer == peer}
    with_xla = {row.case for row in rows if row.peer == "xla" and row.timing(mode)}
    return {
        case: timing.ratio.median
        for case, timing in timed.items()
        if timing is not None and case in with_xla
    }


def ratios_in(text: str) -> dict[Mode, dict[tuple[str, str], float]]:
    """Returns the ratios to XLA, by case and peer, in the JSON of a run.

    Raises:
        ValueError: It is no such JSON.
    """
    found: dict[Mode, dict[tuple[str, str], float]] = {mode: {} for mode in MODES}
    try:
        for row in json.loads(text)["rows"]:
            place = str(row["case"]), str(row["peer"])
            for mode in MODES:
                if timing := (row["result"] or {}).get(mode):
                    found[mode][place] = float(timing["ratio"]["median"])
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return found


def compare_lines(now: Report, before: Mapping[Mode, Mapping[tuple[str, str], float]]) -> list[str]:
    """Returns how far the ratios to XLA of two runs lie apart.

    Args:
        now: This run.
        before: The ratios of an earlier one.
    """
    lines = []
    for mode in MODES:
        moved: dict[tuple[str, str], float] = {}
        for row in now.rows:
            timing, ratio = row.timing(mode), before[mode].get((row.case, row.peer))
            if row.peer != "xla" and timing and ratio:
                moved[row.case, row.peer] = abs(timing.ratio.median / ratio - 1)
        if moved:
            far = max(moved, key=lambda place: moved[place])
            lines.append(
                f"{mode:9} ratios to XLA differ from the earlier run by"
                f" {Spread.of(list(moved.values())).median:.2%} in the median,"
                f" {moved[far]:.2%} at most ({far[1]} at {far[0]}; {len(moved)} ratios)"
            )
    return lines or ["the two runs have no ratio in common"]


def to_json(report: Report) -> str:
    """Returns a report as JSON."""
    return json.dumps(dataclasses.asdict(report), indent=1, default=str) + "\n"


def to_csv(report: Report) -> str:
    """Returns the rows as CSV, one line each, times in microseconds."""
    fields = ["case", "source", "peer", "status", "note", "flops", "bytes", "error"]
    timing = ["us", "us_low", "us_high", "tflops", "ratio", "ratio_low", "ratio_high"]
    figures = [*timing, "limit_share", "clock_mhz", "busy"]
    names = [*fields, *(f"{mode}_{figure}" for mode in MODES for figure in figures), "mj"]
    records = []
    for row in report.rows:
        cells: list[Any] = [getattr(row, field) for field in fields]
        for mode in MODES:
            cells += _csv_figures(row, mode, report.limits, len(figures))
        joules = row.result.joules if row.result else None
        cells.append(None if joules is None else joules * 1e3)
        records.append(dict(zip(names, cells, strict=True)))
    return table(records)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns records with the same fields as CSV, numbers with six digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in (*records[:1], *(record.values() for record in records)):
        writer.writerow([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row])
    return text.getvalue()


def write(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file whole or not at all."""
    user_folder.write(path, content.encode() if isinstance(content, str) else content)


def write_records(path: pathlib.Path | None, records: Sequence[Mapping[str, Any]]) -> None:
    """Writes records with the same fields as CSV, if there is a path to write to."""
    if path:
        write(path, table(records))


def check_writable(*paths: pathlib.Path | None) -> None:
    """Refuses files that cannot be written: better now than after the run.

    Raises:
        RequestError: One of them cannot be.
    """
    for path in filter(None, paths):
        folder = path.parent
        if not folder.is_dir():
            raise RequestError(f"cannot write {path}: there is no folder {folder}")
        if path.is_dir():
            raise RequestError(f"cannot write {path}: it is a folder")
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror or error}") from None


def _figures(row: Row, mode: Mode, timing: Timing, limits: Limits) -> str:
    us = timing.seconds.median * 1e6
    share = limits.share(row, mode)
    ratio_spread = None if row.peer == "xla" else timing.ratio.share * 100
    # Energy is that of sustained work.
    joules = row.result.joules if row.result and mode == "sustained" else None
    energy = joules * 1e3 if joules is not None else None
    return " ".join(
        (
            _figure(us, 8, 1 if us >= 100 else 2),
            _figure(timing.seconds.share * 100, 4, 1),
            _figure(row.flops / timing.seconds.median / 1e12, 6, 1),
            _figure(timing.ratio.median, 6, 3),
            _figure(ratio_spread, 4, 1),
            _figure(share * 100 if share else None, 4, 0),
            _figure(timing.clock_hz / 1e6 if timing.clock_hz else None, 5, 0),
            _figure(energy, 8, 2 if energy and energy < 100 else 1),
        )
    )


def _figure(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def _csv_figures(row: Row, mode: Mode, limits: Limits, count: int) -> list[float | None]:
    timing = row.timing(mode)
    if timing is None:
        return [None] * count
    return [
        timing.seconds.median * 1e6,
        timing.seconds.low * 1e6,
        timing.seconds.high * 1e6,
        row.flops / timing.seconds.median / 1e12,
        timing.ratio.median,
        timing.ratio.low,
        timing.ratio.high,
        limits.share(row, mode),
        timing.clock_hz / 1e6 if timing.clock_hz else None,
        timing.busy,
    ]
