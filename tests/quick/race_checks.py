"""Looks for races of an access among all accesses before it at once.

Stock JAX compares each access of a buffer with each one before: their clocks, and what they touch.
Here those of a buffer are the rows of two matrices. Where an access is in the source is found out
only if it races.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from jax._src import source_info_util  # noqa: TID251 - here and below, what is slow is private
from jax._src.pallas.mosaic.interpret import race_detection_state  # noqa: TID251

FEW = 8
"""Accesses of a buffer that there is room for at first."""


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the slow parts for as long as the patch lasts."""
    state = race_detection_state.RaceDetectionState
    monkeypatch.setattr(state, "check_read", _check_read)
    monkeypatch.setattr(state, "check_write", _check_write)


class Access(NamedTuple):
    """Who touches what of a buffer, at what time, and where the source says so."""

    thread: Any
    clock: Any
    touched: tuple[Any, ...]
    source_info: Any

    def window(self) -> np.ndarray:
        """Returns where it begins along each axis, and where it ends."""
        bounds = [(i, i + 1) if isinstance(i, int) else _bounds(i) for i in self.touched]
        return np.array(bounds, np.int64).reshape(-1, 2).T

    def __str__(self) -> str:
        info = self.source_info
        frame = "pallas_call" if info is None else source_info_util.summarize(info)
        return f"[{self.touched}] from {self.thread}, {frame}\n  clock: {self.clock}\n"


class Accesses:
    """Reads, or writes, of a buffer: who asks for them and who adds one hold a lock."""

    def __init__(self) -> None:
        self._all: list[Access] = []
        self._clocks = self._windows = np.empty(0)

    def add(self, access: Access, window: np.ndarray) -> None:
        """Adds an access, with its clock as it is now."""
        now, count = access.clock.clock, len(self._all)
        if count == len(self._clocks):
            clocks, windows = (
                np.empty((max(FEW, 2 * count), *row.shape), row.dtype) for row in (now, window)
            )
            if count:
                clocks[:count], windows[:count] = self._clocks, self._windows
            self._clocks, self._windows = clocks, windows
        self._clocks[count], self._windows[count] = now, window
        self._all.append(access)

    def so_far(self) -> tuple[Sequence[Access], np.ndarray, np.ndarray]:
        """Returns those that are there, the clocks of these, and their windows."""
        count = len(self._all)
        return self._all, self._clocks[:count], self._windows[:count]


def first_race(
    accesses: Sequence[Access], clocks: np.ndarray, windows: np.ndarray, now: Any, window: Any
) -> Access | None:
    """Returns the first access that shares elements with a window, neither before now nor after."""
    if not len(clocks):
        return None
    starts, ends = windows[:, 0], windows[:, 1]
    start, end = window
    overlap = ((starts <= start) & (start < ends)) | ((start <= starts) & (starts < end))
    (touching,) = np.logical_and.reduce(overlap, axis=1).nonzero()
    if not len(touching):
        return None
    if len(touching) < len(clocks):
        clocks = clocks[touching]
    no_later = np.logical_and.reduce(clocks <= now, axis=1)
    no_sooner = np.logical_and.reduce(clocks >= now, axis=1)
    (racing,) = (no_later == no_sooner).nonzero()
    return accesses[touching[racing[0]]] if len(racing) else None


def _bounds(part: slice) -> tuple[int, int]:
    assert part.step in (1, None), part
    return part.start, part.stop


def _check_read(
    self: Any, thread: Any, clock: Any, key: Any, touched: Any, source_info: Any = None
) -> None:
    access = Access(thread, clock, touched, source_info)
    window = access.window()
    with self.lock:
        reads, writes = _accesses(self, key)
        written = writes.so_far()
        reads.add(access, window)
    _note(self, key, "read", access, "write", first_race(*written, clock.clock, window))


def _check_write(
    self: Any, thread: Any, clock: Any, key: Any, touched: Any, source_info: Any = None
) -> None:
    access = Access(thread, clock, touched, source_info)
    window = access.window()
    with self.lock:
        reads, writes = _accesses(self, key)
        written, read = writes.so_far(), reads.so_far()
        writes.add(access, window)
    _note(self, key, "write", access, "write", first_race(*written, clock.clock, window))
    _note(self, key, "write", access, "read", first_race(*read, clock.clock, window))


def _accesses(state: Any, key: Any) -> tuple[Accesses, Accesses]:
    """Returns the reads and the writes of a buffer."""
    reads = state.reads.get(key)
    if reads is None:
        reads, _ = state.reads[key], state.writes[key] = Accesses(), Accesses()
    return reads, state.writes[key]


def _note(
    state: Any, key: Any, kind: str, access: Access, other_kind: str, other: Access | None
) -> None:
    """Notes a race of an access with another, if there is one."""
    if other is not None:
        print(f"RACE DETECTED\n  {kind} of {key}{access}  {other_kind} of {key}{other}")
        with state.lock:
            state.races_found = True
