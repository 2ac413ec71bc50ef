"""Any contraction as one batched product of matrices, by reshapes where they do.

The kernels take `[batch, m, k]` or `[batch, k, m]` on the left, `[batch, k, n]` or `[batch, n, k]`
on the right. If the dimensions of an operand that are rows lie side by side, merging them into one
is a reshape and costs nothing. The same goes for columns, contracted dimensions and the batch.
Otherwise the operand is transposed, which is one pass over it. Free choices are made so that the
fewest bytes move:

- which of several dimensions of a group comes first;
- which operand is the left one: the result then needs no transposition;
- whether a dimension of one operand alone is rows, or a batch that shares the other operand.

What is merged is what one device has: a mesh splits dimensions before they are merged.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gemm.call import DIMENSIONS, Call, Operands, Signature
from pallas_gemm.op.contraction import Contraction, Shape
from pallas_gemm.planning.candidates.cuts import SMALLEST_TILE
from pallas_gemm.problem import Epilogue


@dataclasses.dataclass(frozen=True)
class Side:
    """How an operand becomes a matrix, or a batch of them.

    Attributes:
        shape: The shape to give it.
        transposed: The left operand is then `[..., k, m]`, the right one `[..., n, k]`.
        permutation: The order that its dimensions are first put into; None if it is not.
        broadcast: The shape that it then has, the one that it is broadcast to, and which dimensions
            of that it has; None if it is not.
    """

    shape: Shape
    transposed: bool = False
    permutation: Shape | None = None
    broadcast: tuple[Shape, Shape, Shape] | None = None

    @property
    def is_free(self) -> bool:
        """Whether a reshape is enough, and nothing is copied."""
        return self.broadcast is None and self.permutation is None

    def apply(self, x: jax.Array) -> jax.Array:
        """Makes the matrix, or the batch of them."""
        if self.permutation is not None:
            x = jnp.transpose(x, self.permutation)
        if self.broadcast is not None:
            own, whole, dims = self.broadcast
            x = lax.broadcast_in_dim(x.reshape(own), whole, dims)
        return x.reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Form:
    """A contraction as a product of matrices.

    A matrix times a vector is computed as the vector, a single row, times the transposed matrix:
    then many vectors, as under `vmap`, are many rows.

    Attributes:
        a: How the left factor of the product is made.
        b: How the right factor is made.
        extras: How each operand of the epilogue is made, by its name.
        parts: The sizes that the dimensions of the product's result are made of.
        permutation: The order that these are put into; None if it is theirs.
        swapped: The left factor is made of the right operand, and the right one of the left.
        lead: The dimensions of the contraction that are a batch of products.
    """

    a: Side
    b: Side
    extras: Mapping[str, Side]
    parts: Shape
    permutation: Shape | None
    swapped: bool
    lead: str

    def ready(self, given: Operands) -> Operands:
        """Makes the product's operands of those of the contraction; those that are None stay so."""
        left, right = (given.b, given.a) if self.swapped else (given.a, given.b)
        pairs = ((self.a, left), (self.b, right), (self.b, given.up))
        factors = (None if x is None else side.apply(x) for side, x in pairs)
        named = {name: (side, getattr(given, name)) for name, side in self.extras.items()}
        extras = {name: side.apply(x) for name, (side, x) in named.items() if x is not None}
        return Operands(*factors, **extras)

    def result(self, product: jax.Array) -> jax.Array:
        """Makes the contraction's result of the product's."""
        apart = product.reshape(self.parts)
        return apart if self.permutation is None else jnp.transpose(apart, self.permutation)

    @property
    def product_shape(self) -> Shape:
        """The shape of the product: `[m, n]` or `[batch, m, n]`."""
        batch = max(self.a.shape[:-2], self.b.shape[:-2], key=len)
        rows = self.a.shape[-1] if self.a.transposed else self.a.shape[-2]
        return (*batch, rows, self.b.shape[-2] if self.b.transposed else self.b.shape[-1])


class Merged(NamedTuple):
    """A contraction as what a kernel computes.

    Attributes:
        call: The product of matrices.
        signature: Shapes and types of its operands.
        form: How these are made of those of the contraction.
    """

    call: Call
    signature: Signature
    form: Form

    def around(self, multiply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Returns the function of the contraction's operands, of that of the matrices."""

        def run(*operands: jax.Array) -> jax.Array:
            ready = self.form.ready(self.call.unpack(operands))
            return self.form.result(multiply(*ready.present()))

        return run


@functools.lru_cache(maxsize=4096)
def merged(call: Call, contraction: Contraction, signature: Signature) -> Merged:
    """Returns the product of matrices that a contraction comes down to.

    Args:
        call: The product, whatever it says about what is transposed.
        contraction: Its dimensions.
        signature: Shapes and types of its operands.
    """
    named = call.unpack(signature)
    sizes = contraction.sizes(named.a[0], named.b[0])
    widths = (named.a[1].itemsize, named.b[1].itemsize, call.out_dtype.itemsize)
    form = _cheapest(_candidates(contraction, sizes, call.epilogue), widths, contraction)
    merged_call = call.with_swapped_precision() if form.swapped else call
    merged_call = dataclasses.replace(
        merged_call, transpose_a=form.a.transposed, transpose_b=form.b.transposed
    )
    dtypes = [dtype for _, dtype in signature]
    if form.swapped:
        dtypes[:2] = dtypes[1::-1]
    shapes = [form.a.shape, form.b.shape]
    shapes += [form.b.shape] * (named.up is not None)
    shapes += [side.shape for side in form.extras.values()]
    return Merged(merged_call, tuple(zip(shapes, dtypes, strict=True)), form)


def _cheapest(
    candidates: Iterator[Form], widths: tuple[int, int, int], contraction: Contraction
) -> Form:
    """Returns the form that moves the fewest bytes, of several the first."""
    best = next(candidates)
    least = _cost(best, widths, contraction)
    for form in candidates:
        if least == (0, False):
            break
        if (cost := _cost(form, widths, contraction)) < least:
            best, least = form, cost
    return best


def _cost(form: Form, widths: tuple[int, int, int], contraction: Contraction) -> tuple[float, bool]:
    """Returns the bytes that a form moves, and whether it has but one column."""
    left, right, out = widths
    if form.swapped:
        left, right = right, left
    total = 0.0
    for side, width in ((form.a, left), (form.b, right)):
        # What is broadcast is written, and read by the kernel.
        total += 0 if side.is_free else 2 * width * count(side.shape)
    if form.permutation is not None:
        total += 2 * out * count(form.parts)
    residual = form.extras.get("residual")
    if residual is not None and not residual.is_free:
        total += 2 * out * count(residual.shape)
    *lead, rows, columns = form.product_shape
    if lead and count((columns if form.swapped else rows,)) < SMALLEST_TILE:
        # What a tile has beyond its rows is no less work.
        total += 4 * out * count(form.parts)
    free = contraction.rows if form.swapped else contraction.columns
    return total, not free and len(form.parts) > 0


def count(shape: Sequence[Any]) -> float:
    """Returns how many elements there are; any size will do for symbols, which XLA multiplies."""
    return math.prod(size if isinstance(size, int) else 64 for size in shape)


def _candidates(
    contraction: Contraction, sizes: Mapping[str, Any], epilogue: Epilogue
) -> Iterator[Form]:
    """Yields the forms that come into question, the usual one first."""
    can_swap = not epilogue.gated and {"residual", "alpha", "beta"}.issuperset(epilogue.operands)
    forced = _differing(contraction, epilogue)
    every = itertools.product(_more_batch(contraction, forced), (False, can_swap))
    for more, swapped in dict.fromkeys(every):
        own = contraction.swapped if swapped else contraction
        batch = "".join(x for x in contraction.out if x in own.batch + more)
        orders = itertools.product(
            _orders(batch, own.out, own.lhs, own.rhs),
            _orders(_without(own.rows, more), own.lhs, own.out),
            _orders(_without(own.columns, more), own.rhs, own.out),
            _orders(own.contracted, own.lhs, own.rhs),
        )
        for lead, rows, columns, contracted in orders:
            yield Form(
                _side(own.lhs, (lead, rows, contracted), sizes, free_first=True),
                _side(own.rhs, (lead, columns, contracted), sizes, free_first=False),
                _extras(contraction, epilogue, (lead, rows, columns, contracted), sizes),
                *_apart(lead + rows + columns, own.out, sizes),
                swapped,
                lead,
            )


def _differing(contraction: Contraction, epilogue: Epilogue) -> str:
    """Returns rows and columns that have to be a batch: what the epilogue takes differs in them."""
    found = ""
    for name in epilogue.operands:
        own = getattr(contraction, name)
        for letter, group in (("m", contraction.rows), ("n", contraction.columns)):
            found += "".join(x for x in own if x in group and letter not in DIMENSIONS[name])
    return "".join(x for x in contraction.out if x in found)


def _extras(
    contraction: Contraction,
    epilogue: Epilogue,
    groups: tuple[str, str, str, str],
    sizes: Mapping[str, Any],
) -> Mapping[str, Side]:
    """Merges the dimensions of each operand of the epilogue.

    What of a factor lies within blocks comes last in each group: else there is a scale for each of
    its rows, columns or contracted elements.
    """
    lead, rows, columns, contracted = groups
    merged_of = {"m": rows, "n": columns, "k": contracted}
    # Both factors are cut into blocks of as many contracted elements.
    scales = [getattr(contraction, name) for name in epilogue.blocks]
    deep = _first_of(contracted, "".join(scales))
    found = {}
    for name in epilogue.operands:
        own, parts = getattr(contraction, name), {x: merged_of[x] for x in DIMENSIONS[name]}
        if name in epilogue.blocks:
            parts = {x: deep if x == "k" else _first_of(y, own) for x, y in parts.items()}
        found[name] = _late(own, (lead, *parts.values()), sizes)
    return found


def _first_of(group: str, letters: str) -> str:
    """Returns the first dimensions of a group that are merged: with the others, those of blocks."""
    own = sum(x in letters for x in group)
    return group[:own] if all(x in letters for x in group[:own]) else group


def _more_batch(contraction: Contraction, forced: str) -> Iterator[str]:
    """Yields which dimensions of one operand alone might be batches that share the other."""
    if not forced:
        yield ""
    for end in range(1, len(contraction.out)):
        more = _without(contraction.out[:end], contraction.batch)
        for group in (contraction.rows, contraction.columns):
            is_part = more and set(more) < set(group) and set(forced) <= set(more)
            if is_part and contraction.out[end - 1] in more:
                yield more
    if forced:
        yield forced


def _orders(group: str, *like: str) -> list[str]:
    """Returns the orders of a group of dimensions that operands and result have them in."""
    found = ("".join(x for x in own if x in group) for own in like)
    return list(dict.fromkeys(order for order in found if len(order) == len(group)))


def _without(letters: str, others: str) -> str:
    return "".join(x for x in letters if x not in others)


def _sizes(letters: str, sizes: Mapping[str, Any]) -> Shape:
    return tuple(sizes[x] for x in letters)


def _apart(order: str, out: str, sizes: Mapping[str, Any]) -> tuple[Shape, Shape | None]:
    """Returns the dimensions of the product's result, and their order in the contraction's."""
    if _in_order([order.index(x) for x in out], _sizes(out, sizes)):
        return _sizes(out, sizes), None
    return _sizes(order, sizes), tuple(order.index(x) for x in out)


def _side(
    letters: str, groups: tuple[str, str, str], sizes: Mapping[str, Any], *, free_first: bool
) -> Side:
    """Merges the dimensions of an operand into batch, free and contracted.

    Args:
        letters: The operand's dimensions.
        groups: The batch, its free dimensions and those contracted. It may have all, some or none
            of the batch. The free ones are in the order of the product's result, the contracted
            ones in an order that both operands agree on.
        sizes: The size of each dimension.
        free_first: The free dimension comes first where it is not transposed: the left operand.
    """
    batch, free, contracted = groups
    own = "".join(x for x in batch if x in letters)
    shape = _sizes(letters, sizes)
    # What is contracted last is what every kernel and element type can take, so it is tried first.
    for contracted_last in (True, False):
        order = own + (free + contracted if contracted_last else contracted + free)
        places = [letters.index(x) for x in order]
        fits = _in_order(places, [shape[place] for place in places])
        if fits:
            break
    if not fits:
        contracted_last = True
        places = [letters.index(x) for x in own + free + contracted]
    parts = [math.prod(_sizes(group, sizes)) for group in (free, contracted)]
    matrix = tuple(parts if contracted_last else parts[::-1])
    whole, broadcast = _sizes(batch, sizes), None
    lead = (math.prod(whole),) if own and math.prod(whole) != 1 else ()
    if lead and own != batch:
        dims = (*map(batch.index, own), len(batch), len(batch) + 1)
        broadcast = ((*_sizes(own, sizes), *matrix), (*whole, *matrix), dims)
    return Side(
        (*lead, *matrix),
        contracted_last != free_first,
        None if fits else tuple(places),
        broadcast,
    )


def _late(letters: str, groups: tuple[str, ...], sizes: Mapping[str, Any]) -> Side:
    """Merges the dimensions of an operand of the epilogue.

    Args:
        letters: The operand's dimensions.
        groups: The batch, which it has or not, and what each other dimension is merged of.
        sizes: The size of each dimension.
    """
    batch, *others = groups
    lead = batch if any(x in batch for x in letters) else ""
    every = "".join((lead, *others))
    order = "".join(x for x in every if x in letters)
    places = [letters.index(x) for x in order]
    whole, size = _sizes(every, sizes), math.prod(_sizes(lead, sizes))
    dims = tuple(every.index(x) for x in order)
    fits = _in_order(places, _sizes(order, sizes))
    return Side(
        (*((size,) if size != 1 else ()), *(math.prod(_sizes(x, sizes)) for x in others)),
        permutation=None if fits and len(order) == len(every) else tuple(places),
        broadcast=None if len(order) == len(every) else (_sizes(order, sizes), whole, dims),
    )


def _in_order(places: list[int], shape: Any) -> bool:
    """Whether dimensions already lie in that order; those of size 1 may lie anywhere."""
    real = [place for place, size in zip(places, shape, strict=True) if size != 1]
    return real == sorted(real)
