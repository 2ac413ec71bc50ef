"""Trains those who are compared, and shows what was found: losses, times and memory."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from examples import contest
from examples.sequences import Task
from examples.training import Trainee, Training

POINTS = 8
"""Rows of the table of losses."""


class Sizes(Protocol):
    """The report on a model."""

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        ...

    @property
    def product_flops(self) -> int:
        """Multiplications plus additions of a step's products with parameters, both ways."""
        ...


def compare(
    training: Training, kinds: Mapping[str, str], rounds: int, steps: int, console: Console
) -> dict[str, Any]:
    """Trains in turns, and returns what was found, as plain data.

    Args:
        training: The model to train.
        kinds: Names of trainees, and what their layers are.
        rounds: As for `contest.hold`.
        steps: As for `contest.hold`.
        console: Where progress is shown.
    """
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=len(kinds) * (rounds + 1))
        trainees = []
        for name, layers in kinds.items():
            trainees.append(training.trainee(name, layers))
            progress.advance(task)
        progress.update(task, description="training")
        times = contest.hold(
            trainees, training.batch, rounds, steps, lambda: progress.advance(task)
        )
    return _found(trainees, times)


def _found(trainees: Sequence[Trainee], times: Sequence[contest.Times]) -> dict[str, Any]:
    found: dict[str, Any] = {
        trainee.name: {
            "ms_per_step": own.step * 1e3,
            "host_ms": own.host * 1e3,
            "memory_bytes": trainee.memory,
            "has_kernels": trainee.has_kernels,
            "losses": trainee.curve.tolist(),
            "rounds_ms": [seconds * 1e3 for seconds in own.steps],
        }
        for trainee, own in zip(trainees, times, strict=True)
    }
    if len(trainees) == 2:
        found["stock/pallas_gemm"] = contest.ratio(times[1], times[0])
        found["largest_difference"] = float(np.abs(trainees[0].curve - trainees[1].curve).max())
    return found


def show(console: Console, found: dict[str, Any], names: Sequence[str], sizes: Sizes) -> None:
    """Prints the losses and the times."""
    losses = Table("step", *(f"loss of {name}" for name in names))
    count = len(found[names[0]]["losses"])
    for step in sorted({*np.linspace(0, count - 1, min(POINTS, count)).astype(int).tolist()}):
        losses.add_row(str(step), *(f"{found[name]['losses'][step]:.4f}" for name in names))
    console.print(losses)
    best = Task(sizes.vocabulary).best_loss
    console.print(f"Who knows the rule has a loss of {best:.4f}.")
    table = Table("", "ms per step", "TFLOP/s of products", "host ms", "memory GB")
    for name in names:
        own = found[name]
        speed = sizes.product_flops / own["ms_per_step"] / 1e9
        table.add_row(
            name,
            f"{own['ms_per_step']:.2f}",
            f"{speed:.3g}",
            f"{own['host_ms']:.2f}",
            f"{own['memory_bytes'] / 1e9:.3g}",
        )
    console.print(table)
    if len(names) == 2:
        compared = f"stock / pallas_gemm: {found['stock/pallas_gemm']:.3f}x in time per step"
        if not found["pallas_gemm"]["has_kernels"]:
            compared = "XLA computes all products here, of both: their times say nothing"
        console.print(f"{compared}; losses differ by at most {found['largest_difference']:.2g}.")
