"""Groups: what the program computes of their sizes, for a kernel that finds its pieces itself.

    rows in groups      sizes ──▶ the kernel (`hopper/groups/group_walk.py`)
    sums over groups    sizes ──▶ where each group is, the largest first ──▶ the kernel
                        (`hopper/groups/sum_walk.py`)

XLA makes two small kernels of the second: where groups end, and the table of them by size.

Where XLA computes the product (`planning/xla_groups.py`), `bounds` and `tiles_of` say where groups
and their rows of tiles are.

Sizes may say more than there is, by far: no sum of them is larger than `MOST`, so that none wraps.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gemm.kernels import launch, work

MOST = 2**31 - 1
"""The largest sum of sizes: more rows than there are."""


class Bounds(NamedTuple):
    """Where groups are, in rows and in rows of tiles: an array of each, a number for each group.

    Sizes may say more than there are rows: then groups end past the last one, where nothing is read
    or stored.

    Attributes:
        first: The first row of each group.
        end: The row after its last.
        first_tile: Its first row of tiles.
        end_tile: The row of tiles after its last.
    """

    first: jax.Array
    end: jax.Array
    first_tile: jax.Array
    end_tile: jax.Array


class Tiles(NamedTuple):
    """Rows of tiles: of each, its group, its first row, and the row after the last of its group.

    What is beyond the last row of tiles has no rows.
    """

    group: jax.Array
    first: jax.Array
    end: jax.Array


class Ranked(NamedTuple):
    """A row of the table of groups by size, or of a part of one that is cut along k.

    Attributes:
        group: The group.
        first: Its first contracted element.
        end: The one after its last.
        counter: Zero: the first row's counts the pieces that are claimed. XLA makes zeros in the
            kernel that makes the rest, and not in one of their own.
        leg: Which group of those that are cut, and which part of it: `work.pack_leg`.
        rows: How many rows there are of groups and parts: the same in each.
    """

    group: Any
    first: Any
    end: Any
    counter: Any
    leg: Any = None
    rows: Any = None


class Relay(NamedTuple):
    """How crowded groups are cut along k.

    Attributes:
        groups: How many there are at most.
        parts: Into how many one is cut at most.
        rows: Rows of the table that it takes beyond one for each group, at most.
        steps: Of how many steps a group is not cut.
        tile_k: Contracted elements per step.
    """

    groups: int
    parts: int
    rows: int
    steps: int
    tile_k: int


COUNTER = Ranked._fields.index("counter")
CLAIMED = 0, COUNTER
"""Where the table counts what is claimed."""


def flag(plan: Any, number: Any) -> tuple[Any, Any]:
    """Where the table counts who has handed on a consumer's part of a tile that is cut."""
    words = jnp.int32(len(Ranked._fields))
    return table_rows(plan) + lax.div(number, words), lax.rem(number, words)


def table_rows(plan: Any) -> int:
    """How many rows the table has of groups and of their parts, at most."""
    return plan.problem.batch + (plan.relay.rows if plan.relay else 0)


def operand(plan: Any, sizes: jax.Array) -> Any:
    """Returns the operand from which the kernel of a plan finds its pieces."""
    problem = plan.problem
    if not problem.groups:
        flags = plan.handed_on * plan.config.consumers
        rows = table_rows(plan) + -(-flags // len(Ranked._fields))
        table = ranked(sizes, problem.k, rows, plan.relay)
        return jax.new_ref(table) if plan.claims_tiles else launch.on_its_own(table)
    # Sizes in int32 are taken as they are, whatever they say, so that no kernel runs beside.
    return launch.on_its_own(sizes if sizes.dtype == jnp.int32 else _within(sizes, problem.m))


def read(plan: Any, table: Any, row: Any) -> Ranked:
    """A row of the table, as a kernel reads it."""
    words = len(Ranked._fields) if plan.relay else COUNTER + 1
    return Ranked(*(table[row, word] for word in range(words)))


def ranked(sizes: jax.Array, elements: int, most_rows: int, relay: Relay | None) -> jax.Array:
    """Returns the table of groups of so many elements, the largest first: int32 `[rows, words]`.

    A row has the words of `Ranked`. Those after the last group are zeros.
    """
    sizes = _within(sizes, elements)
    words = len(Ranked._fields) if relay else COUNTER + 1
    shape = most_rows, words, sizes.shape[0]
    row, word, group = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))

    def of_group(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, shape, (2,))

    is_own, found = (_whole if relay is None else functools.partial(_cut, relay))(
        sizes, elements, row, of_group
    )
    given = [x for x in found._replace(group=group, counter=jnp.zeros_like(row)) if x is not None]
    # Of each row one group says it, so that a sum is a choice.
    told = jnp.where(is_own, lax.select_n(word, *given), jnp.zeros_like(row))
    return told.sum(axis=2, dtype=jnp.int32)


def _whole(
    sizes: jax.Array, elements: int, row: jax.Array, of_group: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, Ranked]:
    """Returns which rows are each group's, and what they say, where no group is cut."""
    others, before, larger = _pairs(sizes)
    start, rank = _sums(_where(before, others), larger.astype(jnp.int32))
    first, end = (of_group(jnp.minimum(x, elements)) for x in (start, added(start, sizes)))
    return of_group(rank) == row, Ranked(None, first, end, None)


def _cut(
    relay: Relay,
    sizes: jax.Array,
    elements: int,
    row: jax.Array,
    of_group: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, Ranked]:
    """Returns the same where crowded groups are."""
    others, before, larger = _pairs(sizes)
    itself, parts = jnp.eye(*before.shape, dtype=jnp.bool_), _parts(others, relay)
    # All that the other kernel takes of sizes: else XLA makes a third one.
    start, size, rank, base, own, rows, total = _sums(
        _where(before, others),
        _where(itself, others),
        larger.astype(jnp.int32),
        _where(larger, parts),
        _where(itself, parts),
        parts,
        others,
    )
    # Sizes that say more than there is are those of no group that is cut.
    fits = total <= elements
    base, own = jnp.where(fits, base, rank), jnp.where(fits, own, jnp.ones_like(own))
    rows = jnp.where(fits, rows, jnp.full_like(rows, sizes.shape[0]))
    first, end = (of_group(jnp.minimum(x, elements)) for x in (start, added(start, size)))
    part, count = row - of_group(base), of_group(own)
    span = _span(first, end, part, count, relay)
    leg = work.pack_leg(of_group(rank), part, part == count - 1)
    return (part >= 0) & (part < count), Ranked(None, *span, None, leg, of_group(rows))


def _parts(sizes: jax.Array, relay: Relay) -> jax.Array:
    """Returns into how many parts groups of these sizes are cut."""
    return jnp.clip(tiles(tiles(sizes, relay.tile_k), relay.steps), 1, relay.parts)


def _span(
    first: jax.Array, end: jax.Array, part: jax.Array, parts: jax.Array, relay: Relay
) -> tuple[jax.Array, jax.Array]:
    """Returns the first element of a part of a group, and the one after its last.

    But for the first part, they begin where a step does.
    """
    origin = work.aligned(first)
    steps = tiles(end - origin, relay.tile_k)

    def border(number: jax.Array) -> jax.Array:
        return origin + lax.div(steps * number, parts) * relay.tile_k

    return (
        jnp.where(part > 0, border(part), first),
        jnp.where(part < parts - 1, border(part + 1), end),
    )


def bounds(sizes: jax.Array, rows: int, height: int) -> Bounds:
    """Returns where groups of these sizes end, of so many rows and in tiles of this height.

    A negative size is that of an empty group.
    """
    sizes = _within(sizes, rows)
    others, before, _ = _pairs(sizes)
    first, tile = _sums(_where(before, others), _where(before, tiles(others, height)))
    return Bounds(first, added(first, sizes), tile, added(tile, tiles(sizes, height)))


def _pairs(sizes: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns, for each two groups, the size of the other, and if it is before, and if larger.

    Of two that are as large as each other, the one before counts as the larger.
    """
    square = (sizes.shape[0],) * 2
    own, other = (lax.broadcasted_iota(jnp.int32, square, axis) for axis in (0, 1))
    mine, others = (lax.broadcast_in_dim(sizes, square, (axis,)) for axis in (0, 1))
    before = other < own
    return others, before, (others > mine) | ((others == mine) & before)


def _where(those: jax.Array, numbers: jax.Array) -> jax.Array:
    return jnp.where(those, numbers, jnp.zeros_like(numbers))


def _sums(*terms: jax.Array) -> list[jax.Array]:
    """Returns the sums over all others, as `added`: one reduction of all is one kernel."""

    def add(xs: Any, ys: Any) -> Any:
        return tuple(map(added, xs, ys))

    return list(lax.reduce(terms, (jnp.int32(0),) * len(terms), add, (1,)))


def tiles_of(ends: Bounds, height: int, which: jax.Array) -> Tiles:
    """Returns rows of tiles by their numbers."""
    shape = (*which.shape, ends.end.shape[0])
    each = Bounds(*(lax.broadcast_in_dim(x, shape, (which.ndim,)) for x in ends))
    number = lax.broadcast_in_dim(which, shape, tuple(range(which.ndim)))
    own = (each.first_tile <= number) & (number < each.end_tile)
    first = each.first + (number - each.first_tile) * height
    group = lax.broadcasted_iota(jnp.int32, shape, which.ndim)
    found = (jnp.where(own, x, jnp.zeros_like(x)) for x in (group, first, each.end))
    return Tiles(*(x.sum(axis=-1, dtype=jnp.int32) for x in found))


def _within(sizes: jax.Array, rows: int) -> jax.Array:
    """Returns sizes of groups among so many rows, as int32."""
    if sizes.dtype.itemsize < 4:
        sizes = sizes.astype(jnp.int32)
    return jnp.clip(sizes, 0, rows).astype(jnp.int32)


def tiles(rows: jax.Array, height: int) -> jax.Array:
    """Returns how many tiles of a height so many rows take; or steps, or parts."""
    whole, rest = lax.div(rows, jnp.int32(height)), lax.rem(rows, jnp.int32(height))
    return whole + jnp.minimum(rest, 1)


def added(first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns the sum of numbers that are not negative, or `MOST` if it is larger."""
    return first + jnp.minimum(second, MOST - first)
