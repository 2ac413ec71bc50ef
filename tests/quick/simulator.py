"""Lets JAX's GPU simulator do the same in a quarter of the time, and a cluster copy together.

What the threads of a kernel run is evaluated with NumPy, and not compiled by every thread every
time; and what stands for an access of memory is handed NumPy arrays and numbers, of which it would
make them itself: stock JAX first puts each on a device.

That quick, it shows what stock JAX leaves out: of a multicast each CTA copies the whole for itself,
when it likes. On a GPU each sends a part to all, so that nobody has a step which another has not
begun. In clusters of 2 x 2 a CTA would otherwise overtake the one on its diagonal, whose neighbours
then free a slot twice. Here CTAs wait for each other before each copy that they share.
"""

import collections
import functools
import math
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax._src import callback as callbacks  # noqa: TID251 - here and below, what is slow is private
from jax._src.pallas.mosaic.interpret import thread_map, vector_clock  # noqa: TID251
from jax._src.pallas.mosaic_gpu.interpret import (  # noqa: TID251
    gpu_callbacks,
    jaxpr_interpret,
    shared_memory,
)

from tests.quick import numpy_programs, race_checks

KEPT_PROGRAMS = 16
"""Far more than one kernel has."""
OF_SIMULATOR = {gpu_callbacks.__name__, "tests.blackwell_simulator", __name__}
"""The modules whose functions compute with NumPy alone."""


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the slow parts for as long as the patch lasts."""
    monkeypatch.setattr(thread_map, "_run_jaxpr", _evaluated())
    monkeypatch.setattr(callbacks, "io_callback_impl", _of_numpy(callbacks.io_callback_impl))
    monkeypatch.setattr(vector_clock.NpVectorClock, "ordered", ordered)
    monkeypatch.setattr(vector_clock.NpVectorClock, "update", _update)
    race_checks.install(monkeypatch)
    monkeypatch.setattr(shared_memory, "_to_int", _number(shared_memory._to_int))
    memory = shared_memory.GPUSharedMemory
    monkeypatch.setattr(memory, "check_failed", _looked_at_first(memory.check_failed))
    request = shared_memory.HostAllocationRequest
    fields = functools.cache(vars(request)["shape_and_dtype"].__func__)
    monkeypatch.setattr(request, "shape_and_dtype", classmethod(fields))
    monkeypatch.setattr(request, "from_array", classmethod(_read_request))
    monkeypatch.setattr(gpu_callbacks, "_swap", _of_numbers(gpu_callbacks._swap))
    name = "_get_barrier_allocation_key_from_inval"
    stock_key = getattr(jaxpr_interpret, name)
    monkeypatch.setattr(
        jaxpr_interpret, name, lambda keys, *transforms: stock_key(Keys(keys), *transforms)
    )
    interpreter = jaxpr_interpret.JaxprInterpreter
    stock_copy = interpreter._interpret_copy_gmem_to_smem_p
    monkeypatch.setattr(
        interpreter,
        "_interpret_copy_gmem_to_smem_p",
        lambda self, eqn, token, get: stock_copy(self, eqn, _together(self, eqn, token), get),
    )


def ordered(clock: Any, other: Any) -> bool:
    """Whether one of two clocks is before the other, by numbers of Python: a few, every access."""
    own, others = clock.clock.tolist(), other.clock.tolist()
    if own == others:
        return False
    return all(map(operator.le, own, others)) or all(map(operator.ge, own, others))


def _update(clock: Any, other: Any) -> None:
    """Has a clock be no earlier than another, without an array between."""
    np.maximum(clock.clock, other.clock, out=clock.clock)


def _number(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that knows numbers of Python without asking what else they could be."""
    return lambda x: x if type(x) is int else stock(x)


def _looked_at_first(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns a function that takes no lock as long as no thread has failed."""

    def check(memory: Any) -> None:
        if memory._failure is not None:
            stock(memory)

    return check


class Keys:
    """The keys of barriers, of which one is taken without looking whether its number is negative.

    That, and to count from the end if it is, takes eight equations of each wait and arrival.
    """

    def __init__(self, keys: jax.Array) -> None:
        self._keys = keys
        self.shape, self.ndim = keys.shape, keys.ndim

    def __getitem__(self, index: tuple[Any, ...]) -> jax.Array:
        taken = self._keys
        for number in index:
            if isinstance(number, int):
                taken = lax.index_in_dim(taken, number, keepdims=False)
            else:
                taken = lax.dynamic_index_in_dim(
                    taken, number, keepdims=False, allow_negative_indices=False
                )
        return taken


def _read_request(cls: Any, request: np.ndarray) -> Any:
    """Returns the allocation that an array describes, by its fields in order."""
    shape = cls.shape_and_dtype().shape
    if request.shape != shape or request.dtype.kind != "i":
        raise ValueError(f"expected integers of shape {shape}: got {request!r}")
    return cls(**dict(zip(cls.__dataclass_fields__, request.tolist(), strict=True)))


def _evaluated() -> Callable[..., None]:
    """Returns a function that runs a thread's program with NumPy."""
    programs: dict[int, tuple[Any, numpy_programs.Program]] = {}
    lock = threading.Lock()

    def run(jaxpr: Any, consts: Any, *args: Any) -> None:
        with lock:
            if id(jaxpr) not in programs:
                # Beside the program its jaxpr, so that no other one gets its place in memory.
                programs[id(jaxpr)] = jaxpr, numpy_programs.Program(jaxpr)
                if len(programs) > KEPT_PROGRAMS:
                    del programs[next(iter(programs))]
            program = programs[id(jaxpr)][1]
        try:
            program(*map(np.asarray, (*consts, *args)))
        except Exception as error:
            # Callbacks tell by themselves. Of anything else nobody would know, and wait for ever.
            gpu_callbacks._get_shared_memory().set_failed(error, top_level=False)
            raise

    return run


def _of_numpy(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs the simulator's callbacks quickly, and others as they are."""

    def run(*args: Any, callback: Any, result_avals: Sequence[Any], **params: Any) -> Any:
        function = callback.callback_func
        while isinstance(function, functools.partial):
            function = function.func
        if function.__module__ not in OF_SIMULATOR:
            return stock(*args, callback=callback, result_avals=result_avals, **params)
        results = callback(*map(numpy_programs.plain, args))
        return [
            np.asarray(result, aval.dtype)
            for result, aval in zip(results, result_avals, strict=True)
        ]

    return run


def _of_numbers(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that stores a number of Python as what it was before: an int32."""

    def swap(*args: Any, **options: Any) -> Any:
        *where, value, mask = args
        value = np.int32(value) if isinstance(value, int) else value
        return stock(*where, value, mask, **options)

    return swap


def _together(self: Any, eqn: Any, token: Any) -> Any:
    """Waits, before a multicast, for those that share it."""
    axes = eqn.params["collective_axes"]
    if not axes or eqn.params["leader_tracked"] is not None:
        return token
    return callbacks.io_callback(
        functools.partial(
            _meet,
            # Along each axis of the cluster, how many share the copy.
            sharers=tuple(
                size if name in axes else 1
                for name, size in zip(self.mesh.cluster_names, self.mesh.cluster, strict=True)
            ),
        ),
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
    )


class Meetings:
    """How often each CTA has come to where those meet that share a copy."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._came: dict[Any, dict[Any, int]] = collections.defaultdict(dict)

    def come(self, where: Any, who: Any) -> int:
        """Notes that somebody has come; returns how often now."""
        with self._changed:
            came = self._came[where]
            came[who] = turn = came.get(who, 0) + 1
            self._changed.notify_all()
        return turn

    def have_come(self, where: Any, turn: int, sharers: int) -> bool:
        """Whether so many have come so often."""
        with self._changed:
            return sum(turns >= turn for turns in self._came[where].values()) >= sharers

    def wait(self, have_come: Callable[[], bool], check: Callable[[], Any]) -> None:
        """Waits until the others have come, for ever if one never does, unless a check fails."""
        with self._changed:
            while not have_come():
                check()
                self._changed.wait(0.1)


@gpu_callbacks.fail_on_exception
def _meet(*, token: Any, mesh_location: Any, thread: Any, sharers: tuple[int, ...]) -> Any:
    del thread
    memory, cta = gpu_callbacks._get_shared_memory(), mesh_location.block_coords
    # Kept with the memory, they are this simulation's; who comes first makes them.
    meetings = vars(memory).setdefault("meetings", Meetings())
    who = [at if size == 1 else None for at, size in zip(cta, sharers, strict=True)]
    role = mesh_location.thread_id, mesh_location.warp_id
    where = mesh_location.cluster_coords, *role, *who
    turn = meetings.come(where, cta)
    meetings.wait(
        functools.partial(meetings.have_come, where, turn, math.prod(sharers)), memory.check_failed
    )
    return token
