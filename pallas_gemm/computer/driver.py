"""Programs for computers without a GPU: what they need not be told.

Where JAX first looks for devices, its CUDA plugin, which the extra `aot` installs for its compiler,
looks for CUDA's libraries, and prints a traceback if there is no cuDNN. Without CUDA's driver no
GPU could be used, whatever there is of libraries, so that programs skip that check. The library
itself changes nothing for whoever imports it.
"""

import ctypes
import os

from pallas_gemm.computer import occupancy

SKIPS_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
"""The variable by which JAX's plugin is told to skip it."""


def found() -> bool:
    """Whether this computer has CUDA's driver."""
    try:
        ctypes.CDLL(occupancy.LIBRARY)
    except OSError:
        return False
    return True


def skip_check_without_driver() -> None:
    """Call it before JAX is asked for devices."""
    if not found():
        os.environ.setdefault(SKIPS_CHECK, "1")
