"""What every product has to be, in float64 and NumPy, with all of its first derivatives.

All operands have the same dimensions here, of size 1 where they have none. A value carries how it
changes with each element of one operand, so that no program derives what is to be derived.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

ORDER = "vl"
"""The dimensions in front of a matrix: what is mapped, and the batch."""


@dataclasses.dataclass(frozen=True)
class Moving:
    """A value, and how it changes.

    Attributes:
        value: `[1, ...]`.
        change: `[changes, ...]`, of which there is one for each element that is moved.
    """

    value: np.ndarray
    change: np.ndarray

    def __add__(self, other: Self) -> Self:
        return type(self)(self.value + other.value, self.change + other.change)

    def __mul__(self, other: Self) -> Self:
        change = self.change * other.value + self.value * other.change
        return type(self)(self.value * other.value, change)

    def __matmul__(self, other: Self) -> Self:
        change = self.change @ other.value + self.value @ other.change
        return type(self)(self.value @ other.value, change)

    def times(self, factor: Any) -> Self:
        """Returns it times numbers that do not change."""
        return type(self)(self.value * factor, self.change * factor)

    def each(self, f: Any) -> Self:
        """Returns what a rearrangement makes of value and change."""
        return type(self)(f(self.value), f(self.change))


def aligned(x: np.ndarray, letters: str, wanted: str) -> np.ndarray:
    """Returns an array `[changes, *letters]` with the dimensions that are wanted, in order."""
    there = [letter for letter in wanted if letter in letters]
    assert len(there) == len(letters)
    x = x.transpose(0, *(1 + letters.index(letter) for letter in there))
    sizes = dict(zip(there, x.shape[1:], strict=True))
    return x.reshape(x.shape[0], *(sizes.get(letter, 1) for letter in wanted))


def moving(x: np.ndarray, letters: str, wanted: str, *, moves: bool) -> Moving:
    """Returns an operand that moves, each element for itself, or that does not."""
    value = aligned(x[None], letters, wanted)
    if not moves:
        return Moving(value, np.zeros_like(value))
    every = np.eye(x.size).reshape(x.size, *x.shape)
    return Moving(value, aligned(every, letters, wanted))


ACTIVATIONS = {
    None: lambda x: x,
    "relu": lambda x: x.times(x.value > 0),
    "square": lambda x: x * x,
}

FUNCTIONS = {None: lambda x: x, "relu": jax.nn.relu, "square": jnp.square}
"""The same of JAX's arrays."""


def of_rows(x: Moving, group: np.ndarray) -> Moving:
    """Returns what each row has of `[changes, v, groups, ...]` by the number of its group."""
    return x.each(lambda each: each[:, :, np.minimum(group, each.shape[2] - 1)])


def product_of_rows(a: Moving, own: Moving, group: np.ndarray, groups: int) -> Moving:
    """Multiplies each row with its own group's matrix; what is in none is zeros."""
    rows = a.each(lambda x: np.moveaxis(x, 2, 3))  # [changes, v, m, 1, k]
    result = (rows @ of_rows(own, group)).each(lambda x: np.moveaxis(x, 2, 3))
    return result.times((group < groups)[:, None])


def finished(sums: list[Moving], case: Any, x: dict[str, Moving]) -> Moving:
    """Applies an epilogue to one sum, or to both of a gated product."""
    names = (("bias", "col_scale"), ("up_bias", "up_scale"))
    values = []
    for total, (bias, scale) in zip(sums, names, strict=False):
        value = total.times(1 if isinstance(case["alpha"], str) else case["alpha"])
        for factor in ("alpha", "row_scale", scale):
            value = value * x[factor] if factor in x else value
        values.append(value + x[bias] if bias in x else value)
    result = ACTIVATIONS[case["activation"]](values[0])
    if len(values) > 1:
        result = result * values[1]
    if "residual" in x:
        residual = x["residual"]
        residual = residual * x["beta"] if "beta" in x else residual.times(case["residual"])
        result = result + residual
    return result
