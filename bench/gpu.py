"""The benchmark's `Meter`: kernel times from CUPTI, energy and clock from NVML."""

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

from bench.command import RequestError
from pallas_gemm.tuning.measure import Variant
from pallas_gemm.tuning.timing import KernelMeter, launched

MEMORY_SHARE = "0.6"
"""How much of the GPU's memory JAX may take; the rest is for the other libraries."""

POLL_SECONDS = 0.002
SETTLE_SECONDS = 0.1
"""How long energy is not looked at while the clock finds its level."""

CHUNK_SECONDS = 0.02
"""Calls are launched in stretches of this length, so that the queue never runs far ahead."""


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


def require() -> None:
    """Leaves memory to other libraries, and refuses to go on where nothing can be measured.

    Raises:
        RequestError: JAX finds no GPU.
    """
    prepare_environment()
    if reason := missing_gpu():
        raise RequestError(reason)


def known_name() -> str:
    """Returns the name of the first GPU as targets spell it; that of an H200 for others."""
    kind = jax.devices()[0].device_kind.lower()
    return next((name for name in ("h200", "h100", "b200") if name in kind), "h200")


class GpuMeter(KernelMeter):
    """Measures on the first GPU that JAX sees, its energy and clock where NVML is installed."""

    def __init__(self) -> None:
        self.gauge = Gauge.found()
        super().__init__(self.gauge.clock_hz if self.gauge else None)

    def joules(self, variant: Variant, seconds: float) -> float | None:
        """Runs calls in a row for a while: mean power, times how long one call takes."""
        if self.gauge is None:
            return None
        variant.wait(variant.launch(0))
        start = time.perf_counter()
        variant.wait(variant.launch(0))
        chunk = max(1, int(CHUNK_SECONDS / (time.perf_counter() - start)))
        with self.gauge.watch() as samples:
            start = time.perf_counter()
            calls = 0
            while (elapsed := time.perf_counter() - start) < seconds + SETTLE_SECONDS:
                variant.wait(launched(variant.launch, calls, chunk))
                calls += chunk
        watts = watts_between_steps(samples, start + SETTLE_SECONDS)
        return None if watts is None else watts * elapsed / calls


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
