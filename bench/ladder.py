"""Climbing a ladder: configurations of one kernel, each a step with a name, timed beside XLA."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from bench import gpu, report, shapes
from bench.command import RequestError
from bench.peers import Kernel
from bench.session import Options
from pallas_gemm.config import GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.tuning.measure import Settings


def climb(
    texts: Sequence[str],
    steps: Mapping[str, GemmConfig],
    csv: pathlib.Path | None,
    console: Console,
    refusal: Callable[[Device], str | None] = lambda _: None,
) -> report.Report:
    """Times every step and XLA, all in one run.

    Args:
        texts: The products, as on the command line.
        steps: The configurations by name.
        csv: Where the rows go after each product, or None.
        console: Where to print.
        refusal: Says why a GPU cannot climb, or None.

    Raises:
        RequestError: A product cannot be read, the file not be written, or there is no such GPU.
    """
    try:
        cases = tuple(shapes.parse(text) for text in texts)
    except ValueError as error:
        raise RequestError(str(error)) from None
    options = Options(cases, ("xla",), configs=(), settings=Settings(energy_seconds=0.5), csv=csv)
    report.check_writable(csv)
    gpu.require()
    # Only here, where there is a GPU: the limits are kernels.
    from bench import machine, session, workers

    device = machine.this_device()
    if reason := refusal(device):
        raise RequestError(reason)
    bench = machine.open_bench(options)
    rungs = [Kernel([config], device, name) for name, config in steps.items()]
    with workers.Workers() as pool:
        bench = dataclasses.replace(bench, peers=[*bench.peers, *rungs], pool=pool)
        return session.run(options, bench, console, functools.partial(_save, csv))


def status(found: report.Report, steps: Mapping[str, GemmConfig]) -> int:
    """Returns the program's exit status: 1 if a result was wrong or a step broke."""
    broken = {"failed", "wrong"}
    return int(any(row.status in broken and row.peer in {*steps, "xla"} for row in found.rows))


def _save(csv: pathlib.Path | None, found: report.Report) -> None:
    if csv:
        report.write(csv, report.to_csv(found))
