"""The table that a program makes of the sizes of groups, for a kernel that finds its own pieces.

    rows in groups      sizes ──▶ the kernel (`group_walk.py`)
    sums over groups    sizes ──▶ where each group is, the largest first ──▶ the kernel
                        (`sum_walk.py`)

XLA makes two small kernels of the second: where groups end, and the table of them by size.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gemm.kernels import groups, launch, work
from pallas_gemm.kernels.hopper.plan import HopperPlan, Relay


class Ranked(NamedTuple):
    """A row of the table of groups by size, or of a piece of one that is cut along k.

    Attributes:
        group: The group.
        first: Its first contracted element.
        end: The one after its last.
        counter: Zero: the first row's counts the pieces that are claimed. XLA makes zeros in the
            kernel that makes the rest, and not in one of their own.
        leg: Which group of those that are cut, and which piece of it: `work.pack_leg`.
        rows: How many rows there are of groups and pieces: the same in each.
    """

    group: Any
    first: Any
    end: Any
    counter: Any
    leg: Any = None
    rows: Any = None


COUNTER = Ranked._fields.index("counter")
CLAIMED = 0, COUNTER
"""Where the table counts what is claimed."""


def flag(plan: HopperPlan, number: Any) -> tuple[Any, Any]:
    """Where the table counts who has handed on a consumer's part of a tile that is cut."""
    words = jnp.int32(len(Ranked._fields))
    return length(plan) + lax.div(number, words), lax.rem(number, words)


def length(plan: HopperPlan) -> int:
    """How many rows the table has of groups and of their pieces, at most."""
    return plan.problem.batch + (plan.relay.rows if plan.relay else 0)


def operand(plan: HopperPlan, sizes: jax.Array) -> Any:
    """Returns the operand from which the kernel of a plan finds its pieces."""
    problem = plan.problem
    if not problem.groups:
        flags = plan.handed_on * plan.config.consumers
        rows = length(plan) + -(-flags // len(Ranked._fields))
        table = ranked(sizes, problem.k, rows, plan.relay)
        return jax.new_ref(table) if plan.claims_tiles else launch.on_its_own(table)
    return of_rows(sizes, problem.m)


def of_rows(sizes: jax.Array, rows: int) -> jax.Array:
    """Returns the sizes of groups of rows, as a kernel takes them.

    Sizes in int32 are taken as they are, whatever they say, so that no kernel runs beside.
    """
    return launch.on_its_own(sizes if sizes.dtype == jnp.int32 else groups.within(sizes, rows))


def read(plan: HopperPlan, table: Any, row: Any) -> Ranked:
    """A row of the table, as a kernel reads it."""
    words = len(Ranked._fields) if plan.relay else COUNTER + 1
    return Ranked(*(table[row, word] for word in range(words)))


def ranked(sizes: jax.Array, elements: int, most_rows: int, relay: Relay | None) -> jax.Array:
    """Returns the table of groups of so many elements, the largest first: int32 `[rows, words]`.

    A row has the words of `Ranked`. Rows after the last group are zeros.
    """
    sizes = groups.within(sizes, elements)
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
    others, before, larger = groups.pairs(sizes)
    start, rank = groups.sums(groups.where(before, others), larger.astype(jnp.int32))
    first, end = (of_group(jnp.minimum(x, elements)) for x in (start, groups.added(start, sizes)))
    return of_group(rank) == row, Ranked(None, first, end, None)


def _cut(
    relay: Relay,
    sizes: jax.Array,
    elements: int,
    row: jax.Array,
    of_group: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, Ranked]:
    """Returns the same where crowded groups are."""
    others, before, larger = groups.pairs(sizes)
    itself, pieces = jnp.eye(*before.shape, dtype=jnp.bool_), _pieces(others, relay)
    # All that the other kernel takes of sizes: else XLA makes a third one.
    start, size, rank, base, own, rows, total = groups.sums(
        groups.where(before, others),
        groups.where(itself, others),
        larger.astype(jnp.int32),
        groups.where(larger, pieces),
        groups.where(itself, pieces),
        pieces,
        others,
    )
    # Sizes that say more than there is are those of no group that is cut.
    fits = total <= elements
    base, own = jnp.where(fits, base, rank), jnp.where(fits, own, jnp.ones_like(own))
    rows = jnp.where(fits, rows, jnp.full_like(rows, sizes.shape[0]))
    first, end = (of_group(jnp.minimum(x, elements)) for x in (start, groups.added(start, size)))
    piece, count = row - of_group(base), of_group(own)
    span = _span(first, end, piece, count, relay)
    leg = work.pack_leg(of_group(rank), piece, piece == count - 1)
    return (piece >= 0) & (piece < count), Ranked(None, *span, None, leg, of_group(rows))


def _pieces(sizes: jax.Array, relay: Relay) -> jax.Array:
    """Returns into how many pieces groups of these sizes are cut."""
    return jnp.clip(groups.tiles(groups.tiles(sizes, relay.tile_k), relay.steps), 1, relay.pieces)


def _span(
    first: jax.Array, end: jax.Array, piece: jax.Array, pieces: jax.Array, relay: Relay
) -> tuple[jax.Array, jax.Array]:
    """Returns the first element of a piece of a group, and the one after its last.

    But for the first piece, they begin where a step does.
    """
    origin = work.aligned(first, relay.multiple)
    steps = groups.tiles(end - origin, relay.tile_k)

    def border(number: jax.Array) -> jax.Array:
        return origin + lax.div(steps * number, pieces) * relay.tile_k

    return (
        jnp.where(piece > 0, border(piece), first),
        jnp.where(piece < pieces - 1, border(piece + 1), end),
    )
