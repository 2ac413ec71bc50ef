"""Arrays in registers: taken apart, and stored and loaded where Pallas would arrange them anew."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith, memref

from pallas_gemm.kernels import smem
from pallas_gemm.kernels.ptx.operation import (
    NUMBER,
    REF,
    Operation,
    as_it_is,
    assigned,
    number_in,
    word_of,
)
from pallas_gemm.kernels.traced import Ref, Values

Place = tuple[slice, slice]

BLOCK_BYTES = 16
"""Bytes of a row of a block, in which a warp stores sums."""


@Operation
def taken_apart(values: Values, places: Sequence[Place], layout: Any) -> list[Any]:
    """Returns parts of what is in registers.

    JAX finds out together how all that comes of a slice lies in registers, and prints each of these
    operations. It knows how parts taken in this way lie. A kernel with gelu is lowered in half the
    time, to the same machine code.
    """
    shapes = [tuple(part.stop - part.start for part in place) for place in places]
    types = [plgpu.ShapeDtypeStruct(shape, values.dtype, layout=layout) for shape in shapes]

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=types)
    def inline(_: Any, values: Values) -> list[Any]:
        return [values[place] for place in places]

    return inline(values)


@taken_apart.meaning
def _(values: Values, places: Sequence[Place], layout: Any) -> list[Any]:
    del layout
    return [values[place] for place in places]


@Operation
def repeated(vector: Ref, shape: tuple[int, int], axis: int, layout: Any) -> Any:
    """Loads a vector along an axis of a strip, the same values along the other one.

    JAX tries layouts for what it loads and for what it repeats, one after the other. Here it knows
    both: the kernels of a loss are lowered in half the time, to the same machine code.
    """
    out = plgpu.ShapeDtypeStruct(shape, vector.dtype, layout=layout)
    # The layout that a sum over the other axis would have.
    own, signed = layout.reduce(1 - axis).to_mgpu(), _signed(vector.dtype)

    @plgpu.inline_mgpu(arg_types=(REF,), return_type=out)
    def inline(_: Any, vector: Ref) -> Any:
        values = mgpu.FragmentedArray.load_untiled(
            vector, is_signed=signed, layout=own, optimized=False
        )
        return values.broadcast_in_dim(shape, (axis,), layout.to_mgpu())

    return inline(vector)


@repeated.meaning
def _(vector: Ref, shape: tuple[int, int], axis: int, layout: Any) -> Any:
    values = plgpu.load(vector, layout=layout.reduce(1 - axis), optimized=False)
    return lax.broadcast_in_dim(values, shape, (axis,))


@Operation
def counted(dtype: Any, shape: tuple[int, int], axis: int, layout: Any) -> Any:
    """Counts along an axis of a strip, from 0 on."""
    out = plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)
    signed = _signed(dtype)

    @plgpu.inline_mgpu(return_type=out)
    def inline(_: Any) -> Any:
        return mgpu.FragmentedArray.broadcasted_iota(
            utils.dtype_to_ir_type(jnp.dtype(dtype)),
            shape,
            axis,
            layout.to_mgpu(),
            is_signed=signed,
        )

    return inline()


@counted.meaning
def _(dtype: Any, shape: tuple[int, int], axis: int, layout: Any) -> Any:
    return plgpu.broadcasted_iota(dtype, shape, axis, layout=layout)


@Operation
def write_blocks(blocks: Any, values: Values, layout: Any) -> None:
    """Stores values in blocks, each of which a warp stores at once."""

    @plgpu.inline_mgpu(arg_types=(REF, layout))
    def inline(_: Any, blocks: Any, values: Values) -> None:
        values.store_tiled(blocks, swizzle=BLOCK_BYTES, optimized=False)

    inline(blocks, values)


write_blocks.meaning(assigned)


@Operation
def read_blocks(blocks: Any, dtype: Any, layout: Any) -> Any:
    """Loads what `write_blocks` stored."""
    down, along, rows, cols = blocks.shape
    out = plgpu.ShapeDtypeStruct((down * rows, along * cols), dtype, layout=layout)
    signed = _signed(dtype)

    @plgpu.inline_mgpu(arg_types=(REF,), return_type=out)
    def inline(_: Any, blocks: Any) -> Any:
        return mgpu.FragmentedArray.load_tiled(
            blocks, swizzle=BLOCK_BYTES, is_signed=signed, layout=layout.to_mgpu(), optimized=False
        )

    return inline(blocks)


@read_blocks.meaning
def _(blocks: Any, dtype: Any, layout: Any) -> Any:
    del dtype
    return plgpu.load(blocks, layout=layout, optimized=False)


@Operation
def write_lines(slot: Ref, values: Values, *, transposed: bool) -> None:
    """Writes a chunk to shared memory, `[length, lines]` if it is transposed.

    An assignment would choose an arrangement of the slot that knows no distance between lines.
    """

    @plgpu.inline_mgpu(arg_types=(REF, plgpu.Layout.WGMMA))
    def inline(_: Any, slot: Ref, values: Values) -> None:
        target = mgpu.memref_transpose(slot, (1, 0)) if transposed else slot
        values.store_untiled(target, optimized=False)

    inline(slot, values)


@write_lines.meaning
def _(slot: Ref, values: Values, *, transposed: bool) -> None:
    target = slot.transpose((1, 0)) if transposed else slot
    target[...] = values


@Operation
def copy(source: Ref, target: Ref, layout: mgpu.TiledLayout) -> None:
    """Copies from shared to global memory, in however small pieces.

    An assignment to global memory is refused for small ones by some releases, and means no more.
    """
    signed = _signed(target.dtype)

    @plgpu.inline_mgpu(arg_types=(REF, REF))
    def inline(_: Any, source: Ref, target: Ref) -> None:
        values = mgpu.FragmentedArray.load_untiled(
            source, is_signed=signed, layout=layout, optimized=False
        )
        values.store_untiled(target, optimized=False)

    inline(source, target)


@copy.meaning
def _(source: Ref, target: Ref, layout: mgpu.TiledLayout) -> None:
    del layout
    target[...] = source[...]


@Operation
def store_if(made: Any, box: Ref, target: Ref, **options: Any) -> None:
    """Starts a store of TMA, or none."""
    plgpu.copy_smem_to_gmem(box, target, predicate=made, **options)


@store_if.meaning
def _(made: Any, box: Ref, target: Ref, **options: Any) -> None:
    pl.when(made)(lambda: plgpu.copy_smem_to_gmem(box, target, **options))


@Operation
def write_directly(out: Any, values: Values, layout: Any) -> None:
    """Stores values from registers, in however small pieces: half a sector of a row of Blackwell.

    An assignment to global memory is refused for that by some releases, and means no more.
    """

    @plgpu.inline_mgpu(arg_types=(REF, layout))
    def inline(_: Any, out: Any, values: Values) -> None:
        values.store_untiled(out, optimized=False)

    inline(out, values)


write_directly.meaning(assigned)


@Operation
def write_first(out: Any, values: Values, count: Any, layout: Any) -> None:
    """Stores the first `count` values of a vector: what follows them is somebody else's."""

    @plgpu.inline_mgpu(arg_types=(REF, layout, NUMBER))
    def inline(_: Any, out: Any, values: Values, count: Any) -> None:
        end = arith.index_cast(utils.ir.IndexType.get(), word_of(count))

        def store(x: Any, place: tuple[Any, ...]) -> None:
            is_own = arith.cmpi(arith.CmpIPredicate.slt, place[0], end)
            with utils.when(is_own):
                memref.store(x, out, place)

        values.foreach(store)

    inline(out, values, count)


@write_first.meaning
def _(out: Any, values: Values, count: Any, layout: Any) -> None:
    del layout

    @pl.loop(0, jnp.clip(count, 0, values.shape[0]))
    def _each(i: Any) -> None:
        out.at[pl.ds(i, 1)][...] = lax.dynamic_slice_in_dim(values, i, 1)


@Operation
def write_some(out: Any, values: Values, chosen: Values, layout: Any) -> None:
    """Stores the values of a vector where `chosen` is not 0; others store the rest."""

    @plgpu.inline_mgpu(arg_types=(REF, layout, layout))
    def inline(_: Any, out: Any, values: Values, chosen: Values) -> None:
        each = iter(chosen.registers.flat)

        def store(x: Any, place: tuple[Any, ...]) -> None:
            number = number_in(next(each))
            zero = utils.c(0, number.type)
            with utils.when(arith.cmpi(arith.CmpIPredicate.ne, number, zero)):
                memref.store(x, out, place)

        values.foreach(store)

    inline(out, values, chosen)


@write_some.meaning
def _(out: Any, values: Values, chosen: Values, layout: Any) -> None:
    del layout

    @pl.loop(0, values.shape[0])
    def _each(i: Any) -> None:
        @pl.when(lax.dynamic_slice_in_dim(chosen, i, 1)[0] != 0)
        def _store() -> None:
            out.at[pl.ds(i, 1)][...] = lax.dynamic_slice_in_dim(values, i, 1)


@Operation
def write_squares(slot: Ref, values: Values) -> None:
    """Writes a chunk of Blackwell transposed into a slot that has a box for each square."""
    squares, side, _ = slot.shape
    rows = smem.ATOM_ROWS
    transforms = smem.tile_transforms(smem.ATOM_BYTES, values.dtype)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.Layout.TCGEN05))
    def inline(_: Any, slot: Ref, values: Values) -> None:
        tiles = utils.memref_reshape(slot, (squares, side // rows, rows, side))
        # As tiles of the chunk, of 64 rows and 8 columns: each column is a row of an atom.
        values.store_tiled(utils.memref_transpose(tiles, (0, 1, 3, 2)), swizzle=smem.ATOM_BYTES)

    inline(slot, values)


@write_squares.meaning
def _(slot: Ref, values: Values) -> None:
    for square, rows in enumerate(jnp.split(values, slot.shape[0])):
        slot.at[square][...] = rows.T


@Operation
def in_registers(zeros: Any, layout: Any) -> Any:
    """Lays an array out as WGMMA has it."""
    return plgpu.layout_cast(zeros, layout)


in_registers.meaning(as_it_is)


@Operation
def fenced(total: Values, layout: Any) -> Any:
    """Keeps the compiler from computing with registers on the other side."""
    out = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    def inline(_: Any, total: Values) -> Any:
        return fragmented_array.optimization_barrier(total)

    return inline(total)


fenced.meaning(as_it_is)


def _signed(dtype: Any) -> bool | None:
    """Whether integers are signed, which Mosaic asks; None for other types."""
    return True if jnp.issubdtype(dtype, jnp.integer) else None
