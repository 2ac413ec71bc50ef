"""Computers without a GPU: their users see no traceback of libraries that only a GPU needs.

JAX's CUDA plugin, which the extra `aot` installs for its compiler, looks for CUDA's libraries when
JAX first looks for devices, and prints a traceback if there is no cuDNN. Without CUDA's driver no
GPU can be used, whatever there is of libraries. There, `import pallas_gemm` has the plugin skip
that check; where there is a driver, and where the user has said something, it changes nothing.
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
    """Has JAX's plugin skip its check; no use after JAX was asked for devices."""
    if not found():
        os.environ.setdefault(SKIPS_CHECK, "1")
