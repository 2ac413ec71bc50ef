"""Fetches scales and vectors into the L1 before the consumers load them: the L2 is far away.

    scales of blocks               one warp does it for all that the consumers load in a step
    vectors of an epilogue         each consumer does it for its own tile, before it adds up

A fetch has no result: the simulator does nothing.
"""

from typing import Any

from pallas_gemm.device import LINE_BYTES
from pallas_gemm.kernels.hardware import LANES, WARPGROUP_THREADS
from pallas_gemm.kernels.ptx.operation import Operation, Ptx, nothing


@Operation
def rows(scales: Any, first: Any, block: Any, *, count: int, each: int) -> None:
    """Fetches the scales of some rows, and of the blocks of k whose scales lie in the same sector.

    Args:
        scales: The scales, `[rows, blocks]`.
        first: The first row.
        block: The block of k.
        count: How many rows.
        each: The rows that a scale is of.
    """
    (lines, length), size = scales.shape, scales.dtype.itemsize
    text = [
        "{ .reg .u32 own, row; .reg .b64 at; mov.u32 own, %laneid;",
        f"div.u32 row, $1, {each}; add.u32 own, own, row;",
    ]
    for start in range(0, -(-count // each), LANES):
        text.append(
            f"add.u32 row, own, {start}; min.u32 row, row, {lines - 1};"
            f" mad.wide.u32 at, row, {length * size}, $0; mad.wide.u32 at, $2, {size}, at;"
            " prefetch.global.L1 [at];"
        )
    Ptx(" ".join([*text, "}"]))([scales], [first, block])


@Operation
def columns(scales: Any, first: Any, block: Any, *, count: int, each: int) -> None:
    """Fetches the scales of some columns.

    Args:
        scales: The scales, `[blocks, columns]`.
        first: The first column.
        block: The block of k.
        count: How many columns.
        each: The columns that a scale is of.
    """
    length, size = scales.shape[1], scales.dtype.itemsize
    text = (
        "{ .reg .pred inside; .reg .u32 own, column; .reg .b64 at; mov.u32 own, %laneid;"
        f" mul.lo.u32 own, own, {LINE_BYTES // size}; setp.lt.u32 inside, own, {-(-count // each)};"
        f" div.u32 column, $1, {each}; add.u32 column, column, own;"
        f" min.u32 column, column, {length - 1};"
        f" mad.wide.u32 at, $2, {length * size}, $0; mad.wide.u32 at, column, {size}, at;"
        " @inside prefetch.global.L1 [at]; }"
    )
    Ptx(text)([scales], [first, block])


@Operation
def vector(values: Any, first: Any, *, count: int) -> None:
    """Fetches some values of a vector: each thread of a warpgroup one line of the cache.

    Args:
        values: The vector.
        first: The first value.
        count: How many values.
    """
    (length,), size = values.shape, values.dtype.itemsize
    each = LINE_BYTES // size
    # One line more than they fill: the first value may lie within a line.
    lines = -(-count // each) + 1
    text = (
        "{ .reg .pred inside; .reg .u32 own, value; .reg .b64 at; mov.u32 own, %tid.x;"
        f" and.b32 own, own, {WARPGROUP_THREADS - 1}; setp.lt.u32 inside, own, {lines};"
        f" mad.lo.u32 value, own, {each}, $1; min.u32 value, value, {length - 1};"
        f" mad.wide.u32 at, value, {size}, $0; @inside prefetch.global.L1 [at]; }}"
    )
    Ptx(text)([values], [first])


for _operation in (rows, columns, vector):
    _operation.meaning(nothing)
