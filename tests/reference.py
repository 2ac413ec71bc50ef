"""The product in float64, and the one rule for how far a result may be from it.

A result is right if its error in every tile of 64 x 64 elements is at most twice the error there of
XLA's product in the same types, or of the exact value rounded once where XLA has less. Products of
small integers have no error at all, and are compared bit for bit.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import special

TILE = 64


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: Mapping[str | None, Callable[[np.ndarray], np.ndarray]] = {
    None: lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu_tanh,
    "gelu_tanh": _gelu_tanh,
    "gelu_exact": lambda x: x * special.ndtr(x),
    "silu": lambda x: x * special.expit(x),
    "swish": lambda x: x * special.expit(x),
    "sigmoid": special.expit,
    "tanh": np.tanh,
}


@dataclasses.dataclass(frozen=True)
class Formula:
    """`activation(alpha * (a @ b) + bias) * (alpha * (a @ up)) + beta * residual`."""

    transpose_a: bool = False
    transpose_b: bool = False
    activation: str | None = None
    alpha: float = 1
    beta: float = 1

    def __call__(
        self,
        a: Any,
        b: Any,
        *,
        up: Any = None,
        bias: Any = None,
        residual: Any = None,
        multiply: Callable[[np.ndarray, np.ndarray], np.ndarray] = np.matmul,
    ) -> np.ndarray:
        """Returns the value in float64, not rounded."""
        left = wide(a).swapaxes(-1, -2) if self.transpose_a else wide(a)

        def times(right: Any) -> np.ndarray:
            stored = wide(right)
            turned = stored.swapaxes(-1, -2) if self.transpose_b else stored
            return self.alpha * multiply(left, turned)

        result = times(b)
        if bias is not None:
            result = result + wide(bias)
        result = ACTIVATIONS[self.activation](result)
        if up is not None:
            result = result * times(up)
        if residual is not None:
            result = result + self.beta * wide(residual)
        return result

    def gradients(
        self,
        operands: Mapping[str, Any],
        g: np.ndarray,
        multiply: Callable[[np.ndarray, np.ndarray], np.ndarray] = np.matmul,
    ) -> dict[str, np.ndarray]:
        """Returns what a cotangent of a product of matrices pulls back to; relu at most."""
        a, b = wide(operands["a"]), wide(operands["b"])
        a = a.T if self.transpose_a else a
        b = b.T if self.transpose_b else b
        gradients = {"residual": self.beta * g} if "residual" in operands else {}
        if self.activation == "relu":
            before = self.alpha * multiply(a, b)
            before = before + wide(operands["bias"]) if "bias" in operands else before
            g = g * (before > 0)
        if "bias" in operands:
            gradients["bias"] = g.sum(axis=0)
        da, db = self.alpha * multiply(g, b.T), self.alpha * multiply(a.T, g)
        gradients["a"] = da.T if self.transpose_a else da
        gradients["b"] = db.T if self.transpose_b else db
        return gradients


def wide(x: Any) -> np.ndarray:
    """Returns an array of any type in float64."""
    return np.asarray(x).astype(np.float64)


def rounded(exact: np.ndarray, dtype: Any) -> np.ndarray:
    """Rounds exact values once, and returns them in float64 again."""
    return exact.astype(np.dtype(dtype)).astype(np.float64)


def tile_errors(result: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Returns the largest error in each tile; a vector counts as a row."""
    error = np.abs(result - exact)
    error = error.reshape((*(1,) * max(0, 2 - error.ndim), *error.shape))
    tiles = [-(-size // TILE) for size in error.shape[-2:]]
    extra = [(0, count * TILE - size) for count, size in zip(tiles, error.shape[-2:], strict=True)]
    padded = np.pad(error, [(0, 0)] * (error.ndim - 2) + extra)
    split = padded.reshape(*error.shape[:-2], tiles[0], TILE, tiles[1], TILE)
    return split.max(axis=(-3, -1))


def assert_as_good_as_xla(ours: Any, xlas: Any, exact: np.ndarray) -> None:
    """Applies the rule to a result and XLA's result in the same type."""
    assert ours.shape == xlas.shape == exact.shape
    assert ours.dtype == xlas.dtype
    if exact.size == 0:
        return
    measure = np.maximum(
        tile_errors(wide(xlas), exact), tile_errors(rounded(exact, ours.dtype), exact)
    )
    error = tile_errors(wide(ours), exact)
    assert np.all(error <= 2 * measure), (error / np.maximum(measure, 1e-300)).max()


def assert_exact(ours: Any, exact: np.ndarray) -> None:
    """Compares a result bit for bit with exact values rounded once."""
    assert ours.shape == exact.shape
    np.testing.assert_array_equal(wide(ours), rounded(exact, ours.dtype))


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns small integers, whose products and sums are exact in any type and order."""
    return _converted(rng.integers(-2, 3, shape).astype(np.int32), dtype)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns N(0, 1)."""
    return _converted(rng.standard_normal(shape).astype(np.float32), dtype)


def _converted(numbers: np.ndarray, dtype: Any) -> Any:
    """Converts with NumPy, for which JAX would compile a program for each shape and type."""
    return jnp.asarray(numbers.astype(jnp.dtype(dtype)))
