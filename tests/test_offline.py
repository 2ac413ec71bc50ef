"""Compilation without a GPU: what is reported agrees with what the kernels were written to need."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_gemm
from pallas_gemm import offline

pytestmark = pytest.mark.usefixtures("compiled_anew")

DEPTH = 64
BARRIER_BYTES = 8
# How operands lie in shared memory for the tensor cores to read them.
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def hopper_product(m: int, n: int) -> Callable[[Any, Any], Any]:
    """Returns a kernel in which one warpgroup multiplies [m, DEPTH] by [DEPTH, n]."""

    def product(a_gmem: Any, b_gmem: Any, out_gmem: Any, smem: Any, loaded: Any) -> None:
        a_smem, b_smem, out_smem = smem
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, loaded)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, loaded)
        plgpu.barrier_wait(loaded)

        def multiply(acc: Any) -> Any:
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        total = pl.run_scoped(multiply, plgpu.ACC((m, n), jnp.float32))
        out_smem[...] = total.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    shapes = ((m, DEPTH), (DEPTH, n), (m, n))
    return plgpu.kernel(
        product,
        out_type=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        scratch_types=[
            [plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED) for shape in shapes],
            plgpu.Barrier(num_arrivals=2),
        ],
    )


def copy_in_clusters(columns: int) -> Callable[[Any], Any]:
    """Returns a Blackwell kernel: 4 blocks in clusters of 2 pass rows through tensor memory."""

    def through_tensor_memory(in_gmem: Any, out_gmem: Any, tmem: Any) -> None:
        part = jax.lax.axis_index("group") * 2 + jax.lax.axis_index("block")
        rows = pl.ds(part * 128, 128)
        plgpu.async_store_tmem(
            tmem, plgpu.load(in_gmem.at[rows], layout=plgpu.Layout.TCGEN05, optimized=False)
        )
        plgpu.commit_tmem()
        out_gmem[rows] = plgpu.async_load_tmem(tmem)

    return plgpu.kernel(
        through_tensor_memory,
        out_type=jax.ShapeDtypeStruct((512, columns), jnp.float32),
        scratch_types=[plgpu.TMEM((128, columns), jnp.float32)],
        grid=(2,),
        grid_names=("group",),
        cluster=(2,),
        cluster_names=("block",),
    )


def operands(m: int, n: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    left, right = (m, DEPTH), (DEPTH, n)
    return jax.ShapeDtypeStruct(left, jnp.bfloat16), jax.ShapeDtypeStruct(right, jnp.bfloat16)


def test_a_small_tile_fits_and_its_shared_memory_is_what_it_asked_for() -> None:
    m, n = 64, 64
    report = offline.compile_report(hopper_product(m, n), *operands(m, n), target="h200")
    elements = m * DEPTH + DEPTH * n + m * n
    assert report.shared_memory_bytes == 2 * elements + BARRIER_BYTES
    assert (report.grid, report.cluster, report.threads) == ((1, 1, 1), (1, 1, 1), 128)
    # The accumulator alone is m * n / 128 registers of each thread.
    assert m * n // 128 < report.registers <= 255
    assert report.spill_bytes == 0
    assert report.serialized == ()
    assert report.tensor_memory_columns == 0
    assert report.kernel == "product"
    assert ".target sm_90a" in report.ptx
    assert "wgmma.mma_async" in report.ptx
    # Of one generation and of no other time.
    for target in ("h100", "h200"):
        again = offline.compile_report(hopper_product(m, n), *operands(m, n), target=target)
        assert (again.target, again.ptx) == (target, report.ptx)


def test_a_tile_beyond_the_registers_spills_and_serializes() -> None:
    # 512 registers of accumulator for each thread, of 255.
    m, n = 256, 256
    report = offline.compile_report(hopper_product(m, n), *operands(m, n), target="h200")
    assert report.registers == 255
    assert report.spill_store_bytes > 0
    assert report.spill_load_bytes > 0
    assert report.spill_bytes == report.spill_store_bytes + report.spill_load_bytes
    assert len(report.serialized) == 1
    assert "insufficient register resources" in report.serialized[0]


def test_a_blackwell_kernel_reports_its_clusters_and_tensor_memory() -> None:
    operand = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    report = offline.compile_report(copy_in_clusters(64), operand, target="b200")
    assert ".target sm_100a" in report.ptx
    assert (report.grid, report.cluster, report.threads) == ((4, 1, 1), (2, 1, 1), 128)
    assert report.tensor_memory_columns == 64
    assert report.serialized == ()


@pytest.mark.usefixtures("new_processes")
def test_several_targets_in_one_process() -> None:
    # In this order, because a compiler that remembers its first target would fail on the second.
    operand = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    offline.compile_report(copy_in_clusters(64), operand, target="b200")
    hopper = offline.compile_report(hopper_product(64, 64), *operands(64, 64), target="h200")
    assert ".target sm_90a" in hopper.ptx


def test_every_kernel_of_a_function_is_reported_once_in_order() -> None:
    narrow, wide = hopper_product(64, 64), hopper_product(64, 128)

    @jax.jit
    def layers(a: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        return wide(narrow(narrow(a, weights["narrow"]), weights["narrow"]), weights["wide"])

    a, narrow_b = operands(64, 64)
    weights = {"narrow": narrow_b, "wide": operands(64, 128)[1]}
    first, second = offline.compile_reports(layers, a, weights, target="h200")
    assert first.shared_memory_bytes == 3 * 2 * 64 * 64 + BARRIER_BYTES
    assert second.shared_memory_bytes == 5 * 2 * 64 * 64 + BARRIER_BYTES
    with pytest.raises(ValueError, match="holds 2 Pallas GPU kernels"):
        offline.compile_report(layers, a, weights, target="h200")


def test_a_function_without_a_kernel_is_refused() -> None:
    operand = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    # Products of this package, too, are XLA's where no GPU is planned for.
    with pytest.warns(UserWarning, match=r"holds no .* as within `with pallas_gemm.target\('h200'"):
        assert offline.compile_reports(pallas_gemm.gemm, operand, operand, target="h200") == ()
    with pytest.raises(ValueError, match=r"holds 0 Pallas GPU kernels.*pallas_gemm.target\('h200'"):
        offline.compile_report(jnp.matmul, operand, operand, target="h200")


class Boxed(NamedTuple):
    """A tree of a type that nobody has registered for `jax.export`."""

    value: Any


def test_results_may_be_trees_of_any_type() -> None:
    operand = jax.ShapeDtypeStruct((64, DEPTH), jnp.bfloat16)

    def boxed(a: Boxed, b: Any) -> dict[str, Boxed]:
        return {"out": Boxed(hopper_product(64, 64)(a.value, b))}

    wide = jax.ShapeDtypeStruct((DEPTH, 64), jnp.bfloat16)
    (report,) = offline.compile_reports(boxed, Boxed(operand), wide, target="h200")
    assert report.spill_bytes == 0


def test_a_kernel_that_the_target_cannot_run_is_refused() -> None:
    with pytest.raises(RuntimeError, match="target='b200' failed"):
        offline.compile_report(hopper_product(64, 64), *operands(64, 64), target="b200")


def test_an_unknown_target_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(ValueError, match=r"target='a100' is unknown; .*legal: b200, .*, h800"):
        offline.compile_report(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32), target="a100")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "_importable", lambda module: not module.startswith("nvidia"))
    with pytest.raises(RuntimeError, match=r"needs nvidia-cuda-nvcc: pip install .*aot"):
        offline.compile_report(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32), target="h200")


def test_compiling_leaves_the_settings_of_this_process_alone() -> None:
    setting = "jax_export_ignore_forward_compatibility"
    before = getattr(jax.config, setting)
    operand = jax.ShapeDtypeStruct((8,), jnp.float32)
    # Also when tracing fails half-way.
    with pytest.raises(ZeroDivisionError):
        offline.compile_report(lambda _: 1 // 0, operand, target="h200")
    assert getattr(jax.config, setting) == before
