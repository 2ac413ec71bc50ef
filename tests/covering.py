"""Few cases in which every two options meet: what goes wrong mostly takes no more than two.

One option changed at a time lets no two of them meet, and all combinations are too many: a dozen
options of 2 to 6 values have millions, while 70 cases hold each pair of values.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Case = dict[str, Any]
TRIES = 8
"""How often cases are chosen, equally good ones in another order; the fewest are taken."""


def pairs(
    options: Mapping[str, Sequence[Any]],
    is_legal: Callable[[Case], object],
    drawn: int,
    *,
    strength: int = 2,
    settled: Callable[[Case], Case] = dict,
) -> list[Case]:
    """Returns legal cases that hold every pair of values that a legal one of those drawn has.

    Args:
        options: The values of each option, by its name.
        is_legal: Says of a case, by something true, that it can be computed.
        drawn: How many random cases there are to choose from.
        strength: How many values are to meet: 3 for every three.
        settled: Makes of a random case one that is more often legal.
    """
    rng = np.random.default_rng(0)
    sizes = np.array([len(values) for values in options.values()])
    some = rng.integers(sizes, size=(drawn, len(sizes)))

    def case(values: np.ndarray) -> Case:
        return {name: options[name][value] for name, value in zip(options, values, strict=True)}

    cases = [own for own in (settled(case(values)) for values in some) if is_legal(own)]
    legal = np.array([[options[name].index(own[name]) for name in options] for own in cases])
    numbers = legal + np.cumsum(sizes) - sizes
    together = np.array(list(itertools.combinations(range(len(sizes)), strength))).T
    # Values that meet, as one number.
    meetings = np.ravel_multi_index(
        tuple(numbers[:, together].swapaxes(0, 1)), (sizes.sum(),) * strength
    )
    there, numbered = np.unique(meetings, return_inverse=True)
    numbered = numbered.reshape(meetings.shape)
    by_meeting = np.argsort(numbered, axis=None, kind="stable") // numbered.shape[1]
    counts = np.bincount(numbered.ravel(), minlength=len(there))
    holders = np.split(by_meeting, np.cumsum(counts)[:-1])
    tries = [_chosen(numbered, holders, rng) for _ in range(TRIES)]
    return [cases[number] for number in min(tries, key=len)]


def _chosen(
    meetings: np.ndarray, holders: Sequence[np.ndarray], rng: np.random.Generator
) -> list[int]:
    """Returns cases that hold each meeting.

    Args:
        meetings: The numbers of the meetings in each case.
        holders: The cases that hold each meeting.
        rng: Chooses among equally good cases.
    """
    is_new = np.ones(len(holders), bool)
    news = np.full(len(meetings), meetings.shape[1])
    chosen: list[int] = []
    while is_new.any():
        best = int(rng.choice(np.flatnonzero(news == news.max())))
        own = meetings[best]
        # A case holds each meeting once.
        for meeting in own[is_new[own]]:
            news[holders[meeting]] -= 1
        is_new[own] = False
        chosen.append(best)
    return chosen
