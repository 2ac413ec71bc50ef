"""Makes the package's table of tuned configs for this computer's kind of GPU.

    python bench/tune.py
        the suites below, for at most 7 minutes
    python bench/tune.py --suites=llama8b --output=mine.json --csv=mine.csv

Products are tuned in the order of the suites, the most used ones and those of
which least is known first. While one is timed, the next ones are compiled. The
table is written anew, whole, after each product. So a run that is stopped
keeps its results, and a run with --resume goes on with the missing products.
Products that the heuristics leave to XLA are tried too. Where XLA is faster,
the table says so, and the product is XLA's.

`gain` compares the tuned config with the heuristics' choice: the root of the
product of the ratios in a burst and in sustained work. `over_xla` is the same
against XLA.
"""

import importlib
import pathlib
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)
    # Says which extra is missing, before an import fails.
    importlib.import_module("bench")

from absl import flags
from rich.console import Console

from bench import command, gpu, peers, products, random_suite, report, shapes, workers
from pallas_gemm import explain
from pallas_gemm.device import Device
from pallas_gemm.planning import proof, tables, targeting
from pallas_gemm.planning.architectures import architecture_of
from pallas_gemm.problem import Problem
from pallas_gemm.tuning import autotune as tuning
from pallas_gemm.tuning import outcome
from pallas_gemm.tuning import space as tuning_space
from pallas_gemm.tuning.timing import KernelMeter

PROGRAM = "tune"
FOLDER = pathlib.Path(tables.__file__).parent / "tuned"
SUITES = (
    "short",
    "batched",
    "odd",
    "shallow",
    "dtypes",
    "llama8b",
    "epilogues",
    "layouts",
    "squares",
    "gradients",
    "decode",
    "deepseek",
    "llama70b",
    "waves",
    "wgrad",
)
AHEAD = 3
"""How many products are compiled while another one is timed."""


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command line."""
    text = {"flag_values": values}
    flags.DEFINE_list("suites", list(SUITES), "Suites, in the order of tuning.", **text)
    flags.DEFINE_integer("seed", 0, "Of --suites=random.", 0, **text)
    flags.DEFINE_string("output", None, "The table; default: the package's own.", **text)
    flags.DEFINE_bool("resume", False, "Tune only what the table does not hold yet.", **text)
    flags.DEFINE_string("csv", None, "Write what was found to this file.", **text)
    flags.DEFINE_float("seconds", 420.0, "Begin no product after so long.", 1.0, **text)
    flags.DEFINE_integer("most", tuning_space.MOST, "Configs of each product.", 1, **text)


def cases_of(values: flags.FlagValues) -> list[shapes.Case]:
    """Returns the cases with the products to tune.

    Raises:
        RequestError: A suite is unknown.
    """
    try:
        names = command.several("suites", values.suites)
        cases = [case for name in names for case in random_suite.suite(name, values.seed)]
    except ValueError as error:
        raise command.RequestError(str(error)) from None
    return list(dict.fromkeys(cases))


def products_of(case: shapes.Case, device: Device) -> list[Problem]:
    """Returns the problems that a case asks tuned configs for."""
    with tables.recording() as record, targeting.target(device):
        explain(peers.fused(case), products.operand_shapes(case))
    return [problem for problem, planned in record.problems.values() if planned == device]


def _run(values: flags.FlagValues) -> int:
    """Tunes.

    Returns:
        0; 2 for a request that cannot be met.
    """
    cases, seconds = cases_of(values), command.seconds("seconds", values.seconds)
    output, rows = map(command.output_path, (values.output, values.csv))
    report.check_writable(output, rows)
    gpu.require()
    device = targeting.first_gpu()
    architecture = architecture_of(device) if device else None
    if device is None or architecture is None:
        raise command.RequestError("no kernel runs on this GPU")
    if why := proof.why_untrusted(architecture, device):
        raise command.RequestError(f"the {architecture.name} kernel is {why}")
    if output is None:
        command.make_folder(FOLDER)
        output = FOLDER / f"{tables.slug(device.kind)}.json"
        report.check_writable(output)
    table = _before(output, device) if values.resume else tables.Table(device.kind)
    console = command.console()
    with workers.Workers() as pool:
        tools = tuning.Tools(KernelMeter(), pool.build_kernel, AHEAD)
        tuned = tuned_products(cases, table, device, tools, console, seconds, values.most)
        table, found = kept(tuned, table, output, rows)
    for line in summary_lines(found):
        console.print(line)
    console.print(f"{len(table)} entries in {output}", soft_wrap=True)
    return 0


def kept(
    results: Iterable[outcome.Tuned | outcome.Untuned],
    table: tables.Table,
    output: pathlib.Path,
    csv: pathlib.Path | None,
) -> tuple[tables.Table, list[outcome.Tuned]]:
    """Writes both files anew after each product.

    Returns:
        The table with what was found, and all that was tuned.
    """
    found: list[outcome.Tuned] = []
    for result in results:
        if not isinstance(result, outcome.Tuned):
            continue
        found.append(result)
        if csv:
            report.write(csv, to_csv(found))
        table |= tables.Table.of(table.device, dict([result.entry]))
        table.save(output)
    return table, found


def tuned_products(
    cases: Iterable[shapes.Case],
    known: tables.Table,
    device: Device,
    tools: tuning.Tools,
    console: Console,
    seconds: float,
    most: int,
) -> Iterator[outcome.Tuned | outcome.Untuned]:
    """Yields what is found for each product until the time is over, and prints it.

    Products that are being compiled when the time is over are dropped.
    """
    start = time.perf_counter()
    wanted: dict[tables.Key, Problem] = {}
    for case in cases:
        for problem in products_of(case, device):
            if tables.Key.of(problem) not in known.by_key:
                wanted.setdefault(tables.Key.of(problem), problem)
    console.print(f"{device.kind}: {len(wanted)} products")
    pairs = ((problem, device) for problem in wanted.values())
    for count, tuned in enumerate(tuning.tune(pairs, tools, most=most), 1):
        took = time.perf_counter() - start
        console.print(f"{count}/{len(wanted)} {took:.0f} s  {tuned}")
        yield tuned
        if took > seconds:
            console.print(f"time is over: {len(wanted) - count} products are left for --resume")
            return


def summary_lines(found: Sequence[outcome.Tuned]) -> list[str]:
    """Returns how close the heuristics come without a table."""
    lines = []
    if ours := [tuned for tuned in found if tuned.left is None]:
        worst = max(ours, key=lambda tuned: tuned.gain)
        mean = statistics.geometric_mean([tuned.gain for tuned in ours])
        lines.append(
            f"tuned configs are faster than the heuristics' choice by {mean - 1:.1%} in geometric"
            f" mean, {worst.gain - 1:.1%} at most ({outcome.problem_label(worst.problem)};"
            f" {len(ours)} products)"
        )
        if slower := sum(tuned.over_xla < 1 for tuned in ours):
            lines.append(f"{slower} of them are slower than XLA, which the table says")
    if left := [tuned for tuned in found if tuned.left is not None]:
        won = [tuned for tuned in left if tuned.over_xla >= 1]
        best = max(left, key=lambda tuned: tuned.over_xla)
        lines.append(
            f"of {len(left)} products that the heuristics leave to XLA, {len(won)} are faster"
            f" tuned, {best.over_xla:.3f} x XLA at best ({outcome.problem_label(best.problem)})"
        )
    return lines or ["nothing was tuned"]


def to_csv(found: Sequence[outcome.Tuned]) -> str:
    """Returns one line for each product, times in microseconds."""
    return report.table([*map(_record, found)])


def _record(tuned: outcome.Tuned) -> dict[str, Any]:
    chosen = tuned.chosen_seconds
    return {
        "product": outcome.problem_label(tuned.problem),
        "heuristics": outcome.config_label(tuned.chosen),
        "heuristics_us": "" if chosen is None else f"{chosen * 1e6:.2f}",
        "tuned": outcome.config_label(tuned.config),
        "tuned_us": f"{tuned.seconds * 1e6:.2f}",
        "gain": f"{tuned.gain:.4f}",
        "over_xla": f"{tuned.over_xla:.4f}",
        "tried": tuned.tried,
        "dropped": "; ".join(tuned.dropped),
    }


def _before(path: pathlib.Path, device: Device) -> tables.Table:
    """Returns the table in a file; an empty one if there is no file."""
    if not path.exists():
        return tables.Table(device.kind)
    try:
        table = tables.Table.load(path)
    except (OSError, tables.TableError) as error:
        raise command.RequestError(f"resume: {error}") from None
    if table.device != device.kind:
        raise command.RequestError(f"resume: {path} is for {table.device}, not for {device.kind}")
    return table


if __name__ == "__main__":
    command.start(PROGRAM, _run, define_flags)
