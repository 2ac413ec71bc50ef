"""One run of the benchmark, case after case."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from bench import command, contest, report
from bench.peer import Peer
from bench.shapes import Case
from bench.workers import Workers
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.tuning.measure import Meter, Settings, measure


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the command line.

    Attributes:
        cases: The cases to time.
        peers: Names of whom to time.
        configs: Configs of our kernel to time as the peer "kernel", which takes the best of them.
        settings: How long to look.
        cold: Whether each call takes other operands, until more than the L2 cache has been read.
        full_grid: Whether JAX's kernel is tuned over its whole grid of configs.
        csv: File to write, or None.
        json: File to write, or None.
        plot: Folder for pictures, or None.
        against: Earlier JSON to compare with, or None.
    """

    cases: tuple[Case, ...]
    peers: tuple[str, ...]
    configs: tuple[HopperConfig, ...]
    settings: Settings
    cold: bool = True
    full_grid: bool = False
    csv: pathlib.Path | None = None
    json: pathlib.Path | None = None
    plot: pathlib.Path | None = None
    against: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Bench:
    """What a run works with: `machine.open_bench` makes the real one, tests make one up.

    Attributes:
        meter: Times kernels.
        peers: Whom to time; XLA first.
        absent: Why each of the other peers asked for is not here.
        environment: The device and the versions, for the report.
        limits: Measures what the chip can do at most, for dtypes by name.
        pool: Processes that lower kernels; None for none.
    """

    meter: Meter
    peers: Sequence[Peer]
    absent: Mapping[str, str]
    environment: Mapping[str, Any]
    limits: Callable[[Sequence[str]], report.Limits]
    pool: Workers | None = None


def run(
    options: Options,
    bench: Bench,
    console: Console,
    save: Callable[[report.Report], object] = lambda _: None,
) -> report.Report:
    """Times every case, and prints each as soon as it is done.

    Args:
        options: The options of the command line.
        bench: The tools of a run.
        console: Where to print.
        save: Called after each case with all that was found by then.

    Returns:
        All that was found.
    """
    for name, reason in bench.absent.items():
        console.print(f"{name} is absent: {reason}")
    rows: list[report.Row] = []
    with command.progress_bar() as bar:
        cases = bar.add_task("cases", total=len(options.cases))
        steps = command.Steps(bar, bar.add_task("limits of the chip", total=None))
        limits = bench.limits(sorted({case.dtype for case in options.cases}))
        console.print(report.opening(bench.environment, limits))
        console.print(report.header())
        for case in options.cases:
            found = _run_case(case, options, bench, steps)
            rows += found
            console.print(report.case_line(found[0]))
            for row in found:
                for line in report.row_lines(row, limits):
                    console.print(line)
            save(report.Report(bench.environment, limits, rows))
            bar.advance(cases)
    return report.Report(bench.environment, limits, rows)


def failed(rows: Sequence[report.Row]) -> bool:
    """Whether a result was wrong, or a program of ours broke."""
    return any(
        row.status == "wrong" or (row.status == "failed" and row.peer in ("ours", "kernel"))
        for row in rows
    )


def _run_case(case: Case, options: Options, bench: Bench, steps: command.Steps) -> list[report.Row]:
    blank = report.Row(case.name, case.source, "", "refused", "", case.flops, case.bytes)
    rows = {
        peer.name: dataclasses.replace(blank, peer=peer.name, note=peer.refusal(case) or "")
        for peer in bench.peers
    }
    takers = [peer for peer in bench.peers if not rows[peer.name].note]
    passed, dropped = contest.contenders(
        case,
        takers,
        cold=options.cold,
        start=steps.start,
        advance=steps.advance,
        pool=bench.pool,
    )
    for out in dropped:
        rows[out.peer] = dataclasses.replace(
            rows[out.peer], status=out.status, note=out.note, error=out.error
        )
    try:
        rows |= {row.peer: row for row in _timed(passed, rows, options, bench, steps)}
    except RuntimeError as error:
        # The other cases are another matter.
        note = contest.reason(error)
        rows |= {
            one.peer: dataclasses.replace(rows[one.peer], status="failed", note=note)
            for one in passed
        }
    return list(rows.values())


def _timed(
    passed: Sequence[contest.Contender],
    rows: Mapping[str, report.Row],
    options: Options,
    bench: Bench,
    steps: command.Steps,
) -> list[report.Row]:
    """Returns the rows of those that passed, with what was measured of the best of each peer."""
    chosen = contest.choose(passed, bench.meter, steps.start, steps.advance)
    if not chosen:
        return []
    variants = [contender.variant for contender in chosen]
    steps.start("timing", options.settings.turns(len(variants)))
    results = measure(
        variants, bench.meter, options.settings, baseline=contest.BASELINE, advance=steps.advance
    )
    return [
        dataclasses.replace(
            rows[one.peer],
            status="ok",
            note=one.label,
            error=one.error,
            result=results[one.peer],
        )
        for one in chosen
    ]
