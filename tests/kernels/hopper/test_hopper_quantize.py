"""The kernel that quantizes blocks: simulated, with races recorded, and compiled."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm import Quantized
from pallas_gemm.device import H200
from pallas_gemm.kernels import quantize
from pallas_gemm.kernels.hopper.quantize import kernel
from pallas_gemm.kernels.hopper.quantize.plan import QuantizePlan, refusals, slots
from pallas_gemm.kernels.quantize import Block, Quantization, Way
from pallas_gemm.planning import quantize as planning
from tests import races, summaries
from tests.quantized import assert_quantized

E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
BOTH = (-1, -2)
SHAPE = (208, 272)
"""Two rows and three columns of tiles, the last of which reach beyond the matrix."""


def how(
    *, dtype: Any = E4M3, block: tuple[int, int] = (1, 128), axes: Any = BOTH, power: bool = False
) -> Quantization:
    return Quantization(np.dtype(dtype), tuple(Way(axis, Block(*block)) for axis in axes), power)


MIXED = Quantization(E4M3, (Way(-1, Block(1, 128)), Way(-2, Block(128, 128))))
"""What the gradient of a layer's result becomes in training."""


def simulated(own: Quantization, x: jax.Array, *tiles: jax.Array, **options: Any) -> list[Any]:
    """Simulates the kernel; fails if it raced."""
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    options["groups"] = tiles[0].shape[0] if tiles else None
    plan = QuantizePlan(own, (1, *x.shape), x.dtype, H200, interpret, **options)
    run = functools.partial(
        planning.by_kernel, planning.Quantizer(own, x.shape, plan, ""), kernel.build(plan)
    )
    with races.recorded() as raced:
        found = jax.block_until_ready(run(x, *tiles))
        assert not raced()
    return found


@pytest.mark.parametrize(
    "own",
    [
        how(),
        how(block=(1, 32), dtype=E5M2, power=True),
        how(block=(1, 64), axes=(-1,)),
        how(block=(128, 128)),
        how(block=(128, 128), axes=(-2,), power=True),
        how(dtype=jnp.int8, axes=(-2,)),
        MIXED,
        Quantization(E4M3, MIXED.ways[::-1]),
    ],
    ids=str,
)
def test_blocks_are_what_numpy_computes(own: Quantization, rng: np.random.Generator) -> None:
    x = rng.standard_normal(SHAPE) * 2.0 ** rng.integers(-6, 6, (SHAPE[0], 1))
    x[:, 130:140] = 0
    x = jnp.asarray(x, jnp.bfloat16)
    found = simulated(own, x)
    for number, way in enumerate(own.ways):
        pair = Quantized(*found[2 * number : 2 * number + 2])
        rest = {"axis": way.axis, "power_of_two": own.power_of_two}
        assert_quantized(pair, x, way.block, own.dtype.type, **rest)


def test_a_ring_of_one_slot_and_several_store_slots_are_as_good(rng: np.random.Generator) -> None:
    """One CTA takes all tiles, in slots that are used again."""
    x = jnp.asarray(rng.standard_normal(SHAPE).astype(jnp.float16))
    for stages, stores in ((1, 1), (1, 2), (3, 1)):
        options = {"stages": stages, "stores": stores, "band": 1, "ctas": 1}
        found = simulated(how(), x, **options)
        for pair, axis in ((found[:2], -1), (found[2:], -2)):
            assert_quantized(Quantized(*pair), x, (1, 128), jnp.float8_e4m3fn, axis=axis)


@pytest.mark.every_other
@pytest.mark.parametrize(
    ("own", "sizes"),
    [
        (how(block=(1, 32)), (100, 0, 150, 6)),
        (MIXED, (1, 129, 37, 40)),
        (how(axes=(-2,), dtype=jnp.int8), (0, 256)),
        (how(axes=(-2,), block=(128, 128)), (200, 100)),
    ],
    ids=str,
)
def test_groups_of_rows_are_told_apart(
    own: Quantization, sizes: tuple[int, ...], rng: np.random.Generator
) -> None:
    """Along columns, each begins with a multiple of 128, and zeros follow it."""
    x = rng.standard_normal((256, 144)) * 2.0 ** rng.integers(-6, 6, (256, 1))
    x = jnp.asarray(x, jnp.bfloat16)
    tiles = quantize.tiles_of_groups(jnp.asarray(sizes), 256, own.height)
    apart, first, start = np.zeros((len(tiles) * 128, 144)), 0, 0
    for size in (*sizes, max(0, 256 - sum(sizes))):
        rows = np.asarray(x[first : first + size], np.float64)
        apart[start : start + len(rows)] = rows
        first, start = first + size, start + quantize.filled_up(size, 128)
    found = simulated(own, x, tiles, ctas=3)
    for number, way in enumerate(own.ways):
        pair = Quantized(*found[2 * number : 2 * number + 2])
        whole = apart if way.axis == -2 else x
        assert_quantized(pair, whole, way.block, own.dtype.type, axis=way.axis)


def test_every_tile_is_taken_once() -> None:
    for band in (1, 2, 3, 8):
        plan = QuantizePlan(how(), (2, 600, 300), jnp.bfloat16, H200, band=band)
        found = [kernel.tile_at(plan, jnp.int32(i)) for i in range(plan.tiles)]
        every = {tuple(map(int, at)) for at in found}
        assert every == {(b, i, j) for b in range(2) for i in range(5) for j in range(3)}


@pytest.mark.parametrize(
    ("own", "dtype", "groups"),
    [
        (how(), jnp.bfloat16, None),
        (how(axes=(-1,)), jnp.bfloat16, None),
        (how(axes=(-2,), dtype=E5M2), jnp.float16, None),
        (how(block=(1, 32), power=True), jnp.bfloat16, None),
        (how(block=(128, 128)), jnp.bfloat16, None),
        (how(block=(128, 128), axes=(-2,), power=True), jnp.float16, None),
        (how(dtype=jnp.int8), jnp.bfloat16, None),
        (MIXED, jnp.bfloat16, None),
        (how(), jnp.bfloat16, 72),
        (MIXED, jnp.bfloat16, 72),
    ],
    ids=lambda own: str(own)[:80],
)
def test_nothing_is_spilled(own: Quantization, dtype: Any, groups: int | None) -> None:
    rest = {"stages": slots(own), "groups": groups}
    plan = QuantizePlan(own, (1, 8192, 8192), jnp.dtype(dtype), H200, **rest)
    given = [jax.ShapeDtypeStruct(plan.shape, dtype)]
    given += [jax.ShapeDtypeStruct((groups, 2), jnp.int32)] if groups else []
    (found,) = summaries.KEPT.of(kernel.build(plan), *given, target="h200")
    assert found.spill_bytes == 0
    # As many CTAs share an SM as the plan says.
    assert found.shared_memory_bytes * plan.resident <= H200.shared_memory
    assert found.registers * 128 * plan.resident <= 65536


def test_a_kernel_says_what_it_cannot_do() -> None:
    def why(own: Quantization, shape: Any = (1, 256, 256), dtype: Any = jnp.bfloat16) -> str:
        return "; ".join(refusals(own, shape, np.dtype(dtype)))

    assert not why(how())
    assert "got float32" in why(how(), dtype=jnp.float32)
    assert "got (2, 128)" in why(how(block=(2, 128)))
    assert not why(MIXED)
    assert "got (4, 128)" in why(Quantization(E4M3, (*MIXED.ways, Way(-1, Block(4, 128)))))
    assert "nothing to quantize" in why(how(), (1, 0, 256))
    assert "rows must be a multiple of 16 for float8_e4m3fn, got 100" in why(how(), (1, 100, 256))
    assert not why(how(axes=(-1,)), (1, 100, 256))
    assert "columns must be a multiple of 8 for bfloat16, got 100" in why(how(), (1, 256, 100))
