"""Orders for chips whose cache is split among several dies."""

import numpy as np

from schedules import _check
from schedules.table import Schedule, share_sizes


def by_die(schedule: Schedule, dies: int) -> Schedule:
    """Reorders a schedule so that each die works through one run of tiles that follow each other.

    Hardware that deals work to its dies in turn gives position p to die `p % dies`, which tears
    neighbours apart. Position p here holds tile `(p % dies) * ceil(tiles / dies) + p // dies` of
    the schedule, so that the tiles of one die are neighbours again and share that die's cache.
    Where `dies` does not divide the number of tiles, the last dies get one tile less.

    `schedules.model` places workers at random, because no source says how a GPU deals them. So it
    predicts the cost of an order torn apart, on a B200 too, and not the cost on a chip that deals
    in turn.

    >>> from schedules import raster
    >>> from schedules.draw import numbers
    >>> print(numbers(by_die(raster(8, 8), 4)))
     0  4  8 12 16 20 24 28
    32 36 40 44 48 52 56 60
     1  5  9 13 17 21 25 29
    33 37 41 45 49 53 57 61
     2  6 10 14 18 22 26 30
    34 38 42 46 50 54 58 62
     3  7 11 15 19 23 27 31
    35 39 43 47 51 55 59 63

    Args:
        schedule: The order to share out.
        dies: How many dies take turns.

    Raises:
        ValueError: An argument is not legal; the message names it.
    """
    if not isinstance(schedule, Schedule):
        raise ValueError(f"schedule must be a Schedule, got {schedule!r}")
    dies = _check.positive_int("dies", dies)
    busy = min(dies, len(schedule))
    turn, die = np.divmod(np.arange(len(schedule)), busy)
    sizes = share_sizes(len(schedule), busy)
    starts = np.cumsum(sizes) - sizes
    order = schedule.order[starts[die] + turn]
    name = f"by_die:{dies}:{schedule.name}"
    return Schedule(schedule.grid, order, name, schedule.triangle)
