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
    """What the steps of a trainee took.

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
    """Trains all, a few steps each in turns, so that a GPU's clock favours nobody.

    Args:
        trainees: Who takes part.
        batch: Returns the examples of a step.
        rounds: How many turns each has.
        steps: Steps of one turn.
        advance: Called after each turn.

    Returns:
        The times of each.
    """
    times = [Times() for _ in trainees]
    for turn in range(rounds):
        batches = [batch(turn * steps + i) for i in range(steps)]
        jax.block_until_ready(batches)
        order = list(zip(trainees, times, strict=True))
        # Whoever comes second finds a warmer GPU.
        for trainee, found in order if turn % 2 else order[::-1]:
            start = time.perf_counter()
            for tokens in batches:
                called = time.perf_counter()
                trainee.train(tokens)
                found.hosts.append(time.perf_counter() - called)
            trainee.wait()
            found.steps.append((time.perf_counter() - start) / steps)
            advance()
    return times


def ratio(times: Times, of: Times) -> float:
    """Returns how many times faster the first is, the median over rounds."""
    pairs = list(zip(times.steps, of.steps, strict=True))
    return statistics.median(other / own for own, other in pairs[1:] or pairs)
