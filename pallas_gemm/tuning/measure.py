"""Times several ways to compute one thing against each other, so that the comparison is fair.

A GPU under load is power limited: its clock wanders by a few percent over seconds, and for all
variants alike. So each round gives every variant a short turn, and times of the same round are
compared. A turn depends on the heat of the turn before it, so over the rounds each variant follows
each other one equally often. The result is the median over rounds of these ratios, which moves far
less than the ratio of the medians.

Two modes are told apart. *Burst*: a few calls after a pause, at a clock that power does not limit.
*Sustained*: call after call without a gap, at the clock that the power limit leaves.

This module knows no GPU: it is given a `Meter`, which `timing.py` makes real and the tests make up.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

FEWEST_CALLS = 10
"""Calls of a sustained turn, however long one takes."""

MOST_CALLS = 2000
"""Calls of a sustained turn, however short one is: the CPU needs some 20 us to launch one."""

SETTLING_SHARE = 0.25
"""The part of a sustained turn that still feels its predecessor's clock, and is dropped."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to compute the thing.

    Attributes:
        name: The key of the results.
        launch: Starts call number i, so that a variant may take other operands in each, and
            returns what can be waited for.
        wait: Returns when that has been computed.
    """

    name: str
    launch: Callable[[int], Any]
    wait: Callable[[Any], object]


@dataclasses.dataclass(frozen=True)
class Turn:
    """The measurement of a stretch of calls.

    Attributes:
        seconds: The time of each call: that of its kernels, without the gaps between them.
        wall: How long the stretch took.
        clock_hz: The clock of the multiprocessors near its end, if it could be read.
    """

    seconds: tuple[float, ...]
    wall: float
    clock_hz: float | None = None


class Meter(Protocol):
    """The functions of a GPU that this module needs."""

    def turn(self, variant: Variant, calls: int) -> Turn:
        """Runs `calls` calls in a row."""
        ...

    def joules(self, variant: Variant, seconds: float) -> float | None:
        """Runs calls in a row for about `seconds`: the energy of one; None if it has no gauge."""
        ...

    def pause(self, seconds: float) -> None:
        """Leaves the GPU alone."""
        ...


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long to look.

    Attributes:
        burst_rounds: Rounds of burst turns; 0 for none.
        burst_calls: Calls of a burst turn.
        pause: Seconds before each burst turn.
        sustained_rounds: Rounds of sustained turns; 0 for none.
        turn_seconds: Length of a sustained turn.
        warm_seconds: How long the GPU is kept busy before the first of them.
        energy_seconds: How long each variant runs for its energy to be read; 0 for never. The
            counter of an H200 moves ten times a second.
    """

    burst_rounds: int = 5
    burst_calls: int = 6
    pause: float = 0.1
    sustained_rounds: int = 12
    turn_seconds: float = 0.1
    warm_seconds: float = 1.0
    energy_seconds: float = 0.5

    def turns(self, variants: int) -> int:
        """Returns how many turns a measurement of these variants takes, for a progress bar."""
        energy = 1 if self.energy_seconds else 0
        return variants * (self.burst_rounds + self.sustained_rounds + energy)


@dataclasses.dataclass(frozen=True)
class Spread:
    """A series of figures: its median, and the quartiles that hold the middle half of it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> "Spread":
        """Returns the spread of a series of at least one figure."""
        low, median, high = np.percentile(np.asarray(figures, np.float64), (25, 50, 75))
        return cls(float(median), float(low), float(high))

    @property
    def share(self) -> float:
        """Half the distance of the quartiles, as a share of the median: the +- of a table."""
        return (self.high - self.low) / 2 / self.median


@dataclasses.dataclass(frozen=True)
class Timing:
    """One variant in one mode.

    Attributes:
        seconds: Time of a call.
        ratio: The baseline's time over this one's, round by round: above 1 is faster.
        clock_hz: Mean clock of the multiprocessors, if it could be read.
        busy: Share of the wall time during which kernels ran. Far below 1, the CPU was too slow to
            keep the GPU busy, and nothing is said about sustained work.
    """

    seconds: Spread
    ratio: Spread
    clock_hz: float | None
    busy: float


@dataclasses.dataclass(frozen=True)
class Result:
    """Everything measured of one variant; what was not asked for is None."""

    burst: Timing | None
    sustained: Timing | None
    joules: float | None


def turn_order(count: int, round_number: int) -> list[int]:
    """Returns the order of a round's turns: a row of a Williams square.

    The first row zigzags, 0, n-1, 1, n-2, ..., and each round adds one to every place. For an even
    count, each turn follows each other one once in `count` rounds; for an odd one, where every
    other round runs backwards, twice in `2 * count`.
    """
    zigzag = [place // 2 if place % 2 == 0 else -1 - place // 2 for place in range(count)]
    order = [(place + round_number) % count for place in zigzag]
    return order[::-1] if count % 2 and round_number % 2 else order


def measure(
    variants: Sequence[Variant],
    meter: Meter,
    settings: Settings,
    *,
    baseline: str,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Result]:
    """Times variants against each other.

    Args:
        variants: The variants to time; their names must differ.
        meter: The GPU.
        settings: How long to look.
        baseline: Name of the variant that the others' ratios refer to.
        advance: Called after each turn; `settings.turns` says how many there are.

    Returns:
        Each variant's result, under its name.

    Raises:
        ValueError: Two variants share a name, or none is called `baseline`.
    """
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise ValueError(f"variants must have different names, got {names}")
    if baseline not in names:
        raise ValueError(f"baseline={baseline!r} is not among the variants {names}")
    burst = _burst_turns(variants, meter, settings, advance)
    sustained = _sustained_turns(variants, meter, settings, burst, advance)
    energy = _energies(variants, meter, settings, advance)
    return {
        name: Result(
            _timing(burst[name], burst[baseline], settled=False),
            _timing(sustained[name], sustained[baseline], settled=True),
            energy[name],
        )
        for name in names
    }


_Turns = Mapping[str, list[Turn]]


def _burst_turns(
    variants: Sequence[Variant], meter: Meter, settings: Settings, advance: Callable[[], None]
) -> _Turns:
    turns: dict[str, list[Turn]] = {variant.name: [] for variant in variants}
    for round_number in range(settings.burst_rounds):
        for place in turn_order(len(variants), round_number):
            meter.pause(settings.pause)
            turns[variants[place].name].append(meter.turn(variants[place], settings.burst_calls))
            advance()
    return turns


def _sustained_turns(
    variants: Sequence[Variant],
    meter: Meter,
    settings: Settings,
    burst: _Turns,
    advance: Callable[[], None],
) -> _Turns:
    turns: dict[str, list[Turn]] = {variant.name: [] for variant in variants}
    if not settings.sustained_rounds:
        return turns
    calls: dict[str, int] = {}
    for variant in variants:
        seen = burst[variant.name] or [meter.turn(variant, 3)]
        seconds = float(np.median([np.median(turn.seconds) for turn in seen]))
        calls[variant.name] = _calls_for(settings.turn_seconds, seconds)
    _warm_up(variants[0], meter, settings, calls[variants[0].name])
    for round_number in range(settings.sustained_rounds):
        for place in turn_order(len(variants), round_number):
            variant = variants[place]
            turns[variant.name].append(meter.turn(variant, calls[variant.name]))
            advance()
    return turns


def _warm_up(variant: Variant, meter: Meter, settings: Settings, calls: int) -> None:
    """Keeps the GPU busy until its clock has settled."""
    for _ in range(math.ceil(settings.warm_seconds / settings.turn_seconds)):
        meter.turn(variant, calls)


def _calls_for(seconds: float, of_one_call: float) -> int:
    return min(MOST_CALLS, max(FEWEST_CALLS, math.ceil(seconds / of_one_call)))


def _energies(
    variants: Sequence[Variant], meter: Meter, settings: Settings, advance: Callable[[], None]
) -> dict[str, float | None]:
    energies: dict[str, float | None] = {variant.name: None for variant in variants}
    if settings.energy_seconds:
        for variant in variants:
            energies[variant.name] = meter.joules(variant, settings.energy_seconds)
            advance()
    return energies


def _timing(turns: Sequence[Turn], baseline: Sequence[Turn], *, settled: bool) -> Timing | None:
    """Sums up the turns of one variant beside the baseline's turns of the same rounds."""
    if not turns:
        return None
    mine = [_typical(turn, settled) for turn in turns]
    other = [_typical(turn, settled) for turn in baseline]
    clocks = [turn.clock_hz for turn in turns if turn.clock_hz is not None]
    return Timing(
        seconds=Spread.of(mine),
        ratio=Spread.of([theirs / ours for ours, theirs in zip(mine, other, strict=True)]),
        clock_hz=sum(clocks) / len(clocks) if clocks else None,
        busy=sum(sum(turn.seconds) for turn in turns) / sum(turn.wall for turn in turns),
    )


def _typical(turn: Turn, settled: bool) -> float:
    dropped = int(len(turn.seconds) * SETTLING_SHARE) if settled else 0
    return float(np.median(turn.seconds[dropped:]))
