"""The real `Meter`: how long kernels take on this computer's GPU, as CUPTI reports it.

CUPTI, the profiling interface of CUDA, is reached through the extension that JAX ships for its own
profiler. It sees all kernels of the process. Only one program can listen to it: not under Nsight
Compute, Nsight Systems or compute-sanitizer.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from pallas_gemm.tuning.measure import Turn, Variant


class TimingError(RuntimeError):
    """The GPU cannot be measured, or what was read makes no sense."""


class KernelMeter:
    """Reads the time of every kernel of this process.

    Args:
        clock: Reads the clock of the multiprocessors, in Hz.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        from jax.experimental.mosaic.gpu import profiler

        if profiler.mosaic_gpu_lib is None:
            raise TimingError("this build of JAX has no CUPTI")
        # The public wrapper takes only functions under jit, runs each once more before it looks,
        # which would bring its operands into the cache, and keeps every result alive.
        self._cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # noqa: SLF001
        self._clock = clock

    def turn(self, variant: Variant, calls: int) -> Turn:
        """Runs `calls` calls in a row and reads the time of every kernel."""
        self._listen()
        try:
            start = time.perf_counter()
            done = launched(variant.launch, 0, calls)
            # The launches have returned, the kernels still run: this is the clock under load.
            clock_hz = self._clock() if self._clock else None
            variant.wait(done)
            wall = time.perf_counter() - start
        finally:
            # Detaching and attaching again would cost more than most turns.
            kernels = self._cupti._cupti_get_timings(False)  # noqa: SLF001
        return Turn(seconds_per_call(kernels, calls, variant.name), wall, clock_hz)

    def _listen(self) -> None:
        try:
            self._cupti._cupti_init()  # noqa: SLF001
        except RuntimeError as error:
            raise TimingError(
                f"CUPTI cannot be used, perhaps because a profiler is running ({error})"
            ) from error

    def joules(self, variant: Variant, seconds: float) -> float | None:  # noqa: ARG002 - no gauge
        """Returns None: reading energy takes more than CUPTI."""
        return None

    def pause(self, seconds: float) -> None:
        """Leaves the GPU alone."""
        time.sleep(seconds)


def seconds_per_call(
    kernels: Sequence[tuple[str, float]], calls: int, name: str
) -> tuple[float, ...]:
    """Shares kernels out to the calls that launched them.

    Args:
        kernels: Name and milliseconds of each kernel, as CUPTI lists them.
        calls: How many equal calls launched them.
        name: The name of the calls, for the message.

    Returns:
        The seconds of each call's kernels.

    Raises:
        TimingError: There are none, or the calls did not all launch the same kernels.
    """
    each, rest = divmod(len(kernels), calls)
    if rest or not each:
        raise TimingError(f"{name}: {calls} calls launched {len(kernels)} kernels")
    names = [kernel for kernel, _ in kernels]
    if any(names[i] != names[i % each] for i in range(len(names))):
        raise TimingError(f"{name}: its calls launched different kernels: {sorted(set(names))}")
    times = [milliseconds * 1e-3 for _, milliseconds in kernels]
    return tuple(sum(times[i * each : (i + 1) * each]) for i in range(calls))


def launched(launch: Callable[[int], Any], first: int, calls: int) -> Any:
    """Launches calls in a row and returns what the last of them can be waited for by.

    The results of the others are dropped as they come: ten of them would fill the memory.
    """
    done = None
    for i in range(first, first + calls):
        done = launch(i)
    return done
