"""What keeps the Blackwell kernel's roles in step, taken away piece by piece: it is noticed.

Without this, a test that finds no race would say nothing: it could not find any.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.device import B200
from pallas_gemm.kernels import place, protocol, work
from pallas_gemm.kernels.blackwell import issue, launch_control, store
from pallas_gemm.kernels.blackwell import kernel as blackwell
from pallas_gemm.kernels.blackwell.config import PAIR, BlackwellConfig
from pallas_gemm.kernels.blackwell.cta import accumulator_of, freed_of
from pallas_gemm.kernels.blackwell.plan import BlackwellPlan
from pallas_gemm.problem import Problem
from pallas_gemm.proving import products
from tests import blackwell_simulator

# One pair computes five tiles of three steps, with two of everything: all of it is used in turn.
CONFIG = BlackwellConfig(
    tile=(128, 64), stages=2, cluster=PAIR, ctas=2, store_columns=32, schedule="raster"
)
DYNAMIC = dataclasses.replace(CONFIG, persistence="dynamic")
WIDE = dataclasses.replace(CONFIG, tile=(128, 512), accumulators=1, store_columns=64)
PROBLEM = Problem(1280, 64, 136, transpose_b=True)

Plant = Callable[[pytest.MonkeyPatch], None]


def leave_out(module: Any, name: str) -> Plant:
    """A call that is forgotten."""
    return lambda monkeypatch: monkeypatch.setattr(module, name, lambda *_, **__: None)


def put(module: Any, name: str, wrong: Callable[..., Any]) -> Plant:
    """A function that does something else."""
    return lambda monkeypatch: monkeypatch.setattr(module, name, wrong)


def arrive_before_reading(cta: Any, turn: Any, half: Any) -> None:
    """Frees an accumulator without waiting for the reads of it."""
    plgpu.barrier_arrive(freed_of(cta, turn, half))


def free_both_halves_at_once(cta: Any, turn: Any, half: Any) -> None:
    """Frees the second half of an accumulator when only the first has been read."""

    @pl.when(half == 0)
    def _free() -> None:
        FREE(cta, turn, 0)
        FREE(cta, turn, 1)


def await_first_half(cta: Any, turn: Any, half: int) -> None:
    """Waits for one half of an accumulator and takes the other for free."""
    if half == 0:
        AWAIT(cta, turn, half)


def publish_the_other_accumulator(cta: Any, turn: Any) -> None:
    """Announces sums under the phase of the other accumulator."""
    plgpu.tcgen05_commit_arrive(
        cta.barriers.ready.at[accumulator_of(cta.plan, turn + 1)], collective_axis="pair"
    )


def commit_in_one_cta(barrier: Any, collective_axis: str | None = None) -> None:
    """Tells only the first CTA that an MMA is done."""
    del collective_axis
    COMMIT(barrier)


def locate_too_low(config: Any, problem: Any, piece: work.Piece) -> place.Where:
    """Places every tile one row of tiles too far down."""
    return LOCATE(config, problem, piece._replace(row=piece.row + 1))


def wants_more_until_a_refusal(taken: launch_control.Taken) -> Any:
    """Takes the first refusal for the end."""
    return WANTS_MORE(taken) & ~taken.refused


def take_and_ask_after_the_end(
    requests: Any, taken: launch_control.Taken, *, asks: bool, plan: BlackwellPlan
) -> launch_control.Taken:
    """Makes one more request when an answer was a refusal."""
    taken = TAKE(requests, taken, asks=asks, plan=plan)
    if asks:
        pl.when(taken.refused)(lambda: launch_control.ask(requests, taken.made))
    return taken


AWAIT, FREE = issue.await_accumulator, store.free_accumulator
COMMIT, LOCATE = plgpu.tcgen05_commit_arrive, place.locate
TAKE, WANTS_MORE = launch_control.take, launch_control.wants_more

# What is left out or wrong, in which kernel, and what may come of it: an unordered access is a race
# whatever the order of the run, unless the simulator stops at what is not allowed before it.
FAULTS: dict[str, tuple[Plant, BlackwellConfig, set[str]]] = {
    "slots are filled before they are free": (
        leave_out(issue, "await_slot"),
        CONFIG,
        {"race", "refused"},
    ),
    "operands are multiplied before they are there": (
        leave_out(issue, "await_operands"),
        CONFIG,
        {"race", "refused"},
    ),
    "an accumulator is overwritten before it was read": (
        leave_out(issue, "await_accumulator"),
        CONFIG,
        {"race", "refused"},
    ),
    "sums are read before they are complete": (
        leave_out(issue, "await_sums"),
        CONFIG,
        {"race", "refused"},
    ),
    "an accumulator is freed while it is read": (
        put(store, "free_accumulator", arrive_before_reading),
        CONFIG,
        {"race", "refused"},
    ),
    "half of an accumulator is freed while it is read": (
        put(store, "free_accumulator", free_both_halves_at_once),
        WIDE,
        {"race", "refused"},
    ),
    "half of an accumulator is overwritten before it was read": (
        put(issue, "await_accumulator", await_first_half),
        WIDE,
        {"race", "refused"},
    ),
    "a store slot is overwritten before it was stored": (
        leave_out(store, "await_store_slot"),
        CONFIG,
        {"race", "refused"},
    ),
    "a chunk is stored before all threads wrote it": (
        leave_out(plgpu, "commit_smem"),
        CONFIG,
        {"race", "refused"},
    ),
    "an answer is overwritten before all have read it": (
        leave_out(launch_control, "await_readers"),
        DYNAMIC,
        {"race", "refused"},
    ),
    "a barrier expects a reader too few": (
        put(protocol, "read_arrivals", lambda roles: roles - 1),
        DYNAMIC,
        {"race", "refused"},
    ),
    "a barrier expects an arrival too many": (
        put(protocol, "freed_arrivals", lambda: 2),
        CONFIG,
        {"stuck"},
    ),
    "the wrong accumulator is announced": (
        put(issue, "publish_sums", publish_the_other_accumulator),
        CONFIG,
        {"stuck"},
    ),
    "the other CTA is not told that an MMA is done": (
        put(plgpu, "tcgen05_commit_arrive", commit_in_one_cta),
        CONFIG,
        {"stuck"},
    ),
    "a request is made after a refusal": (
        put(launch_control, "take", take_and_ask_after_the_end),
        DYNAMIC,
        {"asked"},
    ),
    "tiles go to the wrong place": (put(place, "locate", locate_too_low), CONFIG, {"wrong"}),
}


class Simulated:
    """The kernel of a config, traced when it is run first, and the clusters that wait for it."""

    def __init__(self, config: BlackwellConfig, launch: blackwell_simulator.Launch) -> None:
        self._launch = launch
        self._operands = products.small_integers(PROBLEM, np.random.default_rng(0))
        self._expected = products.rounded(PROBLEM, products.exact(PROBLEM, self._operands))
        plan = BlackwellPlan(PROBLEM, config, B200, interpret=blackwell_simulator.PARAMS)
        self._kernel = jax.jit(blackwell.build(plan))

    def faults(self) -> set[str]:
        """Runs it and returns what is wrong with it."""
        self._launch.begin()
        return blackwell_simulator.faults(self._kernel, self._operands.present(), self._expected)


def installed(
    monkeypatch: pytest.MonkeyPatch, config: BlackwellConfig, **waiting: Any
) -> blackwell_simulator.Launch:
    waiting = waiting or {"started": 1 if config.persistence == "dynamic" else None}
    return blackwell_simulator.install(monkeypatch, **waiting)


def faults(monkeypatch: pytest.MonkeyPatch, config: BlackwellConfig, **waiting: Any) -> set[str]:
    return Simulated(config, installed(monkeypatch, config, **waiting)).faults()


@pytest.fixture(scope="module")
def sound() -> dict[BlackwellConfig, Simulated]:
    """The kernels as they are, which take longer to trace than to run."""
    return {}


@pytest.fixture
def faults_of_sound(
    sound: dict[BlackwellConfig, Simulated], monkeypatch: pytest.MonkeyPatch
) -> Callable[[BlackwellConfig], set[str]]:
    def run(config: BlackwellConfig) -> set[str]:
        launch = installed(monkeypatch, config)
        if config not in sound:
            sound[config] = Simulated(config, launch)
        return sound[config].faults()

    return run


@pytest.mark.parametrize("config", [CONFIG, DYNAMIC, WIDE], ids=["static", "dynamic", "wide"])
def test_nothing_is_wrong_as_it_is(config, faults_of_sound):
    assert faults_of_sound(config) == set()


@pytest.mark.every_other
@pytest.mark.parametrize(
    ("config", "cta", "warpgroup"),
    [
        *itertools.product([CONFIG, DYNAMIC], [0, 1], [0, 1, 2]),
        # Those who wait for the halves.
        (WIDE, 0, 1),
        (WIDE, 1, 2),
    ],
    ids=lambda value: "wide" if value is WIDE else getattr(value, "persistence", value),
)
def test_whoever_is_slow_is_waited_for(config, cta, warpgroup, faults_of_sound, monkeypatch):
    """A phase that completes before its waiter has seen the one before is a wait without end."""
    blackwell_simulator.dawdle(monkeypatch, cta, warpgroup)
    assert faults_of_sound(config) == set()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name, monkeypatch):
    plant, config, evidence = FAULTS[name]
    plant(monkeypatch)
    assert evidence & faults(monkeypatch, config)


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 12),
    reason="that simulator keeps the barriers of a cluster until all of it has left",
)
def test_a_cta_that_leaves_before_all_have_read_its_answers_is_noticed(monkeypatch):
    leave_out(launch_control, "drain")(monkeypatch)
    # The multiplier that issues nothing comes late, or nobody would arrive on a CTA that has left.
    blackwell_simulator.dawdle(monkeypatch, 1, 1)
    assert {"race", "refused"} & faults(monkeypatch, DYNAMIC)


def test_an_answer_that_is_left_behind_after_a_refusal_is_noticed(monkeypatch):
    put(launch_control, "wants_more", wants_more_until_a_refusal)(monkeypatch)
    # The first cluster's second request is granted after its first was refused.
    waiting = {"started": 2, "refused": frozenset({0})}
    found = faults(monkeypatch, DYNAMIC, **waiting)
    assert {"refused", "stuck", "wrong"} & found
