"""The statistics of timing, on a made-up GPU whose clock wanders and who remembers who ran last."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_gemm.tuning import timing
from pallas_gemm.tuning.measure import (
    FEWEST_CALLS,
    MOST_CALLS,
    SETTLING_SHARE,
    Settings,
    Spread,
    Timing,
    Turn,
    Variant,
    measure,
    turn_order,
)

SETTINGS = Settings(
    burst_rounds=6, burst_calls=4, sustained_rounds=12, turn_seconds=0.1, energy_seconds=0.5
)


class MadeUpGpu:
    """A meter with a clock of its own.

    Args:
        seconds: How long a call of each variant takes at the nominal clock.
        speed: The clock at a time, in units of the nominal one.
        echo: By how much a turn is slower just after each variant, from the first call on, until
            it has settled.
    """

    def __init__(
        self,
        seconds: dict[str, float],
        speed: Callable[[float], float] = lambda _: 1.0,
        echo: dict[str, float] | None = None,
    ) -> None:
        self.now = 0.0
        self.turns: list[tuple[str, int]] = []
        self.pauses: list[float] = []
        self._seconds = seconds
        self._speed = speed
        self._echo = echo or {}
        self._last: str | None = None

    def turn(self, variant: Variant, calls: int) -> Turn:
        start, times = self.now, []
        slow = self._echo.get(self._last or "", 0.0)
        for call in range(calls):
            feels = slow if call < calls * SETTLING_SHARE else 0.0
            times.append(self._seconds[variant.name] * (1 + feels) / self._speed(self.now))
            # A gap as long as half of the call lies between two calls.
            self.now += 1.5 * times[-1]
        self._last = variant.name
        self.turns.append((variant.name, calls))
        return Turn(tuple(times), self.now - start, 1e9 * self._speed(start))

    def joules(self, variant: Variant, seconds: float) -> float | None:
        self.now += seconds
        return 700 * self._seconds[variant.name]

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


def variants(*names: str) -> list[Variant]:
    return [Variant(name, lambda i: i, lambda done: done) for name in names]


def timing_of(result: Timing | None) -> Timing:
    assert result is not None
    return result


@given(st.integers(1, 12))
def test_every_turn_follows_every_other_equally_often(count: int) -> None:
    rounds = count if count % 2 == 0 else 2 * count
    orders = [turn_order(count, number) for number in range(rounds)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
    wanted = {pair for pair in itertools.product(range(count), repeat=2) if pair[0] != pair[1]}
    assert set(pairs) == wanted
    assert len(set(pairs.values())) <= 1


def test_a_wandering_clock_does_not_move_the_ratios() -> None:
    gpu = MadeUpGpu(
        {"xla": 1e-3, "ours": 0.97e-3, "slow": 1.2e-3},
        # Two slow waves of three and two percent.
        speed=lambda t: 1 + 0.03 * math.sin(t / 3) + 0.02 * math.sin(t / 0.7),
    )
    results = measure(variants("xla", "ours", "slow"), gpu, SETTINGS, baseline="xla")
    for mode in ("burst", "sustained"):
        ratios = {name: getattr(results[name], mode).ratio.median for name in results}
        assert ratios["xla"] == 1
        assert ratios["ours"] == pytest.approx(1 / 0.97, rel=0.006)
        assert ratios["slow"] == pytest.approx(1 / 1.2, rel=0.006)


def test_the_times_themselves_do_wander() -> None:
    gpu = MadeUpGpu({"xla": 1e-3}, speed=lambda t: 1 + 0.1 * math.sin(t))
    sustained = timing_of(measure(variants("xla"), gpu, SETTINGS, baseline="xla")["xla"].sustained)
    assert sustained.seconds.share > 0.02
    assert sustained.ratio == Spread(1, 1, 1)


def test_what_a_turn_feels_of_its_predecessor_is_dropped_from_sustained_turns() -> None:
    gpu = MadeUpGpu({"xla": 1e-3, "hot": 1e-3}, echo={"hot": 0.5})
    results = measure(variants("xla", "hot"), gpu, SETTINGS, baseline="xla")
    for name in ("xla", "hot"):
        assert timing_of(results[name].sustained).seconds == Spread(1e-3, 1e-3, 1e-3)


def test_turns_have_the_length_that_was_asked_for() -> None:
    gpu = MadeUpGpu({"short": 1e-6, "middling": 1e-3, "long": 1.0})
    settings = dataclasses.replace(SETTINGS, burst_rounds=1, sustained_rounds=1, warm_seconds=0)
    measure(variants("short", "middling", "long"), gpu, settings, baseline="short")
    assert dict(gpu.turns[3:]) == {"short": MOST_CALLS, "middling": 100, "long": FEWEST_CALLS}
    assert [calls for _, calls in gpu.turns[:3]] == [4, 4, 4]
    assert gpu.pauses == [settings.pause] * 3


def test_the_gpu_is_warm_before_the_first_sustained_turn() -> None:
    gpu = MadeUpGpu({"xla": 1e-3})
    settings = Settings(
        burst_rounds=0, sustained_rounds=2, turn_seconds=0.1, warm_seconds=1, energy_seconds=0
    )
    measure(variants("xla"), gpu, settings, baseline="xla")
    # Three calls to learn how long one takes, ten turns of a tenth of a second, and two rounds.
    assert [calls for _, calls in gpu.turns] == [3] + [100] * 12


def test_clock_busy_share_and_energy_are_reported() -> None:
    gpu = MadeUpGpu({"xla": 1e-3})
    result = measure(variants("xla"), gpu, SETTINGS, baseline="xla")["xla"]
    sustained = timing_of(result.sustained)
    assert sustained.clock_hz == 1e9
    assert sustained.busy == pytest.approx(1 / 1.5)
    assert result.joules == pytest.approx(0.7)


def test_what_is_not_asked_for_is_not_measured() -> None:
    gpu = MadeUpGpu({"xla": 1e-3})
    settings = Settings(burst_rounds=3, sustained_rounds=0, energy_seconds=0)
    result = measure(variants("xla"), gpu, settings, baseline="xla")["xla"]
    assert result.burst is not None
    assert (result.sustained, result.joules) == (None, None)
    assert len(gpu.turns) == 3


@pytest.mark.parametrize(("energy", "names"), [(0.5, "abc"), (0.0, "ab")])
def test_progress_advances_as_often_as_was_announced(energy: float, names: str) -> None:
    gpu = MadeUpGpu(dict.fromkeys(names, 1e-3))
    settings = dataclasses.replace(SETTINGS, energy_seconds=energy)
    steps: list[None] = []
    measure(variants(*names), gpu, settings, baseline="a", advance=lambda: steps.append(None))
    assert len(steps) == settings.turns(len(names))


@pytest.mark.parametrize(
    ("names", "baseline", "message"),
    [
        (("a", "a"), "a", "different names, got \\['a', 'a'\\]"),
        (("a", "b"), "c", "baseline='c' is not among the variants \\['a', 'b'\\]"),
    ],
)
def test_names_that_do_not_tell_variants_apart_are_refused(
    names: tuple[str, ...], baseline: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        measure(variants(*names), MadeUpGpu({}), SETTINGS, baseline=baseline)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50))
def test_a_spread_is_the_median_and_the_quartiles(figures: list[float]) -> None:
    spread = Spread.of(figures)
    assert spread.low <= spread.median <= spread.high
    assert spread.median == pytest.approx(float(np.median(figures)))
    # A quartile between two figures leaves one more outside than a quarter of the gaps.
    outside = (len(figures) - 1) / 4 + 1
    assert sum(x < spread.low * (1 - 1e-9) for x in figures) <= outside
    assert sum(x > spread.high * (1 + 1e-9) for x in figures) <= outside


def test_the_share_of_a_spread_is_half_the_middle_half() -> None:
    assert Spread(median=2.0, low=1.9, high=2.3).share == pytest.approx(0.1)


def test_kernels_are_shared_out_to_calls() -> None:
    kernels = [("a", 1.0), ("b", 0.5), ("a", 2.0), ("b", 0.25)]
    assert timing.seconds_per_call(kernels, 2, "xla") == pytest.approx((1.5e-3, 2.25e-3))


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ([], "xla: 2 calls launched 0 kernels"),
        ([("a", 1.0)] * 3, "xla: 2 calls launched 3 kernels"),
        (
            [("a", 1.0), ("b", 1.0)],
            r"xla: its calls launched different kernels: \['a', 'b'\]",
        ),
    ],
)
def test_kernels_that_cannot_be_shared_out_are_an_error(
    kernels: list[tuple[str, float]], message: str
) -> None:
    with pytest.raises(timing.TimingError, match=message):
        timing.seconds_per_call(kernels, 2, "xla")


def test_results_are_dropped_as_calls_go_on() -> None:
    assert timing.launched(lambda i: i * i, 3, 4) == 36
    assert timing.launched(lambda i: i, 0, 0) is None


class TakenCupti:
    """CUPTI while a profiler listens to it."""

    def _cupti_init(self) -> None:
        raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")


def test_where_cupti_cannot_be_used_the_error_says_so() -> None:
    meter = timing.KernelMeter()
    meter._cupti = TakenCupti()
    with pytest.raises(timing.TimingError, match="a profiler is running"):
        meter.turn(variants("xla")[0], 1)
