"""A product whose result is cut in half, and both halves joined: the two sums of a gated product.

    y = x @ w + b                        w is [k, 2n], [k, 2, n], [2, k, n] or [2, n, k]
    gate, up = y[:, :n], y[:, n:]        or y[:, 0] and y[:, 1]
    silu(gate) * up

For a trial, the program has the two products in the place of the one. Where the kernel of both
saves time, it is given the whole of `w`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from pallas_gemm.call import signature_of
from pallas_gemm.op import side_by_side
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.product import product, product_p
from pallas_gemm.op.side_by_side import Half, SideBySide, side_by_side_p
from pallas_gemm.planning import prediction
from pallas_gemm.rewriting.elementwise import bytes_of, is_elementwise, variables
from pallas_gemm.rewriting.folds import LEAST_SAVED, Fold, Folder
from pallas_gemm.rewriting.inside import ALLOWED
from pallas_gemm.rewriting.level import Level, renamed
from pallas_gemm.rewriting.products import Dense, How, avals_of

LONGEST = 8
"""Operations between a product and where its result is cut, at most: there are one or two."""
SQUEEZES = frozenset(("squeeze", "reshape"))
"""Operations that leave out a dimension of one element."""


@dataclasses.dataclass(frozen=True)
class Beside:
    """A product as the two of a gated one.

    Attributes:
        out: The result of the product.
        old: The equations from the product to the halves of its result, in their order.
        pair: The two products in its place.
        fold: These, and what is around them, as one kernel.
        kernel: The same of the whole array.
        given: The operands of its function, those that are halves as they lie in one array.
    """

    out: Any
    old: tuple[Any, ...]
    pair: "_Pair"
    fold: Fold
    kernel: SideBySide
    given: tuple[Any, ...]

    @property
    def saved(self) -> float:
        """Seconds that it is predicted to save."""
        return self.fold.saved

    @property
    def told(self) -> dict[Any, tuple[str, ...]]:
        """The names of the operations that the product is computed with, by its result."""
        names = dict.fromkeys(e.primitive.name for e in self.fold.region.inside)
        return {self.out: ("both halves of its result", *names)}

    def apply(self, level: Level) -> None:
        """Puts it in the place of the product and of the operations."""
        read = [made for e in self.old for x in variables(e) if (made := level.maker(x))]
        level.exchange(self.old, self.pair.equations, self.out)
        self.fold.apply(level)
        gated = level.maker(self.fold.region.results[0])
        operands = [gated.invars[0], self.pair.both, *self.given]
        new = gated.replace(
            primitive=side_by_side_p,
            invars=operands,
            params={"own": self.kernel, "devices": gated.params["devices"]},
            effects=side_by_side.effects(self.kernel, avals_of(operands)),
        )
        level.rename(gated, new)
        level.remove_unread([*self.pair.equations, *read])


class _Cut(NamedTuple):
    """How a value is cut in half.

    Attributes:
        axis: Along which dimension.
        drops: Each half is one of two places of that dimension, and does not have it.
    """

    axis: int
    drops: bool

    def half(self, x: Any, i: int, axes: tuple[int, ...]) -> Any:
        """Returns what an array is to a half, of which it has some dimensions."""
        if self.axis not in axes:
            return x
        axis = axes.index(self.axis)
        size = x.shape[axis] // 2
        if size:
            x = lax.slice_in_dim(x, i * size, (i + 1) * size, axis=axis)
        return lax.squeeze(x, (axis,)) if self.drops else x

    def spread(self, x: Any, axes: tuple[int, ...], whole: tuple[int, ...]) -> Any:
        """Returns a half of a whole that an array was broadcast to."""
        middle = () if self.drops else (whole[self.axis] // 2,)
        shape = (*whole[: self.axis], *middle, *whole[self.axis + 1 :])
        if self.drops:
            axes = tuple(own - (own > self.axis) for own in axes if own != self.axis)
        return lax.broadcast_in_dim(x, shape, axes)


class _Beside(NamedTuple):
    """A value that an operation reads beside the product's result, and is not as large as that.

    Attributes:
        stored: The value, or the one that is broadcast to it.
        axes: Which dimensions of the result it has.
        whole: The shape that it is broadcast to; None if it is not.
    """

    stored: Any
    axes: tuple[int, ...]
    whole: tuple[int, ...] | None = None

    def half(self, cut: _Cut, x: Any, i: int) -> Any:
        """Returns what it is to a half of the result."""
        half = cut.half(x, i, self.axes)
        return half if self.whole is None else cut.spread(half, self.axes, self.whole)


class _Step(NamedTuple):
    """An operation between a product and where its result is cut.

    Attributes:
        equation: The operation.
        cut: How what it makes is cut.
        beside: The values that it reads beside the product's result.
    """

    equation: Any
    cut: _Cut
    beside: dict[Any, _Beside]

    def of_half(self, half: Any, i: int, known: Mapping[Any, Any]) -> Any:
        """Computes it of a half of the product's result, and of the values beside."""
        inputs = [self._input(x, half, i, known) for x in self.equation.invars]
        return self.equation.primitive.bind(*inputs, **self.equation.params)

    def _input(self, x: Any, half: Any, i: int, known: Mapping[Any, Any]) -> Any:
        if isinstance(x, core.Literal):
            return x.val
        own = self.beside.get(x)
        return half if own is None else own.half(self.cut, known[own.stored], i)


class _Cuts(NamedTuple):
    """The equations that cut a value in half.

    Attributes:
        how: How they cut it.
        halves: The halves.
        equations: The equations.
    """

    how: _Cut
    halves: tuple[Any, Any]
    equations: tuple[Any, ...]


class _Chain(NamedTuple):
    """The operations from a product to where its result is cut.

    Attributes:
        steps: The operations, but those that only tell the halves apart.
        first: How the product's own result is cut.
        halves: The halves of the last value.
        equations: All equations, that of the product first.
    """

    steps: tuple[_Step, ...]
    first: _Cut
    halves: tuple[Any, Any]
    equations: tuple[Any, ...]


class _Pair(NamedTuple):
    """Two products in the place of one.

    Attributes:
        equations: They make the halves of the chain.
        both: The array that has the right operands of both.
        axis: The dimension of it along which they lie side by side.
        products: The products.
    """

    equations: tuple[Any, ...]
    both: Any
    axis: int
    products: tuple[Dense, Dense]


def beside_of(level: Level, own: Dense, how: How, folder: Folder) -> Beside | None:
    """Returns a product as two that a kernel joins; None if it is not cut, or no time is saved."""
    own = own.in_order
    chain = _chain(level, own.out)
    pair = None if chain is None else _pair(level, own, chain)
    if chain is None or pair is None:
        return None
    level.exchange(chain.equations, pair.equations, own.out)
    fold = folder.pair(level, pair.products)
    level.put_back(chain.equations, pair.equations)
    if fold is None:
        return None
    region, results = fold.region, pair.products[0].out.aval.shape
    if sum(x.aval.shape == results for x in region.results) > 1:
        return None
    cuts = {e.outvars[0]: _half(e) for e in pair.equations if e.primitive.name == "slice"}
    given = tuple(cuts[x][0] if x in cuts else x for x in region.operands)
    halves = tuple(cuts[x][1] if x in cuts else None for x in region.operands)
    dims = pair.products[0].dims
    kernel = SideBySide(fold.call, dims, fold.function, pair.axis, halves)
    signature = signature_of(avals_of((own.factors[0], pair.both, *given)))
    planned = kernel._replace(call=kernel.call.with_target(how.device)).plan(signature)
    if isinstance(planned, str):
        return None
    in_place = {i for i, _ in kernel.vectors(planned, [x.aval.shape for x in given]).values()}
    copied = [x for i, x in enumerate(region.operands) if x in cuts and i not in in_place]
    copies = prediction.pass_seconds(2 * sum(map(bytes_of, copied)), how.device) if copied else 0.0
    fold = fold._replace(saved=fold.saved - copies)
    if fold.saved <= LEAST_SAVED * own.seconds:
        return None
    return Beside(own.out, chain.equations, pair, fold, kernel, given)


def _half(cut: Any) -> tuple[Any, Half]:
    """Returns the array that an equation cuts in half, and which half it makes."""
    (x,), start = cut.invars, cut.params["start_indices"]
    axis = next(i for i, size in enumerate(x.aval.shape) if size != cut.outvars[0].aval.shape[i])
    return x, Half(axis, int(start[axis] > 0))


def _chain(level: Level, product: Any) -> _Chain | None:
    """Returns the operations from a product to where its result is cut; None if it is not."""
    x, between = product, []
    while (cuts := _cuts(level, x)) is None:
        step = level.only_reader(x)
        if step is None or len(between) == LONGEST or not _is_step(step, x):
            return None
        between.append(step)
        (x,) = step.outvars
    cut, steps = cuts.how, []
    for equation in reversed(between):
        if equation.primitive.name == "reshape":
            if not _tells_apart(equation, cut):
                return None
            cut = _Cut(cut.axis, False)
            continue
        beside = _beside(level, equation)
        if beside is None:
            return None
        steps.append(_Step(equation, cut, beside))
    every = (level.maker(product), *between, *cuts.equations)
    return _Chain(tuple(reversed(steps)), cut, cuts.halves, every)


def _is_step(step: Any, x: Any) -> bool:
    name = step.primitive.name
    is_one = name in ALLOWED and len(step.outvars) == 1
    return name == "reshape" or (is_one and is_elementwise(step, x.aval.shape, ALLOWED))


def _tells_apart(reshape: Any, cut: _Cut) -> bool:
    """Whether a reshape makes two places of what is cut, and does nothing else."""
    before, after = (x.aval.shape for x in (*reshape.invars, *reshape.outvars))
    place = cut.axis
    one = (*after[:place], math.prod(after[place : place + 2]), *after[place + 2 :])
    return before == one


def _beside(level: Level, step: Any) -> dict[Any, _Beside] | None:
    """Returns what a step reads beside a product's result; None if that is as large."""
    whole, found = step.outvars[0].aval.shape, {}
    every = set(variables(step))
    for x in every:
        made, shape = level.maker(x), x.aval.shape
        if shape != whole:
            found[x] = _Beside(x, tuple(range(len(shape))))
        elif made is not None and made.primitive.name == "broadcast_in_dim":
            if isinstance(made.invars[0], core.Literal):
                return None
            found[x] = _Beside(made.invars[0], made.params["broadcast_dimensions"], whole)
    return found if len(every - set(found)) == 1 else None


def _cuts(level: Level, x: Any) -> _Cuts | None:
    """Returns the equations that cut a value in half, if that is all that is done with it."""
    makers = level.readers(x)
    names = [e.primitive.name for e in makers]
    if x in level.results or names not in (["split"], ["slice", "slice"]):
        return None
    whole = x.aval.shape
    if names == ["split"]:
        axis, halves = makers[0].params["axis"], makers[0].outvars
        starts = [0, makers[0].params["sizes"][0]]
    else:
        makers = sorted(makers, key=lambda e: e.params["start_indices"])
        first, second = (e.params["start_indices"] for e in makers)
        axis = next((i for i, start in enumerate(second) if start), 0)
        halves, starts = [e.outvars[0] for e in makers], [first[axis], second[axis]]
        if any(e.params["strides"] for e in makers):
            return None
    half = (*whole[:axis], whole[axis] // 2, *whole[axis + 1 :])
    if starts != [0, half[axis]] or [y.aval.shape for y in halves] != [half, half]:
        return None
    if half[axis] > 1:
        return _Cuts(_Cut(axis, False), tuple(halves), tuple(makers))
    squeezes = [level.only_reader(y) for y in halves]
    dropped = (*half[:axis], *half[axis + 1 :])
    for squeeze in squeezes:
        if squeeze is None or squeeze.primitive.name not in SQUEEZES:
            return None
        if squeeze.outvars[0].aval.shape != dropped:
            return None
    ends = tuple(e.outvars[0] for e in squeezes)
    return _Cuts(_Cut(axis, True), ends, (*makers, *squeezes))


def _pair(level: Level, own: Dense, chain: _Chain) -> _Pair | None:
    """Returns two products in the place of one; None if its columns are not what is cut."""
    dims, (left, right) = own.dims, own.factors
    letter = dims.out[chain.first.axis]
    if letter not in dims.columns or (chain.first.drops and dims.rhs[-1] == letter):
        return None
    axis = dims.rhs.index(letter)
    if chain.first.drops:
        without = {"rhs": dims.rhs.replace(letter, ""), "out": dims.out.replace(letter, "")}
        dims = dims.with_letters(**without)
    read = tuple(dict.fromkeys(x.stored for step in chain.steps for x in step.beside.values()))

    def halves(a: Any, b: Any, *beside: Any) -> Any:
        known = dict(zip(read, beside, strict=True))
        if chain.first.drops:
            b = lax.collapse(b, axis, axis + 2)
        for i, part in enumerate(jnp.split(b, 2, axis)):
            half = product(own.call, dims, a, part)
            for step in chain.steps:
                half = step.of_half(half, i, known)
            yield half

    given = (left, right, *read)
    equation = level.maker(own.out)
    with equation.ctx.manager, jax.sharding.use_abstract_mesh(mesh_context.no_mesh()):
        types = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in given]
        program = jax.make_jaxpr(lambda *args: list(halves(*args)))(*types).jaxpr
    if signature_of(avals_of(program.outvars)) != signature_of(avals_of(chain.halves)):
        return None
    equations = renamed(program, given, chain.halves, equation)
    makers = [e for e in equations if e.primitive is product_p]
    products = [
        dataclasses.replace(
            own, dims=dims, factors=tuple(e.invars), out=e.outvars[0], seconds=own.seconds / 2
        )
        for e in makers
    ]
    (cut,) = (e for e in equations if makers[0].invars[1] in e.outvars)
    return _Pair(equations, cut.invars[0], axis, (products[0], products[1]))
