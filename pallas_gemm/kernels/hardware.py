"""Numbers of the hardware that the kernels are written for, whatever they compute."""

WARPGROUP_THREADS = 128
"""Threads that one role has, and that share what it holds in registers."""
LANES = 32
"""Threads of a warp."""
WARPS = 4
"""Warps of a warpgroup."""
MAX_REGISTERS = 255
"""Registers that a thread can have at all."""
MAX_BARRIERS = 32
"""The most barriers that Mosaic allows in one array."""
WGMMA_ROWS = 64
"""Rows of one WGMMA."""
WGMMA_BYTES = 32
"""Bytes of contracted elements of one WGMMA."""
WGMMA_DEPTH = WGMMA_BYTES // 2
"""Contracted elements of 16 bits of one WGMMA."""
WGMMA_COLUMNS = 8
"""The columns of a WGMMA are a multiple of this."""
