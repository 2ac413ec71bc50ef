"""Weights of 4 and 8 bits as others store them: qwix, AWQ, GPTQ.

    qwix    QArray: qvalue, scale and zero_point of as many dimensions; the sizes say the blocks
    AWQ     eight columns in an int32, from the lowest four bits on: 0, 2, 4, 6, 1, 3, 5, 7
    GPTQ    eight rows in an int32, in order; of zero points, stored less one, eight columns

Each function returns what a `QuantizedWeight` consists of.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.api import arguments
from pallas_gemm.op import widening

Parts = tuple[Any, Any, Any, int, np.dtype]
"""Values, scale, zero, axis, and the type of what they stand for."""

PER_NUMBER = 8
"""Values of four bits in an int32."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each four bits of a number, the lowest first."""
SYMMETRIC = 8
"""The zero point of unsigned values whose range is as wide below zero as above."""


def is_qwix(x: Any) -> bool:
    """Whether an object is a `QArray`, or holds one as qwix's quantized parameters do."""
    own = getattr(x, "array", x)
    return all(hasattr(own, name) for name in ("qvalue", "scale", "zero_point"))


def of_qwix(given: Any) -> Parts:
    """Returns the parts of a `QArray` whose scales are of groups of rows, channels or the tensor.

    Raises:
        TypeError: It is none, or its values are of no type of few bits.
        ValueError: Its scales are of other blocks.
    """
    if not is_qwix(given):
        raise TypeError(f"array must be a qwix.QArray, got {type(given).__name__}: {given!r:.80}")
    own = getattr(given, "array", given)
    values, scale, zero = own.qvalue, own.scale, own.zero_point
    widening.check_type("qvalue", values.dtype)
    if values.ndim < 2:
        raise ValueError(f"qvalue must be a matrix or several, got shape {list(values.shape)}")
    arrays = {"scale": scale} if zero is None else {"scale": scale, "zero_point": zero}
    # A channel is a column, unless rows are what have scales of their own.
    rows, columns = values.shape[-2:]
    is_turned = scale.shape[-2] in (1, rows) and scale.shape[-1] not in (1, columns)
    axis = -1 if is_turned or scale.shape[-2:] == (rows, 1) != (1, 1) else -2
    k, n = (values.shape[-2], values.shape[-1])[:: 1 if axis == -2 else -1]
    found = []
    for name, x in arrays.items():
        *front, groups, columns = x.shape if axis == -2 else (*x.shape[:-2], *x.shape[:-3:-1])
        alike = len(front) == values.ndim - 2 and all(
            a in (1, b) for a, b in zip(front, values.shape, strict=False)
        )
        if not alike or columns not in (1, n) or groups == 0 or k % groups:
            raise ValueError(
                f"{name} must have one value for the tensor, each channel or each group of one of"
                f" the last two dimensions of qvalue{list(values.shape)}, got {list(x.shape)}"
            )
        found.append(x if axis == -2 else jnp.swapaxes(x, -1, -2))
    groups = max(x.shape[-2] for x in found)
    wanted = (*values.shape[:-2], groups, n)
    scale, zero, *_ = (*(_widespread(x, wanted) for x in found), None)
    return values, scale, zero, axis, np.dtype(scale.dtype)


def _widespread(x: Any, shape: tuple[int, ...]) -> Any:
    """Returns an array with a value for each group and column, of one that has fewer."""
    if x.shape[-2] not in (1, shape[-2]):
        raise ValueError(
            f"scale and zero_point must have as many groups as each other, or one, got"
            f" {x.shape[-2]} and {shape[-2]}"
        )
    return x if x.shape == shape else jnp.broadcast_to(x, shape)


def of_awq(qweight: Any, scales: Any, qzeros: Any) -> Parts:
    """Returns the parts of a layer of an AWQ checkpoint.

    Raises:
        TypeError: An array is not of its type.
        ValueError: An array is not of its shape.
    """
    qweight, scales = _packed("qweight", qweight), _scales(scales)
    qzeros = _packed("qzeros", qzeros)
    k, n = qweight.shape[0], qweight.shape[1] * PER_NUMBER
    _check_scales(scales, k, n)
    _check_shape("qzeros", qzeros, (scales.shape[0], n // PER_NUMBER))
    values, zero = (_columns(x)[..., np.argsort(AWQ_ORDER)] for x in (qweight, qzeros))
    return _finished(values.reshape(k, n), scales, zero.reshape(-1, n))


def of_gptq(qweight: Any, scales: Any, qzeros: Any, g_idx: Any, version: Any) -> Parts:
    """Returns the parts of a layer of a GPTQ checkpoint.

    Raises:
        TypeError: An array is not of its type.
        ValueError: An array is not of its shape, or rows are sorted by their activations.
    """
    if version not in (1, 2):
        raise ValueError(f"version must be 1 or 2, got {version!r}")
    qweight, scales = _packed("qweight", qweight), _scales(scales)
    k, n = qweight.shape[0] * PER_NUMBER, qweight.shape[1]
    _check_scales(scales, k, n)
    group = k // scales.shape[0]
    if g_idx is not None and not np.array_equal(np.asarray(g_idx), np.arange(k) // group):
        raise ValueError(
            "g_idx must name groups of rows that lie side by side, but this checkpoint sorts rows"
            " by their activations (desc_act=True): make one with desc_act=False"
        )
    values = jnp.swapaxes(_columns(jnp.swapaxes(qweight, 0, 1)).reshape(n, k), 0, 1)
    if qzeros is None:
        # Less 8, they are what the same bits with the highest one flipped are as int4.
        signed = jax.lax.bitcast_convert_type((values ^ SYMMETRIC).astype(jnp.uint4), jnp.int4)
        return signed, scales, None, -2, np.dtype(scales.dtype)
    qzeros = _packed("qzeros", qzeros)
    _check_shape("qzeros", qzeros, (scales.shape[0], n // PER_NUMBER))
    zero = _columns(qzeros).reshape(-1, n)
    if version == 1:
        zero = (zero + 1) & 15
    return _finished(values, scales, zero)


def _columns(x: jax.Array) -> jax.Array:
    """Returns the eight values of each number, the lowest bits first, in one dimension more."""
    wide = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.stack([(wide >> shift) & 15 for shift in range(0, 32, 4)], axis=-1)


def _finished(values: jax.Array, scales: jax.Array, zero: jax.Array) -> Parts:
    return values.astype(jnp.uint4), scales, zero.astype(jnp.uint4), -2, np.dtype(scales.dtype)


def _packed(name: str, x: Any) -> jax.Array:
    x = arguments.array(name, x)
    if x.dtype != jnp.int32 or x.ndim != 2:
        raise TypeError(
            f"{name} must be a matrix of int32, each with eight values of 4 bits, got"
            f" {x.dtype}{list(x.shape)}"
        )
    return x


def _scales(x: Any) -> jax.Array:
    x = arguments.array("scales", x)
    if x.dtype not in widening.OF_SCALES:
        raise TypeError(f"scales must be of bfloat16, float16 or float32, got {x.dtype}")
    return x


def _check_scales(scales: jax.Array, k: int, n: int) -> None:
    fits = scales.ndim == 2 and scales.shape[1] == n and scales.shape[0] and not k % scales.shape[0]
    if not fits:
        raise ValueError(
            f"scales must be of shape [k / group, n] for a weight of k={k} and n={n}, got"
            f" {list(scales.shape)}"
        )


def _check_shape(name: str, x: jax.Array, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} must be of shape {list(shape)}, got {list(x.shape)}")
