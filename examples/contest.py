"""Trains several transformers on the same examples in turns, and times their steps."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from examples.training import Trainee


@dataclasses.dataclass
class Times:
    """The times of a trainee's steps.

    Attributes:
        steps: Seconds per step, one number for each round.
        hosts: Seconds that Python needs to start a step, one number for each step.
    """

    steps: list[float] = dataclasses.field(default_factory=list)
    hosts: list[float] = dataclasses.field(default_factory=list)

    @property
    def step(self) -> float:
        """The median over rounds, without the first one if there are others."""
        return statistics.median(self.steps[1:] or self.steps)

    @property
    def host(self) -> float:
        """The median over steps."""
        return statistics.median(self.hosts)


def hold(
    trainees: Sequence[Trainee],
    batch: Callable[[int], jax.Array],
    rounds: int,
    steps: int,
    advance: Callable[[], Any],
) -> list[Times]:
    """Trains all in rounds of two turns each, so that a GPU's clock favours nobody.

    A GPU that has just begun to work is up to 3% faster than a few seconds later. So nothing is
    prepared between the turns, and those who come first in a round come last in it as well. Its
    clock follows the power with a delay: long turns tell more than many.

    Args:
        trainees: The trainees.
        batch: Returns the examples of a step.
        rounds: How many rounds there are.
        steps: Steps of one turn.
        advance: Called after each round of each.

    Returns:
        The times of each.
    """
    times = [Times() for _ in trainees]
    batches = [batch(step) for step in range(rounds * 2 * steps)]
    jax.block_until_ready(batches)
    order = list(zip(trainees, times, strict=True))
    for first in range(0, len(batches), 2 * steps):
        turns = {id(found): 0.0 for found in times}
        for start, half in ((first, order), (first + steps, order[::-1])):
            for trainee, found in half:
                turns[id(found)] += _turn(trainee, found, batches[start : start + steps])
        for found in times:
            found.steps.append(turns[id(found)] / (2 * steps))
            advance()
    return times


def _turn(trainee: Trainee, found: Times, batches: Sequence[jax.Array]) -> float:
    """Makes some steps, notes what Python needed for each, and returns the seconds of all."""
    start = time.perf_counter()
    for tokens in batches:
        called = time.perf_counter()
        trainee.train(tokens)
        found.hosts.append(time.perf_counter() - called)
    trainee.wait()
    return time.perf_counter() - start


def ratio(times: Times, of: Times) -> float:
    """Returns how many times faster the first is, the median over rounds."""
    pairs = list(zip(times.steps, of.steps, strict=True))
    return statistics.median(other / own for own, other in pairs[1:] or pairs)
