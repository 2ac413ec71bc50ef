"""Words that CTAs share in global memory: flags, counters and mailboxes, simulated with numbers.

Without the mistakes that are planted here, a test that finds nothing wrong would say nothing: it
could not find any.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm.device import H200
from pallas_gemm.kernels.hardware import WARPGROUP_THREADS
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper import plan as plans
from pallas_gemm.kernels.hopper.along_k import relay
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.dense import claims
from pallas_gemm.kernels.hopper.groups import sum_walk, table
from pallas_gemm.kernels.ptx import mailbox, words
from pallas_gemm.problem import Epilogue, Problem
from pallas_gemm.proving import products
from tests import blackwell_simulator, group_products, ptx_simulator

# Two stages and few slots, so that all of it is used again.
CLAIMED = HopperConfig(
    tile=(64, 64), consumers=1, stages=2, ctas=2, store_columns=32, persistence="dynamic"
)
TILES = Problem(640, 128, 72)
PAIRS = dataclasses.replace(CLAIMED, cluster=(2, 1), ctas=4)
SIZES = (30, 700, 0, 70, 360)
"""Of groups: the second is cut into four parts, and the last into two."""
GROUPS = Problem(
    *(64, 128, 1208),
    transpose_a=True,
    batch=len(SIZES),
    shared_a=True,
    shared_b=True,
    ragged_k=True,
)
SCALED = dataclasses.replace(GROUPS, epilogue=Epilogue(alpha=2.0))
RELAYED = dataclasses.replace(CLAIMED, ctas=3)
TWO_CONSUMERS = dataclasses.replace(RELAYED, tile=(128, 64), consumers=2)

Case = tuple[Problem, HopperConfig]
CASES: dict[str, Case] = {
    "claimed": (TILES, CLAIMED),
    "claimed in clusters": (TILES, PAIRS),
    # With an epilogue, no group is cut.
    "claimed sums": (SCALED, RELAYED),
    "relayed": (GROUPS, RELAYED),
    "relayed by two consumers": (dataclasses.replace(GROUPS, m=128), TWO_CONSUMERS),
}
Plant = Callable[[pytest.MonkeyPatch], None]


class Simulated:
    """A kernel whose CTAs share words, its operands, and its result."""

    def __init__(self, case: Case) -> None:
        problem, config = case
        plan = ptx_simulator.SharingPlan(
            problem, config, H200, interpret=blackwell_simulator.PARAMS
        )
        assert plan.claims_tiles
        assert bool(plan.relay) == (problem.ragged_k and problem is not SCALED)
        operands = products.small_integers(problem, np.random.default_rng(0))
        self._arrays: Sequence[Any] = operands.present()
        if problem.ragged_k:
            self._arrays = (*operands[:2], jnp.array(SIZES))
            exact = group_products.exact(problem, SIZES, *operands[:2]) * problem.epilogue.alpha
        else:
            exact = products.exact(problem, operands)
        self._expected = products.rounded(problem, exact)
        self._kernel = jax.jit(hopper.build(plan))

    def faults(self) -> set[str]:
        """Runs it and returns what is wrong with it."""
        return blackwell_simulator.faults(self._kernel, self._arrays, self._expected)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts groups of few steps, and has every word of a mailbox used again."""
    monkeypatch.setattr(plans, "SHORTEST_PIECE", 3)
    monkeypatch.setattr(claims, "CLAIM_SLOTS", 8)


ARRIVALS, CLAIMS, COUNTER = "red.release", "st.relaxed", "shfl.sync"
"""What the programs say that may come late."""


@pytest.mark.parametrize(
    ("name", "slow"),
    [
        *itertools.product(("claimed",), ("", CLAIMS)),
        ("claimed in clusters", ""),
        *itertools.product(("claimed sums",), ("", COUNTER)),
        *itertools.product(("relayed", "relayed by two consumers"), ("", ARRIVALS, COUNTER)),
    ],
)
def test_nothing_is_wrong_as_it_is(name, slow, monkeypatch):
    ptx_simulator.install(monkeypatch, ptx_simulator.Delays(slow=slow))
    assert Simulated(CASES[name]).faults() == set()


def leave_out(module: Any, name: str) -> Plant:
    """A call that is forgotten."""
    return lambda monkeypatch: monkeypatch.setattr(module, name, lambda *_, **__: None)


def put(module: Any, name: str, wrong: Any) -> Plant:
    """Something else."""
    return lambda monkeypatch: monkeypatch.setattr(module, name, wrong)


def say(module: Any, name: str, old: str, new: str) -> Plant:
    """Another word in a program of PTX."""
    right = getattr(module, name)
    text = right if isinstance(right, str) else right.text
    assert text.count(old) == 1
    wrong = text.replace(old, new)
    return put(module, name, wrong if isinstance(right, str) else right._replace(text=wrong))


def await_the_first_part(plan: Any, flag: Any, arrivals: Any) -> None:
    """Waits for one part however many there were."""
    AWAIT(plan, flag, jnp.minimum(arrivals, WARPGROUP_THREADS))


def await_one_warp_of_the_last_part(plan: Any, flag: Any, arrivals: Any) -> None:
    """Waits for all warps of the parts before, and for one of the last."""
    AWAIT(plan, flag, arrivals - 3 * WARPGROUP_THREADS // 4)


def hand_on_too_early(cta: Any, leg: relay.Leg, total: Any) -> None:
    """Says that sums are stored, and then stores them."""
    words.arrive(cta.plan, leg.flag)
    relay.store_sums(cta, leg, total)


def claim_in_every_cta(
    counter: Any, table: Any, mailbox: Any, tag: Any, claimant: Any, workers: int
) -> None:
    """Claims a tile in each CTA of a cluster."""
    CLAIM(counter, table, mailbox, tag, jnp.ones_like(claimant), workers)


def end_in_the_second_cta(board: Any, tag: Any, peeked: Any) -> Any:
    """Has one CTA of a cluster leave after its first tile, with which the other shares copies."""
    word = RESOLVE(board, tag, peeked)
    return jnp.where(lax.axis_index("cluster_row") == 1, mailbox.END, word)


def following_beyond_all_workers(cta: Any, number: Any) -> Any:
    """Takes the first pieces for given, though they are claimed, too."""
    return FOLLOWING(cta, number) + cta.plan.workers


AWAIT, CLAIM, FLAG, FOLLOWING, RESOLVE = (
    words.await_arrivals,
    mailbox.claim,
    table.flag,
    sum_walk._following,
    mailbox.resolve,
)

# What is left out or wrong, in which kernel, and what may come of it.
FAULTS: dict[str, tuple[Plant, str, set[str]]] = {
    "sums are added before they were handed on": (
        leave_out(words, "await_arrivals"),
        "relayed",
        {"race", "wrong"},
    ),
    "sums are added when the first part was handed on": (
        put(words, "await_arrivals", await_the_first_part),
        "relayed",
        {"race", "wrong"},
    ),
    "sums are added when a warp has handed them on": (
        put(words, "await_arrivals", await_one_warp_of_the_last_part),
        "relayed",
        {"race", "wrong"},
    ),
    "sums are handed on before they are stored": (
        put(relay, "hand_on", hand_on_too_early),
        "relayed",
        {"race", "wrong"},
    ),
    "sums are handed on and nobody is told": (leave_out(words, "arrive"), "relayed", {"stuck"}),
    "an arrival releases nothing": (
        say(words, "ARRIVE", "release", "relaxed"),
        "relayed",
        {"race"},
    ),
    "a wait acquires nothing": (say(words, "AWAIT", "acquire", "relaxed"), "relayed", {"race"}),
    "consumers share a flag": (
        put(table, "flag", lambda plan, number: FLAG(plan, number // 2)),
        "relayed by two consumers",
        {"race", "wrong"},
    ),
    "pieces are counted twice": (say(words, "CLAIM", ", 1;", ", 2;"), "relayed", {"wrong"}),
    "pieces of sums are counted twice": (
        say(words, "CLAIM", ", 1;", ", 2;"),
        "claimed sums",
        {"wrong"},
    ),
    "pieces are counted before they are claimed": (
        put(sum_walk, "_following", following_beyond_all_workers),
        "relayed",
        {"wrong", "stuck"},
    ),
    "tiles are counted twice": (say(mailbox, "CLAIM", ", 1;", ", 2;"), "claimed", {"wrong"}),
    "the first tiles are claimed again": (
        say(mailbox, "CLAIM", "number, {workers}", "number, 0"),
        "claimed",
        {"race"},
    ),
    "every CTA of a cluster claims": (
        put(mailbox, "claim", claim_in_every_cta),
        "claimed in clusters",
        {"wrong", "refused", "stuck"},
    ),
    "one CTA of a cluster leaves": (
        put(mailbox, "resolve", end_in_the_second_cta),
        "claimed in clusters",
        {"stuck"},
    ),
    "a word is taken before it is written": (
        put(mailbox, "resolve", lambda *given: given[-1]),
        "claimed",
        {"wrong", "refused", "stuck", "race"},
    ),
    "words of all rounds look alike": (
        put(claims, "tag", jnp.ones_like),
        "claimed",
        {"wrong", "refused", "stuck", "race"},
    ),
    "a mailbox has a word": (put(claims, "CLAIM_SLOTS", 1), "claimed", {"refused", "stuck"}),
}


LATE = {
    "sums are added when a warp has handed them on": ptx_simulator.Delays(slow=ARRIVALS),
    "consumers share a flag": ptx_simulator.Delays(slow=ARRIVALS, warpgroup=1),
    "words of all rounds look alike": ptx_simulator.Delays(slow=CLAIMS),
}
"""What has to come late for a fault to show."""
TRIES = 5
"""Runs in one of which a fault has to show: the threads of the simulator run in any order."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name, monkeypatch):
    plant, case, evidence = FAULTS[name]
    plant(monkeypatch)
    ptx_simulator.install(monkeypatch, LATE.get(name, ptx_simulator.Delays()))
    if name == "a mailbox has a word":
        # The consumer of the first CTA has to come late to barriers.
        blackwell_simulator.dawdle(monkeypatch, 0, 0)
    assert any(evidence & Simulated(CASES[case]).faults() for _ in range(TRIES))
