"""The limits of this chip, measured in the same run as everything else.

Two ceilings: a kernel that does nothing but issue WGMMA on random data that already lies in shared
memory, and a copy that does nothing but move bytes. Every kernel stays below both. Under sustained
load the first is far below the data sheet, because of the power limit; that is why it is measured.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from bench.products import normal
from pallas_gemm.tuning.measure import Variant

TILE = (128, 256)
"""Rows and columns that one CTA's two warpgroups accumulate, the widest that needs no cluster."""

SLOTS = 4
"""Steps of operands in shared memory, so that not the same bits are multiplied every time."""

STEP_BYTES = 128
ROUNDS = 512
"""How often a CTA goes through its slots: about a millisecond."""

COPIED_BYTES = 2**31


def wgmma_flops(dtype: Any, ctas: int) -> int:
    """Returns the operations of one call of `wgmma_only`."""
    depth = STEP_BYTES // jnp.dtype(dtype).itemsize
    return ctas * ROUNDS * SLOTS * 2 * TILE[0] * TILE[1] * depth


def wgmma_only(dtype: Any, ctas: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns a function of the operands of one CTA, `[slots, rows, k]` and `[slots, cols, k]`.

    Each CTA loads them once, multiplies them over and over, and at the end stores one row per
    warpgroup, so that the work cannot be left out. Its result is of no use.
    """
    rows, cols = TILE
    depth = STEP_BYTES // jnp.dtype(dtype).itemsize
    accumulator = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32
    transforms = (
        plgpu.TilingTransform((8, depth)),
        plgpu.SwizzleTransform(STEP_BYTES),
    )

    return plgpu.kernel(
        _body,
        out_type=jax.ShapeDtypeStruct((ctas, 2, cols), accumulator),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((SLOTS, rows, depth), dtype, transforms=transforms),
            plgpu.SMEM((SLOTS, cols, depth), dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name="wgmma_only",
    )


def _body(a_gmem: Any, b_gmem: Any, out_gmem: Any, a_smem: Any, b_smem: Any, loaded: Any) -> None:
    """Runs `wgmma_only` in a warpgroup: each has half of the rows."""
    rows, cols = TILE[0] // 2, TILE[1]
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _load() -> None:
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, loaded)

    plgpu.barrier_wait(loaded)
    mine = pl.ds(warpgroup * rows, rows)

    def multiply(acc: Any) -> Any:
        @pl.loop(0, ROUNDS)
        def _round(_: Any) -> None:
            for slot in range(SLOTS):
                plgpu.wgmma(acc, a_smem.at[slot, mine], b_smem.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(1)

        return acc[...]

    total = pl.run_scoped(multiply, plgpu.ACC((rows, cols), out_gmem.dtype))
    out_gmem[lax.axis_index("cta"), warpgroup] = total.max(axis=0)


def wgmma_operands(dtype: Any) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the shapes of the operands of `wgmma_only`."""
    depth = STEP_BYTES // jnp.dtype(dtype).itemsize
    return (
        jax.ShapeDtypeStruct((SLOTS, TILE[0], depth), dtype),
        jax.ShapeDtypeStruct((SLOTS, TILE[1], depth), dtype),
    )


def wgmma_variant(dtype: Any, ctas: int) -> Variant:
    """Returns the kernel that only issues WGMMA, ready to be timed, on N(0, 1) operands."""
    shapes = wgmma_operands(dtype)
    run = jax.jit(wgmma_only(dtype, ctas)).lower(*shapes).compile()
    keys = jax.random.split(jax.random.key(0), 2)
    a, b = (normal(key, shape.shape, shape.dtype) for key, shape in zip(keys, shapes, strict=True))
    return Variant("wgmma", lambda _: run(a, b), jax.block_until_ready)


def copy_variant() -> Variant:
    """Returns a copy that reads and writes `COPIED_BYTES`, ready to be timed."""
    data = jnp.zeros(COPIED_BYTES // 4, jnp.int32)
    # Adding one keeps the compiler from leaving the copy out.
    run = jax.jit(functools.partial(jnp.add, jnp.int32(1))).lower(data).compile()
    return Variant("copy", lambda _: run(data), jax.block_until_ready)
