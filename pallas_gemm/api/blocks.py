"""Scales of blocks: what their shapes say, and the product whose dimensions are cut into blocks.

A scale of `[m / r, k / g]` has a value for each block of r rows and g contracted elements. The
dimensions of the product are cut accordingly, `m` into `m / r` and `r`, so that each dimension of a
scale is one of the product. JAX maps, derives and splits a product by its dimensions, these too.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.sharding import NamedSharding

from pallas_gemm.call import Operands
from pallas_gemm.op.contraction import ONE, Contraction, Shape
from pallas_gemm.op.mesh import mesh_axes, typed
from pallas_gemm.problem import BLOCKS, OF_FACTORS, SCALES

SHORTEST = 16
"""Contracted elements of a block, unless it is all of them. Shorter ones would mostly be scales of
the wrong side."""
OF_SCALES = dict(zip(SCALES, BLOCKS, strict=True))
"""The operand that a scale becomes if it has a dimension along k."""


class Factor(NamedTuple):
    """A factor of a product as a matrix, or several.

    Attributes:
        name: The caller's name for it.
        lead: Its leading dimensions.
        size: Its rows if it is the left one, its columns if it is the right one.
        k: Contracted elements.
        weights: It has few bits beside a wider factor. Then a scale with all dimensions is one of
            its blocks, whatever else the shape may mean.
    """

    name: str
    lead: Shape
    size: int
    k: int
    weights: bool = False


def checked(name: str, scale: Any, factor: Factor, *, left: bool) -> Any:
    """Checks a scale of blocks. Returns it without a last block that is a part of one.

    Args:
        name: The caller's name for it.
        scale: The scale: a floating-point array of two dimensions at least.
        factor: The factor that it scales.
        left: It is the left one.

    Raises:
        ValueError: Its shape matches no blocks.
    """
    *lead, first, second = scale.shape
    rows, deep = (first, second) if left else (second, first)
    wide, along = block(factor.size, rows), block(factor.k, deep, SHORTEST)
    fits = not lead or (
        len(lead) == len(factor.lead)
        and all(own in (1, size) for own, size in zip(lead, factor.lead, strict=True))
    )
    if wide and along and fits and factor.k % along == 0:
        if factor.size % wide:
            # The last block is a part of one: each row or column gets its own value.
            axis = scale.ndim - (2 if left else 1)
            scale = _repeated(scale, wide, axis, factor.size)
        return scale
    raise ValueError(_why(name, scale.shape, factor, (wide, along, fits), left=left))


def block(size: int, count: int, shortest: int = 1) -> int:
    """Returns the length of the blocks that a dimension is cut into, by their number; else 0.

    It is all of the dimension, or a power of two: no other may be meant by a number of blocks of
    which the last is a part of one.
    """
    if is_symbolic_dim(size) or is_symbolic_dim(count):
        return int(size == count)
    if count == 1:
        return max(size, 1)
    length = shortest
    while length < size and -(-size // length) > count:
        length *= 2
    return length if -(-size // length) == count else 0


def _why(
    name: str, shape: Shape, factor: Factor, found: tuple[int, int, bool], *, left: bool
) -> str:
    """Says why a shape matches no blocks, and which shape would."""
    wide, along, fits = found
    (*_, first, second) = shape
    side = ("m", "rows of a") if left else ("n", f"columns of {factor.name}")
    form = f"[{side[0]} / r, k / g]" if left else f"[k / g, {side[0]} / c]"
    if along and factor.k % along:
        whole = -(-factor.k // along) * along
        return (
            f"{name} of {list(shape)} says blocks of {along} along k, of which k={factor.k} is no"
            f" multiple: pad both operands with zeros to {whole}, or take shorter blocks"
        )
    if not fits:
        return (
            f"{name} of {list(shape)} must have nothing in front of {form}, or what"
            f" {factor.name} has there, {list(factor.lead)}"
        )
    flipped = (second, first) if left else (first, second)
    if block(factor.size, flipped[0]) and block(factor.k, flipped[1], SHORTEST):
        return (
            f"{name} must be {form}, one value for each block of {factor.name}, got {list(shape)};"
            " transposed it would fit"
        )
    near = [
        count if own else _nearest(size, count, shortest)
        for size, count, own, shortest in (
            (factor.size, (first if left else second), wide, 1),
            (factor.k, (second if left else first), along, SHORTEST),
        )
    ]
    nearest = near if left else near[::-1]
    return (
        f"{name} must be {form}, one value for each block of {factor.size} {side[1]} and"
        f" k={factor.k}, where r, c and g are powers of two or all, and g is {SHORTEST} at least;"
        f" got {list(shape)}, the nearest is {nearest}"
    )


def _nearest(size: int, count: int, shortest: int) -> int:
    """Returns into how many blocks a dimension can be cut, nearest to a number."""
    lengths = [shortest << i for i in range(max(1, size).bit_length())]
    counts = {-(-size // length) for length in lengths if size % length == 0} | {1}
    return min(counts, key=lambda own: abs(own - count))


def _repeated(scale: Any, times: int, axis: int, size: int) -> Any:
    """Repeats each value along an axis, up to a size."""
    front, rest = scale.shape[:axis], scale.shape[axis + 1 :]
    if isinstance(scale, jax.ShapeDtypeStruct):
        return shaped(scale, (*front, size, *rest))
    # JAX repeats nothing along an axis that the type of an array says is split.
    each = jnp.broadcast_to(
        jnp.expand_dims(scale, axis + 1), (*scale.shape[: axis + 1], times, *rest)
    )
    whole = each.reshape(*front, scale.shape[axis] * times, *rest)
    whole = typed.split_into(whole, axis, size)
    return jax.lax.slice_in_dim(whole, 0, size, axis=axis)


def as_vector(scale: Any, size: int, lead: Shape, *, left: bool) -> Any:
    """Returns the scales of blocks that are as long as k, as one for each row or column.

    Args:
        scale: The scale.
        size: How many rows or columns there are.
        lead: The leading dimensions of the result.
        left: It scales the left factor.
    """
    own = scale.shape[:-2]
    count = scale.shape[-2 if left else -1]
    front = (1,) * (len(lead) - len(own)) + own if own else ()
    if isinstance(scale, jax.ShapeDtypeStruct):
        return shaped(scale, (*front, size))
    vector = scale.reshape(*front, count)
    return vector if count == size else _repeated(vector, size // count, vector.ndim - 1, size)


def alike(given: Operands) -> Operands:
    """Returns operands whose scales are all of blocks of the same length along k: the shortest."""
    axes = {name: -1 if name == BLOCKS[0] else -2 for name in BLOCKS}
    scales = {name: x for name in BLOCKS if (x := getattr(given, name)) is not None}
    counts = [x.shape[axes[name]] for name, x in scales.items()]
    # Nothing of k is one block, or none.
    most = min(counts) if 0 in counts else max(counts, default=1)
    found = {}
    for name, x in scales.items():
        axis = x.ndim + axes[name]
        count = x.shape[axis]
        found[name] = x if count == most else _repeated(x, max(1, most // count), axis, most)
    return given._replace(**found)


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
    factor_letters = {"a": letters["lhs"], "b": letters["rhs"], "up": letters.pop("up", "")}
    for name, x in scales.items():
        left = name == "row_blocks"
        front = (dims.lhs if left else dims.rhs)[: x.ndim - 2]
        front = "".join(c if size != 1 else ONE for c, size in zip(front, x.shape, strict=False))
        pair = zip("mk" if left else "kn", x.shape[-2:], strict=True)
        each = [_first_parts(cuts.get(letter), letter, count) for letter, count in pair]
        parts = tuple(size for _, shape in each for size in shape)
        of = "a" if left else "up" if name.startswith("up") else "b"
        first = [*front, *(own[0] for own, _ in each)]
        split = _split_as(x, first, found[of], factor_letters[of])
        found[name] = shaped(split, (*x.shape[:-2], *parts))
        letters[name] = front + "".join(own for own, _ in each)
    _, letters["out"] = _reshaped(None, dims.out, cuts)
    letters["whole"] = dims.out
    return dims.with_letters(**letters), Operands(**{"a": None, "b": None} | found)


def _split_as(x: Any, letters: Sequence[str], factor: Any, own: str) -> Any:
    """Splits scales as their factor is split, where its type says how.

    Args:
        x: The scales.
        letters: The dimension of the factor that each of theirs begins with.
        factor: The factor, cut.
        own: Its dimensions.
    """
    split = typed.placement_of(factor)
    if split is None:
        return x
    axes = dict(zip(own, split, strict=True))
    return typed.split_along(x, [axes.get(letter, ()) for letter in letters])


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
            # One at a time: of an explicit mesh, JAX splits no two dimensions at once.
            place = len(shape) - (len(letters) - letters.index(c))
            shape = (*shape[:place], *cuts[c].sizes, *shape[place + 1 :])
            x = shaped(typed.split_into(x, place, cuts[c].sizes[0]), shape)
    return x, new


def cut_spec(sharding: Any, before: str, dims: Contraction, operands: Sequence[Any]) -> Any:
    """Returns how a result whose dimensions are cut is split: the outermost part as the whole.

    Axes that would split a block split nothing.

    Args:
        sharding: The sharding that is asked for, or its axes for each dimension, or None.
        before: The letters of the dimensions before they are cut.
        dims: The dimensions after that; the last part of each has the letter of the whole.
        operands: The operands, cut.
    """
    if sharding is None:
        return None
    spec = getattr(sharding, "spec", sharding)
    mesh = getattr(sharding, "mesh", jax.sharding.get_abstract_mesh())
    axes, found, is_first = dict(zip(before, spec, strict=False)), [], True
    after, sizes = dims.out, dims.sizes(operands[0].shape, operands[1].shape)
    for place, letter in enumerate(after):
        whole = next(x for x in after[place:] if x in before)
        own = axes.get(whole) if is_first else None
        is_first = letter in before
        if own is not None and not is_first:
            own = mesh_axes.dividing(mesh, (own,) if isinstance(own, str) else own, sizes[letter])
        found.append(own or None)
    new = jax.P(*found)
    return NamedSharding(mesh, new) if isinstance(sharding, NamedSharding) else new


def shaped(x: Any, shape: Shape) -> Any:
    """Reshapes an array, or broadcasts it where it is smaller."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype)
    if tuple(x.shape) == shape:
        return x
    return x.reshape(shape) if x.size == np.prod(shape) else jnp.broadcast_to(x, shape)
