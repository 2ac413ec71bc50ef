"""The operands of the epilogue: checked, and in shapes that the product takes.

Each has its own of the result's dimensions: rows, columns, both or none. In front it has nothing,
or what the result has there: then each product of a batch has its own.
"""

import numbers
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_gemm.api import arguments, blocks
from pallas_gemm.api.blocks import Factor
from pallas_gemm.call import DIMENSIONS, Operands
from pallas_gemm.kernels.element_types import BITS, FLOATS_16, SINGLE, is_widened
from pallas_gemm.op.contraction import ONE, Shape
from pallas_gemm.op.in_blocks import shaped
from pallas_gemm.planning import ignored
from pallas_gemm.problem import KINDS, OF_FACTORS, SCALES, ZEROS, Epilogue

OF_GATE = {
    "bias": "gate_bias",
    "col_scale": "gate_scale",
    "col_zeros": "gate_zero",
    "up_zeros": "up_zero",
}
"""The names that a caller of `gated_gemm` has for them."""
OF_ONE = {"col_zeros": "col_zero", "up_zeros": "up_zero"}
"""The names that a caller of another function has for them."""


class Result(NamedTuple):
    """The shape of a product's result.

    Attributes:
        lead: The leading dimensions.
        rows: How many; None if the left operand is a vector.
        columns: How many; None if the right operand is one.
    """

    lead: Shape
    rows: int | None
    columns: int | None

    @classmethod
    def of(cls, a: Any, b: Any, transpose_a: bool, transpose_b: bool) -> "Result":
        """Returns the shape for operands that may be multiplied."""
        return cls(
            jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2]),
            a.shape[-1 if transpose_a else -2] if a.ndim > 1 else None,
            b.shape[-2 if transpose_b else -1] if b.ndim > 1 else None,
        )

    def factors(
        self, left: Any, right: Any, k: int, name: str, up: str = "w_up"
    ) -> dict[str, Factor]:
        """Returns the factor that each scale of blocks belongs to, of operands that are matrices.

        Args:
            left: The left operand.
            right: The right operand.
            k: Contracted elements.
            name: The caller's name for the right operand.
            up: The caller's name for the other right operand.
        """
        of_left, of_right, of_up = SCALES
        found = {}
        if self.rows is not None:
            found[of_left] = Factor("a", tuple(left.shape[:-2]), self.rows, k)
        if self.columns is not None:
            weights = is_widened(left.dtype, right.dtype)
            own = Factor(name, tuple(right.shape[:-2]), self.columns, k, weights)
            found |= {of_right: own, of_up: own._replace(name=up)}
        return found

    @property
    def is_matrices(self) -> bool:
        """Whether it has rows and columns."""
        return None not in (self.rows, self.columns)

    @property
    def whole(self) -> Shape:
        """The shape of the result, as a tuple."""
        return (*self.lead, *(size for size in (self.rows, self.columns) if size is not None))

    def is_front(self, lead: Shape) -> bool:
        """Whether an operand may have this in front."""
        if not lead:
            return True
        fits = len(lead) == len(self.lead) and self.is_matrices
        return fits and all(own in (1, size) for own, size in zip(lead, self.lead, strict=True))


def of_sums(
    name: str, called: str, given: Operands, result: Result, factors: Mapping[str, Factor]
) -> tuple[str, Any]:
    """Checks a bias or a scale; returns it as an operand, and the name of that.

    Raises:
        ValueError: Its shape is not legal, or a factor has a scale of its own.
    """
    x = getattr(given, name)
    held = getattr(given, blocks.OF_SCALES.get(name, "")) if name in SCALES else None
    if held is not None and x is not None:
        raise ValueError(
            f"{called} must be None beside a QuantizedWeight, which has scales of its own"
        )
    if held is not None or (name in factors and _has_blocks(x, factors[name], result)):
        x, left = x if held is None else held, name == SCALES[0]
        x = floating(called, arguments.array(called, x))
        x = blocks.checked(called, x, factors[name], left=left)
        if x.shape[-1 if left else -2] != 1:
            return blocks.OF_SCALES[name], x
        x = blocks.as_vector(x, factors[name].size, result.lead, left=left)
    return name, vector(called, x, DIMENSIONS[name], result)


def checked(
    given: Operands,
    epilogue: Epilogue,
    result: Result,
    factors: Mapping[str, Factor] = MappingProxyType({}),
    names: Mapping[str, str] = MappingProxyType(OF_ONE),
) -> tuple[Epilogue, Operands]:
    """Checks what an epilogue takes.

    Args:
        given: The operands that the caller gives; factors do not count but for `up`.
        epilogue: The rest of the caller's epilogue; alpha and beta may be arrays.
        result: The result's shape.
        factors: The factor of each scale that may be one of blocks.
        names: The caller's names for operands, where they are others.

    Returns:
        The epilogue, and its operands without the factors.

    Raises:
        ValueError: A shape is not legal.
        TypeError: A type is not.
    """
    gated = given.up is not None
    found: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    for name in ("alpha", "beta"):
        value = _number(name, getattr(epilogue, name), result)
        fixed[name], found[name] = (value, None) if isinstance(value, float) else (None, value)
    for name in ("bias", "up_bias", *SCALES):
        own, x = of_sums(name, names.get(name, name), given, result, factors)
        found[own] = x
    for name, scale in zip(ZEROS, SCALES[1:], strict=True):
        if getattr(given, name) is not None:
            called = [names.get(x, x) for x in (name, scale)]
            _add_zeros(found, given, (name, scale), called, factors[scale])
    found["residual"] = _residual(given.residual, result)
    if found["residual"] is None and fixed["beta"] != 1:
        ignored.warn(f"beta={epilogue.beta} has no effect without a residual, which it scales")
        fixed["beta"], found["beta"] = fixed["beta"] or 1.0, None
    if gated:
        _both_in_blocks(found, names)
    flags: dict[str, Any] = {
        name: found.get(name) is not None for name in KINDS if name not in fixed
    }
    made = Epilogue(activation=epilogue.activation, gated=gated, **fixed, **flags)
    return made, Operands(None, None, **found)


def _add_zeros(
    found: dict[str, Any], given: Operands, names: Sequence[str], called: Sequence[str], of: Factor
) -> None:
    """Checks zero points and adds them: then the scales beside them are those of blocks, too.

    Args:
        found: The operands that are checked.
        given: The operands as they were given.
        names: The zero points and their scales.
        called: The caller's names for both.
        of: The factor that both belong to.
    """
    (zero_name, scale_name), own = names, blocks.OF_SCALES[names[1]]
    zeros = arguments.array(called[0], getattr(given, zero_name))
    held = getattr(given, own)
    scale = getattr(given, scale_name) if held is None else held
    if not of.weights:
        raise TypeError(
            f"{called[0]} is for a right operand of few bits ({', '.join(sorted(map(str, BITS)))})"
            " beside a left one of bfloat16, float16 or float32, got"
            f" {given.a.dtype} and {given.b.dtype}"
        )
    if scale is None:
        raise ValueError(f"{called[0]} needs {called[1]}, the scales of the same groups")
    if zeros.dtype != given.b.dtype and zeros.dtype not in FLOATS_16 | {SINGLE}:
        raise TypeError(
            f"{called[0]} must be of the type of {of.name}, {given.b.dtype}, or of bfloat16,"
            f" float16 or float32, got {zeros.dtype}"
        )
    if zeros.shape != jnp.shape(scale):
        raise ValueError(
            f"{called[0]} must have the shape of {called[1]}, {list(jnp.shape(scale))}, got"
            f" {list(zeros.shape)}"
        )
    if found.get(own) is None:
        # One for each column is one for each block that is as long as k.
        vector_of_scale = found[scale_name]
        if vector_of_scale.ndim not in (1, 1 + len(of.lead)):
            raise ValueError(
                f"{called[1]} and {called[0]} must have no dimensions in front that {of.name} has"
                f" not, got {list(zeros.shape)}"
            )
        *lead, columns = vector_of_scale.shape
        shape = (*lead, 1, columns)
        found |= {scale_name: None, own: shaped(vector_of_scale, shape)}
        zeros = shaped(shaped(zeros, vector_of_scale.shape), shape)
    found[zero_name] = blocks.checked(called[0], zeros, of, left=False)


def _has_blocks(scale: Any, factor: Factor, result: Result) -> bool:
    """Whether a scale has a dimension along k: more than one, and not as one of each product."""
    shape = tuple(getattr(scale, "shape", ()))
    if factor.weights and len(shape) == 2 + len(factor.lead):
        return True
    if len(shape) < 2 or (shape[-1] == factor.size and result.is_front(shape[:-1])):
        return False
    # Of several products, a row of scales for each is the likelier mistake.
    is_row = result.lead and len(shape) == 2 and shape[-1] == factor.size
    return not is_row or bool(blocks.block(factor.k, shape[-2], blocks.SHORTEST))


def _both_in_blocks(found: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Refuses gated products of which one sum alone has blocks with scales."""
    shapes = []
    for own in ("col", "up"):
        given = (found.get(f"{own}_{kind}") for kind in ("blocks", "scale"))
        shapes.append(next((tuple(x.shape) for x in given if x is not None), ()))
    in_blocks = any(found.get(name) is not None for name in ("col_blocks", "up_blocks"))
    if in_blocks and (found.get("col_zeros") is None) != (found.get("up_zeros") is None):
        zeros = " and ".join(names[name] for name in ZEROS)
        raise ValueError(f"{zeros} must both be given, or neither")
    if in_blocks and shapes[0] != shapes[1]:
        gate, up = (list(own) or None for own in shapes)
        raise ValueError(
            f"{names.get(SCALES[1], SCALES[1])} and {SCALES[2]} must have one shape where one has a"
            f" dimension along k, got {gate} and {up}"
        )


def letters(extras: Operands, out: str, result: Result) -> dict[str, str]:
    """Returns the dimensions of each operand of the epilogue, of a result with dimensions `out`."""
    found = {}
    for name, own in DIMENSIONS.items():
        if (x := getattr(extras, name)) is None or name in OF_FACTORS:
            continue
        front = x.ndim - len(own)
        if name == "residual":
            named, goal = out[len(out) - x.ndim :], result.whole[len(out) - x.ndim :]
        else:
            named, goal = out[:front] + own, (*result.lead[:front], *x.shape[front:])
        pairs = zip(named, x.shape, goal, strict=True)
        found[name] = "".join(x if size == whole else ONE for x, size, whole in pairs)
    return found


def _number(name: str, value: Any, result: Result) -> Any:
    """Returns alpha or beta: a float, or an array of what only the running program knows."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return arguments.number(name, value)
    if isinstance(value, bool | np.bool_) or not hasattr(value, "dtype"):
        raise TypeError(
            f"{name} must be a number, or a floating-point array of no dimension, got"
            f" {type(value).__name__}: {value!r:.80}"
        )
    x = floating(name, arguments.array(name, value))
    if not result.is_front(tuple(x.shape)):
        lead = f" or {list(result.lead)}, one for each product," if result.lead else ""
        raise ValueError(
            f"{name} must be a number or an array of shape [],{lead} got {list(x.shape)}"
        )
    return x


def vector(name: str, x: Any, letter: str, result: Result) -> Any:
    """Checks what has one value per row, or per column, of the result.

    Args:
        name: The caller's name for it.
        x: The operand, or None.
        letter: "m" if it lies along the rows, "n" if along the columns.
        result: The result's shape.

    Raises:
        ValueError: Its shape is another.
        TypeError: It is complex or of bools, or a scale is of integers.
    """
    if x is None:
        return None
    is_bias = name.endswith("bias")
    x = arguments.array(name, x)
    x = _real(name, x) if is_bias else floating(name, x)
    line, vector_operand = ("row", "a") if letter == "m" else ("column", "b")
    size, other = (result.rows, result.columns)[:: 1 if letter == "m" else -1]
    if size is None or (letter == "m" and other is None):
        missing = vector_operand if size is None else "b"
        raise ValueError(f"{name} needs a result with {line}s, but {missing} is a vector")
    shape = tuple(x.shape)
    if shape == ():
        return shaped(x, (size,))
    if is_bias and len(shape) == len(result.whole) >= 2 and shape[-2] == 1 and result.is_matrices:
        # As it would be added to the result.
        shape = (*shape[:-2], shape[-1])
    if shape and shape[-1] == size and result.is_front(shape[:-1]):
        return shaped(x, shape)
    legal = f"[{size}]"
    if result.lead and result.is_matrices:
        legal += f" or {[*result.lead, size]}"
    hint = ""
    if name in ("row_scale", "col_scale") and shape == (other,):
        hint = f"; {'col_scale' if letter == 'm' else 'row_scale'} would fit"
    raise ValueError(
        f"{name} must have one value per {line} of the result, shape {legal}, got"
        f" {list(x.shape)}{hint}"
    )


def _residual(x: Any, result: Result) -> Any:
    """Checks a residual: it broadcasts to the result, but does not make it larger."""
    if x is None:
        return None
    x = _real("residual", arguments.array("residual", x))
    shape, whole = tuple(x.shape), result.whole
    if shape == whole:
        return x
    try:
        fits = jnp.broadcast_shapes(shape, whole) == whole
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"residual must have the result's shape {list(whole)}, or broadcast to it, got"
            f" {list(shape)}"
        )
    return x


def _real(name: str, x: Any) -> Any:
    if x.dtype == bool or jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{name} must be an array of real numbers, got dtype {x.dtype}")
    return x


def floating(name: str, x: Any) -> Any:
    """Returns an array of floats as it is.

    Raises:
        TypeError: It is of another type.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"{name} must be of a floating-point type, such as float32, got dtype {x.dtype}"
        )
    return x
