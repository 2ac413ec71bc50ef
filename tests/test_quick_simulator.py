"""What the quick simulator computes in another way than JAX is the same."""

import itertools

from jax._src.pallas.mosaic.interpret.vector_clock import NpVectorClock  # noqa: TID251

from tests import quick_simulator


def _clock(*times: int) -> NpVectorClock:
    clock = NpVectorClock(len(times))
    clock.clock[:] = times
    return clock


def test_clocks_are_ordered_as_by_jax() -> None:
    clocks = [_clock(*times) for times in itertools.product(range(3), repeat=3)]
    for one, other in itertools.product(clocks, repeat=2):
        expected = one.lt(other) or other.lt(one)
        assert quick_simulator.ordered(one, other) == expected
