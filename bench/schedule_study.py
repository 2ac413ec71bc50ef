"""Times the orders of tiles on this GPU, with the model's prediction beside each.

    python bench/schedule_study.py
        8192 cubed, tiles of 128 x 128
    python bench/schedule_study.py --tile=128x256 --csv=study.csv --plot=plots
    python bench/schedule_study.py --counters
        reads the L2's counters as well

One table for each kind of persistence and shape of cluster: order by order,
computed on the device ("online") or read from a table ("offline"). Times are
those of the kernel; `x XLA` is the median over rounds of the time of XLA's
product over this one's in the same round. Counters are read when everything
has been timed, so that whatever happens under Nsight Compute, the times are
there.
"""

import concurrent.futures
import csv
import dataclasses
import importlib
import io
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)
    # Says which extra is missing, before an import fails.
    importlib.import_module("bench")

from absl import flags
from rich.console import Console

from bench import command, contest, counters, gpu, peers, report, shapes, study, workers
from bench.contest import Contender
from pallas_gemm.config import GemmConfig, Persistence
from pallas_gemm.device import Device
from pallas_gemm.kernels.blackwell.config import BlackwellConfig
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.tuning.measure import Meter, Settings, measure
from pallas_gemm.tuning.timing import TimingError

PROGRAM = "schedule_study"
KERNEL = "pallas_gemm"
"""The beginning of the names of our kernels."""

PAUSE = 0.05
"""Seconds before each burst turn: many launches are compared, and none of them is hot for long."""


BASES: Mapping[str, Callable[[tuple[int, int], int | None], GemmConfig]] = {
    # The same epilogue for every order: only tables can be stored late.
    "hopper": lambda tile, ctas: HopperConfig(tile=tile, ctas=ctas, late_store=False),
    "blackwell": lambda tile, ctas: BlackwellConfig(tile=tile, ctas=ctas),
}
"""The config that all launches share, by the name of the kernel."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the command line.

    Attributes:
        case: The product.
        base: The config that all launches share.
        orders: Names of the orders.
        persistence: Kinds of persistence.
        clusters: Shapes of clusters.
        settings: How long to look.
        counters: Whether to read the hardware's counters.
        counter_seconds: How long they may take for each kind of persistence.
        csv: File to write, or None.
        plot: Folder for pictures, or None.
    """

    case: shapes.Case
    base: GemmConfig
    orders: tuple[str, ...]
    persistence: tuple[Persistence, ...]
    clusters: tuple[tuple[int, int], ...]
    settings: Settings
    counters: bool
    counter_seconds: float
    csv: pathlib.Path | None
    plot: pathlib.Path | None


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command line."""
    text = {"flag_values": values}
    flags.DEFINE_string("shape", "8192x8192x8192", "The product, as for gemm_bench.", **text)
    flags.DEFINE_enum("kernel", "hopper", list(BASES), "Whose orders are timed.", **text)
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
    flags.DEFINE_float("counter_seconds", 120.0, "For each persistence, at most.", 1.0, **text)
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
        base = BASES[values.kernel](_pair("tile", values.tile), values.ctas)
        for cluster in clusters:
            dataclasses.replace(base, cluster=cluster)
    except ValueError as error:
        raise command.RequestError(str(error)) from None
    if (case.batch, case.epilogue, case.direction) != (1, "none", "forward"):
        raise command.RequestError(f"shape must be that of one bare product, got {values.shape!r}")
    return Options(
        case=case,
        base=base,
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
        counter_seconds=command.seconds("counter_seconds", values.counter_seconds),
        csv=command.output_path(values.csv),
        plot=command.output_path(values.plot),
    )


def _run(values: flags.FlagValues) -> int:
    """Runs the study.

    Returns:
        0; 1 if a launch failed or was wrong; 2 for a request that cannot be met.
    """
    start = time.perf_counter()
    options = options_from(values)
    if options.plot:
        command.make_folder(options.plot)
    report.check_writable(options.csv, options.plot and options.plot / "orders.png")
    if options.counters and (reason := counters.missing()):
        raise command.RequestError(reason)
    gpu.require()
    from bench import machine

    device = machine.this_device()
    problem = options.case.problem
    chosen = _chosen(options, device)
    launches = study.contestants(chosen, device)
    if values.replay:
        # A process that is watched is slow at lowering; its workers are not watched.
        with workers.Workers() as pool:
            return replay(options, launches[1:], pool, lambda line: _say_under_ncu(line, start))
    console = command.console()
    clock = command.Stopwatch(console.print)
    with clock("predicting"):
        predicted = study.predictions(chosen, problem, device, os.cpu_count() or 1)
    rows = [study.Row(*pair) for pair in zip(chosen, predicted, strict=True)]
    with workers.Workers() as pool:
        rows = timed_rows(rows, options, Bench(launches, gpu.GpuMeter(), pool), console, clock)
    for line in study.choice_lines(rows):
        console.print(line)
    if options.plot:
        from bench import plots

        records = csv.DictReader(io.StringIO(study.to_csv(rows)))
        heading = f"{options.case.name} on {device.kind}"
        report.write(options.plot / "orders.png", plots.orders(records, heading))
    if options.counters:
        rows = counted_rows(rows, options, console, clock)
    console.print(clock.summary())
    return 0 if all(row.result for row in rows) else 1


def _chosen(options: Options, device: Device) -> list[study.Launch]:
    """Returns the launches that are asked for, or raises an error if none is legal."""
    problem = options.case.problem
    found = study.launches(
        problem,
        device,
        options.base,
        orders=options.orders,
        persistence=options.persistence,
        clusters=options.clusters,
    )
    if not found:
        raise command.RequestError(
            f"no launch is legal: {'; '.join(options.base.refusals(problem, device))}"
        )
    return found


@dataclasses.dataclass(frozen=True)
class Bench:
    """The tools that time launches.

    Attributes:
        peers: XLA, and a peer named like each launch.
        meter: The GPU's.
        pool: Processes that lower kernels; None for none.
    """

    peers: Sequence[peers.Peer]
    meter: Meter
    pool: workers.Workers | None = None


def timed_rows(
    rows: Sequence[study.Row],
    options: Options,
    bench: Bench,
    console: Console,
    clock: command.Stopwatch,
) -> list[study.Row]:
    """Times every launch, and prints and writes each table as soon as it is done.

    Args:
        rows: The launches with their predictions.
        options: The options of the command line.
        bench: The tools that time them.
        console: Where to print.
        clock: Says how long each part took.

    Returns:
        The rows with their results; those that failed or were wrong have none.
    """
    done: list[study.Row] = []
    with command.progress_bar() as bar:
        steps = command.Steps(bar, bar.add_task("study", total=None))
        with clock("compiling and checking"):
            by_name = _contenders(options, bench, steps, console)
        for (persistence, cluster), table in study.tables(rows).items():
            names = [row.launch.name for row in table if row.launch.name in by_name]
            variants = [by_name[name].variant for name in (contest.BASELINE, *names)]
            steps.start(f"timing {persistence}", options.settings.turns(len(variants)))
            try:
                with clock(f"timing {persistence} {cluster[0]}x{cluster[1]}"):
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
            _show(done[-len(table) :], console, study.time_lines, study.traffic_lines)
            _write(done, options)
    return done


def _contenders(
    options: Options, bench: Bench, steps: command.Steps, console: Console
) -> dict[str, Contender]:
    """Returns XLA and the launches that are right, by name, and prints what became of others."""
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
    by_name = {contender.peer: contender for contender in passed}
    if contest.BASELINE not in by_name:
        raise TimingError("XLA's product, which all are compared with, failed")
    return by_name


def counted_rows(
    rows: Sequence[study.Row], options: Options, console: Console, clock: command.Stopwatch
) -> list[study.Row]:
    """Reads the counters of each kind of persistence in a run of its own.

    Their tables are printed, and the CSV is written anew, after each. A run that fails or takes too
    long leaves its rows without counters.

    Args:
        rows: All launches that the options ask for, in order.
        options: The options of the command line.
        console: Where to print.
        clock: Says how long each run took.

    Returns:
        The rows with their counters.
    """
    done = list(rows)
    for kind in options.persistence:
        places = [i for i, row in enumerate(done) if row.launch.config.persistence == kind]
        if not places:
            continue
        console.print(
            f"counting {len(places)} {kind} launches under Nsight Compute,"
            f" for {options.counter_seconds:g} s at most"
        )
        try:
            with clock(f"counting {kind}"):
                counted = counters.collect(
                    _replay_command(kind),
                    KERNEL,
                    expected=len(places),
                    seconds=options.counter_seconds,
                )
        except counters.CountingError as error:
            console.print(f"counting {kind}: {error}")
            continue
        for place, seen in zip(places, counted, strict=True):
            done[place] = dataclasses.replace(done[place], counters=seen)
        _show([done[place] for place in places], console, study.traffic_lines)
        _write(done, options)
    return done


def _show(rows: Sequence[study.Row], console: Console, *kinds: study.Lines) -> None:
    for table in study.tables(rows).values():
        for lines in kinds:
            for line in lines(table):
                console.print(line)


def _write(rows: Sequence[study.Row], options: Options) -> None:
    if options.csv:
        report.write(options.csv, study.to_csv(rows))


def _replay_command(persistence: Persistence) -> list[str]:
    """Returns the command line of this program for what Nsight Compute is to watch."""
    program = [sys.executable, str(pathlib.Path(__file__).resolve())]
    # Of a flag that is given twice, the last one counts.
    return [*program, *sys.argv[1:], f"--persistence={persistence}", "--replay"]


def replay(
    options: Options,
    launches: Sequence[peers.Peer],
    pool: workers.Workers | None,
    say: Callable[[str], object],
) -> int:
    """Runs each launch once, in order; what else runs on the GPU has other names.

    Args:
        options: The options of the command line.
        launches: A peer for each launch.
        pool: Processes that lower kernels; None for none.
        say: Called with a line after each stage: the last one tells where a run was ended.

    Returns:
        The exit status.
    """
    import jax

    from bench import products

    candidates = [candidate for peer in launches for candidate in peer.candidates(options.case)]
    say(f"lowering {len(candidates)} kernels")
    with concurrent.futures.ThreadPoolExecutor(command.threads()) as threads:
        runners = list(threads.map(lambda one: peers.built(one, pool), candidates))
    say(f"lowered and compiled {len(runners)} kernels")
    operands = jax.block_until_ready(products.make_operands(options.case, jax.random.key(0)))
    for count, runner in enumerate(runners, 1):
        jax.block_until_ready(runner(operands))
        say(f"launched {count} of {len(runners)}")
    return 0


def _say_under_ncu(line: str, start: float) -> None:
    print(f"{PROGRAM}: {line}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


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
    command.start(PROGRAM, _run, define_flags)
