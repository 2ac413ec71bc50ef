"""A block of global memory that a warp copies, maybe to another device. Nothing simulated does."""

from pallas_gemm.kernels.ptx.operation import Ptx
from pallas_gemm.kernels.traced import Ref

BLOCK_BYTES = 2048
"""What a warp copies at once: four times 16 bytes for each lane."""

_PARTS = range(4)
_COPY = "\n".join(
    (
        "{ .reg .u32 lane; .reg .u64 first, from, to;",
        *(f".reg .u32 {', '.join(f'x{part}{word}' for word in range(4))};" for part in _PARTS),
        "mov.u32 lane, %laneid; mul.wide.u32 first, lane, 16;",
        "add.u64 from, first, $0; add.u64 to, first, $1;",
        *(
            f"ld.global.v4.u32 {{x{part}0, x{part}1, x{part}2, x{part}3}}, [from+{512 * part}];"
            for part in _PARTS
        ),
        *(
            f"st.global.v4.u32 [to+{512 * part}], {{x{part}0, x{part}1, x{part}2, x{part}3}};"
            for part in _PARTS
        ),
        "}",
    )
)


COPY = Ptx(_COPY)


def copy(source: Ref, target: Ref) -> None:
    """Copies a block."""
    COPY([source, target])
