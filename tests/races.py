"""Whether any kernel of a program raced: the simulator keeps the races of the last one alone."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # noqa: TID251 - no other way


@contextlib.contextmanager
def recorded() -> Iterator[Callable[[], bool]]:
    """Returns a function that says whether a kernel has raced since; forgets it all in the end."""
    stock, kernels = gpu_callbacks.GPURaceDetectionState, []

    def begin(*args: Any, **kwargs: Any) -> Any:
        # From JAX 0.12 on, a race ends its kernel unless another is asked for.
        warning = {"on_race": "warn"} if "on_race" in kwargs else {}
        kernels.append(stock(*args, **(kwargs | warning)))
        return kernels[-1]

    gpu_callbacks.GPURaceDetectionState = begin  # type: ignore[misc]
    try:
        yield lambda: any(kernel.races_found for kernel in kernels)
    finally:
        gpu_callbacks.GPURaceDetectionState = stock  # type: ignore[misc]
        gpu_callbacks.reset_gpu_interpret_mode_state()
