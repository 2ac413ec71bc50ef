"""Float32 that is rounded to TF32 on its way into shared memory."""

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from pallas_gemm import all_gather_gemm, gated_gemm, gemm, grouped_gemm, target
from pallas_gemm.device import H200
from pallas_gemm.kernels.exchange import Exchange
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.hopper.widened.config import WidenedConfig
from pallas_gemm.kernels.ptx import tf32
from pallas_gemm.op import kept_kernels
from pallas_gemm.problem import Problem

F32, TF32 = np.dtype(np.float32), "TF32_TF32_F32"
SIMULATOR = plgpu.InterpretGPUParams(detect_races=True)
SMALL = HopperConfig(tile=(64, 64), stages=2, consumers=1, store_columns=32, late_store=False)
NAMED = {"transpose_b": True, "implementation": "hopper"}
MATRIX, RIGHT, STORED = (512, 96), (256, 96), (96, 256)
TURNED = WidenedConfig(tile=(64, 16), stages=2, step=32, along_k=1, store_columns=16)
Product = Callable[..., jax.Array]


def with_residual(a: jax.Array, b: jax.Array, residual: jax.Array) -> jax.Array:
    """Adds what is no factor, and not rounded."""
    return gemm(a, b, residual=residual, precision=TF32, **NAMED)


def in_groups(a: jax.Array, b: jax.Array, **named: Any) -> jax.Array:
    """Multiplies rows in groups by matrices."""
    named = {"precision": TF32, **(named or NAMED)}
    return grouped_gemm(a, b, jnp.array([100, 0, 412], jnp.int32), **named)


PRODUCTS: dict[str, tuple[Product, list[tuple[int, ...]], int, int]] = {
    "plain": (functools.partial(gemm, precision=TF32, **NAMED), [MATRIX, RIGHT], 2, 2),
    "of a batch": (
        functools.partial(gemm, precision=TF32, **NAMED),
        [(2, *MATRIX), (2, *RIGHT)],
        2,
        2,
    ),
    "gated": (functools.partial(gated_gemm, **NAMED), [MATRIX, RIGHT, RIGHT], 3, 3),
    "with a residual": (with_residual, [MATRIX, RIGHT, (512, 256)], 2, 2),
    "in groups": (in_groups, [MATRIX, (3, *RIGHT)], 2, 3),
    "through registers": (functools.partial(gemm, config=TURNED), [MATRIX, STORED], 2, 2),
    "gated, through registers": (
        functools.partial(gated_gemm, config=dataclasses.replace(TURNED, tile=(128, 16))),
        [MATRIX, STORED, STORED],
        3,
        3,
    ),
    "in groups, through registers": (
        functools.partial(in_groups, config=TURNED),
        [MATRIX, (3, *STORED)],
        2,
        2,
    ),
}
"""Each product, the shapes of its operands, how many of them are factors, and the maps of these.

The first ones are. The last rows of a group have a map of their own.
"""
MAPS = ((96, 320), (32, 64)), ((8192, 4096), (32, 256)), ((64, 70, 3), (32, 8, 1))
"""The sizes of arrays and of what is loaded of them at once, the last dimension first."""


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the tensor maps lie that are changed as kernels are lowered, which none is kept of."""
    found: list[int] = []
    set_bit = tf32._set_bit

    def noted(maps: Any, offset: int) -> None:
        found.append(offset)
        set_bit(maps, offset)

    monkeypatch.setenv("PALLAS_GEMM_KEPT_MB", "0")
    monkeypatch.setattr(kept_kernels, "_lowered", kept_kernels._lowered.__wrapped__)
    monkeypatch.setattr(tf32, "_set_bit", noted)
    return found


def lowered(name: str) -> str:
    """The program of a product as text."""
    product, shapes, *_ = PRODUCTS[name]
    operands = [jax.ShapeDtypeStruct(shape, F32) for shape in shapes]
    with target("h200"):
        # A function of its own, so that it is lowered anew.
        traced = jax.jit(functools.partial(product)).trace(*operands)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", PRODUCTS)
def test_each_factor_is_rounded_as_it_is_loaded_and_by_no_pass(
    name: str, changed: list[int]
) -> None:
    text = lowered(name)
    assert "reduce_precision" not in text
    # A residual and the result have maps, too.
    assert len(set(changed)) == len(changed) == PRODUCTS[name][3]


def test_rows_of_other_devices_are_rounded_as_they_are_loaded(changed: list[int]) -> None:
    """They have a map beside those of this device's rows and of the right operand."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Auto,))
    gathering = jax.shard_map(
        lambda a, b: all_gather_gemm(a, b, "x", transpose_b=True, precision=TF32),
        mesh=mesh,
        in_specs=(P("x"), P("x")),
        out_specs=P(None, "x"),
    )
    whole = jax.ShapeDtypeStruct((1024, 512), F32)
    with target("h200"):
        text = jax.jit(gathering).trace(whole, whole).lower(lowering_platforms=("cuda",)).as_text()
    assert "reduce_precision" not in text
    assert len(set(changed)) == len(changed) == 3


def test_a_kernel_without_maps_of_its_factors_is_refused(
    changed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tf32._place
    seen: list[int] = []

    def other(array: Any) -> int:
        # The factors are looked for first.
        seen.append(place(array))
        return seen[-1] + 10 * (len(seen) > 2)

    monkeypatch.setattr(tf32, "_place", other)
    with pytest.raises(RuntimeError, match="cut off what TF32 does not hold"):
        lowered("plain")
    assert not changed


def test_the_program_sets_one_bit_of_a_map_and_keeps_the_others() -> None:
    with mlir.make_ir_context() as context, ir.Location.unknown():
        context.load_all_available_dialects()
        context.allow_unregistered_dialects = True
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            maps = ir.Operation.create("test.maps", [ir.Type.parse("!llvm.ptr")]).result
            tf32._set_bit(maps, 256)
        operations = [str(own).split(" : ")[0] for own in module.body]
    place, loaded, one, both, stored = operations[-5:]
    assert place.endswith(f"llvm.getelementptr %0[{256 // 4 + 2}]")
    assert one.endswith(f"constant {1 << 16}")
    names = [own.split(" = ")[0] for own in (place, loaded, one, both)]
    assert loaded.endswith(f"llvm.load {names[0]}")
    assert both.endswith(f"llvm.or {names[1]}, {names[2]}")
    assert stored == f"llvm.store {names[3]}, {names[0]}"


@pytest.mark.parametrize(
    ("changes", "rounds"),
    [
        ({}, True),
        ({"interpret": SIMULATOR}, False),
        ({"exchange": Exchange((("x", 2),), ("x",), gathers=True)}, True),
    ],
    ids=["alone", "simulated", "on two devices"],
)
def test_where_tma_rounds(changes: dict[str, Any], rounds: bool) -> None:
    for dtype in (F32, np.dtype(jnp.bfloat16)):
        problem = Problem(512, 256, 128, dtype, dtype, dtype, transpose_b=True)
        plan = HopperPlan(problem, SMALL, H200, **changes)
        assert plan.rounds_loads == (rounds and dtype == F32)


def test_a_simulated_kernel_rounds() -> None:
    rng = np.random.default_rng(0)
    problem = Problem(72, 40, 96, F32, F32, F32, transpose_b=True)
    kernel = jax.jit(hopper.build(HopperPlan(problem, SMALL, H200, interpret=SIMULATOR)))
    shapes = problem.a_shape, problem.b_shape
    a, b = (jnp.asarray(rng.normal(size=shape).astype(F32)) for shape in shapes)
    assert jnp.array_equal(kernel(a, b), kernel(rounded(a), rounded(b)))
    assert not jnp.array_equal(a, rounded(a))


def rounded(x: Any) -> jax.Array:
    """What TF32 holds, to the nearest even number."""
    return lax.reduce_precision(jnp.asarray(x), exponent_bits=8, mantissa_bits=10)


@pytest.mark.gpu("hopper")
@pytest.mark.parametrize("name", PRODUCTS)
def test_bits_are_those_of_operands_that_were_rounded_before(name: str) -> None:
    product, shapes, factors, _ = PRODUCTS[name]
    rng, compiled = np.random.default_rng(1), jax.jit(product)
    operands = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    # Halfway between two numbers of TF32: to the even one.
    operands[0][..., :8] = (operands[0][..., :8].view(np.int32) & -(1 << 13) | 1 << 12).view(F32)
    before = [*map(rounded, operands[:factors]), *operands[factors:]]
    assert jnp.array_equal(compiled(*operands), compiled(*before))


@pytest.mark.gpu("hopper")
@pytest.mark.parametrize("left", [True, False])
def test_numbers_at_the_ends_of_float32(left: bool) -> None:
    ends = [np.nan, np.inf, -np.inf, 3.4028235e38, 3.4e38, 1e-38, -1e-40, -0.0]
    bits = np.array([0x7F800001, 0xFF800001, 0x7FA00001, 0x7F7FEFFF], np.uint32)
    numbers = np.concatenate([np.array(ends, np.float32), bits.view(np.float32)])
    x = np.zeros((128, 128), np.float32)
    x[np.arange(len(numbers)), np.arange(len(numbers))] = numbers
    product = jax.jit(functools.partial(gemm, precision=TF32, **NAMED))
    ones = np.ones((128, 128), np.float32)
    found = product(x, ones)[:, 0] if left else product(ones, x)[0]
    np.testing.assert_array_equal(found[: len(numbers)], rounded(numbers))


@pytest.mark.gpu("hopper")
def test_the_drivers_maps_of_float32_and_tf32_differ_in_this_bit_alone() -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    assert driver.cuInit(0) == 0
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert driver.cuCtxPushCurrent_v2(context) == 0
    try:
        for dims, box in MAPS:
            single, short = (encoded(driver, kind, dims, box) for kind in (7, 11))
            expected = single.copy()
            expected[tf32.WORD] |= tf32.ROUNDS
            assert (single != short).any()
            np.testing.assert_array_equal(short, expected)
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        driver.cuDevicePrimaryCtxRelease(0)


def encoded(driver: Any, kind: int, dims: tuple[int, ...], box: tuple[int, ...]) -> np.ndarray:
    """The words of a tensor map of the driver's, of elements of a kind, with swizzled rows."""
    rank, room = len(dims), ctypes.create_string_buffer(192)
    start = (ctypes.addressof(room) + 63) // 64 * 64
    strides = np.cumprod([4, *dims[:-1]])[1:]
    status = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(start),
        kind,
        rank,
        ctypes.c_void_p(1 << 20),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * (rank - 1))(*map(int, strides)),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        *(0, 3, 0, 0),
    )
    assert status == 0
    return np.array((ctypes.c_uint32 * 32).from_address(start), np.uint32)
