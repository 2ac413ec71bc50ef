"""Adds up what other devices have stored in this one's memory.

XLA makes all devices of the mesh wait for one another before it starts a kernel that asks which
device it runs on. So what any of them stored in the kernels before is there when this one starts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

BLOCK = 2048
"""Elements that a warpgroup adds at once: two loads of 16 bytes for each thread and device."""
LOADED = 8
"""Elements that a thread loads at once."""


def add_up(parts: jax.Array, dtype: Any, axis: str) -> jax.Array:
    """Returns the sum over the first dimension, when all devices have stored.

    It is made in float32; of integers, in their type.

    Args:
        parts: The arrays that each device has stored, `[devices, rows, columns]`.
        dtype: Type of the sum.
        axis: The axis of the mesh along which the devices lie.
    """
    devices, rows, columns = parts.shape
    blocks = rows * columns // BLOCK
    wide = parts.dtype if jnp.issubdtype(parts.dtype, jnp.integer) else jnp.float32

    def body(parts: Any, out: Any) -> None:
        block = lax.axis_index("block")
        layout = plgpu.Layout.WG_STRIDED((BLOCK,), vec_size=LOADED)
        loaded = [
            plgpu.load(parts.at[device, block], layout=layout, optimized=False)
            for device in range(devices)
        ]
        total = loaded[0].astype(wide)
        for part in loaded[1:]:
            total += part.astype(wide)

        # That the kernel asks is what makes it wait.
        @pl.when(lax.axis_index(axis) >= 0)
        def _always() -> None:
            out[block] = total.astype(dtype)

    total = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((blocks, BLOCK), dtype),
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="pallas_gemm_add_up",
    )(parts.reshape(devices, blocks, BLOCK))
    return total.reshape(rows, columns)
