"""A counter in global memory, from which a warp claims the next number."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

_CLAIM = """{
    .reg .pred idle; .reg .u32 lane; .reg .u32 number;
    mov.u32 lane, %laneid;
    setp.ne.u32 idle, lane, 0;
    @idle bra CLAIMED;
    atom.relaxed.gpu.global.add.u32 number, [$1], 1;
    CLAIMED:
    shfl.sync.idx.b32 $0, number, 0, 31, 0xffffffff;
}"""

_INT32 = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT)


def claim(counter: Any) -> Any:
    """Returns the next number, the same for all lanes of the warp."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_INT32)
    def inline(_: Any, counter: Any) -> Any:
        int32 = utils.ir.IntegerType.get_signless(32)
        number = utils.inline_ptx(
            _CLAIM, utils.memref_ptr(counter), result_types=int32, has_side_effects=True
        )
        return mgpu.FragmentedArray.splat(number, (), is_signed=True)

    return inline(counter)
