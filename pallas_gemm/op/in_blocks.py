"""Products whose factors have scales of blocks: their dimensions are cut into blocks.

A scale of `[m / r, k / g]` has a value for each block of r rows and g contracted elements. The
dimensions of the product are cut accordingly, `m` into `m / r` and `r`, so that each dimension of a
scale is one of the product. JAX maps, derives and splits a product by its dimensions, these too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.call import Call, Operands
from pallas_gemm.op.contraction import ONE, Contraction, Shape, joined
from pallas_gemm.op.product import product
from pallas_gemm.problem import OF_FACTORS


def multiplied(
    call: Call,
    contraction: Contraction,
    *operands: jax.Array,
    multiply: Callable[..., jax.Array] = product,
) -> jax.Array:
    """Computes what a call says, cut into blocks if these have scales.

    Args:
        call: The call.
        contraction: The dimensions of all operands but the scales of blocks.
        *operands: The operands, those scales among them.
        multiply: Computes the same of operands that have all their dimensions.
    """
    if not call.epilogue.blocks:
        return multiply(call, contraction, *operands)
    shape = contraction.shape(*(x.shape for x in operands[:2]))
    dims, own = ready(call, contraction, operands)
    return joined(multiply(call, dims, *own), shape)


def by_xla(call: Call, contraction: Contraction, *operands: jax.Array) -> jax.Array:
    """Computes the same by XLA."""
    return multiplied(
        call, contraction, *operands, multiply=lambda call, dims, *own: dims.by_xla(call, *own)
    )


def ready(
    call: Call, contraction: Contraction, operands: Sequence[Any]
) -> tuple[Contraction, tuple[Any, ...]]:
    """Returns a product in blocks, without dimensions that broadcast, and its operands."""
    if call.epilogue.blocks:
        contraction, given = cut(contraction, call.unpack(operands))
        operands = given.present()
    contraction, shapes = contraction.without_ones(call, [x.shape for x in operands])
    return contraction, tuple(map(shaped, operands, shapes))


class Cut(NamedTuple):
    """A dimension that is cut: the letters of its parts, the outermost first, and their sizes."""

    letters: str
    sizes: Shape


def cut(dims: Contraction, given: Operands) -> tuple[Contraction, Operands]:
    """Cuts the dimensions of a product of matrices into blocks.

    Args:
        dims: The dimensions of all operands but the scales of blocks.
        given: The operands, those scales among them.

    Returns:
        The dimensions, and the operands in shapes that have them.
    """
    sizes = dims.sizes(given.a.shape, given.b.shape)
    scales = {own: x for own in OF_FACTORS if (x := getattr(given, own)) is not None}
    counts: dict[str, set[int]] = {"m": set(), "n": set(), "k": set()}
    for name, x in scales.items():
        pair = ("m", "k") if name == "row_blocks" else ("k", "n")
        for letter, count in zip(pair, x.shape[-2:], strict=True):
            counts[letter].add(count)
    cuts: dict[str, Cut] = {}
    for letter, own in counts.items():
        cuts |= _cut_of(dims, letter, sizes.get(letter, 1), sorted(own), cuts)
    found, letters = {}, {}
    operands = {"a": dims.lhs, "b": dims.rhs, "up": dims.rhs}
    for name, x in given._asdict().items():
        if x is None or name in scales:
            continue
        own = operands.get(name) or getattr(dims, name)
        found[name], new = _reshaped(x, own, cuts)
        letters[{"a": "lhs", "b": "rhs"}.get(name, name)] = new
    letters.pop("up", None)
    for name, x in scales.items():
        left = name == "row_blocks"
        front = (dims.lhs if left else dims.rhs)[: x.ndim - 2]
        front = "".join(c if size != 1 else ONE for c, size in zip(front, x.shape, strict=False))
        pair = zip("mk" if left else "kn", x.shape[-2:], strict=True)
        each = [_first_parts(cuts.get(letter), letter, count) for letter, count in pair]
        parts = tuple(size for _, shape in each for size in shape)
        found[name] = shaped(x, (*x.shape[:-2], *parts))
        letters[name] = front + "".join(own for own, _ in each)
    _, letters["out"] = _reshaped(None, dims.out, cuts)
    letters["whole"] = dims.out
    return dims.with_letters(**letters), Operands(**{"a": None, "b": None} | found)


def _cut_of(
    dims: Contraction, letter: str, size: int, counts: Sequence[int], taken: Mapping[str, Cut]
) -> dict[str, Cut]:
    """Returns how a dimension is cut into blocks, and these into others, if it is."""
    found: list[tuple[str, int]] = []
    before = 1
    used = {*dims.lhs, *dims.rhs, *"".join(own.letters for own in taken.values())}
    free = (x for x in map(chr, range(ord("A"), ord("Z") + 1)) if x not in used)
    for count in (*counts, size):
        if count != before:
            found.append((next(free), count // before))
            before = count
    if len(found) < 2:
        return {}
    letters = "".join(x for x, _ in found[:-1]) + letter
    return {letter: Cut(letters, tuple(own for _, own in found))}


def _first_parts(own: Cut | None, letter: str, count: int) -> tuple[str, Shape]:
    """Returns the letters and sizes of a dimension that a scale has, by the number of blocks."""
    if own is None:
        return (letter if count != 1 else ONE), (count,)
    letters, sizes, total = "", (), 1
    for x, size in zip(own.letters, own.sizes, strict=True):
        if total == count:
            break
        letters, sizes, total = letters + x, (*sizes, size), total * size
    return (letters, sizes) if letters else (ONE, (1,))


def _reshaped(x: Any, letters: str, cuts: Mapping[str, Cut]) -> tuple[Any, str]:
    """Returns an array with its dimensions cut, and their letters."""
    new = "".join(cuts[c].letters if c in cuts else c for c in letters)
    if x is None or new == letters:
        return x, new
    shape = tuple(x.shape)
    for c in letters:
        if c in cuts:
            place = len(shape) - (len(letters) - letters.index(c))
            shape = (*shape[:place], *cuts[c].sizes, *shape[place + 1 :])
            x = shaped(x, shape)
    return x, new


def shaped(x: Any, shape: Shape) -> Any:
    """Reshapes an array, or broadcasts it where it is smaller."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype)
    if tuple(x.shape) == shape:
        return x
    return x.reshape(shape) if x.size == np.prod(shape) else jnp.broadcast_to(x, shape)
