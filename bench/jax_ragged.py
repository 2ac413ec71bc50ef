"""JAX's own kernels for rows in groups, with configs of the grids that their programs search."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from bench.products import Formula, Operands, Results
from bench.shapes import Case

MODULES = tuple(
    f"jax.experimental.pallas.ops.gpu.{name}"
    for name in ("ragged_dot_mgpu", "transposed_ragged_dot_mgpu")
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A config of both kernels.

    Attributes:
        rows: Rows of a tile.
        cols: Columns of a tile.
        steps: How many steps of the contraction are loaded ahead.
        width: Columns of tiles of a group of these.
    """

    rows: int
    cols: int
    steps: int
    width: int

    @property
    def label(self) -> str:
        """The config in a few characters."""
        return f"{self.rows}x{self.cols}/{self.steps}/{self.width}"

    def divides(self, case: Case) -> bool:
        """Whether the case's sizes are multiples of its tiles, as both kernels demand."""
        if case.direction == "forward":
            return case.k % 64 == 0 and case.n % (self.cols * self.width) == 0
        # Each is contracted once, and columns of a gradient once or rows of one.
        least = math.lcm(64, self.rows, self.cols * self.width)
        return case.k % least == 0 and case.n % least == 0

    @property
    def options(self) -> dict[str, int]:
        """The arguments of both kernels."""
        return {
            "block_m": self.rows,
            "block_n": self.cols,
            "block_k": 64,
            "max_concurrent_steps": self.steps,
            "grid_block_n": self.width,
        }


def refusal(case: Case, *, full: bool) -> str | None:
    """Returns why neither kernel can compute a case, or None."""
    if case.dtype not in ("bf16", "f16"):
        return "16-bit types only"
    return None if choices(case, full=full) else "sizes must be multiples of its tiles"


def choices(case: Case, *, full: bool) -> Sequence[Choice]:
    """Returns the configs that divide a case: a few, or the whole grid."""
    rows, cols = ((64, 128, 192),) * 2 if full else ((64, 128), (128, 192))
    steps, widths = ((2, 4, 5, 6), (1, 2, 4, 8, 16)) if full else ((4,), (1, 4))
    grid = itertools.starmap(Choice, itertools.product(rows, cols, steps, widths))
    return [choice for choice in grid if choice.divides(case)]


def formula(case: Case, choice: Choice) -> Formula:
    """Returns a case with a config."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    transposed = case.problem.transpose_b

    def run(operands: Operands) -> Results:
        a, b, g = (operands.get(name) for name in ("a", "b", "cotangent"))
        options: dict[str, Any] = {"group_sizes": operands["sizes"], **choice.options}
        results = []
        if case.direction != "backward":
            results.append(ragged_dot(a, b, transpose_rhs=transposed, **options))
        if case.direction != "forward":
            results.append(ragged_dot(g, b, transpose_rhs=not transposed, **options))
            pair = (g, a) if transposed else (a, g)
            results.append(transposed_ragged_dot(*pair, **options))
        return tuple(results)

    return run
