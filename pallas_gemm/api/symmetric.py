"""The public functions whose result is symmetric, so that half of the work is enough."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.api import arguments, function, notes, promises, request
from pallas_gemm.api.eager import compiled
from pallas_gemm.api.gemm import Order, answer
from pallas_gemm.api.request import Request
from pallas_gemm.call import DIMENSIONS, Numerics, Operands, Options, SymmetricCall, signature_of
from pallas_gemm.config import GemmConfig
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.symmetric import mirrored, symmetric
from pallas_gemm.planning import dispatch
from pallas_gemm.problem import Epilogue
from schedules import parse


def gram(  # noqa: PLR0913 - each is a keyword
    x: jax.Array,
    *,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[jax.Array] = (),
    alpha: float | jax.Array = 1,
    beta: float | jax.Array = 1,
    residual: jax.Array | None = None,
    transpose: bool = False,
    preferred_element_type: Any = None,
    precision: Any = None,
    schedule: Order = None,
    config: GemmConfig | None = None,
    implementation: str | None = None,
    numerics: Numerics | None = None,
    check: bool = False,
) -> Any:
    """Computes `alpha * (x @ x.T) + beta * residual`, rounded once and symmetric bit for bit.

    A kernel computes what is on and below the diagonal, and stores it twice. Where none takes the
    product, all of it is computed, as by `gemm`. On a mesh of several devices, outside of
    `jax.shard_map`, it is symmetric as far as `gemm` makes it so.

    >>> squares = gram(x)
    >>> squares.shape
    (64, 64)

    Args:
        x: A matrix, or several: leading dimensions are those of a batch.
        epilogue: A function of the float32 product and of `operands`, instead of the words that
            say the same. XLA computes it after the product.
        operands: The arrays that `epilogue` takes after the product.
        alpha: As for `gemm`.
        beta: As for `gemm`.
        residual: An array of the result's shape and type. It has to be symmetric: what is above its
            diagonal may or may not be read.
        transpose: Computes `x.T @ x`, without a copy.
        preferred_element_type: As for `gemm`.
        precision: As for `gemm`.
        schedule: As for `gemm`; tiles above the diagonal are left out of it.
        config: As for `gemm`.
        implementation: As for `gemm`.
        numerics: As for `gemm`.
        check: Whether to look if the residual is symmetric, which takes a pass over it.

    Returns:
        The result. Its derivative is that of `x @ x.T`, and one product in reverse mode.

    Raises:
        ValueError: As for `gemm`, or `check` finds that the residual is not symmetric.
        TypeError: As for `gemm`, or the residual is not of the result's type.
    """
    if arguments.flag("check", check):
        promises.check_symmetric("residual", residual)
    options = arguments.options(implementation, config, schedule, numerics)
    words = {"residual": residual, "alpha": alpha, "beta": beta}
    words["preferred_element_type"] = preferred_element_type
    multiply = functools.partial(_gram, transpose=transpose, precision=precision, options=options)
    if function.is_given(epilogue, operands):
        return function.after(multiply, (x,), epilogue, operands, words, numerics)
    return multiply(x, **words)


def symmetric_matmul(  # noqa: PLR0913 - each is a keyword
    a: jax.Array,
    b: jax.Array,
    *,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[jax.Array] = (),
    alpha: float | jax.Array = 1,
    beta: float | jax.Array = 1,
    residual: jax.Array | None = None,
    preferred_element_type: Any = None,
    precision: Any = None,
    schedule: Order = None,
    config: GemmConfig | None = None,
    implementation: str | None = None,
    numerics: Numerics | None = None,
    check: bool = False,
) -> Any:
    """Computes `alpha * (a @ b) + beta * residual` of symmetric matrices that commute.

    So do powers and polynomials of one matrix, such as `symmetric_matmul(a, a)`. The result is then
    symmetric, too, and a kernel computes half of it, as for `gram`. Bit for bit it is symmetric
    where `a` is `b`; of others, squares of 64 on the diagonal are as they are computed.

    >>> fourth_powers = symmetric_matmul(squares, squares)

    Args:
        a: A symmetric matrix, or several: leading dimensions are those of a batch.
        b: Another one of the same shape and type that commutes with it.
        epilogue: A function of the float32 product and of `operands`, instead of the words that
            say the same. XLA computes it after the product.
        operands: The arrays that `epilogue` takes after the product.
        alpha: As for `gemm`.
        beta: As for `gemm`.
        residual: As for `gram`.
        preferred_element_type: As for `gemm`.
        precision: As for `gemm`.
        schedule: As for `gram`.
        config: As for `gemm`.
        implementation: As for `gemm`.
        numerics: As for `gemm`.
        check: Whether to look if the operands are symmetric and commute, which takes more than the
            product does.

    Returns:
        The result. Its derivative is that of `a @ b`.

    Raises:
        ValueError: As for `gemm`, or an operand is not square, or `check` finds that something is
            not as it has to be.
        TypeError: As for `gemm`, or types differ.
    """
    if arguments.flag("check", check):
        for name, x in (("a", a), ("b", b), ("residual", residual)):
            promises.check_symmetric(name, x)
        promises.check_commute(a, b)
    options = arguments.options(implementation, config, schedule, numerics)
    words = {"residual": residual, "alpha": alpha, "beta": beta}
    words["preferred_element_type"] = preferred_element_type
    multiply = functools.partial(_symmetric_matmul, precision=precision, options=options)
    if function.is_given(epilogue, operands):
        return function.after(multiply, (a, b), epilogue, operands, words, numerics)
    return multiply(a, b, **words)


@compiled("x", "residual")
def _gram(
    x: jax.Array,
    residual: jax.Array | None = None,
    alpha: Any = 1,
    beta: Any = 1,
    preferred_element_type: Any = np.float32,
    *,
    transpose: bool,
    precision: Any,
    options: Options,
) -> jax.Array:
    x = _matrices("x", x)
    transpose = arguments.flag("transpose", transpose)
    operands = Operands(x, x, residual=residual, alpha=alpha, beta=beta)
    result = {"preferred_element_type": preferred_element_type, "precision": precision}
    return _answer("gram", operands, (transpose, not transpose), options, **result)


@compiled("a", "b", "residual")
def _symmetric_matmul(
    a: jax.Array,
    b: jax.Array,
    residual: jax.Array | None = None,
    alpha: Any = 1,
    beta: Any = 1,
    preferred_element_type: Any = np.float32,
    *,
    precision: Any,
    options: Options,
) -> jax.Array:
    a, b = _matrices("a", a), _matrices("b", b)
    for name, x in (("a", a), ("b", b)):
        if x.shape[-1] != x.shape[-2]:
            raise ValueError(
                f"{name} must be square, because it must be symmetric, got shape {list(x.shape)}"
            )
    if a.shape != b.shape:
        raise ValueError(
            f"a and b must have the same shape, got {list(a.shape)} and {list(b.shape)}"
        )
    if a.dtype != b.dtype:
        raise TypeError(f"a and b must have the same dtype, got {a.dtype} and {b.dtype}")
    # What is symmetric may be read either way; this one has no condition on its size.
    operands = Operands(a, b, residual=residual, alpha=alpha, beta=beta)
    result = {"preferred_element_type": preferred_element_type, "precision": precision}
    return _answer("product", operands, (False, True), options, **result)


def _matrices(name: str, x: Any) -> Any:
    x = arguments.array(name, x)
    if x.ndim < 2:
        raise ValueError(f"{name} must be a matrix or several, got shape {list(x.shape)}")
    return x


def _answer(
    kind: Literal["gram", "product"],
    operands: Operands,
    transposed: tuple[bool, bool],
    options: Options,
    **result: Any,
) -> jax.Array:
    """Computes a product whose result is symmetric."""
    schedule = options.schedule
    order = parse(schedule) if isinstance(schedule, str) else schedule
    if getattr(order, "is_online", False):
        raise ValueError(f"schedule must be a table for a symmetric result, got {schedule!r}")
    epilogue = Epilogue(operands.alpha, operands.beta)
    given = operands._replace(alpha=None, beta=None)
    asked = request.of_gemm(given, epilogue, options, *transposed, **result)
    _check_residual(asked, transposed[0])
    on_mesh = mesh_context.is_on_mesh(*asked.operands.present())
    if asked.outside is not None or asked.result_sharding is not None:
        if kind == "product":
            # As it is written: `a @ b.T` has the same value, and another derivative.
            asked = request.of_gemm(given, epilogue, options, **result)
        whole = answer(asked)
        return whole if on_mesh else _mirrored(whole)
    call = dataclasses.replace(asked.call, transpose_a=transposed[0], transpose_b=transposed[1])
    return _of_matrices(SymmetricCall.of(call, kind), asked)


@jax.custom_jvp
def _mirrored(whole: jax.Array) -> jax.Array:
    """Returns a result whose halves are the same; its derivative is that of the whole product."""
    return mirrored(whole)


_mirrored.defjvp(lambda primals, tangents: (_mirrored(*primals), *tangents))


def _check_residual(asked: Request, transpose: bool) -> None:
    a, residual = asked.operands.a, asked.operands.residual
    size = a.shape[-1 if transpose else -2]
    shape, dtype = (*a.shape[:-2], size, size), asked.call.out_dtype
    if residual is None:
        return
    if tuple(residual.shape) != shape:
        raise ValueError(
            f"residual must have the result's shape {list(shape)}, got {list(residual.shape)}"
        )
    if np.dtype(residual.dtype) != dtype:
        raise TypeError(f"residual must be of the result's type, {dtype}, got {residual.dtype}")


def _of_matrices(call: SymmetricCall, asked: Request) -> jax.Array:
    """Computes it with all leading dimensions as one."""
    lead = asked.operands.a.shape[:-2]
    merged = {
        name: _merged(x, lead) if x.ndim > len(DIMENSIONS[name]) else x
        for name, x in asked.operands._asdict().items()
        if x is not None
    }
    ready = Operands(**merged).present()
    notes.note(asked)
    if call.options.names_something:
        # What is named and does not fit is refused here, before anything is traced.
        dispatch.check(call, signature_of(ready))
    run = symmetric if notes.is_noting() else _symmetric
    result = run(call, *ready)
    return result.reshape(*lead, *result.shape[-2:])


def _merged(x: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """Returns an array whose leading dimensions are one; some may have had one element."""
    own = x.shape[len(lead) :]
    return jnp.broadcast_to(x, (*lead, *own)).reshape(math.prod(lead), *own)


_symmetric = jax.jit(symmetric, static_argnums=0, inline=True)
