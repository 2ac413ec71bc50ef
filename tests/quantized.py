"""Blocks of a matrix in 8 bits as NumPy computes them, block by block and in float64."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

LARGEST = {jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0, jnp.int8: 127.0}
"""Of each type."""
ROUNDED = {each: np.dtype(each) for each in (jnp.float8_e4m3fn, jnp.float8_e5m2)}
HALF_A_STEP = {jnp.float8_e4m3fn: 2.0**-4, jnp.float8_e5m2: 2.0**-3, jnp.int8: 0.0}
"""Of a number, relative to it."""
LEAST_STEP = {jnp.float8_e4m3fn: 2.0**-10, jnp.float8_e5m2: 2.0**-17, jnp.int8: 0.5}
"""Half a step near zero."""


class Expected(NamedTuple):
    """Values and scales, both as the matrix lies."""

    values: np.ndarray
    scale: np.ndarray


def quantized(
    x: Any, block: tuple[int, int], dtype: Any, *, axis: int, power_of_two: bool = False
) -> Expected:
    """Quantizes a matrix; `block` says how many lie side by side, and how many along the axis."""
    wide = np.asarray(x).astype(np.float64)
    height, width = block if axis == -1 else block[::-1]
    values = np.zeros(wide.shape)
    shape = -(-wide.shape[0] // height), -(-wide.shape[1] // width)
    scale = np.ones(shape)
    for i in range(shape[0]):
        for j in range(shape[1]):
            here = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            amax = np.abs(wide[here]).max()
            if amax > 0:
                scale[i, j] = amax / LARGEST[dtype]
            if power_of_two and amax > 0:
                fraction, exponent = np.frexp(scale[i, j])
                scale[i, j] = np.ldexp(0.5 if fraction == 0.5 else 1.0, exponent)
            values[here] = rounded(wide[here] / scale[i, j], dtype)
    return Expected(values, scale)


def rounded(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Rounds to the nearest number of a type."""
    if dtype == jnp.int8:
        return np.round(x)
    return x.astype(np.float32).astype(ROUNDED[dtype]).astype(np.float64)


def assert_quantized(
    found: Any, x: Any, block: tuple[int, int], dtype: Any, *, axis: int, power_of_two: bool = False
) -> None:
    """Compares a `Quantized` with what NumPy computes of the same matrix.

    Powers of two leave no room: all is equal. Else a value may be rounded the other way where it is
    half between two, and is compared with what it stands for.
    """
    expected = quantized(x, block, dtype, axis=axis, power_of_two=power_of_two)
    values = np.asarray(found.values).astype(np.float64)
    assert found.values.dtype == dtype
    assert found.scale.dtype == jnp.float32
    values = values.T if axis == -2 else values
    if power_of_two:
        np.testing.assert_array_equal(found.scale, expected.scale)
        np.testing.assert_array_equal(values, expected.values)
        return
    np.testing.assert_allclose(found.scale, expected.scale, rtol=1e-6)
    assert np.mean(values != expected.values) < 0.01
    height, width = block if axis == -1 else block[::-1]
    scale = np.repeat(np.repeat(np.asarray(found.scale, np.float64), height, 0), width, 1)
    scale = scale[: values.shape[0], : values.shape[1]]
    wide = np.asarray(x).astype(np.float64) / scale
    error = np.abs(values - wide)
    most = np.maximum(np.abs(wide) * HALF_A_STEP[dtype], LEAST_STEP[dtype])
    assert (error <= most * 1.0001).all()
