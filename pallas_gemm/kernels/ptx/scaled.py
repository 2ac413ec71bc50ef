"""The sum of a block, scaled and added: WGMMAs into fresh registers, then an operation per element.

The tensor cores add up what is in a block. The sums over blocks are float32's own.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.mosaic.gpu.mma_utils import create_descriptor
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, llvm, math, memref, vector

from pallas_gemm.kernels import smem
from pallas_gemm.kernels.hardware import WGMMA_ROWS
from pallas_gemm.kernels.ptx import turns
from pallas_gemm.kernels.ptx.operation import NUMBER, REF, Operation, emit, number_in, word_of
from pallas_gemm.kernels.ptx.sums import LAYOUT, array_of, registers_of
from pallas_gemm.kernels.smem import ATOM_BYTES
from pallas_gemm.kernels.traced import Values

ROWS, COLUMNS = LAYOUT.reduce(1), LAYOUT.reduce(0)
ATOMS = WGMMA_ROWS // smem.ATOM_ROWS
DEPTH_BYTES = 32
"""Bytes of k that one WGMMA takes."""


@Operation
def load(
    scales: Any, first: Any, block: Any, *, count: int, each: int, left: bool, clipped: bool
) -> Any:
    """Starts to load the scales of some rows or columns into the registers that need them.

    Args:
        scales: The scales of the left factor, `[rows, blocks]`; of the right, `[blocks, columns]`.
        first: The first row or column.
        block: The block of k.
        count: How many rows or columns.
        each: The rows or columns that a scale is of.
        left: They are rows.
        clipped: Some of them may be beyond the last one.
    """
    layout = ROWS if left else COLUMNS
    out = plgpu.ShapeDtypeStruct((count,), jnp.dtype(jnp.float32), layout=layout)

    @plgpu.inline_mgpu(arg_types=(REF, NUMBER, NUMBER), return_type=out)
    def inline(_: Any, scales: Any, first: Any, block: Any) -> Any:
        index = utils.ir.IndexType.get()
        own: Any = layout.to_mgpu()
        first, block = (arith.index_cast(index, word_of(x)) for x in (first, block))
        last = utils.c(utils.ir.MemRefType(scales.type).shape[0 if left else 1] - 1, index)
        kind = utils.ir.VectorType.get((own.vector_length,), utils.ir.F32Type.get())
        registers = np.empty(own.registers_shape((count,)), dtype=object)
        places = zip(np.ndindex(registers.shape), own.thread_idxs((count,)), strict=True)
        for place, (start,) in places:
            value = llvm.mlir_undef(kind)
            for i in range(own.vector_length):
                at = arith.addi(arith.addi(first, start), utils.c(i, index))
                at = at if each == 1 else arith.divui(at, utils.c(each, index))
                at = arith.minui(at, last) if clipped else at
                one = memref.load(scales, [at, block] if left else [block, at])
                value = vector.insert(one, value, dynamic_position=[], static_position=[i])
            registers[place] = value
        return fragmented_array.FragmentedArray(_registers=registers, _layout=own, _is_signed=None)

    return inline(scales, first, block)


@load.meaning
def _(
    scales: Any, first: Any, block: Any, *, count: int, each: int, left: bool, clipped: bool
) -> Any:
    del clipped
    # The simulator has no load of what is apart: all of one block, of which some are taken.
    every = scales[:, block] if left else scales[block]
    return jnp.take(every, jnp.minimum((first + jnp.arange(count)) // each, len(every) - 1))


@Operation
def meet() -> None:
    """Lets a warpgroup see what its threads have stored in shared memory."""

    @plgpu.inline_mgpu()
    def inline(_: Any) -> None:
        utils.warpgroup_barrier()

    inline()


@meet.meaning
def _() -> None:
    plgpu.commit_smem()


class Staged(NamedTuple):
    """Scales of columns are taken from shared memory.

    Attributes:
        early: Before the products that they scale are made.
    """

    early: bool


class Block(NamedTuple):
    """A block of a step, and its scales.

    Attributes:
        depth: Its contracted elements.
        rows: The scale of each row, or None.
        columns: The scale of each part's columns, a number or one for each; or ().
        staged: They are references to shared memory; else None.
    """

    depth: slice
    rows: Any
    columns: tuple[Any, ...]
    staged: Staged | None = None

    @property
    def operands(self) -> list[tuple[Any, Any]]:
        """The scales, and how each lies in registers."""
        found = [] if self.rows is None else [(self.rows, ROWS)]
        kinds: list[Any] = [REF] * len(self.columns)
        if self.staged is None:
            kinds = [COLUMNS if jnp.ndim(own) else NUMBER for own in self.columns]
        return found + list(zip(self.columns, kinds, strict=True))

    def within(self, operands: Iterator[Any]) -> "Block":
        """Returns it with what these became."""
        rows = None if self.rows is None else next(operands)
        return self._replace(rows=rows, columns=tuple(next(operands) for _ in self.columns))


@Operation
def add_step(
    total: Values,
    before: Values | None,
    turn: turns.Turn | None,
    a: Any,
    b: Sequence[Any],
    blocks: Sequence[Block],
) -> Any:
    """Adds the scaled products of a step's blocks, one after the other, and waits for each.

    Returns the sum, and the last product, whose registers the next step may take again. Else the
    assembler would start that while they are in use, and have too few.

    Args:
        total: The sum.
        before: The last product of the step before, if it is taken again.
        turn: The warpgroup's turn to issue WGMMAs, if warpgroups take turns.
        a: The left operand; it has the rows of the sum.
        b: Parts of the right operand, whose columns are those of the sum.
        blocks: The blocks.
    """
    refs = [plgpu.RefType(smem.tile_transforms(ATOM_BYTES, ref.dtype)) for ref in (a, *b)]
    given = [pair for block in blocks for pair in block.operands]
    spare, numbers = (() if x is None else (x,) for x in (before, turn and turn.me))
    types = (LAYOUT, *(LAYOUT for _ in spare), *(NUMBER for _ in numbers), *refs)
    shapes = (total.shape, (WGMMA_ROWS, b[0].shape[0]))
    out = [plgpu.ShapeDtypeStruct(shape, total.dtype, layout=LAYOUT) for shape in shapes]

    @plgpu.inline_mgpu(arg_types=(*types, *(kind for _, kind in given)), return_type=out)
    def inline(_: Any, total: Values, *others: Any) -> Any:
        left = iter(others)
        registers = [x for _ in spare for x in registers_of(next(left)).flat]
        registers = [number_in(x) for x in registers]
        own = turn and turn._replace(me=word_of(next(left)))
        a, parts = next(left), [next(left) for _ in b]
        sums = registers_of(total).copy()
        for block in blocks:
            registers = _add(sums, a, parts, block.within(left), registers, own)
        one = utils.ir.VectorType.get((1,), utils.ir.F32Type.get())
        product = np.array([vector.broadcast(one, x) for x in registers], dtype=object)
        product = product.reshape((1, shapes[1][1] // 8, *sums.shape[2:]))
        return [array_of(sums), array_of(product)]

    return inline(total, *spare, *numbers, a, *b, *(x for x, _ in given))


@add_step.meaning
def _(
    total: Values,
    before: Values | None,
    turn: turns.Turn | None,
    a: Any,
    b: Sequence[Any],
    blocks: Sequence[Block],
) -> Any:
    del before, turn
    for block in blocks:
        products = [_simulated(total, a, part, block, i) for i, part in enumerate(b)]
        total = total + jnp.concatenate(products, axis=1)
    return total, None


def _simulated(total: Values, a: Any, part: Any, block: Block, number: int) -> Any:
    """Returns the scaled product of a block and a part of its columns."""

    def product(acc: Any) -> Any:
        right = part.at[:, block.depth].transpose((1, 0))
        plgpu.wgmma(acc, a.at[:, block.depth], right)
        return acc[...]

    count = part.shape[0]
    scale: Any = jnp.float32(1)
    if block.rows is not None:
        scale = block.rows[:, None]
    if block.columns:
        own = block.columns[number]
        own = own if block.staged is None else own[...]
        scale = scale * (own[None] if jnp.ndim(own) else own)
    return scale * pl.run_scoped(product, plgpu.ACC((total.shape[0], count), total.dtype))


def _add(
    sums: Any,
    a: Any,
    parts: Sequence[Any],
    block: Block,
    registers: Sequence[Any],
    turn: turns.Turn | None,
) -> Any:
    """Adds the scaled products of a block. Returns the registers in which the last one was."""
    start = 0
    for number, part in enumerate(parts):
        width = smem.ATOM_ROWS * utils.ir.MemRefType(part.type).shape[0]
        scale = block.columns[number] if block.columns else None
        for panel in range(len(sums)):
            left = utils.memref_slice(a, slice(panel * ATOMS, (panel + 1) * ATOMS))
            row = None if block.rows is None else _of_panel(block.rows, panel)
            of_columns = _of_columns(scale, width) if block.staged and block.staged.early else None
            registers = _product(left, part, width, block.depth, registers, turn)
            mine = sums[panel : panel + 1, start // 8 : (start + width) // 8]
            if of_columns is None and scale is not None:
                of_columns = _of_columns(scale, width)
            mine[...] = _added(mine, registers, row, of_columns)
        start += width
    return registers


def _of_columns(scale: Any, width: int) -> Any:
    """The scale of all columns, or two for each 8: those of a thread's columns."""
    if isinstance(scale, fragmented_array.FragmentedArray):
        return scale.registers.reshape(-1) if scale.shape else word_of(scale)
    index = utils.ir.IndexType.get()
    kind = utils.ir.VectorType.get((2,), utils.ir.F32Type.get())
    thread = arith.index_cast(index, utils.thread_idx())
    first = arith.muli(arith.remui(thread, utils.c(4, index)), utils.c(2, index))
    found = np.empty(width // 8, dtype=object)
    for group in range(len(found)):
        value = llvm.mlir_undef(kind)
        for i in range(2):
            one = memref.load(scale, [arith.addi(first, utils.c(8 * group + i, index))])
            value = vector.insert(one, value, dynamic_position=[], static_position=[i])
        found[group] = value
    return found


def _of_panel(rows: Any, panel: int) -> list[Any]:
    """The scales of a thread's two rows of a panel of 64."""
    each = rows.registers.reshape(-1, 2)[panel]
    return [number_in(x) for x in each]


def _product(
    left: Any,
    right: Any,
    columns: int,
    depth: slice,
    before: Sequence[Any],
    turn: turns.Turn | None,
) -> list[Any]:
    """Issues the WGMMAs of a block into fresh registers, and waits for them.

    Args:
        left: The left operand.
        right: The right operand.
        columns: How many there are of it.
        depth: Which contracted elements.
        before: The registers of the product before, which are taken again. Else the assembler would
            start this one while those are in use, and have too few.
        turn: See `add_step`.
    """
    types = [utils.ir.MemRefType(x.type).element_type for x in (left, right)]
    whole = ATOM_BYTES // utils.bytewidth(types[0])
    (a, (_, a_strides)), _, _ = create_descriptor(
        left, group_size=(WGMMA_ROWS, whole), logical_k_major=False, swizzle=ATOM_BYTES
    )
    turned = utils.memref_transpose(right, (1, 0, 3, 2))
    (b, (_, b_strides)), _, _ = create_descriptor(
        turned, group_size=(whole, columns), logical_k_major=True, swizzle=ATOM_BYTES
    )
    each = DEPTH_BYTES // utils.bytewidth(types[0])
    steps = range(depth.start // each, depth.stop // each)
    offsets = [(i * a_strides[-1], i * b_strides[-1]) for i in steps]
    text = _text(columns, offsets, types, len(before), in_turns=turn is not None)
    waits = turn.barriers if turn else ()
    constraints = [*map(str, range(len(before))), "l", "l", *["r"] * len(waits)]
    return list(emit(text, [*before, a, b, *waits], constraints, columns // 2))


def _text(columns: int, offsets: Any, types: Any, before: int, *, in_turns: bool) -> str:
    """The WGMMAs of a block, and the wait for them: one text, of whose results nothing is early.

    The first half of them is a group of its own: when that has ended, the next turn begins.
    """
    count = columns // 2
    a, b, wait, give = (f"${count + before + i}" for i in range(4))
    registers = "{" + ",".join(f"${i}" for i in range(count)) + "}"
    names = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2"}
    kinds = ".".join(names[str(x)] for x in types)
    commit = "wgmma.commit_group.sync.aligned;"
    each = [
        f"setp.ne.b32 p, {int(number > 0)}, 0;"
        f" add.s64 a, {a}, {left >> 4}; add.s64 b, {b}, {right >> 4};"
        f" wgmma.mma_async.sync.aligned.m64n{columns}k{DEPTH_BYTES}.f32.{kinds}"
        f" {registers}, a, b, p, 1, 1;"
        for number, (left, right) in enumerate(offsets)
    ]
    half = len(each) // 2
    lines = ["wgmma.fence.sync.aligned;", *each[:half], commit, *each[half:], commit]
    if in_turns:
        lines = [turns.wait(wait), *lines]
        lines += ["wgmma.wait_group.sync.aligned 1;"] if half else []
        lines.append(turns.arrive(give))
    lines.append("wgmma.wait_group.sync.aligned 0;")
    return " ".join(["{ .reg .pred p; .reg .b64 a, b;", *lines, "}"])


def _added(own: Any, products: list[Any], row: Any, scale: Any) -> Any:
    """Scales products and adds them to registers of a sum: of a panel and some columns."""
    found = np.empty(own.shape, dtype=object)
    of_columns = scale if isinstance(scale, np.ndarray) else None
    one, factors = (scale if of_columns is None else None), row
    if one is not None:
        factors = [one, one] if row is None else [arith.mulf(x, one) for x in row]
    f32 = utils.ir.VectorType.get((1,), utils.ir.F32Type.get())
    flat = own.reshape(-1, 2, 2)
    results = found.reshape(-1, 2, 2)
    for group, half, i in np.ndindex(flat.shape):
        factor = None if factors is None else factors[half]
        if of_columns is not None:
            x = number_in(of_columns[group], i)
            factor = x if factor is None else arith.mulf(factor, x)
        before = number_in(flat[group, half, i])
        x = products[4 * group + 2 * half + i]
        x = arith.addf(before, x) if factor is None else math.fma(x, factor, before)
        results[group, half, i] = vector.broadcast(f32, x)
    return results.reshape(own.shape)
