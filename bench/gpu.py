"""The real `Meter`: kernel times from CUPTI, energy and clock from NVML.

CUPTI, the profiling interface of CUDA, is reached through the extension that JAX ships for its own
profiler; it sees the kernels of the whole process, so that those of other libraries are timed in
the same way.
"""

import contextlib
import importlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from bench.measure import Turn, Variant

MEMORY_SHARE = "0.6"
"""How much of the GPU's memory JAX may take; the rest is for the other libraries."""

POLL_SECONDS = 0.002
SETTLE_SECONDS = 0.1
"""How long energy is not looked at while the clock finds its level."""

CHUNK_SECONDS = 0.02
"""Calls are launched in stretches of this length, so that the queue never runs far ahead."""


class MeterError(RuntimeError):
    """The GPU cannot be measured, or what was read makes no sense."""


def prepare_environment() -> None:
    """Leaves memory to other libraries; must run before JAX first asks for a device."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_SHARE)
    # Otherwise the message of a compilation that took long would tear the table.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def missing_gpu() -> str | None:
    """Returns why nothing can be measured here, or None."""
    logger = logging.getLogger("jax")
    level = logger.level
    # A plugin without its libraries is reported with a traceback; here one line says it all.
    logger.setLevel(logging.CRITICAL)
    try:
        platform = jax.default_backend()
    except RuntimeError as error:
        return f"JAX finds no device: {str(error).splitlines()[0]}"
    finally:
        logger.setLevel(level)
    if platform != "gpu":
        return (
            f"this needs an NVIDIA GPU, but JAX's default backend is {platform!r}"
            " (python -c 'import jax; jax.devices()' says why)"
        )
    return None


class GpuMeter:
    """Measures on the first GPU that JAX sees."""

    def __init__(self) -> None:
        from jax.experimental.mosaic.gpu import profiler

        if profiler.mosaic_gpu_lib is None:
            raise MeterError("this build of JAX has no CUPTI")
        # The public wrapper takes only functions under jit, and keeps every result alive.
        self._cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # noqa: SLF001
        self._gauge = Gauge.found()

    @property
    def gauge(self) -> "Gauge | None":
        """Energy and clock, where NVML is installed."""
        return self._gauge

    def turn(self, variant: Variant, calls: int) -> Turn:
        """Runs `calls` calls in a row and reads the time of every kernel."""
        self._cupti._cupti_init()  # noqa: SLF001
        try:
            start = time.perf_counter()
            done = _launch(variant, 0, calls)
            # The launches have returned, the kernels still run: this is the clock under load.
            clock = self._gauge.clock_hz() if self._gauge else None
            variant.wait(done)
            wall = time.perf_counter() - start
        finally:
            # Detaching and attaching again would cost more than most turns.
            kernels = self._cupti._cupti_get_timings(False)  # noqa: SLF001
        return Turn(seconds_per_call(kernels, calls, variant.name), wall, clock)

    def joules(self, variant: Variant, seconds: float) -> float | None:
        """Runs calls in a row for a while: mean power, times how long one call takes."""
        if self._gauge is None:
            return None
        variant.wait(variant.launch(0))
        start = time.perf_counter()
        variant.wait(variant.launch(0))
        chunk = max(1, int(CHUNK_SECONDS / (time.perf_counter() - start)))
        with self._gauge.watch() as samples:
            start = time.perf_counter()
            calls = 0
            while (elapsed := time.perf_counter() - start) < seconds + SETTLE_SECONDS:
                variant.wait(_launch(variant, calls, chunk))
                calls += chunk
        watts = watts_between_steps(samples, start + SETTLE_SECONDS)
        return None if watts is None else watts * elapsed / calls

    def pause(self, seconds: float) -> None:
        """Leaves the GPU alone."""
        time.sleep(seconds)


class Gauge:
    """Energy and clock of one GPU through NVML."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def found(cls) -> "Gauge | None":
        """Returns the gauge of the GPU that JAX uses, or None where NVML cannot be asked."""
        try:
            pynvml: Any = importlib.import_module("pynvml")
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
            if visible.isdigit():
                handle = pynvml.nvmlDeviceGetHandleByIndex(int(visible))
            else:
                handle = pynvml.nvmlDeviceGetHandleByUUID(visible)
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except pynvml.NVMLError:
            return None
        return cls(pynvml, handle)

    def clock_hz(self) -> float:
        """Returns the clock of the multiprocessors now."""
        return self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM) * 1e6

    def energy(self) -> float:
        """Returns the joules used since the driver was loaded."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) * 1e-3

    def driver(self) -> str:
        """Returns the version of the driver."""
        return str(self._nvml.nvmlSystemGetDriverVersion())

    def power_limit(self) -> float:
        """Returns the power, in watts, that the GPU keeps within."""
        return self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) * 1e-3

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[tuple[float, float]]]:
        """Collects (time, energy) in the background until the block is left."""
        samples: list[tuple[float, float]] = []
        stop = threading.Event()

        def collect() -> None:
            while not stop.wait(POLL_SECONDS):
                energy = self.energy()
                samples.append((time.perf_counter(), energy))

        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        try:
            yield samples
        finally:
            stop.set()
            thread.join()


def watts_between_steps(samples: Sequence[tuple[float, float]], since: float) -> float | None:
    """Returns the mean power between the first and the last step of the energy counter.

    The counter stands still and then jumps, so only the times of its jumps mean anything.

    Args:
        samples: (time, energy) in the order in which they were read.
        since: Earlier samples are left out.

    Returns:
        Watts, or None if the counter moved less than twice.
    """
    late = [sample for sample in samples if sample[0] >= since]
    steps = [after for before, after in itertools.pairwise(late) if after[1] != before[1]]
    if len(steps) < 2:
        return None
    (first_time, first_energy), (last_time, last_energy) = steps[0], steps[-1]
    return (last_energy - first_energy) / (last_time - first_time)


def seconds_per_call(
    kernels: Sequence[tuple[str, float]], calls: int, name: str
) -> tuple[float, ...]:
    """Shares kernels out to the calls that launched them.

    Args:
        kernels: Name and milliseconds of each kernel, as CUPTI lists them.
        calls: How many equal calls launched them.
        name: Whose calls they were, for the message.

    Returns:
        The seconds of each call's kernels.

    Raises:
        MeterError: There are none, or the calls did not all launch the same kernels.
    """
    each, rest = divmod(len(kernels), calls)
    if rest or not each:
        raise MeterError(f"{name}: {calls} calls launched {len(kernels)} kernels")
    names = [kernel for kernel, _ in kernels]
    if any(names[i] != names[i % each] for i in range(len(names))):
        raise MeterError(f"{name}: its calls launched different kernels: {sorted(set(names))}")
    times = [milliseconds * 1e-3 for _, milliseconds in kernels]
    return tuple(sum(times[i * each : (i + 1) * each]) for i in range(calls))


def _launch(variant: Variant, first: int, calls: int) -> Any:
    done = None
    for i in range(first, first + calls):
        # The result of the call before is dropped here: ten of them would fill the memory.
        done = variant.launch(i)
    return done
