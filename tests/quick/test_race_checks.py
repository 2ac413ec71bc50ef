"""Races that are looked for all at once are those that JAX finds two by two."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import race_detection_state  # noqa: TID251
from jax._src.pallas.mosaic.interpret.vector_clock import NpVectorClock  # noqa: TID251

from tests.quick import race_checks

Drawn = tuple[str, str, NpVectorClock, tuple[slice | int, ...]]


def _drawn(rng: np.random.Generator) -> Drawn:
    kind, key = rng.choice(["read", "write"]), rng.choice(["one buffer", "another"])
    clock = NpVectorClock(3)
    clock.clock[:] = rng.integers(0, 3, 3)
    start, row = int(rng.integers(6)), int(rng.integers(2))
    step = None if rng.integers(2) else 1
    columns = slice(start, start + int(rng.integers(4)), step)
    return str(kind), str(key), clock, (columns, row)


def _state() -> Any:
    """Returns what was told of no access yet; some releases of JAX tell it the number of cores."""
    kind: Any = race_detection_state.RaceDetectionState
    fields = {field.name for field in dataclasses.fields(kind)}
    return kind(**dict.fromkeys(fields & {"num_cores"}, 2))


def _races(one: Drawn, other: Drawn) -> bool:
    """Says it of two accesses as stock JAX does."""
    (kind, key, clock, touched), (others, other_key, before, other_touched) = one, other
    return (
        key == other_key
        and "write" in (kind, others)
        and not (before.lt(clock) or clock.lt(before))
        and race_detection_state._ranges_overlap(touched, other_touched)
    )


def _tell(state: Any, access: Drawn) -> bool:
    """Returns whether an access races with those that a state was told of."""
    kind, key, clock, touched = access
    state.races_found = False
    {"read": race_checks._check_read, "write": race_checks._check_write}[kind](
        state, "a thread", clock, key, touched
    )
    return state.races_found


def test_an_access_races_with_those_that_jax_says(rng: np.random.Generator) -> None:
    found = []
    for _ in range(60):
        state, told = _state(), []
        for _ in range(3 * race_checks.FEW):
            access = _drawn(rng)
            found.append(_tell(state, access))
            assert found[-1] == any(_races(access, other) for other in told)
            told.append(access)
    assert 0.1 < np.mean(found) < 0.9


def test_a_clock_that_goes_on_was_what_it_was() -> None:
    state = _state()
    clock, later = NpVectorClock(2), NpVectorClock(2)
    clock.clock[:], later.clock[:] = (0, 1), (1, 1)
    _tell(state, ("write", "a buffer", clock, (slice(0, 4),)))
    clock.inc(1)
    assert not _tell(state, ("write", "a buffer", later, (slice(0, 4),)))
    assert _tell(state, ("read", "a buffer", clock, (slice(3, 5),)))


def test_a_race_is_told_with_both_accesses(capsys: pytest.CaptureFixture[str]) -> None:
    state = _state()
    _tell(state, ("read", "a buffer", NpVectorClock(2), (slice(4, 9),)))
    for position, kind in enumerate(("read", "write")):
        clock = NpVectorClock(2)
        clock.inc(position)
        _tell(state, (kind, "a buffer", clock, (slice(position, 4),)))
    said = capsys.readouterr().out
    assert "write of a buffer[(slice(1, 4, None),)] from a thread, pallas_call" in said
    assert "read of a buffer[(slice(0, 4, None),)] from a thread, pallas_call" in said


def test_the_simulator_looks_for_races_so() -> None:
    state = race_detection_state.RaceDetectionState
    assert state.check_read is race_checks._check_read
    assert state.check_write is race_checks._check_write
