"""How an array is split along other axes of a mesh than it is, and what that sends.

    slice       axes come last in a dimension              nothing
    gather      the last axes of a dimension go            what a device lacks of the larger part
    exchange    the last axes of one dimension come last   all of a part but a device's own share
                in another: an all-to-all
    permute     devices trade whole parts                  a part

Slices alone, and gathers alone, are XLA's to make: it makes one of several alike. Where there is
more to do XLA often gathers the whole array, its "last resort", so a device's share does it itself.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jax import lax

Axes = tuple[str, ...]

Placement = tuple[Axes, ...]
"""The axes of the mesh along which each dimension of an array is split, the outer one first."""

Sizes = tuple[tuple[str, int], ...]
"""The axes of a mesh with their sizes."""


class Step(NamedTuple):
    """The steps that move the parts of an array.

    Attributes:
        name: See above.
        axes: Along which axes; all of the mesh where whole parts are traded.
        source: The dimension that they split.
        target: The dimension that they split afterwards.
        pairs: Which device sends its part to which, if whole parts are traded.
    """

    name: str
    axes: Axes
    source: int = 0
    target: int = 0
    pairs: tuple[tuple[int, int], ...] = ()

    def run(self, x: jax.Array) -> jax.Array:
        """Does it to a device's part, as all of them do."""
        if self.name == "slice":
            size = x.shape[self.target] // lax.axis_size(self.axes)
            return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axes) * size, size, self.target)
        if self.name == "gather":
            return lax.all_gather(x, self.axes, axis=self.source, tiled=True)
        if self.name == "exchange":
            return lax.all_to_all(x, self.axes, self.target, self.source, tiled=True)
        return lax.ppermute(x, self.axes, self.pairs)


def count(placement: Placement, sizes: Mapping[str, int]) -> int:
    """Returns into how many parts an array is split."""
    return math.prod(sizes[axis] for axes in placement for axis in axes)


def is_xlas(steps: Sequence[Step]) -> bool:
    """Whether XLA makes these steps as well as we."""
    return {step.name for step in steps} in (set(), {"slice"}, {"gather"})


def received(placement: Placement, steps: Sequence[Step], sizes: Mapping[str, int]) -> float:
    """Returns how much of an array arrives at each device.

    Args:
        placement: How it is split before.
        steps: The step.
        sizes: The size of each axis.
    """
    part, total = 1 / count(placement, sizes), 0.0
    for step in steps:
        parts = math.prod(sizes[axis] for axis in step.axes)
        if step.name == "slice":
            part /= parts
        elif step.name == "gather":
            total += part * (parts - 1)
            part *= parts
        else:
            total += part if step.name == "permute" else part * (1 - 1 / parts)
    return total


@functools.lru_cache(maxsize=4096)
def steps(before: Placement, after: Placement, sizes: Sizes) -> tuple[Step, ...]:
    """Returns what makes parts of an array that is split otherwise.

    Args:
        before: How it is split.
        after: How it is to be split.
        sizes: The axes of the mesh.
    """
    of = dict(sizes)
    choices = (_gathered(before, after), _exchanged(before, after, of))
    return min(choices, key=lambda found: received(before, found, of))


def _gathered(before: Placement, after: Placement) -> tuple[Step, ...]:
    """Returns steps that send to all devices what some lack."""
    pairs = list(zip(before, after, strict=True))
    extra = [_extra(*pair) for pair in pairs]
    missing = [_extra(*pair[::-1]) for pair in pairs]
    gathers = (Step("gather", axes, source=dim) for dim, axes in enumerate(extra) if axes)
    slices = (Step("slice", axes, target=dim) for dim, axes in enumerate(missing) if axes)
    return (*gathers, *slices)


def _exchanged(before: Placement, after: Placement, sizes: Mapping[str, int]) -> tuple[Step, ...]:
    """Returns steps that gather no more than they have to."""
    now, found = before, []
    while now != after:
        if step := _slice(now, after) or _exchange(now, after):
            now = _done(now, step)
        elif (goal := _with_more(now, after, sizes)) is not None:
            step, now = _permute(now, goal, sizes), goal
        else:
            step = _exchange_anyhow(now, after, sizes) or _gather(now, after, sizes)
            now = _done(now, step)
        found.append(step)
    return tuple(found)


def _done(now: Placement, step: Step) -> Placement:
    """Returns how an array is split after a step."""
    axes = [list(own) for own in now]
    if step.name != "slice":
        del axes[step.source][-len(step.axes) :]
    if step.name != "gather":
        axes[step.target] += step.axes
    return tuple(map(tuple, axes))


def _missing(now: Axes, after: Axes) -> Axes:
    """Returns the axes that a dimension lacks; none where those that it has are others."""
    return after[len(now) :] if after[: len(now)] == now else ()


def _extra(now: Axes, after: Axes) -> Axes:
    """Returns the axes that have to go before others come."""
    pairs = zip(now, after, strict=False)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    return now[len(list(same)) :]


def _slice(now: Placement, after: Placement) -> Step | None:
    used = {axis for axes in now for axis in axes}
    for dim, pair in enumerate(zip(now, after, strict=True)):
        if new := tuple(itertools.takewhile(lambda axis: axis not in used, _missing(*pair))):
            return Step("slice", new, target=dim)
    return None


def _exchange(now: Placement, after: Placement) -> Step | None:
    pairs = list(zip(now, after, strict=True))
    for source, target in itertools.permutations(range(len(now)), 2):
        extra, missing = _extra(*pairs[source]), _missing(*pairs[target])
        for axes in (extra[i:] for i in range(len(extra))):
            if missing[: len(axes)] == axes:
                return Step("exchange", axes, source, target)
    return None


def _exchange_anyhow(now: Placement, after: Placement, sizes: Mapping[str, int]) -> Step | None:
    """Gives dimensions the number of parts that they are to have, whichever axes make them."""
    many, few = ([count((own,), sizes) for own in x] for x in (now, after))
    for source, target in itertools.permutations(range(len(now)), 2):
        for i in reversed(range(len(now[source]))):
            axes = now[source][i:]
            parts = count((axes,), sizes)
            if few[target] % (many[target] * parts) == 0 == many[source] % (few[source] * parts):
                return Step("exchange", axes, source, target)
    return None


def _gather(now: Placement, after: Placement, sizes: Mapping[str, int]) -> Step:
    """Gathers as little as lets anything else be done."""
    pairs = enumerate(zip(now, after, strict=True))
    extra = [(dim, axes) for dim, pair in pairs if (axes := _extra(*pair))]
    dim, axes = min(extra, key=lambda own: count((own[1],), sizes))
    return Step("gather", axes, source=dim)


def _with_more(now: Placement, after: Placement, sizes: Mapping[str, int]) -> Placement | None:
    """Returns the next placement, with the number of parts that each dimension has now, or None.

    Axes that are to go come last, from where they can be gathered.
    """
    staying = {axis for own in after for axis in own}
    goal = [
        own if own[: len(wanted)] == wanted and staying.isdisjoint(own[len(wanted) :]) else wanted
        for own, wanted in zip(now, after, strict=True)
    ]
    kept = staying.union(*goal)
    spare = [axis for own in now for axis in own if axis not in kept]
    for dim, own in enumerate(now):
        while count((goal[dim],), sizes) < count((own,), sizes) and spare:
            goal[dim] += (spare.pop(0),)
        if count((goal[dim],), sizes) != count((own,), sizes):
            return None
    return tuple(goal) if tuple(goal) != now else None


def _permute(now: Placement, after: Placement, sizes: Mapping[str, int]) -> Step:
    """Lets each device send its part to one that is to have it; the number of parts stays."""
    every = tuple(sizes)
    devices = list(itertools.product(*(range(size) for size in sizes.values())))

    def part(device: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
        where = dict(zip(every, device, strict=True))
        return tuple(
            functools.reduce(lambda i, axis: i * sizes[axis] + where[axis], axes, 0)
            for axes in placement
        )

    having, wanting = defaultdict(list), []
    for i, device in enumerate(devices):
        having[part(device, now)].append(i)
    pairs = []
    for i, device in enumerate(devices):
        senders = having[part(device, after)]
        if i in senders:
            senders.remove(i)
            pairs.append((i, i))
        else:
            wanting.append((i, part(device, after)))
    pairs += [(having[own].pop(), i) for i, own in wanting]
    return Step("permute", every, pairs=tuple(sorted(pairs)))
