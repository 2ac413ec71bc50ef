"""Few cases in which every two options meet: what goes wrong mostly takes no more than two.

One option changed at a time lets no two of them meet, and all combinations are too many: a dozen
options of 2 to 6 values have millions, while 70 cases hold each pair of values.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Case = dict[str, Any]


def pairs(
    options: Mapping[str, Sequence[Any]], is_legal: Callable[[Case], object], drawn: int
) -> list[Case]:
    """Returns legal cases that hold every pair of values that a legal one of those drawn has.

    Args:
        options: The values of each option, by its name.
        is_legal: Says of a case, by something true, that it can be computed.
        drawn: How many random cases there are to choose from.
    """
    rng = np.random.default_rng(0)
    sizes = np.array([len(values) for values in options.values()])
    some = rng.integers(sizes, size=(drawn, len(sizes)))

    def case(values: np.ndarray) -> Case:
        return {name: options[name][value] for name, value in zip(options, values, strict=True)}

    legal = np.array([values for values in some if is_legal(case(values))])
    left, right = np.array(list(itertools.combinations(range(len(sizes)), 2))).T
    numbers = legal + np.cumsum(sizes) - sizes
    firsts, seconds = numbers[:, left], numbers[:, right]
    is_new = np.ones((sizes.sum(), sizes.sum()), bool)
    chosen: list[Case] = []
    while True:
        news = is_new[firsts, seconds].sum(axis=1)
        best = int(np.argmax(news))
        if not news[best]:
            return chosen
        is_new[firsts[best], seconds[best]] = False
        chosen.append(case(legal[best]))
