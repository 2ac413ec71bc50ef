"""Makes the table of tuned configs that the package ships for this computer's kind of GPU.

    python bench/tune.py                       the suites below, for at most 7 minutes
    python bench/tune.py --suites=llama8b --output=mine.json --csv=mine.csv

Products are tuned in the order of the suites, the most used ones first. The table is written anew,
whole, after each of them, so that a run that is stopped keeps what it has, and one with --resume
goes on with the products that are missing. What the heuristics leave to XLA is left out.

`gain` is how much faster the tuned config is than what the heuristics choose, the root of the
product of the ratios in a burst and in sustained work.
"""

import csv
import dataclasses
import io
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

import jax
from absl import app, flags
from jax.extend.core import Jaxpr, jaxprs_in_params
from rich.console import Console

from bench import command, gpu, peers, products, report, shapes
from pallas_gemm import cache, dispatch, rules, targeting, tuning, tuning_space
from pallas_gemm.device import Device
from pallas_gemm.measure import geometric_mean
from pallas_gemm.problem import Problem
from pallas_gemm.product import product_p

PROGRAM = "tune"
FOLDER = pathlib.Path("pallas_gemm/tuned")
SUITES = (
    "short",
    "squares",
    "layouts",
    "epilogues",
    "llama8b",
    "dtypes",
    "batched",
    "deepseek",
    "llama70b",
    "gradients",
    "waves",
    "odd",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        cases: What contains the products to tune.
        output: The table; None for that of the package.
        resume: Whether what the table already holds stays and is not tuned again.
        csv: File for what was found, or None.
        seconds: No product is begun after so long.
        most: How many configs of each product are tried.
    """

    cases: tuple[shapes.Case, ...]
    output: pathlib.Path | None
    resume: bool
    csv: pathlib.Path | None
    seconds: float
    most: int


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command line."""
    text = {"flag_values": values}
    flags.DEFINE_list("suites", list(SUITES), "Suites, in the order of tuning.", **text)
    flags.DEFINE_string("output", None, "The table; default: the package's own.", **text)
    flags.DEFINE_bool("resume", False, "Tune only what the table does not hold yet.", **text)
    flags.DEFINE_string("csv", None, "Write what was found to this file.", **text)
    flags.DEFINE_float("seconds", 420.0, "Begin no product after so long.", 1.0, **text)
    flags.DEFINE_integer("most", tuning_space.MOST, "Configs of each product.", 1, **text)


def options_from(values: flags.FlagValues) -> Options:
    """Returns what the flags ask for.

    Raises:
        RequestError: A suite is unknown.
    """
    try:
        cases = [case for name in values.suites for case in shapes.suite(name)]
    except ValueError as error:
        raise command.RequestError(str(error)) from None
    return Options(
        cases=tuple(dict.fromkeys(cases)),
        output=command.output_path(values.output),
        resume=values.resume,
        csv=command.output_path(values.csv),
        seconds=values.seconds,
        most=values.most,
    )


def products_of(case: shapes.Case, device: Device) -> list[Problem]:
    """Returns the problems that a case asks tuned configs for, without those left to XLA."""
    jaxpr = jax.make_jaxpr(peers.fused(case))(products.operand_shapes(case))
    with cache.recording() as record:
        for equation in _products_in(jaxpr.jaxpr):
            signature = tuple((x.aval.shape, x.aval.dtype) for x in equation.invars)
            dispatch.decide(equation.params["call"].with_target(device), signature)
    found = [problem for problem, _ in record.problems.values()]
    return [problem for problem in found if rules.why_xla(problem) is None]


def main(argv: Sequence[str]) -> int:
    """Tunes.

    Returns:
        0; 2 for a request that cannot be met.
    """
    del argv
    return command.guarded(PROGRAM, lambda: _run(flags.FLAGS))


def _run(values: flags.FlagValues) -> int:
    options = options_from(values)
    gpu.prepare_environment()
    if reason := gpu.missing_gpu():
        raise command.RequestError(reason)
    device = targeting.first_gpu()
    if device is None or tuning.architecture_of(device) is None:
        raise command.RequestError("no kernel runs on this GPU")
    if options.output is None:
        command.make_folder(FOLDER)
    output = options.output or FOLDER / f"{cache.slug(device.kind)}.json"
    if reason := report.why_not_writable([output, *([options.csv] if options.csv else [])]):
        raise command.RequestError(reason)
    table = _before(output, device) if options.resume else cache.Table(device.kind)
    console = command.console()
    found: list[tuning.Tuned] = []
    for tuned in tuned_products(options, table, device, tuning.gpu_tools(), console):
        if not isinstance(tuned, tuning.Tuned):
            continue
        found.append(tuned)
        table |= cache.Table.of(device.kind, dict([tuned.entry]))
        table.save(output)
        if options.csv:
            report.write(options.csv, to_csv(found))
    for line in summary_lines(found):
        console.print(line)
    console.print(f"{len(table)} entries in {output}")
    return 0


def tuned_products(
    options: Options, known: cache.Table, device: Device, tools: tuning.Tools, console: Console
) -> Iterator[tuning.Tuned | tuning.Untuned]:
    """Yields what is found for each product until the time is over, and prints it."""
    start = time.perf_counter()
    wanted: dict[cache.Key, Problem] = {}
    for case in options.cases:
        for problem in products_of(case, device):
            if cache.Key.of(problem) not in known.by_key:
                wanted.setdefault(cache.Key.of(problem), problem)
    console.print(f"{device.kind}: {len(wanted)} products")

    def in_time() -> Iterator[tuple[Problem, Device]]:
        for problem in wanted.values():
            if time.perf_counter() - start > options.seconds:
                return
            yield problem, device

    for count, tuned in enumerate(tuning.tune(in_time(), tools, most=options.most), 1):
        seconds = time.perf_counter() - start
        console.print(f"{count}/{len(wanted)} {seconds:.0f} s  {tuned}")
        yield tuned


def summary_lines(found: Sequence[tuning.Tuned]) -> list[str]:
    """Returns how close the heuristics come without a table."""
    if not found:
        return ["nothing was tuned"]
    worst = max(found, key=lambda tuned: tuned.gain)
    mean = geometric_mean([tuned.gain for tuned in found])
    return [
        f"tuned configs are faster than the heuristics' choice by {mean - 1:.1%} in geometric mean,"
        f" {worst.gain - 1:.1%} at most ({tuning.problem_label(worst.problem)};"
        f" {len(found)} products)"
    ]


def to_csv(found: Sequence[tuning.Tuned]) -> str:
    """Returns one line for each product, times in microseconds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["product", "heuristics", "heuristics_us", "tuned", "tuned_us", "gain", "tried", "dropped"]
    )
    for tuned in found:
        chosen = tuned.chosen_seconds
        cells: list[Any] = [
            tuning.problem_label(tuned.problem),
            tuning.config_label(tuned.chosen),
            "" if chosen is None else f"{chosen * 1e6:.2f}",
            tuning.config_label(tuned.config),
            f"{tuned.seconds * 1e6:.2f}",
            f"{tuned.gain:.4f}",
            tuned.tried,
            "; ".join(tuned.dropped),
        ]
        writer.writerow(cells)
    return text.getvalue()


def _before(path: pathlib.Path, device: Device) -> cache.Table:
    """Returns the table in a file; an empty one if there is no file."""
    if not path.exists():
        return cache.Table(device.kind)
    try:
        table = cache.Table.load(path)
    except (OSError, cache.TableError) as error:
        raise command.RequestError(f"resume: {error}") from None
    if table.device != device.kind:
        raise command.RequestError(f"resume: {path} is for {table.device}, not for {device.kind}")
    return table


def _products_in(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive is product_p:
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _products_in(inner)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main, flags_parser=command.parser(PROGRAM))
