"""Products whose operand is gathered, or whose result is reduced and scattered, by many devices.

Both are called inside `jax.shard_map`, by every device along an axis of the mesh, and the
derivative of one is the other:

- `all_gather_gemm` gathers the rows of its left operand;
- `gemm_reduce_scatter` sends rows of partial sums to the devices that they belong to, as soon as
  they are computed.

The kernel sends and receives while it multiplies, wherever it can (`fused_collective`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.api import arguments, extras, function, request
from pallas_gemm.api.gemm import Activation, gemm
from pallas_gemm.call import Call, Operands, Options
from pallas_gemm.kernels.functions import activations
from pallas_gemm.op.linear import kept_dtype
from pallas_gemm.op.mesh import fused_collective
from pallas_gemm.op.mesh.reduction import reduction_dtype, travelling_dtype
from pallas_gemm.op.product import equally_varying
from pallas_gemm.planning import numerics
from pallas_gemm.planning.by_xla import xla
from pallas_gemm.problem import Epilogue


def all_gather_gemm(  # noqa: PLR0913 - each is a keyword
    a: jax.Array,
    b: jax.Array,
    axis_name: str,
    *,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[jax.Array] = (),
    bias: jax.Array | None = None,
    activation: Activation = None,
    preferred_element_type: Any = None,
    precision: Any = None,
    transpose_b: bool = False,
) -> Any:
    """Computes `activation(all_gather(a) @ b + bias)`; the gradient of `a` is scattered.

    >>> y = all_gather_gemm(x, w, "model", activation="gelu")  # doctest: +SKIP

    Args:
        a: This device's rows, `[..., rows, k]`; all devices' rows follow one another in the result.
        b: This device's right operand, `[k, n]`.
        axis_name: The axis of the mesh along which to gather, of a `jax.shard_map` around the call.
        epilogue: A function of the float32 result and of `operands`, instead of the words that say
            the same. XLA computes it, on each device.
        operands: The arrays that `epilogue` takes after the result.
        bias: One value per column of this device's result.
        activation: As for `gemm`.
        preferred_element_type: As for `gemm`.
        precision: As for `gemm`.
        transpose_b: `b` is stored `[n, k]`.

    Returns:
        `[..., devices * rows, n]`.

    Raises:
        ValueError: A shape is not legal, or there is no such axis.
        TypeError: An argument is of the wrong type.
    """
    if function.is_given(epilogue, operands):
        words = {"bias": bias, "activation": activation}
        words["preferred_element_type"] = preferred_element_type
        how = {
            "preferred_element_type": np.float32,
            "precision": precision,
            "transpose_b": transpose_b,
        }
        multiply = functools.partial(all_gather_gemm, axis_name=axis_name, **how)
        return function.after(multiply, (a, b), epilogue, operands, words)
    transpose_b = arguments.flag("transpose_b", transpose_b)
    a, b = arguments.array("a", a), arguments.array("b", b)
    columns = _check_factors(a, b, transpose_b)
    bias = extras.vector("bias", bias, "n", extras.Result((), a.shape[-2], columns))
    dtype = arguments.result_type(a, b, preferred_element_type).dtype
    arguments.axis_size(axis_name)
    group = _Group(
        axis_name,
        transpose_b,
        dtype,
        _sums_dtype(a, b, dtype),
        precision,
        activations.resolve(activation),
    )
    a, b, bias = group.varying(a, b, bias)
    return _gathered(group, a, b, bias)


def gemm_reduce_scatter(
    a: jax.Array,
    b: jax.Array,
    axis_name: str,
    *,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[jax.Array] = (),
    preferred_element_type: Any = None,
    precision: Any = None,
    transpose_b: bool = False,
) -> Any:
    """Computes this device's rows of the sum over all devices of `a @ b`, sending meanwhile.

    >>> y = gemm_reduce_scatter(h, w, "model")  # doctest: +SKIP

    Sums travel in the result's type, or as `reduce_in` says. Where the kernel sends them they are
    added in float32; XLA's collective adds them in the type in which they travel.

    Args:
        a: This device's left operand, `[..., rows, k]`; the axis must divide `rows`.
        b: This device's right operand, `[k, n]`.
        axis_name: The axis of the mesh along which to add up, of a `jax.shard_map` around the call.
        epilogue: A function of the float32 result and of `operands`, instead of the words that say
            the same. XLA computes it, on each device.
        operands: The arrays that `epilogue` takes after the result.
        preferred_element_type: As for `gemm`.
        precision: As for `gemm`.
        transpose_b: `b` is stored `[n, k]`.

    Returns:
        `[..., rows / devices, n]`.

    Raises:
        ValueError: A shape is not legal, or there is no such axis.
        TypeError: An argument is of the wrong type.
    """
    if function.is_given(epilogue, operands):
        how = {
            "preferred_element_type": np.float32,
            "precision": precision,
            "transpose_b": transpose_b,
        }
        multiply = functools.partial(gemm_reduce_scatter, axis_name=axis_name, **how)
        words = {"preferred_element_type": preferred_element_type}
        return function.after(multiply, (a, b), epilogue, operands, words)
    transpose_b = arguments.flag("transpose_b", transpose_b)
    a, b = arguments.array("a", a), arguments.array("b", b)
    _check_factors(a, b, transpose_b)
    size = arguments.axis_size(axis_name)
    if a.shape[-2] % size:
        raise ValueError(
            f"the rows of a must be a multiple of the {size} devices along axis_name={axis_name!r},"
            f" got {a.shape[-2]}"
        )
    dtype = arguments.result_type(a, b, preferred_element_type).dtype
    group = _Group(axis_name, transpose_b, dtype, _sums_dtype(a, b, dtype), precision)
    a, b, _ = group.varying(a, b, None)
    return _scattered(group, a, b)


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
            f"a and b must agree in the contracted size, got {a.shape[-1]} columns of a and"
            f" {contracted} {'columns' if transpose_b else 'rows'} of b"
        )
    return columns


def _sums_dtype(a: jax.Array, b: jax.Array, out_dtype: Any) -> np.dtype:
    """Returns the type that sums travel in."""
    sums = xla.wide_dtype(a.dtype, b.dtype, out_dtype)
    return travelling_dtype(sums, out_dtype, reduction_dtype())


@dataclasses.dataclass(frozen=True)
class _Group:
    """Devices that compute a product together, and how.

    Attributes:
        axis: The axis of the mesh along which they lie.
        transpose_b: The right operand is stored `[n, k]`.
        out_dtype: Type of the result.
        sums_dtype: The type that sums travel in.
        precision: As for `gemm`.
        activation: Applied to the product, or None.
    """

    axis: str
    transpose_b: bool
    out_dtype: Any
    sums_dtype: Any
    precision: Any
    activation: Any = None

    def varying(self, *operands: Any) -> list[Any]:
        """Lets all operands vary over the axes that one varies over, and over that of the group."""
        present = [x for x in operands if x is not None]
        *varied, _ = equally_varying([*present, lax.axis_index(self.axis)])
        rest = iter(varied)
        return [None if x is None else next(rest) for x in operands]

    def multiply(self, a: jax.Array, b: jax.Array, dtype: Any, **epilogue: Any) -> jax.Array:
        """Multiplies on this device."""
        return gemm(
            a,
            b,
            transpose_b=self.transpose_b,
            preferred_element_type=dtype,
            precision=self.precision,
            **epilogue,
        )

    def asked(
        self, a: jax.Array, b: jax.Array, dtype: Any, bias: Any = None, activation: Any = None
    ) -> request.Request:
        """Returns what multiplying on this device comes down to; `a` may lack rows."""
        operands = Operands(a, b, bias=bias)
        epilogue = Epilogue(activation=activation)
        result = {"preferred_element_type": dtype, "precision": self.precision}
        return request.of_gemm(operands, epilogue, Options(), False, self.transpose_b, **result)

    def matrices(self, asked: request.Request) -> Call:
        """Returns the product of the matrices as they are stored."""
        return dataclasses.replace(asked.call, transpose_b=self.transpose_b)

    def gather(self, mine: jax.Array) -> jax.Array:
        """Gathers the rows of all devices."""
        return lax.all_gather(mine, self.axis, axis=mine.ndim - 2, tiled=True)

    def gather_and_multiply(
        self, a: jax.Array, b: jax.Array, dtype: Any, bias: Any = None, activation: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the product with the rows of all devices, and those rows."""
        if a.ndim == 2:
            asked = self.asked(a, b, dtype, bias, activation)
            if asked.outside is None:
                how = fused_collective.GatheredProduct(self.matrices(asked), (self.axis,))
                return fused_collective.gathered_product(how, *asked.operands.present())
        every = self.gather(a)
        return self.multiply(every, b, dtype, bias=bias, activation=activation), every

    def multiply_and_scatter(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns this device's rows of the sum of all devices' products.

        Raises:
            ValueError: Something is promised of sums that are one device's.
        """
        promised = numerics.stated(Options()).numerics
        if promised is not None and (promised.invariant == "rows" or promised.part is not None):
            why = f"devices along axis_name={self.axis!r} add up their sums"
            raise ValueError(numerics.why_not_kept(promised, why))
        if a.ndim == 2:
            asked = self.asked(a, b, self.sums_dtype)
            if asked.outside is None:
                call = self.matrices(asked)
                how = fused_collective.ScatteredProduct(call, (self.axis,), self.out_dtype)
                return fused_collective.scattered_product(how, a, b)
        total = self.multiply(a, b, self.sums_dtype)
        total = lax.psum_scatter(total, self.axis, scatter_dimension=a.ndim - 2, tiled=True)
        return total.astype(self.out_dtype)

    def for_gradient(self, dtype: Any) -> "_Group":
        """Returns the group for the product with the transposed right operand."""
        return dataclasses.replace(
            self,
            transpose_b=not self.transpose_b,
            out_dtype=kept_dtype(dtype),
            activation=None,
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(group: _Group, a: jax.Array, b: jax.Array, bias: jax.Array | None) -> jax.Array:
    return group.gather_and_multiply(a, b, group.out_dtype, bias, group.activation)[0]


def _gathered_forward(group: _Group, a: Any, b: Any, bias: Any) -> tuple[jax.Array, Any]:
    if group.activation is None:
        result, every = group.gather_and_multiply(a, b, group.out_dtype, bias)
        return result, (every, b, bias, None)
    # As for `gemm`: the pre-activation is kept, and XLA applies the activation.
    before, every = group.gather_and_multiply(a, b, kept_dtype(group.out_dtype), bias)
    result = group.activation(before.astype(jnp.float32)).astype(group.out_dtype)
    return result, (every, b, bias, before)


def _gathered_backward(group: _Group, kept: Any, g: jax.Array) -> tuple[Any, Any, Any]:
    every, b, bias, before = kept
    if before is not None:
        wide = before.astype(jnp.float32)
        (g,) = jax.vjp(group.activation, wide)[1](g.astype(jnp.float32))
    db_bias = None if bias is None else _column_sums(g).astype(bias.dtype)
    left, right = _for_gradient(every), _for_gradient(b)
    da = _scattered(group.for_gradient(every.dtype), g.astype(right.dtype), right)
    db = _right_gradient(group, left, right, g.astype(left.dtype))
    return da.astype(every.dtype), db.astype(b.dtype), db_bias


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scattered(group: _Group, a: jax.Array, b: jax.Array) -> jax.Array:
    return group.multiply_and_scatter(a, b)


def _scattered_forward(group: _Group, a: Any, b: Any) -> tuple[jax.Array, Any]:
    return _scattered(group, a, b), (a, b)


def _scattered_backward(group: _Group, kept: Any, g: jax.Array) -> tuple[Any, Any]:
    a, b = kept
    left, right = _for_gradient(a), _for_gradient(b)
    backward = group.for_gradient(a.dtype)
    g = g.astype(right.dtype)
    da, every = backward.gather_and_multiply(g, right, backward.out_dtype)
    db = _right_gradient(group, left, right, every.astype(left.dtype))
    return da.astype(a.dtype), db.astype(b.dtype)


_gathered.defvjp(_gathered_forward, _gathered_backward)
_scattered.defvjp(_scattered_forward, _scattered_backward)


def _right_gradient(group: _Group, a: jax.Array, b: jax.Array, g: jax.Array) -> jax.Array:
    """Returns the gradient of the right operand, in the layout in which it is stored."""
    multiply = functools.partial(group.multiply, a, dtype=g.dtype)
    (gradient,) = jax.linear_transpose(multiply, b)(g)
    return gradient


def _for_gradient(x: jax.Array) -> jax.Array:
    """Widens operands of 8 bits, which is exact."""
    return x.astype(jnp.bfloat16) if x.dtype.itemsize == 1 else x


def _column_sums(g: jax.Array) -> jax.Array:
    return jnp.sum(g.astype(jnp.float32), axis=tuple(range(g.ndim - 1)))
