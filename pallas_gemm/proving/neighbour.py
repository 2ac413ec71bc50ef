"""A kernel of higher priority beside ours: each of its blocks wants a whole SM, and at once.

While it waits for one, launch control refuses to hand out clusters that have not started.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator

from pallas_gemm.computer import occupancy

BLOCKS = 1024
"""Of each kernel: more than there are SMs, so that every one is wanted."""

_NON_BLOCKING = 1


@contextlib.contextmanager
def beside(ordinal: int) -> Iterator[Callable[[], int]]:
    """Launches such kernels until the block is left; gives a function that counts them.

    Args:
        ordinal: Which GPU of this computer, as CUDA counts them.

    Raises:
        DriverError: The driver refused, or not one was launched.
    """
    stop, launched = threading.Event(), [0]
    errors: list[occupancy.DriverError] = []

    def work() -> None:
        try:
            _launch(ordinal, stop, launched)
        except occupancy.DriverError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield lambda: launched[0]
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]
    if not launched[0]:
        raise occupancy.DriverError("no kernel of higher priority was launched")


def _launch(ordinal: int, stop: threading.Event, launched: list[int]) -> None:
    driver = occupancy.Driver()
    device = driver.device(ordinal)
    shared_bytes = occupancy.shared_bytes_per_block(driver, device)
    grid = (ctypes.c_uint(BLOCKS), ctypes.c_uint(1), ctypes.c_uint(1))
    block = (ctypes.c_uint(occupancy.THREADS), ctypes.c_uint(1), ctypes.c_uint(1))
    with contextlib.ExitStack() as undo:
        undo.enter_context(occupancy.current(driver, device))
        kernel = undo.enter_context(occupancy.filling_kernel(driver, shared_bytes))
        least, greatest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        driver("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        flags = ctypes.c_uint(_NON_BLOCKING)
        driver("cuStreamCreateWithPriority", ctypes.byref(stream), flags, greatest)
        undo.callback(driver, "cuStreamDestroy_v2", stream)
        launch = (kernel, *grid, *block, ctypes.c_uint(shared_bytes), stream, None, None)
        while not stop.is_set():
            driver("cuLaunchKernel", *launch)
            driver("cuStreamSynchronize", stream)
            launched[0] += 1
