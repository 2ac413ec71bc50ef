"""How long something takes, whatever else the computer does meanwhile."""

import time
from collections.abc import Callable

import numpy as np

YARDSTICK_SECONDS = 0.11
"""What the yardstick takes of a CPU that nothing slows down: the least of 50 times, of which the
longest was 0.21. A prediction beside it took 3.8 to 6.8 times as long."""


def takes_at_most(seconds: float, run: Callable[[], object], tries: int = 10) -> bool:
    """Whether one of some tries takes no more of a CPU that nothing else slows down.

    What shares the caches and the cores adds to CPU time too, and slows a yardstick as much.
    """
    for _ in range(tries):
        taken = _cpu_seconds(run)
        # A yardstick allows more time, and never less.
        if taken <= seconds or taken <= seconds * _cpu_seconds(_yardstick) / YARDSTICK_SECONDS:
            return True
    return False


def _cpu_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _yardstick() -> None:
    """Does some work of NumPy's and some of Python's."""
    numbers = np.random.default_rng(0)
    for _ in range(20):
        np.sort(numbers.random(100_000))
    sum(number * number % 7 for number in range(1_000_000))
