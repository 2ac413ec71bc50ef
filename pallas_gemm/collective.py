"""Products whose operand is gathered, or whose result is reduced and scattered, while they run.

Both are called inside `jax.shard_map`, by every device along an axis of the mesh. The rows that
travel are cut into the devices' chunks, and go round in a ring, from neighbour to neighbour:

- `all_gather_gemm` multiplies the chunk that is there while the next one arrives;
- `gemm_reduce_scatter` computes what it adds to one sum while another sum is on its way. Two rings
  in opposite directions carry one half of each chunk, so that a sum which arrives is added in the
  kernel of the next product (its residual) while the sum of the other ring travels.

Loops are unrolled, and no product waits for the message that is sent in its step: this is what
XLA's scheduler needs to run them at the same time. The derivative of one is the other.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm import activations, arguments
from pallas_gemm.api import Activation, gemm
from pallas_gemm.autodiff import kept_dtype
from pallas_gemm.kernels import xla
from pallas_gemm.partitioning import reduction_dtype
from pallas_gemm.product import equally_varying

# XLA has one message under way at a time unless it is told otherwise, and waits for the second of
# two that are sent in a step; two sums that are sent in turn suit it.
_GATHER_RINGS = 1
_SCATTER_RINGS = 2


def all_gather_gemm(  # noqa: PLR0913 - each is a keyword
    a: jax.Array,
    b: jax.Array,
    axis_name: str,
    *,
    bias: jax.Array | None = None,
    activation: Activation = None,
    preferred_element_type: Any = None,
    precision: Any = None,
    transpose_b: bool = False,
    rings: int = _GATHER_RINGS,
    overlap: bool = True,
) -> jax.Array:
    """Computes `activation(all_gather(a) @ b + bias)`, gathering the rows of `a` meanwhile.

    >>> y = all_gather_gemm(x, w, "model", activation="gelu")  # doctest: +SKIP

    Args:
        a: This device's rows, `[..., rows, k]`; all devices' rows follow one another in the result.
        b: This device's right operand, `[k, n]`.
        axis_name: The axis of the mesh along which to gather, of a `jax.shard_map` around the call.
        bias: One value per column of this device's result.
        activation: As for `gemm`.
        preferred_element_type: As for `gemm`.
        precision: As for `gemm`.
        transpose_b: `b` is stored `[n, k]`.
        rings: 1 sends each chunk to one neighbour; 2 sends one half of it to each, for links that
            carry both directions at once. XLA then has to be told to have two messages under way
            (`xla_gpu_experimental_parallel_collective_overlap_limit`).
        overlap: False gathers first and multiplies then, as JAX's own collectives do.

    Returns:
        `[..., devices * rows, n]`.

    Raises:
        ValueError: A shape is not legal, or there is no such axis.
        TypeError: An argument is of the wrong type.
    """
    a, b = arguments.array("a", a), arguments.array("b", b)
    columns = _check_factors(a, b, transpose_b)
    bias = arguments.bias(bias, columns)
    dtype = arguments.result_dtype(a, b, preferred_element_type)
    ring = _Ring(
        axis_name,
        _axis_size(axis_name),
        _check_rings(rings),
        bool(overlap),
        bool(transpose_b),
        dtype,
        _sums_dtype(a, dtype),
        precision,
        activations.resolve(activation),
    )
    a, b, bias = ring.varying(a, b, bias)
    return _gathered(ring, a, b, bias)


def gemm_reduce_scatter(
    a: jax.Array,
    b: jax.Array,
    axis_name: str,
    *,
    preferred_element_type: Any = None,
    precision: Any = None,
    transpose_b: bool = False,
    rings: int = _SCATTER_RINGS,
    overlap: bool = True,
) -> jax.Array:
    """Computes this device's rows of the sum over all devices of `a @ b`, adding up meanwhile.

    >>> y = gemm_reduce_scatter(h, w, "model")  # doctest: +SKIP

    Sums travel in float32, or as `reduce_in` says, and are rounded to the result's type at the end.

    Args:
        a: This device's left operand, `[..., rows, k]`; the axis must divide `rows`.
        b: This device's right operand, `[k, n]`.
        axis_name: The axis of the mesh along which to add up, of a `jax.shard_map` around the call.
        preferred_element_type: As for `gemm`.
        precision: As for `gemm`.
        transpose_b: `b` is stored `[n, k]`.
        rings: 2 sends one half of each sum to each neighbour, so that one half is computed, with
            the addition in the kernel, while the other travels; 1 sends whole sums to one
            neighbour and adds them in a pass of their own.
        overlap: False multiplies first and reduces then, as JAX's own collectives do.

    Returns:
        `[..., rows / devices, n]`.

    Raises:
        ValueError: A shape is not legal, or there is no such axis.
        TypeError: An argument is of the wrong type.
    """
    a, b = arguments.array("a", a), arguments.array("b", b)
    _check_factors(a, b, transpose_b)
    size = _axis_size(axis_name)
    if a.shape[-2] % size:
        raise ValueError(
            f"a has {a.shape[-2]} rows, which the {size} devices along axis_name={axis_name!r} do"
            " not divide"
        )
    dtype = arguments.result_dtype(a, b, preferred_element_type)
    ring = _Ring(
        axis_name,
        size,
        _check_rings(rings),
        bool(overlap),
        bool(transpose_b),
        dtype,
        _sums_dtype(a, dtype),
        precision,
    )
    a, b, _ = ring.varying(a, b, None)
    return _scattered(ring, a, b)


def _check_factors(a: Any, b: Any, transpose_b: bool) -> int:
    """Returns the columns of a product of rows and a matrix.

    Raises:
        ValueError: They cannot be multiplied.
        TypeError: One is complex.
    """
    for name, x, legal in (("a", a, a.ndim >= 2), ("b", b, b.ndim == 2)):
        if not legal:
            wanted = "[..., rows, k]" if name == "a" else "[k, n]"
            raise ValueError(f"{name} must have the shape {wanted}, got {list(x.shape)}")
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise TypeError(f"{name} must be real, got {x.dtype}")
    contracted, columns = b.shape[::-1] if transpose_b else b.shape
    if a.shape[-1] != contracted:
        raise ValueError(
            f"a has {a.shape[-1]} columns and b {contracted} rows"
            f"{' (it is transposed)' if transpose_b else ''}; they must be as many"
        )
    return columns


def _sums_dtype(a: jax.Array, out_dtype: Any) -> np.dtype:
    """Returns the type that sums travel in."""
    sums = xla.wide_dtype(a.dtype, out_dtype)
    return reduction_dtype() or sums if jnp.issubdtype(sums, jnp.floating) else sums


def _check_rings(rings: Any) -> int:
    if rings not in (1, 2):
        raise ValueError(f"rings={rings!r} must be 1 or 2")
    return int(rings)


def _axis_size(axis_name: Any) -> int:
    """Returns how many devices there are along an axis.

    Raises:
        ValueError: No `shard_map` around the call has it.
    """
    try:
        return lax.axis_size(axis_name)
    except (NameError, KeyError):
        raise ValueError(
            f"axis_name={axis_name!r} must be an axis of a `jax.shard_map` around the call"
        ) from None


@dataclasses.dataclass(frozen=True)
class _Ring:
    """How rows go round, and what is multiplied with them.

    Attributes:
        axis: The axis of the mesh.
        size: How many devices there are along it.
        rings: In how many directions rows travel.
        overlap: Whether they do so while products are computed.
        transpose_b: The right operand is stored `[n, k]`.
        out_dtype: Type of the result.
        sums_dtype: The type that sums travel in.
        precision: As for `gemm`.
        activation: Applied to the product, or None.
    """

    axis: str
    size: int
    rings: int
    overlap: bool
    transpose_b: bool
    out_dtype: Any
    sums_dtype: Any
    precision: Any
    activation: Any = None

    def varying(self, *operands: Any) -> list[Any]:
        """Lets all operands vary over the axes that one varies over, and over that of the ring."""
        present = [x for x in operands if x is not None]
        *varied, _ = equally_varying([*present, lax.axis_index(self.axis)])
        rest = iter(varied)
        return [None if x is None else next(rest) for x in operands]

    def multiply(self, a: jax.Array, b: jax.Array, dtype: Any, **epilogue: Any) -> jax.Array:
        """Multiplies rows on this device."""
        return gemm(
            a,
            b,
            transpose_b=self.transpose_b,
            preferred_element_type=dtype,
            precision=self.precision,
            **epilogue,
        )

    def halves(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """Yields the direction, the first row and the number of rows of what travels together."""
        if self.rings == 1 or rows % 2 or self.size == 1:
            yield 1, 0, rows
        else:
            yield 1, 0, rows // 2
            yield -1, rows // 2, rows // 2

    def send(self, x: jax.Array, step: int) -> jax.Array:
        """Sends to the device that is so many steps further along the axis."""
        pairs = [(i, (i + step) % self.size) for i in range(self.size)]
        return lax.ppermute(x, self.axis, pairs)

    def gather(self, mine: jax.Array | None) -> jax.Array | None:
        """Gathers the rows of all devices in one step; None if there are none."""
        if mine is None or self.size == 1:
            return mine
        return lax.all_gather(mine, self.axis, axis=mine.ndim - 2, tiled=True)

    def for_gradients(self, dtype: Any, rings: int) -> "_Ring":
        """Returns the ring of the product with the transposed right operand."""
        return dataclasses.replace(
            self,
            rings=rings,
            transpose_b=not self.transpose_b,
            out_dtype=kept_dtype(dtype),
            activation=None,
        )


def _gather_multiply(
    ring: _Ring, a: jax.Array, b: jax.Array, **epilogue: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the product of all devices' rows, and those rows."""
    rows, axis = a.shape[-2], a.ndim - 2
    if not ring.overlap or ring.size == 1:
        every: Any = ring.gather(a)
        return ring.multiply(every, b, ring.out_dtype, **epilogue), every
    index = lax.axis_index(ring.axis)
    halves = list(ring.halves(rows))
    chunks = [lax.slice_in_dim(a, first, first + count, axis=axis) for _, first, count in halves]
    result = every = None
    for step in range(ring.size):
        here = chunks
        if step < ring.size - 1:
            chunks = [ring.send(x, -half[0]) for x, half in zip(here, halves, strict=True)]
        parts = [ring.multiply(x, b, ring.out_dtype, **epilogue) for x in here]
        # Rows are sent on only when what was there before them is multiplied: XLA would otherwise
        # send them all round before it multiplies any.
        chunks, parts = lax.optimization_barrier((chunks, parts))
        for (direction, first, _), chunk, part in zip(halves, here, parts, strict=True):
            place = (index + direction * step) % ring.size * rows + first
            result = _put(result, part, place, ring.size * rows)
            every = _put(every, chunk, place, ring.size * rows)
    assert result is not None
    assert every is not None
    return result, every


def _put(whole: jax.Array | None, part: jax.Array, place: Any, rows: int) -> jax.Array:
    """Puts rows into an array of so many, which is made if there is none yet."""
    axis = part.ndim - 2
    if whole is None:
        shape = (*part.shape[:axis], rows, part.shape[-1])
        whole, _ = equally_varying([lax.empty(shape, part.dtype), part])
    return lax.dynamic_update_slice_in_dim(whole, part, place, axis)


def _multiply_scatter(
    ring: _Ring, a: jax.Array, b: jax.Array, mine: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns this device's rows of the sum of all devices' products.

    Args:
        ring: How they go round.
        a: The left operand, with the rows of all devices.
        b: The right operand.
        mine: Rows of this device, to be gathered too.

    Returns:
        This device's rows, and what was gathered.
    """
    axis = a.ndim - 2
    if ring.size == 1:
        return ring.multiply(a, b, ring.out_dtype), mine
    if not ring.overlap:
        product = ring.multiply(a, b, ring.sums_dtype)
        total = lax.psum_scatter(product, ring.axis, scatter_dimension=axis, tiled=True)
        return total.astype(ring.out_dtype), ring.gather(mine)
    index, rows = lax.axis_index(ring.axis), a.shape[-2] // ring.size
    halves = list(ring.halves(rows))
    fused = len(halves) == 2 and jnp.issubdtype(ring.sums_dtype, jnp.floating)
    sums: list[Any] = [None] * len(halves)
    for step in range(ring.size):
        for i, (direction, first, count) in enumerate(halves):
            # What is added now is on its way to this device for so many steps more.
            owner = (index + direction * (ring.size - 1 - step)) % ring.size
            part = lax.dynamic_slice_in_dim(a, owner * rows + first, count, axis)
            coming = ring.send(sums[i], direction) if step else None
            if mine is not None and (step, i) == (ring.size - 1, len(halves) - 1):
                # These rows are sent after all sums, and after the product that covers the last.
                (coming, *sums[:i]), mine = lax.optimization_barrier(((coming, *sums[:i]), mine))
            if coming is not None and fused:
                # The other ring's product covers the way of this sum.
                sums[i] = ring.multiply(part, b, ring.sums_dtype, residual=coming)
            else:
                product = ring.multiply(part, b, ring.sums_dtype)
                sums[i] = product if coming is None else product + coming
    return jnp.concatenate(sums, axis=axis).astype(ring.out_dtype), ring.gather(mine)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(ring: _Ring, a: jax.Array, b: jax.Array, bias: jax.Array | None) -> jax.Array:
    return _gather_multiply(ring, a, b, bias=bias, activation=ring.activation)[0]


def _gathered_forward(ring: _Ring, a: Any, b: Any, bias: Any) -> tuple[jax.Array, Any]:
    if ring.activation is None:
        return _gathered(ring, a, b, bias), (a, b, bias, None)
    # As for `gemm`: the pre-activation is kept, and XLA applies the activation.
    kept = dataclasses.replace(ring, out_dtype=kept_dtype(ring.out_dtype), activation=None)
    before = _gathered(kept, a, b, bias)
    result = ring.activation(before.astype(jnp.float32)).astype(ring.out_dtype)
    return result, (a, b, bias, before)


def _gathered_backward(ring: _Ring, kept: Any, g: jax.Array) -> tuple[Any, Any, Any]:
    a, b, bias, before = kept
    if before is not None:
        wide = before.astype(jnp.float32)
        (g,) = jax.vjp(ring.activation, wide)[1](g.astype(jnp.float32))
    db_bias = None if bias is None else _column_sums(g).astype(bias.dtype)
    left, right = _for_gradient(a), _for_gradient(b)
    backward = ring.for_gradients(a.dtype, _SCATTER_RINGS)
    da, every = _multiply_scatter(backward, g.astype(right.dtype), right, left)
    assert every is not None
    db = _right_gradient(ring, every, right, g.astype(left.dtype))
    return da.astype(a.dtype), db.astype(b.dtype), db_bias


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scattered(ring: _Ring, a: jax.Array, b: jax.Array) -> jax.Array:
    return _multiply_scatter(ring, a, b)[0]


def _scattered_forward(ring: _Ring, a: Any, b: Any) -> tuple[jax.Array, Any]:
    return _scattered(ring, a, b), (a, b)


def _scattered_backward(ring: _Ring, kept: Any, g: jax.Array) -> tuple[Any, Any]:
    a, b = kept
    left, right = _for_gradient(a), _for_gradient(b)
    da, every = _gather_multiply(
        ring.for_gradients(a.dtype, _GATHER_RINGS), g.astype(right.dtype), right
    )
    db = _right_gradient(ring, left, right, every.astype(left.dtype))
    return da.astype(a.dtype), db.astype(b.dtype)


_gathered.defvjp(_gathered_forward, _gathered_backward)
_scattered.defvjp(_scattered_forward, _scattered_backward)


def _right_gradient(ring: _Ring, a: jax.Array, b: jax.Array, g: jax.Array) -> jax.Array:
    """Returns the gradient of the right operand, in the layout in which it is stored."""
    multiply = functools.partial(ring.multiply, a, dtype=g.dtype)
    (gradient,) = jax.linear_transpose(multiply, b)(g)
    return gradient


def _for_gradient(x: jax.Array) -> jax.Array:
    """Widens operands of 8 bits, which is exact."""
    return x.astype(jnp.bfloat16) if x.dtype.itemsize == 1 else x


def _column_sums(g: jax.Array) -> jax.Array:
    return jnp.sum(g.astype(jnp.float32), axis=tuple(range(g.ndim - 1)))
