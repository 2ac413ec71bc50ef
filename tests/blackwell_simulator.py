"""Teaches JAX's GPU simulator what the Blackwell kernel needs and it lacks.

`install` replaces, for one test, the parts of JAX 0.11's simulator that know nothing of

* pairs of CTAs: copies of which each CTA makes one half while the first CTA's barrier counts the
  bytes of both, MMAs that read and write the memory of two CTAs, commits that arrive in both;
* barriers that count bytes: a phase ends when all arrivals and all announced bytes are there, in
  any order;
* cluster launch control, which the stock simulator always refuses: here waiting clusters are handed
  out until there are none;
* deadlocks: when all threads of a cluster wait, one fails, instead of hanging the test.

Races are recorded as in the stock simulator. All of it follows the PTX ISA's description of
`mbarrier`, `cp.async.bulk.tensor` with `.cta_group::2`, `tcgen05.mma` and `tcgen05.commit` with
`.cta_group::2`, and `clusterlaunchcontrol`.
"""

import collections
import dataclasses
import functools
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import callback  # noqa: TID251 - here and below, what is extended is private
from jax._src.pallas.mosaic.interpret import thread_map  # noqa: TID251
from jax._src.pallas.mosaic_gpu import primitives  # noqa: TID251
from jax._src.pallas.mosaic_gpu.interpret import (  # noqa: TID251
    gpu_callbacks,
    jaxpr_interpret,
    shared_memory,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.blackwell import plan as blackwell_plan
from tests import races
from tests.quick import simulator as quick_simulator

ANSWER_BYTES = 16
ASYNC_UNITS = 512
"""Asynchronous operations that can be told apart. Two that share a unit, of which the simulator has
five if it is not asked for more, pass for one after the other, and their races are not seen."""
POLL_SECONDS = 0.001
"""Between two looks at what nobody is notified of."""

StockBarrier = shared_memory.Barrier
StockCopy = gpu_callbacks.AsyncCopyGmemToSmemTask
StockMma = gpu_callbacks.TcGen05Mma
Key = shared_memory.HostAllocationKey


class Crowd:
    """The threads that simulate a cluster, and which of them wait for a barrier.

    All that happens in the simulator is done by these threads: once all of them wait, they do so
    for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._polling = 0
        # What each of those that poll waits for, and how many of the others come late.
        self._awaited: dict[int, Callable[[], bool]] = {}
        self._late = 0
        # How many wait for each barrier, and have not been notified.
        self._waiting: dict[Any, int] = {}
        self._stuck = False

    def begin(self, threads: int) -> bool:
        """Threads start; returns whether they are the warps of one that was there, and rests."""
        with self._lock:
            are_warps = self._threads > 0
            if not are_warps:
                self._waiting, self._stuck = {}, False
            self._threads += threads - are_warps
        return are_warps

    def leave(self) -> None:
        """A thread ends, and arrives no more."""
        with self._lock:
            self._threads -= 1
            self._look_for_deadlock()
            stuck = list(self._waiting) if self._stuck else []
        for barrier in stuck:
            with barrier:
                barrier.notify_all()

    def wait(self, barrier: "_Watched") -> None:
        """Notes that a thread waits from now on; raises if then all do."""
        with self._lock:
            self._waiting[barrier] = self._waiting.get(barrier, 0) + 1
            self._look_for_deadlock()
        self.raise_if_stuck()

    def go_on(self, barrier: "_Watched") -> None:
        """Notes that all who wait for a barrier are notified."""
        with self._lock:
            self._waiting.pop(barrier, None)

    def poll(self, is_over: Callable[[], Any]) -> None:
        """Waits for something of which nobody is notified."""
        with self._lock:
            self._polling += 1
        try:
            while not is_over():
                time.sleep(POLL_SECONDS)
        finally:
            with self._lock:
                self._polling -= 1

    def wait_for(self, is_true: Callable[[], bool], check: Callable[[], Any]) -> None:
        """Waits until something is true; raises if a check does, or if nobody can make it so."""

        def is_over() -> bool:
            check()
            if is_true():
                return True
            if self._nobody_goes_on(nor_is_late=True):
                raise TimeoutError("All threads wait.")
            return False

        own = threading.get_ident()
        with self._lock:
            self._awaited[own] = is_true
        try:
            self.poll(is_over)
        finally:
            with self._lock:
                del self._awaited[own]

    def come_late(self) -> None:
        """Does nothing while another thread can do something."""
        with self._lock:
            self._late += 1
        try:
            self.poll(self._nobody_goes_on)
        finally:
            with self._lock:
                self._late -= 1

    def others_wait(self, *, or_poll: bool) -> bool:
        """Whether all threads but the one that asks wait, or look whether they still need to."""
        with self._lock:
            return self._others_wait(or_poll=or_poll)

    def raise_if_stuck(self) -> None:
        """Raises if all threads wait."""
        if self._stuck:
            raise TimeoutError("All threads of the cluster wait.")

    def _others_wait(self, *, or_poll: bool) -> bool:
        others = self._threads - (self._polling if or_poll else 1)
        return sum(self._waiting.values()) >= others

    def _nobody_goes_on(self, *, nor_is_late: bool = False) -> bool:
        """Whether all others wait: for a barrier, for what is not so yet, or to come late."""
        # All at one moment. Who polls has said what for before, and says so until after.
        with self._lock:
            all_wait = self._others_wait(or_poll=True) and not (nor_is_late and self._late)
            awaited = list(self._awaited.values())
        return all_wait and not any(is_true() for is_true in awaited)

    def _look_for_deadlock(self) -> None:
        waiting = sum(self._waiting.values())
        self._stuck = self._stuck or (waiting > 0 and waiting == self._threads)


CROWD = Crowd()
"""The simulator runs one cluster after the other."""


class CountingBarrier(StockBarrier):
    """A barrier whose phase also waits for the bytes that were announced.

    Attributes:
        slow: The CTA and the warpgroup that come late, if any do.
    """

    slow: tuple[int, int] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cv = _Watched()
        self._lock = threading.RLock()
        self._missing_bytes = 0
        self._last_arrival: tuple[Any, ...] | None = None

    def arrive(
        self, thread: Any, clock: Any = None, logging_info: Any = None, announced: int = 0
    ) -> None:
        """Arrives, and announces bytes that the phase has to wait for."""
        with self._lock:
            if self._last_arrival is not None:
                raise ValueError("Arrival on a barrier that has all the arrivals of its phase.")
            self._missing_bytes += announced
            with self.cv:
                is_last = self.arrivals_count == self.num_arrivals - 1
            if is_last and self._missing_bytes:
                self._last_arrival = (thread, clock, logging_info)
            else:
                super().arrive(thread, clock, logging_info)

    def transfer(self, count: int, clock: Any) -> None:
        """Some of the bytes are there; they may be there before they were announced."""
        with self._lock:
            self._missing_bytes -= count
            if self.detect_races:
                with self.cv:
                    if self.clock is None:
                        self.clock = clock.copy()
                    else:
                        self.clock.update(clock)
            if self._last_arrival is not None and not self._missing_bytes:
                arrival, self._last_arrival = self._last_arrival, None
                super().arrive(*arrival)

    def wait(self, thread: Any, logging_info: Any = None) -> None:
        """Waits, and comes late if told to."""
        if (thread.block_id, thread.warpgroup_id) == self.slow:
            CROWD.come_late()
        super().wait(thread, logging_info)

    def deallocate(self) -> None:
        """Fails if anything is still on its way."""
        if self._missing_bytes or self._last_arrival is not None:
            raise ValueError(f"Barrier deallocated with {self._missing_bytes} bytes missing.")
        super().deallocate()


class _Team(futures.ThreadPoolExecutor):
    """Threads of the crowd that begin together: the roles of a cluster, or the warps of a role."""

    def __init__(self, max_workers: int) -> None:
        super().__init__(max_workers)
        self._lock = threading.Lock()
        self._running = max_workers
        self._are_warps = CROWD.begin(max_workers)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        return super().submit(self._run, fn, *args, **kwargs)

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        finally:
            with self._lock:
                self._running -= 1
                role_goes_on = self._are_warps and not self._running
            if not role_goes_on:
                CROWD.leave()


class _Watched(threading.Condition):
    def wait(self, timeout: float | None = None) -> bool:
        CROWD.wait(self)
        notified = super().wait(timeout)
        CROWD.raise_if_stuck()
        return notified

    def notify_all(self) -> None:
        CROWD.go_on(self)
        super().notify_all()


class HalfCopy(StockCopy):
    """One CTA's half of a copy that the first CTA's barrier keeps track of."""

    def post_write(self, tma_thread_id: int, shared_memory: Any) -> None:
        """Reports the bytes instead of arriving."""
        del tma_thread_id, shared_memory
        assert isinstance(self.barrier, CountingBarrier)
        self.barrier.transfer(_count_bytes(self.dst_allocation_key, self.dst_access), self.clock)


class PairMma(StockMma):
    """An MMA of two CTAs, if it names the axis of the pair."""

    def __call__(self, pipeline_clock: Any, tma_thread_id: int) -> Any:
        """Multiplies the rows of both CTAs by the columns of both; only the first CTA issues."""
        if self.collective_axis is None:
            return super().__call__(pipeline_clock, tma_thread_id)
        memory = gpu_callbacks._get_shared_memory()
        clock = memory.get_clock(self.thread)
        if self.thread.block_id:
            return clock
        if clock is not None:
            if pipeline_clock is not None:
                clock.update(pipeline_clock)
            clock.inc(tma_thread_id)
        a, b = (
            [self._read(memory, clock, _in_cta(key, cta), access) for cta in (0, 1)]
            for key, access in ((self.a_key, self.a_access), (self.b_key, self.b_access))
        )
        dtype = memory.buffer_shape_and_dtype(self.acc_key).dtype
        with np.errstate(invalid="ignore"):  # NaN and infinity are nothing to warn of.
            product = np.matmul(np.concatenate(a), np.concatenate(b, axis=1), dtype=dtype)
        for cta, rows in enumerate(np.split(product, 2)):
            self._accumulate(memory, clock, _in_cta(self.acc_key, cta), rows)
        if self.barrier_key is not None:
            for cta in (0, 1):
                memory.get_barrier(_in_cta(self.barrier_key, cta)).arrive(self.thread, clock)
        return clock if clock is None else clock.copy()

    def _read(self, memory: Any, clock: Any, key: Key, access: Any) -> np.ndarray:
        value, _, _ = memory.get_buffer_content(key, access, self.thread)
        if clock is not None:
            gpu_callbacks.get_races().check_read(
                self.thread, clock.async_smem_clock, key, access, source_info=self.source_info
            )
        return value

    def _accumulate(self, memory: Any, clock: Any, key: Key, rows: np.ndarray) -> None:
        if self.accumulate:
            before, _, _ = memory.get_buffer_content(key, self.acc_access, None)
            rows = before + rows
        memory.store_buffer_content(key, self.acc_access, rows, self.thread, increment_clock=False)
        if clock is not None:
            gpu_callbacks.get_races().check_write(
                self.thread, clock.generic_clock, key, self.acc_access, source_info=self.source_info
            )


ASKED_AFTER_REFUSAL = "a request after a refusal"


class WaitingClusters:
    """The clusters that have not started, handed out to those that run.

    The simulator runs one cluster after the other. As if they ran together, each but the last gets
    its fair share, and the last one all that is left.

    Attributes:
        started: Clusters of the grid that start by themselves.
        total: All clusters of the grid.
        refused: Which requests of each cluster but the last, counted from 0, are refused although
            there are clusters left, as happens while a kernel of higher priority waits.
    """

    def __init__(self, started: int, total: int, refused: frozenset[int] = frozenset()) -> None:
        self.started, self.total, self.refused = started, total, refused
        self._next = started
        self._asked: dict[Any, int] = collections.defaultdict(int)
        self._granted: dict[Any, int] = collections.defaultdict(int)
        self._refusals_seen: set[Any] = set()
        self._lock = threading.Lock()

    def see_refusal(self, role: Any) -> None:
        """Notes that a role has read a refusal: PTX leaves open what a request after it does."""
        with self._lock:
            self._refusals_seen.add(role)

    def check_request(self, role: Any) -> None:
        """Raises if a role makes a request after it has read a refusal."""
        if role in self._refusals_seen:
            raise RuntimeError(f"{ASKED_AFTER_REFUSAL}: {role}")

    def take(self, cluster: Any) -> int | None:
        """Returns the next cluster, or None if there is none for the cluster that asks."""
        with self._lock:
            request = self._asked[cluster]
            self._asked[cluster] += 1
            share = -(-(self.total - self.started) // self.started)
            had_enough = self._granted[cluster] == share or request in self.refused
            is_last = len(self._asked) == self.started
            if self._next == self.total or (had_enough and not is_last):
                return None
            self._granted[cluster] += 1
            self._next += 1
            return self._next - 1


class Launch:
    """The clusters that wait in each launch of a kernel."""

    def __init__(self) -> None:
        self.plan(0, 0)

    def plan(self, *waiting: Any) -> None:
        """Says what `WaitingClusters` are made of."""
        self._waiting = waiting
        self.begin()

    def begin(self) -> None:
        """Has all of them wait."""
        self.now = WaitingClusters(*self._waiting)


def install(
    monkeypatch: pytest.MonkeyPatch,
    *,
    started: int | None = None,
    refused: frozenset[int] = frozenset(),
) -> Launch:
    """Teaches the simulator for the duration of a test.

    A kernel that was traced meanwhile can be run again, after `begin` of what is returned.

    Args:
        monkeypatch: Undoes it.
        started: How many clusters start by themselves with dynamic persistence; None for all.
        refused: See `WaitingClusters`.
    """
    monkeypatch.setattr(shared_memory, "Barrier", CountingBarrier)
    monkeypatch.setattr(sys.modules[__name__], "CROWD", Crowd())
    monkeypatch.setattr(
        quick_simulator.Meetings,
        "wait",
        lambda _, have_come, check: CROWD.wait_for(have_come, check),
    )
    monkeypatch.setattr(thread_map, "futures", types.SimpleNamespace(ThreadPoolExecutor=_Team))
    monkeypatch.setattr(gpu_callbacks, "TcGen05Mma", PairMma)
    stock_commit = gpu_callbacks.tcgen05_commit_arrive
    monkeypatch.setattr(
        gpu_callbacks, "tcgen05_commit_arrive", functools.partial(_commit, stock_commit)
    )
    interpreter = jaxpr_interpret.JaxprInterpreter
    stock_copy = interpreter._interpret_copy_gmem_to_smem_p
    monkeypatch.setattr(
        interpreter,
        "_interpret_copy_gmem_to_smem_p",
        lambda self, eqn, token, get: (
            stock_copy(self, eqn, token, get)
            if eqn.params["leader_tracked"] is None
            else _interpret_half_copy(self, eqn, token, get())
        ),
    )
    waiting = Launch()
    if started is None:
        return waiting
    plan = blackwell_plan.BlackwellPlan

    def launched(self: blackwell_plan.BlackwellPlan) -> int:
        total = self.config.launched(self.problem, self.device)
        waiting.plan(started, total, refused)
        return started

    monkeypatch.setattr(plan, "launched", property(launched))
    monkeypatch.setattr(
        interpreter,
        "_interpret_try_cluster_cancel_p",
        lambda self, eqn, token, get: _interpret_request(self, eqn, token, get(), waiting),
    )
    monkeypatch.setattr(
        interpreter,
        "_interpret_query_cluster_cancel_p",
        lambda self, eqn, token, get: _interpret_answer(self, eqn, token, get(), waiting),
    )
    return waiting


def dawdle(monkeypatch: pytest.MonkeyPatch, cta: int, warpgroup: int) -> None:
    """Has one role of one CTA come to each barrier when all others can do no more."""
    monkeypatch.setattr(CountingBarrier, "slow", (cta, warpgroup))


def _in_cta(key: Key, cta: int) -> Key:
    """The same buffer or barrier in another CTA of the pair, which may not have allocated it yet.

    On a GPU, a pair begins when both CTAs have their barriers.
    """
    there, memory = dataclasses.replace(key, block_id=cta), gpu_callbacks._get_shared_memory()

    def is_there() -> bool:
        memory.check_failed()
        nobody_makes_it = CROWD.others_wait(or_poll=False)
        if there in memory.mem:
            return True
        if nobody_makes_it:
            raise TimeoutError(f"CTA {cta} has no {there}: it has left, or never came.")
        return False

    if there not in memory.mem:
        CROWD.poll(is_there)
    return there


def _barrier(key: Key) -> CountingBarrier:
    barrier = gpu_callbacks._get_shared_memory().get_barrier(key)
    assert isinstance(barrier, CountingBarrier)
    return barrier


def _count_bytes(key: Key, access: Any) -> int:
    dtype = gpu_callbacks._get_shared_memory().buffer_shape_and_dtype(key).dtype
    return int(np.prod(access.shape)) * np.dtype(dtype).itemsize


def _half(access: Any, axis: int, cta: int) -> Any:
    """One of two halves of a window, along one of the axes that it does not drop."""
    kept = [i for i, index in enumerate(access.range) if isinstance(index, slice)]
    whole = access.range[kept[axis]]
    size = (whole.stop - whole.start) // 2
    half = slice(whole.start + cta * size, whole.start + (cta + 1) * size)
    window = (*access.range[: kept[axis]], half, *access.range[kept[axis] + 1 :])
    return dataclasses.replace(access, range=window)


def _interpret_half_copy(self: Any, eqn: Any, token: Any, invals: Any) -> tuple[Any, list[Any]]:
    (src, dst, barrier), rest = invals[:3], list(invals[3:])
    trees = [eqn.params[f"{name}_transforms_treedef"] for name in ("src", "dst", "barrier")]
    flat = [[rest.pop(0) for _ in range(tree.num_leaves)] for tree in trees]
    key = jaxpr_interpret._get_barrier_allocation_key_from_inval(barrier, trees[2], flat[2])
    (src, src_transforms), (dst, dst_transforms) = (
        jaxpr_interpret.resolve_ref(var.aval, ref, jax.tree.unflatten(tree, leaves))
        for var, ref, tree, leaves in zip(eqn.invars, (src, dst), trees, flat, strict=False)
    )
    return (
        callback.io_callback(
            functools.partial(
                _copy_half, axis=eqn.params["leader_tracked"].axis, source_info=eqn.source_info
            ),
            gpu_callbacks.TOKEN_SHAPE_DTYPE,
            token=token,
            mesh_location=self.mesh_location,
            thread=self.thread,
            src=(src, src_transforms),
            dst=(dst, dst_transforms),
            barrier=key,
        ),
        [],
    )


@gpu_callbacks.fail_on_exception
def _copy_half(
    *,
    token: Any,
    mesh_location: Any,
    thread: Any,
    src: Any,
    dst: Any,
    barrier: Any,
    axis: int,
    source_info: Any,
) -> Any:
    memory = gpu_callbacks._get_shared_memory()
    clock = memory.incr_clock(thread) if memory.detect_races else None
    (src_key, src_access), (dst_key, dst_access) = (_window(memory, *ref) for ref in (src, dst))
    cta = thread.block_id
    leaders_barrier = _in_cta(Key.from_array(barrier), 0)
    if cta == 0:
        both = 2 * _count_bytes(dst_key, dst_access)
        _barrier(leaders_barrier).arrive(thread, clock, announced=both)
    memory.execute_async_task(
        HalfCopy(
            mesh_location=mesh_location,
            thread=thread,
            src_allocation_key=src_key,
            src_access=_half(src_access, axis, cta),
            dst_allocation_key=dst_key,
            dst_access=dst_access,
            barrier_allocation_key=leaders_barrier,
            source_info=source_info,
            clock=None if clock is None else clock.copy(),
        )
    )
    return token


def _window(memory: Any, key_as_array: Any, transforms: Any) -> tuple[Key, Any]:
    key = Key.from_array(key_as_array)
    transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    return key, memory.access(key, transforms)


def _commit(
    stock: Callable[..., Any], *, token: Any, collective_axis: str | None = None, **params: Any
) -> Any:
    """A commit of a pair arrives in both CTAs, and only the first CTA's counts."""
    if collective_axis is None:
        return stock(token=token, **params)
    if params["thread"].block_id:
        return token
    key = Key.from_array(params.pop("barrier_key_as_array"))
    for cta in (0, 1):
        token = stock(token=token, barrier_key_as_array=_in_cta(key, cta).as_np_array, **params)
    return token


def _interpret_request(
    self: Any, eqn: Any, token: Any, invals: Any, waiting: Launch
) -> tuple[Any, list[Any]]:
    answer, barrier, *leaves = invals
    tree = eqn.params["result_transforms_tree"]
    answer, transforms = jaxpr_interpret.resolve_ref(
        eqn.invars[0].aval, answer, jax.tree.unflatten(tree, leaves[: tree.num_leaves])
    )
    key = jaxpr_interpret._get_barrier_allocation_key_from_inval(
        barrier, eqn.params["barrier_transforms_tree"], leaves[tree.num_leaves :]
    )
    return (
        callback.io_callback(
            functools.partial(_request, waiting=waiting, source_info=eqn.source_info),
            gpu_callbacks.TOKEN_SHAPE_DTYPE,
            token=token,
            mesh_location=self.mesh_location,
            thread=self.thread,
            answer=(answer, transforms),
            barrier=key,
        ),
        [],
    )


@gpu_callbacks.fail_on_exception
def _request(
    *,
    token: Any,
    mesh_location: Any,
    thread: Any,
    answer: Any,
    barrier: Any,
    waiting: Launch,
    source_info: Any,
) -> Any:
    waiting.now.check_request(_role(mesh_location, thread))
    memory = gpu_callbacks._get_shared_memory()
    clock = memory.incr_clock(thread)
    key = Key.from_array(barrier)
    _barrier(key).arrive(thread, clock, announced=ANSWER_BYTES)
    if thread.block_id:
        return token
    taken = waiting.now.take(mesh_location.cluster_coords)
    words = np.array([taken or 0, taken is not None, 0, 0], np.int32)
    answer_key, access = _window(memory, *answer)

    def write(unit: int, cta: int) -> None:
        written, target = clock.copy(), _in_cta(answer_key, cta)
        written.inc(unit)
        memory.store_buffer_content(target, access, words.view(np.int8), thread)
        gpu_callbacks.get_races().check_write(
            thread, written.generic_clock, target, access, source_info=source_info
        )
        _barrier(_in_cta(key, cta)).transfer(ANSWER_BYTES, written)

    for cta in range(memory.num_blocks_per_cluster):
        memory.execute_async_task(functools.partial(write, cta=cta))
    return token


def _role(mesh_location: Any, thread: Any) -> str:
    return f"{thread} of cluster {mesh_location.cluster_coords}"


@gpu_callbacks.fail_on_exception
def _see_answer(
    *, token: Any, mesh_location: Any, thread: Any, granted: Any, waiting: Launch
) -> Any:
    if not granted:
        waiting.now.see_refusal(_role(mesh_location, thread))
    return token


def _interpret_answer(
    self: Any, eqn: Any, token: Any, invals: Any, waiting: Launch
) -> tuple[Any, list[Any]]:
    assert eqn.primitive is primitives.query_cluster_cancel_p
    answer, *leaves = invals
    ref, transforms = jaxpr_interpret.resolve_ref(
        eqn.invars[0].aval, answer, jax.tree.unflatten(eqn.params["transforms_tree"], leaves)
    )
    token, words = gpu_callbacks.call_get(
        token=token,
        result_shape_and_dtype=jax.ShapeDtypeStruct((ANSWER_BYTES,), jnp.int8),
        mesh_location=self.mesh_location,
        thread=self.thread,
        allocation_key_as_array=ref,
        transforms=transforms,
        source_info=eqn.source_info,
    )
    number, granted, _, _ = lax.bitcast_convert_type(words.reshape(4, 4), jnp.int32)
    token = callback.io_callback(
        functools.partial(_see_answer, waiting=waiting),
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        granted=granted,
    )
    return token, [number, granted != 0]


def simulate(kernel: Callable[..., Any], operands: Any) -> tuple[np.ndarray, bool]:
    """Runs a kernel that was built for the simulator; returns the result and whether it raced."""
    with races.recorded() as raced:
        return np.asarray(jax.jit(kernel)(*operands)), raced()


def faults(kernel: Callable[..., Any], operands: Any, expected: np.ndarray) -> set[str]:
    """Runs a kernel, which may be jitted, and returns what is wrong with it.

    "race": two accesses that nothing orders. "stuck": a barrier that nobody completes. "refused":
    what the simulator never allows, such as a phase of a barrier that a waiter does not see.
    "asked": a request after a refusal was read. "wrong": another result.
    """
    found = set()
    with races.recorded() as raced:
        try:
            out = np.asarray(jax.jit(kernel)(*operands)).astype(np.float64)
            if not np.array_equal(out, expected):
                found.add("wrong")
        except jax.errors.JaxRuntimeError as error:
            kinds = {"TimeoutError": "stuck", ASKED_AFTER_REFUSAL: "asked"}
            found.add(next((kinds[text] for text in kinds if text in str(error)), "refused"))
        if raced():
            found.add("race")
    return found


PARAMS = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=ASYNC_UNITS)
