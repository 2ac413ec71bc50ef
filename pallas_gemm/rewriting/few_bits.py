"""A product of weights of few bits that the program widens first: a kernel widens them itself.

    x @ (w.astype(x.dtype) * scale)          a scale for each column, or one for all
    x @ (w.reshape(groups, -1, n) * scale[:, None]).reshape(k, n)        for each group of rows
    x @ (w.astype(x.dtype) * jnp.repeat(scale, k // groups, axis=0))     the same

The scales of columns are multiplied into the sums, so that no weight is rounded.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend import core

from pallas_gemm.call import Call, signature_of
from pallas_gemm.kernels.element_types import BITS, FLOATS, is_widened
from pallas_gemm.op.canonical import merged
from pallas_gemm.op.contraction import ONE, Contraction
from pallas_gemm.planning import dispatch, prediction
from pallas_gemm.problem import Epilogue
from pallas_gemm.rewriting.elementwise import bytes_of
from pallas_gemm.rewriting.level import Level
from pallas_gemm.rewriting.products import Dense, How, avals_of, equation_of, is_one_devices

SAME_VALUES = frozenset(("convert_element_type", "reshape"))
MOVES = frozenset(("reshape", "broadcast_in_dim"))


@dataclasses.dataclass(frozen=True)
class FewBits:
    """A product of weights of few bits.

    Attributes:
        product: The product of the weights that the program has widened.
        call: The product of those that it has stored.
        dims: Its dimensions.
        operands: The left operand, the weights, and their scales if they have some.
        cuts: The operations that cut the contracted dimension of operands into groups.
        widening: The operations that widen the weights.
        saved: Seconds that it is predicted to save.
    """

    product: Dense
    call: Call
    dims: Contraction
    operands: tuple[Any, ...]
    cuts: tuple[Any, ...]
    widening: tuple[Any, ...]
    saved: float

    @property
    def told(self) -> dict[Any, tuple[str, ...]]:
        """The words for the product, by its result."""
        return {self.product.out: (f"weights of {self.operands[1].aval.dtype}",)}

    def apply(self, level: Level) -> None:
        """Puts it in the place of the product and of the operations."""
        equation = level.maker(self.product.out)
        new = equation_of(self.call, self.dims, self.operands, self.product.out, equation)
        level.replace(equation, new)
        for cut in self.cuts:
            level.insert(equation, cut.replace(source_info=equation.source_info))
        level.remove_unread(self.widening)


def few_bits_of(level: Level, own: Dense, how: How) -> FewBits | None:
    """Returns a product of the weights as they are stored, if that saves time."""
    for each in (own, own.swapped):
        weights = _weights(level, each.factors[1], each.dims)
        if weights is None or not is_widened(each.factors[0].aval.dtype, weights.values.aval.dtype):
            continue
        if (how.exact and weights.scale is not None) or not is_one_devices(own):
            return None
        return _priced(level, own, each, weights, how)
    return None


def _priced(level: Level, own: Dense, each: Dense, weights: "_Weights", how: How) -> FewBits | None:
    """Returns the product of weights, if it is predicted to be faster."""
    dims, factors, cuts = weights.dims, (each.factors[0], weights.values), ()
    scales = Epilogue(col_scale=bool(dims.col_scale), col_blocks=bool(dims.col_blocks))
    call = dataclasses.replace(each.call, epilogue=scales)
    if dims.col_blocks:
        groups = weights.scale.aval.shape[dims.rhs.index(dims.contracted)]
        dims, cuts = _in_groups(dims, factors, groups)
        factors = tuple(cut.outvars[0] for cut in cuts)
    scale = weights.scale
    if scale is not None and not scale.aval.shape:
        spread = _with_dimensions(scale, len(dims.col_scale))
        cuts, scale = (*cuts, spread), spread.outvars[0]
    operands = factors if scale is None else (*factors, scale)
    signature = signature_of(avals_of(operands))
    planned = merged(call.with_target(how.device), dims, signature)
    decision = dispatch.decide(planned.call, planned.signature)
    if decision.plan is None:
        return None
    wide = each.factors[1]
    saved = own.seconds - decision.plan.seconds
    if level.only_reader(wide) is not None:
        # A pass over memory widens them.
        saved += prediction.pass_seconds(bytes_of(weights.values) + bytes_of(wide), how.device)
    return FewBits(own, call, dims, operands, cuts, weights.widening, saved) if saved > 0 else None


def _with_dimensions(number: Any, rank: int) -> Any:
    """Returns what makes an array of one element of a number."""
    like = jax.ShapeDtypeStruct((), number.aval.dtype)
    (equation,) = jax.make_jaxpr(lambda x: lax.broadcast(x, (1,) * rank))(like).eqns
    return equation.replace(invars=[number], outvars=[core.Var(equation.outvars[0].aval)])


def _in_groups(
    dims: Contraction, factors: tuple[Any, Any], groups: int
) -> tuple[Contraction, tuple[Any, Any]]:
    """Returns the product with the contracted dimension as two, and what cuts both operands."""
    k, within = dims.contracted, dims.unused()
    stored = (dims.lhs, dims.rhs)
    left, right = (letters.replace(k, k + within) for letters in stored)

    def cut(letters: str, x: Any) -> Any:
        place, shape = letters.index(k), x.aval.shape
        new = (*shape[:place], groups, shape[place] // groups, *shape[place + 1 :])
        like = jax.ShapeDtypeStruct(shape, x.aval.dtype)
        (equation,) = jax.make_jaxpr(functools.partial(lax.reshape, new_sizes=new))(like).eqns
        return equation.replace(invars=[x], outvars=[core.Var(equation.outvars[0].aval)])

    first, second = (cut(*each) for each in zip(stored, factors, strict=True))
    return dims.with_letters(lhs=left, rhs=right), (first, second)


class _Weights(NamedTuple):
    """Weights of few bits, as a program widens them.

    Attributes:
        values: The integers, as they are stored.
        dims: The dimensions of the product, with those of the weights and of their scales.
        scale: Their scales; None if they have none.
        widening: The operations that widen them.
    """

    values: Any
    dims: Contraction
    scale: Any
    widening: tuple[Any, ...]


def _weights(level: Level, x: Any, dims: Contraction) -> _Weights | None:
    """Returns what an operand is made of, if that is weights of few bits."""
    seen: list[Any] = []
    made = level.maker(x)
    if made is not None and made.primitive.name == "transpose":
        order = made.params["permutation"]
        stored = "".join(dims.rhs[order.index(i)] for i in range(len(order)))
        dims = dims.with_letters(rhs=stored)
        seen.append(made)
        (x,) = made.invars
    shape = x.aval.shape
    values = _values(level, x, shape, seen)
    if values is not None:
        return _Weights(values, dims, None, tuple(seen))
    made = _behind(level, x, seen)
    if made is None or made.primitive.name != "mul":
        return None
    seen.append(made)
    for wide, scale in (made.invars, made.invars[::-1]):
        values = _values(level, wide, shape, seen)
        there = made.outvars[0].aval.shape
        found = None if values is None else _scale(level, scale, (there, shape), dims)
        if found is not None:
            _behind(level, scale, seen, but=found[1])
            return _Weights(values, *found, tuple(seen))
    return None


def _behind(level: Level, x: Any, seen: list[Any], *, but: Any = None) -> Any:
    """Returns what makes a value, or makes what it is a conversion or another shape of.

    Args:
        level: The function that they are in.
        x: The value.
        seen: Notes what is between.
        but: A value to stop at; more than conversions and shapes may be before it.
    """
    made = level.maker(x)
    names = SAME_VALUES if but is None else SAME_VALUES | MOVES
    while made is not None and x is not but and made.primitive.name in names:
        if _may_change_values(made):
            break
        seen.append(made)
        (x,) = made.invars
        made = level.maker(x)
    return made


def _may_change_values(equation: Any) -> bool:
    """Whether an equation is a cast to a type that does not hold what a float of 16 bits does."""
    is_cast = equation.primitive.name == "convert_element_type"
    return is_cast and np.dtype(equation.outvars[0].aval.dtype) not in FLOATS


def _values(level: Level, wide: Any, shape: tuple[int, ...], seen: list[Any]) -> Any:
    """Returns the integers that a value is a conversion of; None if it is not of some."""
    own, x = [], wide
    while (made := level.maker(x)) is not None and made.primitive.name in SAME_VALUES:
        if _may_change_values(made):
            return None
        own.append(made)
        (x,) = made.invars
        if np.dtype(x.aval.dtype) in BITS and x.aval.shape == shape:
            seen += own
            return x
    return None


def _scale(
    level: Level, scale: Any, shapes: tuple[tuple[int, ...], tuple[int, ...]], dims: Contraction
) -> tuple[Contraction, Any] | None:
    """Returns the dimensions of the product, with those of the scales, and these as stored.

    Args:
        level: The function that they are in.
        scale: The factor of the weights.
        shapes: The shapes of the weights there, and in the product.
        dims: The dimensions of the product.
    """
    own, letters, (shape, whole) = scale.aval.shape, dims.rhs, shapes
    if not own and shape == whole:
        # One for all.
        own = (1,) * len(letters)
    if len(own) != len(shape):
        return None
    if shape == whole:
        used = "".join(x if size != 1 else ONE for x, size in zip(letters, own, strict=True))
        if set(used) - {ONE} <= set(dims.columns):
            return dataclasses.replace(dims, col_scale=used), scale
        stored = _repeated(level, scale, dims)
        return None if stored is None else (dataclasses.replace(dims, col_blocks=letters), stored)
    # The contracted dimension is two here: groups, which have a scale each, and their rows.
    if len(dims.contracted) != 1 or len(shape) != len(letters) + 1:
        return None
    place = letters.index(dims.contracted) + 1
    if (*shape[: place - 1], shape[place - 1] * shape[place], *shape[place + 1 :]) != whole:
        return None
    before = level.maker(scale)
    stored = own[:place] + own[place + 1 :]
    if own[place] != 1 or stored != shape[:place] + shape[place + 1 :] or before is None:
        return None
    if before.primitive.name not in MOVES or before.invars[0].aval.shape != stored:
        return None
    return dataclasses.replace(dims, col_blocks=letters), _not_widened(level, before.invars[0])


def _repeated(level: Level, scale: Any, dims: Contraction) -> Any:
    """Returns scales of groups as they are stored, of those for each row; None if they are none."""
    if len(dims.contracted) != 1:
        return None
    place, rank = dims.rhs.index(dims.contracted), len(dims.rhs)
    cut: list[Any] = []
    spread = _behind(level, scale, cut)
    if spread is None or spread.primitive.name != "broadcast_in_dim":
        return None
    stored = spread.invars[0]
    if isinstance(stored, core.Literal):
        return None
    axes = tuple(i for i in range(rank + 1) if i != place + 1)
    is_spread = tuple(spread.params["broadcast_dimensions"]) == axes
    own, each = stored.aval.shape, spread.outvars[0].aval.shape
    if len(each) != rank + 1:
        return None
    joined = (*each[:place], each[place] * each[place + 1], *each[place + 2 :])
    is_whole = joined == scale.aval.shape and tuple(each[i] for i in axes) == own
    return _not_widened(level, stored) if is_spread and is_whole else None


def _not_widened(level: Level, x: Any) -> Any:
    """Returns what a value is a wider float of; itself if it is none."""
    made = level.maker(x)
    if made is None or made.primitive.name != "convert_element_type":
        return x
    (before,) = made.invars
    types = {np.dtype(own.aval.dtype) for own in (x, before)}
    is_wider = before.aval.dtype.itemsize < x.aval.dtype.itemsize
    return before if types <= FLOATS and is_wider else x
