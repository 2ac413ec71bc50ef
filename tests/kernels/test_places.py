"""Where the largest value is: parts joined in any way are JAX's `argmax` of any values."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import gemm
from pallas_gemm.kernels.functions import places

ODD = (-np.inf, np.inf, np.nan, -0.0, 0.0, 3.0)


def _rows() -> Any:
    rows = [list(row) for row in itertools.product(ODD, repeat=4)]
    return jnp.asarray(rows, jnp.float32)


def _parts(x: Any, count: int) -> list[Any]:
    size = x.shape[1] // count
    each = [places.along(own, 1) for own in jnp.split(x, count, axis=1)]
    return [(largest, found + size * i) for i, (largest, found) in enumerate(each)]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_joined_are_jaxs(count: int) -> None:
    x = _rows()
    found = places.joined(tuple(map(jnp.stack, zip(*_parts(x, count), strict=True))))
    np.testing.assert_array_equal(found[0], np.max(np.asarray(x), 1))
    np.testing.assert_array_equal(found[1], np.argmax(np.asarray(x), 1))


@pytest.mark.parametrize("turned", [False, True])
def test_two_parts_are_jaxs_in_either_order(turned: bool) -> None:
    x = _rows()
    largest, found = places.both(*_parts(x, 2)[:: -1 if turned else 1])
    np.testing.assert_array_equal(largest, np.max(np.asarray(x), 1))
    np.testing.assert_array_equal(found, np.argmax(np.asarray(x), 1))


@pytest.mark.parametrize("argument", [jnp.argmax, jnp.argmin])
def test_a_kernel_finds_any_values(argument: Any) -> None:
    """Each row has two values that are odd, in one tile or in two, and numbers beside them."""
    rows = _rows()
    n, rng = 136, np.random.default_rng(0)
    x = rng.integers(-2, 3, (len(rows), n)).astype(np.float32)
    # In two tiles of 64 columns, and in the last, of 8.
    x[:, [5, 70, 71, 133]] = rows
    a, b = jnp.zeros((len(rows), 64), jnp.bfloat16), jnp.zeros((n, 64), jnp.bfloat16)

    def f(s: Any, x: Any) -> Any:
        return argument(s + x, -1)

    found = jax.jit(
        lambda *x: gemm(
            *x[:2], transpose_b=True, epilogue=f, operands=x[2:], implementation="interpret"
        )
    )(a, b, jnp.asarray(x))
    np.testing.assert_array_equal(found, argument(jnp.asarray(x), -1), strict=True)
