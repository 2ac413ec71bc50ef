"""Products of groups of rows: what mixture-of-experts layers are made of."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import ragged_dot_general as stock_ragged_dot_general

from pallas_gemm.api import arguments, blocks, extras, function, request
from pallas_gemm.api.eager import compiled
from pallas_gemm.api.few_bits import weight_operands
from pallas_gemm.api.gemm import Activation, Order
from pallas_gemm.api.groups import function_of_groups, groups
from pallas_gemm.call import Numerics, Operands
from pallas_gemm.config import GemmConfig
from pallas_gemm.kernels.functions import activations
from pallas_gemm.op.grouped import NO_FORM, form_of, grouped, mapped_form
from pallas_gemm.op.mesh.grouped_partition import rows_of_groups
from pallas_gemm.op.permutation import permuted
from pallas_gemm.planning import numerics as planned
from pallas_gemm.planning.by_xla.xla_groups import ROWS
from pallas_gemm.problem import SCALES, Epilogue

ARRAYS = ("lhs", "rhs", "group_sizes", "group_offset")
GROUPED_GEMM = (
    *("a", "b", "group_sizes", "up", "operands", "bias", "up_bias"),
    *("row_scale", "col_scale", "up_scale", "col_zero", "up_zero"),
)
"""The arguments of a function that are arrays."""


def _check_started(given: Mapping[str, Any]) -> None:
    """Checks the sizes of a call outside of any trace; `given` are its arguments by name.

    Raises:
        ValueError: As of `_check_values`.
    """
    left, right = ("lhs", "rhs") if "lhs" in given else ("a", "b")
    numbers = given.get("ragged_dot_dimension_numbers", ROWS)
    if form_of(numbers, given[left].ndim, given[right].ndim):
        groups.check_values(given["group_sizes"], given[left].shape[0])


@compiled(*ARRAYS, check=_check_started)
def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: jax.Array | None = None,
    out_sharding: Any = None,
    *,
    numerics: Numerics | None = None,
) -> jax.Array:
    """Computes `lax.ragged_dot`, with the same arguments: each row with its own group's matrix.

    The rows of a group lie together, one group after the other. How many each has is known to the
    running program alone: nothing is compiled again, padded or copied when it changes, and the
    values of other groups' rows, of rows in no group and of matrices without rows never show.

    >>> y = ragged_dot(x, experts, jnp.array([20, 0, 40]))  # the last 4 of 64 rows are zeros

    Args:
        lhs: The rows, `[m, k]`.
        rhs: A matrix for each group, `[groups, k, n]`.
        group_sizes: How many rows each group has; what is left of m are zeros in the result.
        precision: As for `lax.ragged_dot`.
        preferred_element_type: Type of the result.
        group_offset: The group that the first matrix is of, `[1]`: rows of other groups than those
            of the matrices are zeros. JAX knows it and does not compute it. Rows are moved for it.
        out_sharding: As for `lax.ragged_dot`, which then computes it.
        numerics: As for `gemm`.

    Returns:
        The result, `[m, n]`.

    Raises:
        TypeError: The operands are of shapes or types that have no such product.
        ValueError: Sizes that are known are negative, or more than there are rows. A tracer's sizes
            are not known. Outside of `jax.jit`, a call waits for the sizes in a `jax.Array`.
    """
    with _as_jax_says(lhs, rhs, group_sizes, ROWS):
        groups.check_ranks(("lhs", lhs), ("rhs", rhs))
    given = (lhs, rhs, group_sizes, ROWS, precision, preferred_element_type)
    return _general(*given, group_offset, out_sharding, numerics=numerics)


@compiled(*ARRAYS, check=_check_started)
def ragged_dot_general(  # noqa: PLR0913 - each is that of `lax`, or a keyword
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    ragged_dot_dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: jax.Array | None = None,
    out_sharding: Any = None,
    *,
    numerics: Numerics | None = None,
) -> jax.Array:
    """Computes `lax.ragged_dot_general`, with the same arguments.

    The products of matrices that `ragged_dot` and its gradients are of may be a kernel's, and
    batches of them. JAX computes products with several dimensions of a kind.

    >>> over_rows = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    >>> ragged_dot_general(x, x, sizes, over_rows).shape
    (3, 16, 16)

    Args:
        lhs: The left operand.
        rhs: The right operand.
        group_sizes: The sizes of the groups along the ragged dimension.
        ragged_dot_dimension_numbers: As for `lax.ragged_dot_general`.
        precision: As for `ragged_dot`.
        preferred_element_type: As for `ragged_dot`.
        group_offset: As for `ragged_dot`, where each group has a matrix.
        out_sharding: As for `ragged_dot`.
        numerics: As for `gemm`.

    Returns:
        The result.

    Raises:
        TypeError: As for `ragged_dot`.
        ValueError: As for `ragged_dot`.
    """
    if not isinstance(ragged_dot_dimension_numbers, lax.RaggedDotDimensionNumbers):
        raise TypeError(
            "ragged_dot_dimension_numbers must be jax.lax.RaggedDotDimensionNumbers(...), got"
            f" {ragged_dot_dimension_numbers!r}"
        )
    given = (lhs, rhs, group_sizes, ragged_dot_dimension_numbers, precision, preferred_element_type)
    return _general(*given, group_offset, out_sharding, numerics=numerics)


@compiled(*GROUPED_GEMM, check=_check_started)
def grouped_gemm(  # noqa: PLR0913 - each is a keyword
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    *,
    up: jax.Array | None = None,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[jax.Array] = (),
    bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    activation: Activation = None,
    alpha: float | jax.Array = 1,
    row_scale: jax.Array | None = None,
    col_scale: jax.Array | None = None,
    up_scale: jax.Array | None = None,
    col_zero: jax.Array | None = None,
    up_zero: jax.Array | None = None,
    preferred_element_type: Any = None,
    precision: Any = None,
    transpose_b: bool = False,
    schedule: Order = None,
    config: GemmConfig | None = None,
    implementation: str | None = None,
    numerics: Numerics | None = None,
) -> Any:
    """Computes `activation(a @ b[group] + bias[group])`, rounded once: `ragged_dot` with more.

    With everything that there is, the result is `activation(value) * up_value`, where `value` is
    `alpha * row_scale[:, None] * col_scale * (a @ b[group]) + bias` and `up_value` the same of up,
    `up_scale` and `up_bias`. Rows in no group are zeros.

    >>> y = grouped_gemm(x, experts, sizes, bias=bias, activation="gelu")

    With `epilogue=f` it computes `f(s, *operands)`, where `s` is the whole product in float32, with
    its scales, or `f(s, s_up, *operands)` with up. Each result has a value, or values, for each
    row. They are zeros for rows in no group, whatever f makes of zeros.

    Args:
        a: The rows, `[m, k]`, those of a group together, one group after the other.
        b: A matrix for each group, `[groups, k, n]`, or a `QuantizedWeight` of them.
        group_sizes: How many rows each group has.
        up: A second matrix for each group, which makes the result a gated one.
        epilogue: A function of the float32 product, or of both, and of `operands`, instead of the
            words that follow but for scales.
        operands: The arrays that `epilogue` takes after the products. For one of
            `[groups, n]` or `[groups, 1]`, each row gets the values of its group.
        bias: One value per column, `[n]`, or of each group, `[groups, n]`.
        up_bias: The same for the product with `up`.
        activation: As for `gemm`.
        alpha: A number, or one for each group, `[groups]`.
        row_scale: One value per row, `[m]`. Or one for each block of the rows, `[m, k / g]`, as for
            `gemm`.
        col_scale: As `bias`. Or one for each block of the matrices, `[groups, k / g, n]` or
            `[groups, k / g, n / c]`, as for `gemm`. Weights of few bits beside a wider left operand
            may have them, too.
        up_scale: The same, for the product with `up`.
        col_zero: As for `gemm`.
        up_zero: As `col_zero`, for the product with `up`.
        preferred_element_type: As for `gemm`.
        precision: As for `gemm`.
        transpose_b: The matrices are stored `[groups, n, k]`.
        schedule: As for `gemm`, by name or an `OnlineSchedule`.
        config: As for `gemm`.
        implementation: As for `gemm`.
        numerics: As for `gemm`.

    Returns:
        The result, `[m, n]`.

    Raises:
        TypeError: As for `ragged_dot`, or of an operand that `gemm` would refuse.
        ValueError: As for `ragged_dot`, or of an operand that `gemm` would refuse.
    """
    words = {
        "bias": bias,
        "up_bias": up_bias,
        "activation": activation,
        "alpha": alpha,
        "row_scale": row_scale,
        "col_scale": col_scale,
        "up_scale": up_scale,
        "col_zero": col_zero,
        "up_zero": up_zero,
        "preferred_element_type": preferred_element_type,
    }
    for name, x in (("up_bias", up_bias), ("up_scale", up_scale), ("up_zero", up_zero)):
        if up is None and x is not None:
            raise ValueError(f"{name} has no meaning without up")
    transpose_b = arguments.flag("transpose_b", transpose_b)
    others = _of_function(epilogue, operands, words, (a, b))
    own = {"col_scale": col_scale, "up_scale": up_scale, "bias": bias, "up_bias": up_bias}
    given = Operands(a, b, up, **own, col_zeros=col_zero, up_zeros=up_zero)
    if others is not None:
        preferred_element_type = np.float32
    given = weight_operands.taken_apart(given, ("b", "up"), transpose_b)
    a, b, sizes = groups.arrays(given.a, given.b, group_sizes, ("a", "b"))
    groups.check_ranks(("a", a), ("b", b))
    groups.check(a, b, sizes, contracted=False, transposed=transpose_b, names=("a", "b"))
    groups.check_values(group_sizes, a.shape[0])
    up = None if given.up is None else groups.up(given.up, b)
    options = planned.stated(arguments.options(implementation, config, schedule, numerics))
    matrices = extras.Result(b.shape[:1], a.shape[0], b.shape[1 if transpose_b else 2])
    factors = matrices.factors(a, b, a.shape[1], "b", "up")
    of_rows = factors.pop("row_scale")
    formula, taken = extras.checked(
        given._replace(a=a, b=b, up=up),
        Epilogue(alpha),  # type: ignore[arg-type]
        matrices,
        factors,
    )
    alone = matrices._replace(lead=())
    rows = Operands(a, b, row_scale=row_scale)
    name, x = extras.of_sums("row_scale", "row_scale", rows, alone, {"row_scale": of_rows})
    taken = blocks.alike(taken._replace(**{name: x}))
    formula = dataclasses.replace(
        formula,
        activation=activations.resolve(activation),
        row_scale=taken.row_scale is not None,
        row_blocks=taken.row_blocks is not None,
    )
    # Scaled weights of few bits have no say in the type of the result.
    right = a if request.has_scaled_weights(formula, a, b) else b
    call = groups.call_of(a, right, sizes, preferred_element_type, precision, options)
    arguments.epilogue_dtype(formula, (a.dtype, right.dtype), call.out_dtype)
    call = dataclasses.replace(call, transpose_b=transpose_b, epilogue=formula)
    last = [getattr(taken, name) for name in formula.operands]
    every = (a, b, *([] if up is None else [up]), sizes, *last)
    if others is not None:
        return function_of_groups.answer(call, every, epilogue, others)
    return groups.answer(call, every)


def _of_function(
    epilogue: Any, operands: Any, words: Mapping[str, Any], factors: Sequence[Any]
) -> list[Any] | None:
    """Returns what a function takes beside scaled sums; None without one."""
    if not function.is_given(epilogue, operands):
        return None
    others = {name: x for name, x in words.items() if name not in SCALES}
    return function.checked(epilogue, operands, function.said(others), factors)


def _general(  # noqa: PLR0913 - as of what calls it
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    numbers: Any,
    precision: Any,
    preferred: Any,
    group_offset: Any,
    out_sharding: Any,
    *,
    numerics: Any,
) -> jax.Array:
    """Computes `ragged_dot` or `ragged_dot_general`."""
    options = planned.stated(arguments.options(None, None, None, numerics))
    out_sharding = arguments.sharding(out_sharding)
    rhs = weight_operands.widened(rhs, lhs)
    with _as_jax_says(lhs, rhs, group_sizes, numbers):
        lhs, rhs, sizes = groups.arrays(lhs, rhs, group_sizes)
    if preferred is not None:
        preferred = arguments.number_type("preferred_element_type", preferred)
    form = form_of(numbers, lhs.ndim, rhs.ndim)
    batch = mapped_form(numbers, lhs.ndim, rhs.ndim)
    if batch is not None and group_offset is out_sharding is None:
        with _as_jax_says(lhs, rhs, sizes, numbers):
            jax.eval_shape(lambda: stock_ragged_dot_general(lhs, rhs, sizes, numbers))
        return _mapped(batch, (precision, preferred, None, None), numerics, lhs, rhs, sizes)
    if group_offset is not None:
        if form is None or form[0]:
            raise NotImplementedError("group_offset must be None where groups have no matrices")
        groups.check_values(group_sizes, lhs.shape[0])
        lhs, sizes, places = _from_group(lhs, sizes, group_offset, rhs.shape[0])
        last = numbers, precision, preferred, None, out_sharding
        return permuted(_general(lhs, rhs, sizes, *last, numerics=numerics), *places)
    given = lhs, rhs, sizes, numbers, precision, preferred
    stock = functools.partial(stock_ragged_dot_general, *given, out_sharding=out_sharding)
    if form is None or out_sharding is not None:
        dtype = lhs.dtype if preferred is None else preferred
        why = "out_sharding is given" if form else NO_FORM
        groups.leave_to_jax(options, (lhs, rhs), np.dtype(dtype), why)
        return stock()
    contracted, transposed = form
    with _as_jax_says(lhs, rhs, sizes, numbers):
        groups.check(lhs, rhs, sizes, contracted=contracted, transposed=transposed)
    groups.check_values(group_sizes, lhs.shape[0])
    call = groups.call_of(lhs, rhs, sizes, preferred, precision, options)
    call = dataclasses.replace(call, transpose_b=transposed, contracted=contracted)
    if why := groups.why_jax(call, (lhs, rhs)):
        groups.leave_to_jax(options, (lhs, rhs), call.out_dtype, why)
        return stock()
    return grouped(planned.resolved_groups(call, lhs, rhs), lhs, rhs, sizes)


def _mapped(
    batch: Any, last: tuple[Any, ...], numerics: Any, lhs: jax.Array, rhs: jax.Array, sizes: Any
) -> jax.Array:
    """Computes a product with a batch dimension as one without, mapped along it."""
    lhs, rhs = jnp.moveaxis(lhs, batch.lhs, 0), jnp.moveaxis(rhs, batch.rhs, 0)
    if sizes.ndim == 1:
        sizes = jnp.broadcast_to(sizes, (lhs.shape[0], *sizes.shape))

    def one(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return _general(lhs, rhs, sizes, batch.numbers, *last, numerics=numerics)

    return jax.vmap(one, out_axes=batch.out)(lhs, rhs, sizes)


@contextlib.contextmanager
def _as_jax_says(*operands: Any) -> Iterator[None]:
    """Adds the words of JAX's own error to ours.

    Args:
        *operands: The caller's operands: lhs, rhs, the sizes, and the dimension numbers.

    Raises:
        TypeError: The operands have no such product; JAX's words follow ours.
    """
    try:
        yield
    except TypeError as error:
        try:
            jax.eval_shape(lambda: stock_ragged_dot_general(*operands))
        except (TypeError, OverflowError) as own:
            words = str(own).strip().splitlines()[0]
            raise TypeError(f"{error}; JAX says: {words}") from None
        raise


def _from_group(lhs: Any, sizes: Any, group_offset: Any, count: int) -> tuple[Any, Any, Any]:
    """Returns rows with those of some groups first, these groups' sizes, and the way back.

    Raises:
        TypeError: The offset is no integer of shape `[1]`, or there are fewer sizes than matrices.
    """
    offset = arguments.array("group_offset", group_offset)
    if offset.shape != (1,) or not jnp.issubdtype(offset.dtype, jnp.integer):
        raise TypeError(
            f"group_offset must be an integer of shape [1], got {offset.dtype}{list(offset.shape)}"
        )
    if sizes.shape[0] < count:
        raise TypeError(
            f"group_sizes must have a size for each of {count} groups of rhs, got {sizes.shape[0]}"
        )
    first = jnp.clip(offset[0], 0, sizes.shape[0] - count)
    own, there, back = rows_of_groups(sizes, lhs.shape[0], first, count)
    return permuted(lhs, there, back), own, (back, there)
