"""Times our matrix multiply and its peers in one process, each checked first.

    python bench/gemm_bench.py
        the short suite: under 4 minutes on one GPU
    python bench/gemm_bench.py --suite=llama8b,decode --peers=xla,ours,torch
    python bench/gemm_bench.py --shape=4096x14336x4096:bias_gelu --plot=plots
    python bench/gemm_bench.py --against=earlier.json
        how far two runs lie apart
    python bench/gemm_bench.py --list
        the suites, their shapes, the peers

Every time is that of the kernels alone, as CUPTI reports it. `burst` is a few
calls after a pause, `sustained` call after call at the clock that the power
limit leaves. `x XLA` is the median over rounds of XLA's time over the peer's
in the same round: above 1 is faster than XLA. `+-%` is half the distance
between the quartiles of the rounds. `lim%` is the share of what this chip's
tensor cores reach in this run when they do nothing else. Results are checked
before they are timed.
"""

import dataclasses
import functools
import json
import pathlib
import sys
import time

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from absl import flags

from bench import command, gpu, peers, random_suite, report, shapes, suites
from bench.session import Options
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.planning import config_json
from pallas_gemm.tuning.measure import Settings

PROGRAM = "gemm_bench"
DEFAULT_PEERS = ("xla", "ours", "jax", "torch", "quack")


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command line."""
    text = {"flag_values": values}
    flags.DEFINE_list("suite", ["short"], "Suites, comma-separated; --list shows them.", **text)
    flags.DEFINE_integer("seed", 0, "Of --suite=random, which draws 64 products.", 0, **text)
    flags.DEFINE_multi_string(
        "shape", [], "A single case instead of suites, as 4096x14336x4096:NT:f16.", **text
    )
    flags.DEFINE_list("peers", list(DEFAULT_PEERS), "Whom to time; xla always is.", **text)
    flags.DEFINE_list("dtypes", [], "Time the cases in these dtypes instead.", **text)
    flags.DEFINE_list("layouts", [], "Time the cases in these layouts instead.", **text)
    flags.DEFINE_enum("direction", None, shapes.DIRECTIONS, "Time this direction instead.", **text)
    flags.DEFINE_string("config", None, "JSON of a kernel configuration to time as well.", **text)
    flags.DEFINE_bool("full_grid", False, "Tune JAX's kernel over all its configs.", **text)
    flags.DEFINE_bool("cold", True, "Rotate operands, so that none is in the L2 cache.", **text)
    flags.DEFINE_integer("burst_rounds", 5, "Rounds of burst turns.", 0, **text)
    flags.DEFINE_integer("sustained_rounds", 12, "Rounds of sustained turns.", 0, **text)
    flags.DEFINE_float("turn_seconds", 0.1, "Length of a sustained turn.", 0.001, **text)
    flags.DEFINE_float("energy_seconds", 0.5, "Time to read energy; 0 for none.", 0.0, **text)
    flags.DEFINE_string("csv", None, "Write the rows to this file.", **text)
    flags.DEFINE_string("json", None, "Write everything to this file.", **text)
    flags.DEFINE_string("plot", None, "Write pictures into this folder.", **text)
    flags.DEFINE_string("against", None, "Compare with the JSON of an earlier run.", **text)
    flags.DEFINE_bool("list", False, "List suites, shapes and peers, and stop.", **text)


def options_from(values: flags.FlagValues) -> Options:
    """Returns what the flags ask for.

    Raises:
        RequestError: A suite, shape, dtype, layout or peer is unknown, or a file cannot be used.
    """
    try:
        cases = _cases(values)
    except ValueError as error:
        raise command.RequestError(str(error)) from None
    names = tuple(dict.fromkeys(["xla", *values.peers]))
    unknown = [name for name in names if name not in peers.PEERS]
    if unknown:
        raise command.RequestError(
            f"peers: there is no {unknown[0]!r}; legal are {', '.join(peers.PEERS)}"
        )
    if not values.burst_rounds and not values.sustained_rounds:
        raise command.RequestError("burst_rounds and sustained_rounds are both 0: nothing to time")
    settings = Settings(
        burst_rounds=values.burst_rounds,
        sustained_rounds=values.sustained_rounds,
        turn_seconds=command.seconds("turn_seconds", values.turn_seconds),
        energy_seconds=command.seconds("energy_seconds", values.energy_seconds)
        if values.sustained_rounds
        else 0.0,
    )
    return Options(
        cases=cases,
        peers=names,
        configs=kernel_configs(values.config) if values.config else (),
        settings=settings,
        cold=values.cold,
        full_grid=values.full_grid,
        csv=command.output_path(values.csv),
        json=command.output_path(values.json),
        plot=command.output_path(values.plot),
        against=command.output_path(values.against),
    )


def kernel_configs(text: str) -> tuple[HopperConfig, ...]:
    """Returns the configs of the Hopper kernel that JSON describes, one or a list of them.

    Raises:
        RequestError: It describes none, or that of another kernel.
    """
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise command.RequestError(f"config: this is no JSON, {error}: {text}") from None
    try:
        entries = entries if isinstance(entries, list) else [entries]
        configs = [config_json.read(entry) for entry in entries]
    except (TypeError, ValueError) as error:
        raise command.RequestError(f"config: {error}") from None
    found = tuple(config for config in configs if isinstance(config, HopperConfig))
    if len(found) < len(configs) or not found:
        raise command.RequestError(f"config: only the Hopper kernel is timed by itself, got {text}")
    return found


def listing() -> str:
    """Returns the suites with their shapes, and the peers with why they are absent."""
    lines = []
    for name, cases in suites.SUITES.items():
        lines.append(f"{name}:")
        for case in cases:
            lines += command.wrapped(f"    {case.name:24} {case.source}", indent=29)
    lines.append("peers:")
    for name, make in peers.PEERS.items():
        lines += command.wrapped(f"    {name:8} {make().absent() or 'present'}", indent=13)
    return "\n".join(lines)


def _run(values: flags.FlagValues) -> int:
    """Runs the benchmark.

    Returns:
        0; 1 if a result was wrong or something of ours failed; 2 for a request that cannot be met.
    """
    if values.list:
        print(listing())
        return 0
    options = options_from(values)
    if options.plot:
        command.make_folder(options.plot)
    outputs = report_files(options)
    report.check_writable(*outputs)
    earlier = _earlier(options.against) if options.against else None
    gpu.require()
    # Only here, where there is a GPU: the limits are kernels.
    from bench import machine, session, workers

    started = time.perf_counter()
    console = command.console()
    with workers.Workers() as pool:
        bench = dataclasses.replace(machine.open_bench(options), pool=pool)
        found = session.run(options, bench, console, functools.partial(_save, options))
    for line in report.summary_lines(found.rows):
        console.print(line)
    if earlier is not None:
        for line in report.compare_lines(found, earlier):
            console.print(line)
    if options.plot:
        from bench import plots

        pictures = (plots.ratio_bars(found), plots.roofline(found))
        for path, picture in zip(outputs[-2:], pictures, strict=True):
            report.write(path, picture)
    console.print(f"Done in {time.perf_counter() - started:.0f} s.")
    return 1 if session.failed(found.rows) else 0


def report_files(options: Options) -> list[pathlib.Path]:
    """Returns every file that the run will write."""
    files = [path for path in (options.csv, options.json) if path]
    if options.plot:
        files += [options.plot / name for name in ("ratios.png", "roofline.png")]
    return files


def _cases(values: flags.FlagValues) -> tuple[shapes.Case, ...]:
    if values.shape:
        cases = [shapes.parse(text) for text in values.shape]
    else:
        names = command.several("suite", values.suite)
        cases = [case for name in names for case in random_suite.suite(name, values.seed)]
    for field, choices in (
        ("dtype", values.dtypes),
        ("layout", values.layouts),
        ("direction", [values.direction] if values.direction else []),
    ):
        if choices:
            cases = [dataclasses.replace(case, **{field: x}) for case in cases for x in choices]
    # Two suites may share a shape; it is timed once.
    return tuple({case.name: case for case in cases}.values())


def _earlier(path: pathlib.Path) -> dict[report.Mode, dict[tuple[str, str], float]]:
    try:
        return report.ratios_in(path.read_text())
    except (OSError, ValueError) as error:
        raise command.RequestError(f"against: {path} is not the JSON of a run: {error}") from None


def _save(options: Options, found: report.Report) -> None:
    """Writes anew, whole, what has been found so far."""
    if options.csv:
        report.write(options.csv, report.to_csv(found))
    if options.json:
        report.write(options.json, report.to_json(found))


if __name__ == "__main__":
    command.start(PROGRAM, _run, define_flags)
