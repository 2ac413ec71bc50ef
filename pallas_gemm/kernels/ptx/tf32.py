"""Float32 on its way into shared memory: TMA rounds it to TF32, to the nearest even number.

The tensor cores use the first bits of a float32, and drop the others. Sums err 2.6 times as much as
those of rounded operands, and sums of positive products are too small by 7e-4 of themselves.

With one bit of a tensor map set, TMA rounds all that it loads. The driver's maps of float32 and of
TF32 differ in this bit alone. Mosaic knows no TF32: it makes a map of float32, and the program sets
the bit before it launches the kernel.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.ptx.operation import REF
from pallas_gemm.kernels.traced import Ref

WORD, ROUNDS = 2, 1 << 16
"""Which word of a tensor map has the bit, and the bit."""
ARGUMENT = "mosaic_gpu.from_kernel_arg_idx"
"""Mosaic's name for the place of an array among the arguments of a kernel."""


def round_loads(arrays: Sequence[Ref]) -> None:
    """Has TMA round what a kernel loads of some arrays of global memory, wherever it does."""

    @plgpu.inline_mgpu(arg_types=(REF,) * len(arrays))
    def inline(context: Any, *given: Any) -> None:
        places = {_place(x) for x in given}
        scratch = context.scratch

        def set_bits(maps: Any) -> None:
            known = zip(context.tma_descriptors, scratch.descriptor_offsets, strict=True)
            found = [(_place(array), offset) for (array, *_), offset in known]
            for place, offset in found:
                if place in places:
                    _set_bit(maps, offset)
            if not places <= {place for place, _ in found}:
                raise RuntimeError("a kernel would cut off what TF32 does not hold of float32")

        # Mosaic makes the maps in the order in which loads are lowered: this comes after them all.
        scratch.host_init.append(lambda _: scratch.host_init.append(set_bits))

    inline(*arrays)


def _place(array: Any) -> int:
    """Returns which argument of the kernel an array is."""
    while isinstance(array, utils.ir.BlockArgument):
        array = array.owner.owner.operands[array.arg_number]
    return utils.ir.IntegerAttr(array.owner.attributes[ARGUMENT]).value


def _set_bit(maps: Any, offset: int) -> None:
    """Has the program set the bit of the tensor map that begins after some bytes."""
    llvm: Any = utils.llvm
    kind = utils.ir.IntegerType.get_signless(32)
    place = utils.getelementptr(maps, [offset // 4 + WORD], kind)
    llvm.store(llvm.or_(llvm.load(kind, place), utils.c(ROUNDS, kind)), place)


def rounded(x: jax.Array) -> jax.Array:
    """Returns what is loaded then. The simulator copies arrays as they are."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)
