"""Teaches JAX's GPU simulator the PTX by which CTAs share words of global memory.

Flags, counters and mailboxes are changed by programs of PTX (`kernels/ptx/operation.py`). Here
the simulator runs the very text of each, warp by warp, on the arrays that all threads share:

    workers     all run together; stock JAX runs one cluster after the other
    ld, st,     at random moments, each at once; a warp that loads a word again waits until
    atom, red   somebody changes it
    release     what the thread has done before is ordered before whoever acquires the word, as soon
                as the last lane of the thread has released
    acquire     orders likewise; relaxed accesses order nothing

So a wait that is left out, taken early, or counts too little shows as a race, or as a wrong number;
and threads that all wait for one another fail (`tests/blackwell_simulator.py`).
"""

import functools
import random
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import callback  # noqa: TID251 - here and below, what is extended is private
from jax._src.pallas.mosaic_gpu.interpret import (  # noqa: TID251
    gpu_callbacks,
    jaxpr_interpret,
    race_detection_state,
    shared_memory,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.ptx import operation
from tests import blackwell_simulator, warp_ptx

DELAYS = (0.0, 0.0, 0.001, 0.004)
"""Seconds before a program of a warp, drawn anew for each."""
WARPS = 4
"""Of a warpgroup."""
BITS_OF_OFFSET = 40
"""Of an address: the others say which array it is in."""
CONCURRENT = "pallas_gemm_hopper"
"""The kernel whose workers run together."""


class SharingPlan(HopperPlan):
    """A plan whose CTAs share words though they are simulated."""

    shares_words = True


class Shared:
    """The words that threads share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.clocks: dict[int, Any] = {}
        self.chances: dict[Any, random.Random] = {}
        self._arrays: list[Any] = []

    def address(self, memory: Any, key: Any, access: Any) -> int:
        """The address of the first word of a part of an array."""
        with self.lock:
            if key not in self._arrays:
                self._arrays.append(key)
            number = self._arrays.index(key)
        shape = memory.mem[key].content.shape
        first = int(np.ravel_multi_index(tuple(map(_first, access.range)), shape))
        return number + 1 << BITS_OF_OFFSET | 4 * first

    def word(self, memory: Any, address: int) -> tuple[np.ndarray, int]:
        """The array of an address, flat, and the number of its word."""
        content = memory.mem[self._arrays[(address >> BITS_OF_OFFSET) - 1]].content
        words = content.reshape(-1).view(np.uint32)
        assert np.shares_memory(words, content)
        return words, (address & (1 << BITS_OF_OFFSET) - 1) // 4


class Words:
    """What a program of one warp sees of memory: see `warp_ptx.Memory`."""

    def __init__(self, memory: Any, shared: Shared, thread: Any, *, is_last_warp: bool) -> None:
        self._memory, self._shared, self._thread = memory, shared, thread
        self._is_last_warp = is_last_warp
        self._seen: dict[int, int] = {}

    def load(self, address: int, order: str) -> int:
        """Loads a word: again, when it has changed."""
        words, place = self._shared.word(self._memory, address)
        if address in self._seen:
            seen = self._seen[address]
            blackwell_simulator.CROWD.wait_for(
                lambda: int(words[place]) != seen, self._memory.check_failed
            )
        with self._shared.lock:
            self._seen[address] = found = int(words[place])
            clock = self._shared.clocks.get(address)
            if order == "acquire" and clock is not None:
                with self._memory.lock:
                    self._memory.clocks[self._thread].update(clock)
        return found

    def store(self, address: int, value: int, order: str) -> None:
        """Stores a word."""
        words, place = self._shared.word(self._memory, address)
        with self._shared.lock:
            words[place] = value
            self._release(address, order)

    def add(self, address: int, value: int, order: str) -> int:
        """Adds to a word."""
        words, place = self._shared.word(self._memory, address)
        with self._shared.lock:
            found = int(words[place])
            words[place] = (found + value) & 0xFFFFFFFF
            self._release(address, order)
        return found

    def _release(self, address: int, order: str) -> None:
        if order != "release" or not self._is_last_warp:
            return
        clock = self._memory.incr_clock(self._thread)
        if address in self._shared.clocks:
            self._shared.clocks[address].update(clock)
        else:
            self._shared.clocks[address] = clock


class Delays(NamedTuple):
    """What comes late.

    Attributes:
        seed: Of what is drawn.
        slow: What a program says that each warp begins when all others can do no more.
        warpgroup: Of which warpgroup of each CTA; None for all.
    """

    seed: int = 0
    slow: str = ""
    warpgroup: int | None = None

    def are_for(self, program: operation.Ptx, thread: Any) -> bool:
        """Whether a thread begins a program late."""
        own = self.warpgroup in (None, thread.warpgroup_id)
        return bool(self.slow) and self.slow in program.text and own


def install(monkeypatch: pytest.MonkeyPatch, delays: Delays) -> None:
    """Teaches the simulator for the duration of a test."""
    blackwell_simulator.install(monkeypatch)
    interpreter = jaxpr_interpret.JaxprInterpreter
    name = "_interpret_inline_mgpu_p"
    monkeypatch.setattr(
        interpreter,
        name,
        functools.partialmethod(_interpret, getattr(interpreter, name), delays),
    )
    stock = plgpu.kernel

    def together(body: Any, **how: Any) -> Any:
        if how["kernel_name"] == CONCURRENT:
            for name in ("", "_names"):
                how["cluster" + name] = (*how["grid" + name], *how["cluster" + name])
            how |= {"grid": (1,), "grid_names": ("all workers",)}
        return stock(body, **how)

    monkeypatch.setattr(plgpu, "kernel", together)
    state = race_detection_state.GPURaceDetectionState
    monkeypatch.setattr(
        state, "check_write", functools.partialmethod(_check_write, state.check_write)
    )


def _check_write(
    self: Any, stock: Any, thread: Any, clock: Any, key: Any, access: Any, source_info: Any = None
) -> None:
    """Looks for races of a write, unless all of it is past the end, where TMA stores nothing."""
    shape = gpu_callbacks._get_shared_memory().buffer_shape_and_dtype(key).shape
    if all(_first(i) < size for i, size in zip(access.range, shape, strict=True)):
        stock(self, thread, clock, key, access, source_info=source_info)


def _first(index: Any) -> int:
    return index.start if isinstance(index, slice) else index


def _interpret(
    self: Any,
    stock: Any,
    delays: Delays,
    eqn: Any,
    token: Any,
    get_invals: Callable[[], Any],
) -> tuple[Any, list[Any]]:
    emitted = eqn.params["mgpu_fn"]
    if not isinstance(emitted, operation.Emitted):
        return stock(self, eqn, token, get_invals)
    count = eqn.params["pytree_args"].num_leaves
    invals = get_invals()
    transforms = eqn.params["pytree_ref_transforms"].unflatten(invals[count:])
    refs = [
        jaxpr_interpret.resolve_ref(var.aval, inval, transform)
        for var, inval, transform in zip(
            eqn.invars[: emitted.refs], invals, transforms[: emitted.refs], strict=False
        )
    ]
    word = jax.ShapeDtypeStruct((), jnp.int32)
    token, *results = callback.io_callback(
        functools.partial(_run, program=emitted.ptx, delays=delays),
        (gpu_callbacks.TOKEN_SHAPE_DTYPE, *[word] * emitted.ptx.results),
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        refs=refs,
        numbers=invals[emitted.refs : count],
    )
    return token, results


@gpu_callbacks.fail_on_exception
def _run(
    *,
    token: Any,
    mesh_location: Any,
    thread: Any,
    refs: Any,
    numbers: Any,
    program: operation.Ptx,
    delays: Delays,
) -> tuple[Any, ...]:
    """Runs a program in a warp, or in those of a warpgroup one after another in any order."""
    del mesh_location
    memory = gpu_callbacks._get_shared_memory()
    shared = vars(memory).setdefault("shared_words", Shared())
    given = [shared.address(memory, *blackwell_simulator._window(memory, *ref)) for ref in refs]
    given += [int(number) & 0xFFFFFFFF for number in numbers]
    chance = shared.chances.setdefault(thread, random.Random(f"{delays.seed} {thread}"))
    is_warp = isinstance(thread, shared_memory.Warp)
    warps = [thread.warp_id] if is_warp else chance.sample(range(WARPS), WARPS)
    found: list[int] = []
    for warp in warps:
        time.sleep(chance.choice(DELAYS))
        if delays.are_for(program, thread):
            blackwell_simulator.CROWD.come_late()
        words = Words(memory, shared, thread, is_last_warp=warp == warps[-1])
        found = warp_ptx.run_warp(program.text, program.results, words, given, warp)
    return token, *map(np.int32, found)
