"""Checks of arguments: each error names the argument, its value and what is legal."""

import contextlib
import difflib
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pallas_gemm.call import Numerics, Options, Order
from pallas_gemm.config import GemmConfig, checked_order
from pallas_gemm.kernels.element_types import BITS
from pallas_gemm.op.contraction import DimensionNumbers, Shape, normal_dimension_numbers
from pallas_gemm.planning.architectures import ARCHITECTURES
from pallas_gemm.problem import Epilogue, element_type
from schedules import Pieces, unsplit


def array(name: str, x: Any) -> Any:
    """Returns an argument as an array, or as it is if it stands for one without values.

    Raises:
        TypeError: It is no array of numbers.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    is_array = hasattr(x, "__jax_array__") or (hasattr(x, "shape") and hasattr(x, "dtype"))
    if not (is_array or isinstance(x, numbers.Number)):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}: {x!r:.80}")
    try:
        x = jnp.asarray(x)
    except (TypeError, OverflowError):
        if not isinstance(x, np.ndarray | numbers.Number):
            raise
        # NumPy has types and orders of bytes that JAX has not, and Python larger numbers.
        got = f"dtype {x.dtype}" if isinstance(x, np.ndarray) else f"{x!r:.80}"
        raise TypeError(
            f"{name} must be an array of numbers of a type that JAX has, got {got}"
        ) from None
    if not _has_values(x.dtype):
        raise TypeError(f"{name} must be an array of numbers, got dtype {x.dtype}")
    return x


def is_array(leaf: Any) -> bool:
    """Whether an argument is an array, or stands for one."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)


def _has_values(dtype: Any) -> bool:
    """Whether products are of this type: numbers, or bools, which are added up by "or"."""
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)


def flag(name: str, value: Any) -> bool:
    """Returns an argument that is true or false.

    Raises:
        TypeError: It is neither.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}: {value!r:.80}")
    return bool(value)


def sharding(value: Any) -> Any:
    """Returns a sharding that is asked for, or None.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(value, NamedSharding | PartitionSpec | None):
        raise TypeError(
            f"out_sharding must be a NamedSharding or a PartitionSpec, got {value!r:.80}"
        )
    return value


def number(name: str, value: Any) -> float:
    """Returns an argument that is a real number.

    Raises:
        TypeError: It is none that is known while tracing.
        ValueError: It is too large.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}: {value!r:.80}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must fit into a float, got {value!r:.40}...") from None


def axis_size(axis_name: Any, *, several: bool = False) -> int:
    """Returns how many devices there are along an axis of a mesh.

    Args:
        axis_name: The axis.
        several: It may be a tuple of axes.

    Raises:
        ValueError: No `shard_map` around the call has it, or it is not one axis.
    """
    if several or isinstance(axis_name, str):
        # JAX says that a name is unbound, and takes a number for an axis of an array.
        with contextlib.suppress(NameError, KeyError, ValueError, TypeError):
            return jax.lax.axis_size(axis_name)
    legal = "one axis or a tuple of axes" if several else "one axis"
    raise ValueError(
        f"axis_name={axis_name!r} must name {legal} of a `jax.shard_map` around the call"
    )


def matmul_shapes(a: Any, b: Any, transpose_a: bool, transpose_b: bool, right: str = "b") -> None:
    """Checks that `a @ b` is defined; `right` is what the caller calls b.

    Raises:
        ValueError: An operand is a scalar, or the leading dimensions do not broadcast.
        TypeError: The contracted sizes differ.
    """
    for name, x in (("a", a), (right, b)):
        if x.ndim == 0:
            raise ValueError(f"{name} must have at least one dimension, got shape ()")
    flipped = {"a": transpose_a and a.ndim > 1, "b": transpose_b and b.ndim > 1}
    a_axis = -2 if flipped["a"] else -1
    b_axis = -1 if flipped["b"] or b.ndim == 1 else -2
    if a.shape[a_axis] != b.shape[b_axis]:
        hint = _transposition_hint(a.shape, b.shape, a_axis, b_axis)
        raise TypeError(
            f"a and {right} must agree in the contracted size, got {a.shape[a_axis]} in"
            f" a{_shape(a.shape)} (dimension {a_axis}) and {b.shape[b_axis]} in"
            f" {right}{_shape(b.shape)} (dimension {b_axis}) with transpose_a={transpose_a},"
            f" transpose_b={transpose_b}{hint}"
        )
    try:
        jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(
            f"the leading dimensions of a{_shape(a.shape)} and {right}{_shape(b.shape)} must"
            f" broadcast: {list(a.shape[:-2])} against {list(b.shape[:-2])}"
        ) from None


def _transposition_hint(a: Shape, b: Shape, a_axis: int, b_axis: int) -> str:
    if len(b) > 1 and a[a_axis] == b[-3 - b_axis]:
        return f"; transpose_b={b_axis == -2} would fit"
    if len(a) > 1 and a[-3 - a_axis] == b[b_axis]:
        return f"; transpose_a={a_axis == -1} would fit"
    return ""


def dimension_numbers(lhs: Any, rhs: Any, given: Any) -> DimensionNumbers:
    """Returns the dimension numbers of a `dot_general` as tuples.

    Without any, the last dimension of a vector or matrix is multiplied with the first of another.

    Raises:
        TypeError: They are not two pairs of sequences of integers, or not legal for these operands.
        ValueError: There are none, and the operands are not such.
    """
    if given is None:
        given = _of_matrices(lhs, rhs)
    try:
        numbers_ = normal_dimension_numbers(given)
    except (TypeError, ValueError):
        raise TypeError(
            "dimension_numbers must be ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))"
            f" with sequences of integers, got {given!r}"
        ) from None
    for kind, pair in zip(("contracting", "batch"), numbers_, strict=True):
        if len(pair[0]) != len(pair[1]):
            raise TypeError(
                f"dimension_numbers must name as many {kind} dimensions of lhs as of rhs, got"
                f" {pair[0]} and {pair[1]}"
            )
        for i, j in zip(*pair, strict=True):
            for name, x, d in (("lhs", lhs, i), ("rhs", rhs, j)):
                if not 0 <= d < x.ndim:
                    raise TypeError(
                        f"dimension_numbers: {kind} dimension {d} is not one of the {x.ndim}"
                        f" dimensions of {name}{_shape(x.shape)}"
                    )
            if lhs.shape[i] != rhs.shape[j]:
                raise TypeError(
                    f"dimension_numbers: {kind} dimensions must have equal sizes, got"
                    f" {lhs.shape[i]} in lhs{_shape(lhs.shape)} (dimension {i}) and {rhs.shape[j]}"
                    f" in rhs{_shape(rhs.shape)} (dimension {j})"
                )
    for name, side in (("lhs", 0), ("rhs", 1)):
        named = (*numbers_[0][side], *numbers_[1][side])
        if len(set(named)) != len(named):
            raise TypeError(
                f"dimension_numbers names a dimension of {name} twice: contracting"
                f" {numbers_[0][side]}, batch {numbers_[1][side]}"
            )
    return numbers_


def _of_matrices(lhs: Any, rhs: Any) -> Any:
    if {lhs.ndim, rhs.ndim} <= {1, 2} and lhs.shape[-1] == rhs.shape[0]:
        return (((lhs.ndim - 1,), (0,)), ((), ()))
    raise ValueError(
        "dimension_numbers=None needs vectors or matrices, the last dimension of lhs as long as the"
        f" first of rhs, got lhs{_shape(lhs.shape)} and rhs{_shape(rhs.shape)}"
    )


def result_type(
    a: Any,
    b: Any,
    preferred_element_type: Any = None,
    product: Callable[..., jax.Array] = jnp.matmul,
    precision: Any = None,
    names: tuple[str, str] = ("a", "b"),
) -> jax.ShapeDtypeStruct:
    """Returns the type that the result has, and whether it is weak, as JAX's own product says.

    Args:
        a: The left operand.
        b: The right operand.
        preferred_element_type: As for `product`.
        product: The function whose rules count: `jnp.matmul` promotes the operands, `lax.dot` takes
            the larger.
        precision: As for `product`; some values allow types that are narrower than the operands'.
        names: The caller's names for both operands.

    Raises:
        TypeError: `preferred_element_type` is no type of numbers, or not one for these operands.
        ValueError: JAX promotes the operands to no common type.
    """
    wanted = None
    if preferred_element_type is not None:
        wanted = number_type("preferred_element_type", preferred_element_type)
    operands = tuple((np.dtype(x.dtype), bool(getattr(x, "weak_type", False))) for x in (a, b))
    settings = (jax.config.jax_enable_x64, jax.config.jax_numpy_dtype_promotion)
    try:
        return _result_type(product, *operands, wanted, precision, settings)
    except ValueError as error:
        # JAX's own, which names no argument.
        error.args = (
            f"{names[0]} and {names[1]} must have types that JAX promotes to one, got {a.dtype} and"
            f" {b.dtype}: cast one of them, or scale {names[1]} if it is one of"
            f" {', '.join(sorted(map(str, BITS)))}; JAX says: {error}",
        )
        raise


@functools.lru_cache(maxsize=4096)
def _result_type(
    product: Callable[..., jax.Array],
    a: tuple[np.dtype, bool],
    b: tuple[np.dtype, bool],
    preferred: np.dtype | None,
    precision: Any,
    _settings: Any,
) -> jax.ShapeDtypeStruct:
    vectors = [jax.ShapeDtypeStruct((1,), dtype, weak_type=weak) for dtype, weak in (a, b)]
    multiply = functools.partial(product, precision=precision, preferred_element_type=preferred)
    return jax.eval_shape(multiply, *vectors)


def number_type(name: str, value: Any) -> np.dtype:
    """Returns the type of numbers that an argument names.

    Raises:
        TypeError: It names none.
    """
    wanted = None
    # JAX takes a number for a type where it has seen an equal one.
    if not isinstance(value, numbers.Number):
        with contextlib.suppress(TypeError):
            wanted = jax.dtypes.canonicalize_dtype(element_type(value))
    if wanted is None or not _has_values(wanted):
        raise TypeError(f"{name}={value!r} is no type of numbers, such as jnp.float32")
    return np.dtype(wanted)


def epilogue_dtype(epilogue: Epilogue, operand_dtypes: Sequence[Any], out_dtype: Any) -> None:
    """Checks that an epilogue makes sense for these types.

    Raises:
        TypeError: It does not.
    """
    if epilogue.is_identity:
        return
    is_complex = any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in operand_dtypes)
    if is_complex or not jnp.issubdtype(out_dtype, jnp.floating):
        types = " and ".join(map(str, dict.fromkeys(operand_dtypes)))
        hint = "" if is_complex else "; preferred_element_type=jnp.float32 would be legal"
        raise TypeError(
            "alpha, scales, bias, activation, residual and gates need real operands and a"
            f" floating-point result, got operands of {types} and a result of {out_dtype}{hint}"
        )


def up(x: Any, gate: Any) -> Any:
    """Checks the second right operand of a gated product: like the first.

    Raises:
        ValueError: Its shape is another, or the first is a vector.
        TypeError: Its type is another.
    """
    if x is None:
        return None
    x = array("w_up", x)
    if gate.ndim < 2:
        raise ValueError(f"w_gate must be a matrix or several, got shape {_shape(gate.shape)}")
    if x.shape != gate.shape:
        raise ValueError(
            f"w_gate and w_up must have the same shape, got {_shape(gate.shape)} and"
            f" {_shape(x.shape)}"
        )
    if x.dtype != gate.dtype:
        raise TypeError(f"w_gate and w_up must have the same dtype, got {gate.dtype} and {x.dtype}")
    return x


def each_with_extras(weights: Any, biases: Any, activations: Any) -> list[tuple[Any, Any, Any]]:
    """Returns every right operand of several products, with its bias and activation or None.

    Raises:
        TypeError: One of the arguments is no sequence.
        ValueError: There are no right operands, or another number of the others.
    """
    if not isinstance(activations, list | tuple) and isinstance(weights, list | tuple):
        activations = [activations] * len(weights)
    for name, value in (("weights", weights), ("biases", biases)):
        if not isinstance(value, list | tuple) and (name, value) != ("biases", None):
            given = type(value).__name__
            if isinstance(value, dict):
                given += f": list({name}.values()) is one"
            elif hasattr(value, "shape"):
                given = f"one of {list(value.shape)}: [{name}] is one"
            else:
                given += f": {value!r:.80}"
            raise TypeError(f"{name} must be a list or tuple of arrays, got {given}")
    if not weights:
        raise ValueError(f"weights must be one array or more, got {weights!r}")
    biases = [None] * len(weights) if biases is None else biases
    for name, values in (("biases", biases), ("activations", activations)):
        if len(values) != len(weights):
            raise ValueError(
                f"{name} must have an entry for each of the {len(weights)} weights, or be None, got"
                f" {len(values)}"
            )
    return list(zip(weights, biases, activations, strict=True))


def each_with_operands(weights: Any, operands: Any) -> list[tuple[Any, Any]]:
    """Returns every right operand of several products, with what a function takes after each.

    Raises:
        TypeError: One of the arguments is no sequence.
        ValueError: There are no right operands, or operands of another number of products.
    """
    every = [w for w, _, _ in each_with_extras(weights, None, None)]
    if operands is None:
        return [(w, ()) for w in every]
    if not isinstance(operands, list | tuple) or len(operands) != len(every):
        given = len(operands) if isinstance(operands, list | tuple) else type(operands).__name__
        raise ValueError(
            f"operands must be a tuple with an entry for each of the {len(every)} weights, got"
            f" {given}"
        )
    return list(zip(every, operands, strict=True))


def options(implementation: Any, config: Any, schedule: Any, numerics: Any = None) -> Options:
    """Returns what a caller names of how a product is to be computed.

    Raises:
        TypeError: The config, the schedule or what is promised is none.
        ValueError: There is no implementation or schedule of that name, or one forbids another.
    """
    if numerics is not None and not isinstance(numerics, Numerics):
        raise TypeError(
            "numerics must be what pallas_gemm.numerics makes, such as"
            f" numerics(invariant='rows'), got {numerics!r:.80}"
        )
    named = _implementation(implementation)
    if named == "xla" and not (config is schedule is None):
        raise ValueError(
            "config and schedule have no meaning for implementation='xla', got"
            f" config={config!r}, schedule={schedule!r}"
        )
    return Options(named, _config(config), _schedule(schedule), numerics=numerics)


def _implementation(value: Any) -> str | None:
    legal = (*(architecture.name for architecture in ARCHITECTURES), "xla", "interpret")
    if value is None or (isinstance(value, str) and value in legal):
        return value
    close = difflib.get_close_matches(str(value).lower(), legal, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ValueError(
        f"implementation={value!r} is unknown; {hint}legal: None, {', '.join(map(repr, legal))}"
    )


def _config(value: Any) -> GemmConfig | None:
    if value is None:
        return None
    if not isinstance(value, GemmConfig) or type(value) is GemmConfig:
        raise TypeError(
            f"config must be the config of a kernel, such as HopperConfig(...), got {value!r:.80}"
        )
    return value


def _schedule(value: Any) -> Order:
    """Checks `schedule=`, as far as that goes without a grid."""
    if value is None:
        return None
    if not isinstance(value, Pieces):
        return checked_order(value)
    try:
        unsplit(value)
    except ValueError as error:
        raise ValueError(f"schedule must be pieces as split_k makes them: {error}") from None
    return value


def _shape(shape: Any) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
