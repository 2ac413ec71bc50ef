"""The barriers of the Hopper kernel: their counts, on trial in a model of who waits for whom.

The model follows from whose data each CTA of a cluster needs, and knows nothing of how the counts
are derived. Its roles run in any order that the barriers allow, and what is wrong shows: a
deadlock, data overwritten before it was read, a phase that a waiter missed, an arrival on a CTA
that has left.
"""

import collections
import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from pallas_gemm.config import CLUSTERS
from pallas_gemm.device import H200
from pallas_gemm.kernels import protocol
from pallas_gemm.kernels.hardware import MAX_BARRIERS
from pallas_gemm.kernels.hopper.config import CLAIM_SLOTS, HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.problem import Epilogue, Problem
from pallas_gemm.proving import products

Cta = tuple[int, int]
"""Row and column within the cluster."""


class ProtocolError(AssertionError):
    """What must never happen on a GPU happened in the model."""


class Barrier:
    """A phase ends when all arrivals and all announced data are there."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.awaited, self.phases = count, 0, 0, 0

    def arrive(self, announced: int = 0) -> None:
        if self.arrived == self.count:
            raise ProtocolError("more arrivals than a phase takes")
        self.arrived += 1
        self.land(-announced)

    def land(self, pieces: int) -> None:
        """Data arrives; that of a peer may do so before it is announced."""
        self.awaited -= pieces
        if self.arrived == self.count and self.awaited == 0:
            self.arrived, self.phases = 0, self.phases + 1

    def passed(self, phase: int) -> bool:
        """Whether a phase is over; a waiter sees only its parity."""
        if self.phases > phase + 1:
            raise ProtocolError("a waiter missed a phase")
        return self.phases == phase + 1


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What runs in the model, with the counts that are on trial."""

    cluster: tuple[int, int] = (1, 1)
    consumers: int = 2
    pingpong: bool = False
    stages: int = 2
    tiles: int = 5
    k_steps: int = 3
    full_error: int = 0
    empty_error: int = 0

    @property
    def full_count(self) -> int:
        return protocol.full_arrivals(copies_per_slot=2) + self.full_error

    @property
    def empty_count(self) -> int:
        per_cta = protocol.empty_arrivals(self.consumers, pingpong=self.pingpong)
        # All CTAs that share a slot's operands: those in the same cluster row or cluster column.
        return per_cta * (sum(self.cluster) - 1) + self.empty_error

    @property
    def ctas(self) -> list[Cta]:
        return list(itertools.product(range(self.cluster[0]), range(self.cluster[1])))

    def sharers(self, cta: Cta, operand: str) -> list[Cta]:
        """Who needs the same part of an operand: of a the same rows, of b the same columns."""
        axis = "ab".index(operand)
        return [other for other in self.ctas if other[axis] == cta[axis]]

    def readers(self, step: int) -> list[int]:
        """Which consumers of a CTA read the data of a step."""
        if self.pingpong:
            return [step // self.k_steps % 2]
        return list(range(self.consumers))

    def uses(self) -> dict[int, tuple[tuple[int, int], int]]:
        """The barrier of each step, its owner's for its slot, and how often it was used before."""
        seen: collections.Counter[tuple[int, int]] = collections.Counter()
        uses = {}
        for step in range(self.tiles * self.k_steps):
            name = (self.readers(step)[0], step % self.stages)
            uses[step] = (name, seen[name])
            seen[name] += 1
        return uses


class Cluster:
    """A cluster at work. Its roles are generators that yield (barrier, phase) to wait, or None."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.uses = kernel, kernel.uses()
        names = list(itertools.product(kernel.ctas, range(2), range(kernel.stages)))
        self.full = {name: Barrier(kernel.full_count) for name in names}
        self.empty = {name: Barrier(kernel.empty_count) for name in names}
        self.baton = {
            (cta, me): Barrier(protocol.baton_arrivals()) for cta in kernel.ctas for me in (0, 1)
        }
        self.content: dict[Any, int] = {}
        self.reads: collections.Counter[tuple[Cta, int]] = collections.Counter()
        self.tile: dict[Any, int] = {}
        self.roles: dict[Any, Iterator[Any]] = {}
        for cta in kernel.ctas:
            self.roles[cta, "producer"] = self.produce(cta)
            for me in range(kernel.consumers):
                self.roles[cta, me] = self.consume(cta, me)

    def run(self, rng: random.Random, without: Any = None) -> None:
        """Runs the roles in random order until they end; all but one, if it is never scheduled."""
        ready: dict[Any, Any] = {role: None for role in self.roles if role != without}
        while ready:
            able = [role for role, wait in ready.items() if wait is None or wait[0].passed(wait[1])]
            if not able and without is None:
                raise ProtocolError(f"{sorted(map(str, ready))} wait forever")
            if not able:
                return
            role = rng.choice(able)
            try:
                ready[role] = next(self.roles[role])
            except StopIteration:
                del ready[role], self.roles[role]

    def produce(self, cta: Cta) -> Iterator[Any]:
        steps, stages = len(self.uses), self.kernel.stages
        for step in range(steps):
            self.tile[cta, "producer"] = step // self.kernel.k_steps
            yield None
            if step >= stages:
                yield self.wait(self.empty, cta, step - stages)
            for operand in "ab":
                peers = self.kernel.sharers(cta, operand)
                self.full[cta, *self.uses[step][0]].arrive(announced=len(peers))
                for peer in peers:
                    self.fill(peer, step, (operand, cta))
                    yield None
        for step in range(max(steps - stages, 0), steps):
            yield self.wait(self.empty, cta, step)

    def consume(self, cta: Cta, me: int) -> Iterator[Any]:
        mine = [step for step in self.uses if me in self.kernel.readers(step)]
        if self.kernel.pingpong and me == 1:
            self.baton[cta, 0].arrive()
        for turn, first in enumerate(mine[:: self.kernel.k_steps]):
            self.tile[cta, me] = first // self.kernel.k_steps
            last = first + self.kernel.k_steps - 1
            if self.kernel.pingpong:
                yield self.baton[cta, me], turn
            for step in range(first, last + 1):
                yield self.wait(self.full, cta, step)
                yield None
                if step > first:
                    self.release(cta, step - 1)
            if self.kernel.pingpong:
                self.baton[cta, 1 - me].arrive()
            yield None
            self.release(cta, last)
        if self.kernel.pingpong and me == self.kernel.tiles % 2:
            yield self.baton[cta, me], len(mine) // self.kernel.k_steps

    def wait(self, barriers: dict[Any, Barrier], cta: Cta, step: int) -> tuple[Barrier, int]:
        name, before = self.uses[step]
        return barriers[cta, *name], before

    def fill(self, cta: Cta, step: int, piece: tuple[str, Cta]) -> None:
        """A piece of an operand lands in a slot."""
        slot = (cta, step % self.kernel.stages, piece)
        old = self.content.get(slot)
        if old is not None and self.reads[cta, old] < len(self.kernel.readers(old)):
            raise ProtocolError("data was overwritten before everybody had read it")
        self.content[slot] = step
        self.full[cta, *self.uses[step][0]].land(1)

    def release(self, cta: Cta, step: int) -> None:
        """A consumer has read a slot, and says so to whoever writes into it."""
        writers = set()
        for operand in "ab":
            for peer in self.kernel.sharers(cta, operand):
                writers.add(peer)
                if self.content.get((cta, step % self.kernel.stages, (operand, peer))) != step:
                    raise ProtocolError("data was read before it was there")
        self.reads[cta, step] += 1
        for peer in writers:
            if not any(role[0] == peer for role in self.roles):
                raise ProtocolError("an arrival on a CTA that has left")
            self.empty[peer, *self.uses[step][0]].arrive()


CONSUMERS = [(1, False), (2, False), (3, False), (2, True)]
NAMES = ["one", "two", "three", "pingpong"]


def run(kernel: Kernel) -> None:
    for seed in range(5):
        Cluster(kernel).run(random.Random(seed))


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(("consumers", "pingpong"), CONSUMERS, ids=NAMES)
@pytest.mark.parametrize("k_steps", [1, 3])
def test_the_counts_let_every_role_pass_and_protect_the_data(cluster, consumers, pingpong, k_steps):
    run(Kernel(cluster, consumers, pingpong, k_steps=k_steps))


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(("consumers", "pingpong"), CONSUMERS, ids=NAMES)
@pytest.mark.parametrize("error", ["full_error", "empty_error"])
@pytest.mark.parametrize("by", [-1, 1])
def test_a_count_that_is_off_by_one_is_noticed(cluster, consumers, pingpong, error, by):
    with pytest.raises(ProtocolError):
        run(Kernel(cluster, consumers, pingpong, **{error: by}))


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("rows", [128, 256])
def test_a_slot_is_full_after_all_copies_of_both_operands(layout, gated, rows):
    problem = products.transposed(Problem(512, 512, 512, epilogue=Epilogue(gated=gated)), layout)
    config = HopperConfig(tile=(rows, 128), stages=2, late_store=False)
    # Where k is not the last dimension, a copy of a is as wide as the swizzle, 64 elements.
    copies_of_a = 1 if layout[0] == "N" else rows // 64
    copies_of_b = 2 if gated else 1
    assert HopperPlan(problem, config, H200).full_arrivals == copies_of_a + copies_of_b


def lead(cluster: tuple[int, int], stages: int) -> int:
    """How many tiles the CTA that claims them can be ahead of any role of its cluster.

    The slowest role stands still. One more is for a role that is still storing its tile, when it
    has read all data of that tile but has not asked for the next one.
    """
    kernel = Kernel(cluster, 1, stages=stages, tiles=4 * stages, k_steps=1)
    claiming = (0, 0), "producer"
    leads = []
    for role in Cluster(kernel).roles:
        model = Cluster(kernel)
        model.run(random.Random(0), without=role)
        if role != claiming:
            leads.append(model.tile[claiming] + 1)
    return max(leads)


def deepest(cluster: tuple[int, int]) -> int:
    """The most stages that are legal with claimed tiles."""
    problem = Problem(8192, 8192, 64, transpose_b=True)
    smallest = HopperConfig(
        tile=(64, max(16, 8 * cluster[0])),
        cluster=cluster,
        persistence="dynamic",
        store_columns=16,
        store_slots=1,
        consumers=1,
    )
    depths = range(2, MAX_BARRIERS + 1)
    configs = [dataclasses.replace(smallest, stages=stages) for stages in depths]
    return max(config.stages for config in configs if not config.refusals(problem, H200))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_claim_is_not_overwritten_before_every_role_has_read_it(cluster):
    assert lead(cluster, deepest(cluster)) < CLAIM_SLOTS
