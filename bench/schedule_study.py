"""Times the orders in which tiles are visited on this GPU, with the model's prediction beside each.

    python bench/schedule_study.py                              8192 cubed, tiles of 128 x 128
    python bench/schedule_study.py --tile=128x256 --csv=study.csv --plot=plots
    python bench/schedule_study.py --counters                   reads the L2's counters as well

One table for each kind of persistence and shape of cluster: order by order, computed on the device
("online") or read from a table ("offline"). Times are those of the kernel; `x XLA` is the median
over rounds of the time of XLA's product over this one's in the same round.
"""

import concurrent.futures
import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from absl import app, flags
from rich.console import Console

from bench import command, contest, counters, gpu, report, shapes, study, workers
from bench.peers import Peer
from pallas_gemm.config import Persistence
from pallas_gemm.hopper_config import HopperConfig
from pallas_gemm.measure import Meter, Settings, measure
from pallas_gemm.timing import TimingError

PROGRAM = "schedule_study"
KERNEL = "pallas_gemm"
"""What the names of our kernels begin with."""

PAUSE = 0.05
"""Seconds before each burst turn: many launches are compared, and none of them is hot for long."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        case: The product.
        base: The config that all launches share.
        orders: Names of the orders.
        persistence: Kinds of persistence.
        clusters: Shapes of clusters.
        settings: How long to look.
        counters: Whether to read the hardware's counters.
        csv: File to write, or None.
        plot: Folder for pictures, or None.
    """

    case: shapes.Case
    base: HopperConfig
    orders: tuple[str, ...]
    persistence: tuple[Persistence, ...]
    clusters: tuple[tuple[int, int], ...]
    settings: Settings
    counters: bool
    csv: pathlib.Path | None
    plot: pathlib.Path | None


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command line."""
    text = {"flag_values": values}
    flags.DEFINE_string("shape", "8192x8192x8192", "The product, as for gemm_bench.", **text)
    flags.DEFINE_string("tile", "128x128", "Rows and columns of a tile.", **text)
    flags.DEFINE_list("orders", ["raster", "hilbert", "clipped_hilbert", "swizzle"], "", **text)
    flags.DEFINE_list("groups", ["8", "12", "16", "20", "24", "28", "32"], "Of swizzle.", **text)
    flags.DEFINE_list("persistence", list(study.PERSISTENCE), "Kinds of persistence.", **text)
    flags.DEFINE_list("clusters", ["1x1", "2x1"], "Shapes of clusters.", **text)
    flags.DEFINE_integer("ctas", None, "At most so many blocks of a persistent kernel.", 1, **text)
    flags.DEFINE_integer("burst_rounds", 5, "Rounds of burst turns.", 0, **text)
    flags.DEFINE_integer("sustained_rounds", 6, "Rounds of sustained turns.", 0, **text)
    flags.DEFINE_float("turn_seconds", 0.06, "Length of a sustained turn.", 0.001, **text)
    flags.DEFINE_float("energy_seconds", 0.3, "Time to read energy; 0 for none.", 0.0, **text)
    flags.DEFINE_bool("counters", False, "Read hardware counters through ncu.", **text)
    flags.DEFINE_string("csv", None, "Write the rows to this file.", **text)
    flags.DEFINE_string("plot", None, "Write pictures into this folder.", **text)
    flags.DEFINE_bool("replay", False, "Only run each launch once: what ncu watches.", **text)


def options_from(values: flags.FlagValues) -> Options:
    """Returns what the flags ask for.

    Raises:
        RequestError: A shape, order, persistence, tile or cluster is not legal.
    """
    try:
        case = shapes.parse(values.shape)
        if "swizzle" in values.orders:
            command.several("groups", values.groups)
        groups = [_positive("groups", text) for text in values.groups]
        names = study.orders(command.several("orders", values.orders), groups)
        pairs = command.several("clusters", values.clusters)
        clusters = tuple(_pair("clusters", text) for text in pairs)
        tile = _pair("tile", values.tile)
    except ValueError as error:
        raise command.RequestError(str(error)) from None
    if (case.batch, case.epilogue, case.direction) != (1, "none", "forward"):
        raise command.RequestError(f"shape must be that of one bare product, got {values.shape!r}")
    return Options(
        case=case,
        # The same epilogue for every order: only tables can be stored late.
        base=HopperConfig(tile=tile, ctas=values.ctas, late_store=False),
        orders=tuple(names),
        persistence=tuple(map(_persistence, command.several("persistence", values.persistence))),
        clusters=clusters,
        settings=Settings(
            burst_rounds=values.burst_rounds,
            pause=PAUSE,
            sustained_rounds=values.sustained_rounds,
            turn_seconds=command.seconds("turn_seconds", values.turn_seconds),
            energy_seconds=command.seconds("energy_seconds", values.energy_seconds),
        ),
        counters=values.counters,
        csv=command.output_path(values.csv),
        plot=command.output_path(values.plot),
    )


def main(argv: Sequence[str]) -> int:
    """Runs the study.

    Returns:
        0; 1 if a launch failed or was wrong; 2 for a request that cannot be met.
    """
    del argv
    return command.guarded(PROGRAM, lambda: _run(flags.FLAGS))


def _run(values: flags.FlagValues) -> int:
    options = options_from(values)
    if options.plot:
        command.make_folder(options.plot)
    outputs = [path for path in (options.csv,) if path]
    outputs += [options.plot / "orders.png"] if options.plot else []
    if reason := report.why_not_writable(outputs) or (options.counters and counters.missing()):
        raise command.RequestError(reason)
    gpu.prepare_environment()
    if reason := gpu.missing_gpu():
        raise command.RequestError(reason)
    from bench import machine

    device = machine.this_device()
    problem = options.case.problem
    chosen = study.launches(
        problem,
        device,
        options.base,
        orders=options.orders,
        persistence=options.persistence,
        clusters=options.clusters,
    )
    if not chosen:
        raise command.RequestError(
            f"no launch is legal: {'; '.join(options.base.refusals(problem, device))}"
        )
    if values.replay:
        return _replay(options, chosen)
    clock = command.Stopwatch()
    console = command.console()
    counted: Sequence[Any] = [None] * len(chosen)
    if options.counters:
        with console.status("counting under Nsight Compute"), clock("counting"):
            counted = _counted(len(chosen))
    with console.status("predicting"), clock("predicting"):
        predicted = study.predictions(chosen, problem, device, os.cpu_count() or 1)
    rows = [
        study.Row(launch, prediction, counters=seen)
        for launch, prediction, seen in zip(chosen, predicted, counted, strict=True)
    ]
    with clock("compiling and timing"), workers.Workers() as pool:
        contestants = study.contestants(chosen, device)
        bench = Bench(contestants, gpu.GpuMeter(), pool)
        rows = timed_rows(rows, options, bench, console)
    for line in study.choice_lines(rows):
        console.print(line)
    if options.plot:
        from bench import plots

        report.write(options.plot / "orders.png", plots.orders(rows))
    console.print(clock.summary())
    return 0 if all(row.result for row in rows) else 1


@dataclasses.dataclass(frozen=True)
class Bench:
    """What launches are timed with.

    Attributes:
        peers: XLA, and a peer named like each launch.
        meter: The GPU's.
        pool: Processes that lower kernels; None for none.
    """

    peers: Sequence[Peer]
    meter: Meter
    pool: workers.Workers | None = None


def timed_rows(
    rows: Sequence[study.Row], options: Options, bench: Bench, console: Console
) -> list[study.Row]:
    """Times every launch, and prints and writes each table as soon as it is done.

    Args:
        rows: The launches with their predictions.
        options: What was asked for.
        bench: What they are timed with.
        console: Where to print.

    Returns:
        The rows with their results; those that failed or were wrong have none.
    """
    with command.progress_bar() as bar:
        steps = command.Steps(bar, bar.add_task("study", total=None))
        passed, dropped = contest.contenders(
            options.case,
            bench.peers,
            cold=False,
            start=steps.start,
            advance=steps.advance,
            pool=bench.pool,
        )
        for out in dropped:
            console.print(f"{out.peer}: {out.status}: {out.note}")
        by_name = {contender.peer: contender.variant for contender in passed}
        if contest.BASELINE not in by_name:
            raise TimingError("XLA's product, which all are compared with, failed")
        done: list[study.Row] = []
        for (persistence, _), table in study.tables(rows).items():
            names = [row.launch.name for row in table if row.launch.name in by_name]
            variants = [by_name[name] for name in (contest.BASELINE, *names)]
            steps.start(f"timing {persistence}", options.settings.turns(len(variants)))
            try:
                results = measure(
                    variants,
                    bench.meter,
                    options.settings,
                    baseline=contest.BASELINE,
                    advance=steps.advance,
                )
            except RuntimeError as error:
                # The other tables are another matter.
                console.print(f"{persistence}: failed: {contest.reason(error)}")
                results = {}
            done += [dataclasses.replace(row, result=results.get(row.launch.name)) for row in table]
            for line in study.table_lines(done[-len(table) :]):
                console.print(line)
            if options.csv:
                report.write(options.csv, study.to_csv(done))
    return done


def _counted(launches: int) -> list[dict[str, float]]:
    """Runs this program again under Nsight Compute."""
    program = [sys.executable, str(pathlib.Path(__file__).resolve()), *sys.argv[1:], "--replay"]
    return counters.collect(program, KERNEL, expected=launches)


def _replay(options: Options, chosen: Sequence[study.Launch]) -> int:
    """Runs each launch once, in order; what else runs on the GPU has other names."""
    import jax

    from bench import machine, products

    peers = study.contestants(chosen, machine.this_device())[1:]
    candidates = [candidate for peer in peers for candidate in peer.candidates(options.case)]
    with concurrent.futures.ThreadPoolExecutor(command.threads()) as pool:
        runners = list(pool.map(lambda candidate: candidate.build(), candidates))
    operands = products.make_operands(options.case, jax.random.key(0))
    for runner in runners:
        jax.block_until_ready(runner(operands))
    return 0


def _persistence(text: str) -> Persistence:
    for kind in study.PERSISTENCE:
        if text == kind:
            return kind
    legal = ", ".join(study.PERSISTENCE)
    raise command.RequestError(f"persistence must be among {legal}, got {text!r}")


def _positive(flag: str, text: str) -> int:
    if not text.isdigit() or not int(text):
        raise ValueError(f"{flag} must be positive whole numbers, got {text!r}")
    return int(text)


def _pair(flag: str, text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2:
        raise ValueError(f"{flag} must be like 128x256, got {text!r}")
    return _positive(flag, parts[0]), _positive(flag, parts[1])


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main, flags_parser=command.parser(PROGRAM))
