"""Gated products whose gate and up are halves of one array, which the kernel reads in place."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import HopperConfig, offline
from pallas_gemm.call import Call, Options, signature_of
from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper import kernel
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.function_of_sums import Function, traced
from pallas_gemm.op.side_by_side import Half, SideBySide, side_by_side_p
from pallas_gemm.problem import Epilogue
from tests import reference

F32, BF16 = jnp.float32, jnp.bfloat16
M = 130
"""Rows: the last tile has two."""
STORED: dict[str, tuple[Contraction, tuple[int, ...], int]] = {
    # How the array is stored, and the dimension along which it is cut. N is 192 or 136, K 128.
    "columns": (Contraction("mk", "kn", "mn"), (96, 2 * 192), 1),
    "rows of columns": (Contraction("mk", "nk", "mn"), (2 * 136, 96), 0),
    "contracted": (Contraction("mk", "kn", "mn"), (2 * 128, 192), 0),
    "contracted last": (Contraction("mk", "nk", "mn"), (136, 2 * 128), 1),
    "heads": (Contraction("mk", "nhk", "mnh"), (2 * 4, 64, 96), 0),
    "one head before k": (Contraction("mk", "hkn", "mhn"), (2, 128, 192), 0),
    "one head after k": (Contraction("mk", "khn", "mhn"), (96, 2, 192), 1),
    "batch": (Contraction("bmk", "bkn", "bmn"), (3, 96, 2 * 128), 2),
    "shared": (Contraction("bmk", "kn", "bmn"), (96, 2 * 128), 1),
}
OPTIONS = Options(implementation="interpret", target=H200)


def joined(gate: Any, up: Any) -> Any:
    return [2 * gate + 3 * up, jnp.maximum(gate, up).astype(BF16)]


def case(name: str, options: Options = OPTIONS) -> tuple[SideBySide, tuple[Any, Any]]:
    """Returns a product of small integers, and its operands."""
    contraction, stored, axis = STORED[name]
    half = (*stored[:axis], stored[axis] // 2, *stored[axis + 1 :])
    sizes = dict(zip(contraction.rhs, half, strict=True)) | {"m": M}
    sizes.setdefault("b", 3)
    rng = np.random.default_rng(0)
    shapes = tuple(sizes[x] for x in contraction.lhs), stored
    a, both = (jnp.asarray(rng.integers(-2, 3, shape).astype(BF16)) for shape in shapes)
    result = jax.ShapeDtypeStruct(tuple(sizes[x] for x in contraction.out), F32)
    function: Function = traced(joined, result, result, sums=2)
    call = Call(F32, epilogue=Epilogue(gated=True), options=options)
    return SideBySide(call, contraction, function, axis), (a, both)


def computed(own: SideBySide, *operands: Any) -> Any:
    return side_by_side_p.bind(*operands, own=own, devices=None)


def expected(own: SideBySide, a: Any, both: Any) -> list[Any]:
    """Computes it with NumPy."""
    wide = np.asarray(a, np.float64), np.asarray(both, np.float64)
    letters = own.contraction
    sums = [
        np.einsum(f"{letters.lhs},{letters.rhs}->{letters.out}", wide[0], half)
        for half in np.split(wide[1], 2, own.axis)
    ]
    return [2 * sums[0] + 3 * sums[1], np.maximum(*sums)]


def check(found: Any, wanted: Any) -> None:
    # Sums of these integers are exact in bfloat16, too.
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float64), other)


def in_place(own: SideBySide, operands: tuple[Any, Any]) -> bool:
    return not isinstance(own.plan(signature_of(operands)), str)


@pytest.mark.parametrize("name", STORED)
def test_each_half_is_read_where_it_lies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced, body = [], kernel._body
    monkeypatch.setattr(kernel, "_body", lambda plan, *x: traced.append(plan) or body(plan, *x))
    own, operands = case(name)
    assert in_place(own, operands)
    check(jax.jit(lambda *x: computed(own, *x))(*operands), expected(own, *operands))
    # Of both products beside each other, and of them apart: no kernel is traced twice.
    assert len(traced) == len(set(traced))


@pytest.mark.gpu("hopper")
@pytest.mark.parametrize("name", STORED)
def test_on_a_gpu(name: str) -> None:
    own, operands = case(name, Options(implementation="hopper"))
    program = jax.jit(lambda *x: computed(own, *x)).lower(*operands)
    assert program.as_text().count("mosaic_gpu_v2") == 1
    check(program.compile()(*operands), expected(own, *operands))


@pytest.mark.parametrize(
    ("letters", "stored", "axis", "why"),
    [
        ("kn", (2 * 96, 192), 0, "the last step of k would read the other half"),
        ("nk", (2 * 132, 100), 0, "operands are made ready for the kernel"),
        ("hkn", (2 * 2, 96, 64), 0, "the product is not one of matrices as they are stored"),
        ("khn", (96, 2, 2 * 64), 2, "the halves of the array are no halves of a matrix"),
        ("kn", (64, 2), 1, "the halves of the array are no halves of a matrix"),
        ("hkn", (2, 96, 192), 0, "the last step of k would read the other half"),
    ],
    ids=["a part of a step", "odd rows", "no matrix", "no halves", "a column", "one head"],
)
def test_elsewhere_the_halves_are_two_arrays(
    letters: str, stored: tuple[int, ...], axis: int, why: str
) -> None:
    out = "m" + letters.replace("k", "")
    half = (*stored[:axis], stored[axis] // 2, *stored[axis + 1 :])
    sizes = dict(zip(letters, half, strict=True)) | {"m": M}
    result = jax.ShapeDtypeStruct(tuple(sizes[x] for x in out), F32)
    call = Call(F32, epilogue=Epilogue(gated=True), options=OPTIONS)
    function = traced(joined, result, result, sums=2)
    own = SideBySide(call, Contraction("mk", letters, out), function, axis)
    rng = np.random.default_rng(1)
    a, both = (jnp.asarray(rng.integers(-2, 3, x).astype(BF16)) for x in ((M, sizes["k"]), stored))
    assert own.plan(signature_of((a, both))) == why
    check(jax.jit(lambda *x: computed(own, *x))(a, both), expected(own, a, both))


BIASES: dict[str, tuple[tuple[int, ...], int, bool]] = {
    # The shape of both biases in one array, the dimension that is cut, and whether it is read so.
    "one after the other": ((2 * 136,), 0, True),
    "two rows": ((2, 136), 0, True),
    "a row": ((1, 2 * 136), 1, True),
    "two columns": ((136, 2), 1, False),
}


IN_PARTS = HopperConfig(
    tile=(128, 128), stages=2, store_columns=32, split_k=2, late_store=False, schedule="raster"
)
READ = [
    *((name, dtype, None) for name in BIASES for dtype in (BF16, F32)),
    # Another kernel joins the parts of k, of all tiles or of the last ones alone.
    ("two rows", BF16, IN_PARTS),
    ("two rows", BF16, dataclasses.replace(IN_PARTS, split_last=2)),
]


@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=pytest.mark.gpu("hopper"))])
@pytest.mark.parametrize(("name", "dtype", "config"), READ)
def test_both_biases_are_read_where_they_lie(
    name: str, dtype: Any, config: HopperConfig | None, on_gpu: bool
) -> None:
    shape, axis, is_read = BIASES[name]
    options = Options(implementation="hopper") if on_gpu else OPTIONS
    options = dataclasses.replace(options, config=config)
    own, factors = case("rows of columns", options)
    bias = jnp.asarray(np.random.default_rng(3).integers(-9, 9, shape).astype(dtype))

    def biased(gate: Any, up: Any, *biases: Any) -> Any:
        one, other = (x.reshape(1, -1).astype(F32) for x in biases)
        return joined(gate + one, up + other)

    halves = tuple(Half(axis, i) for i in range(2))
    cut = [half.of(bias) for half in halves]
    function = traced(biased, *own.function.types, *cut, sums=2)
    own = own._replace(function=function, halves=halves)
    operands = (*factors, bias, bias)
    found = own._replace(call=own.call.with_target(H200)).plan(signature_of(operands))
    assert not isinstance(found, str)
    assert own.vectors(found, [shape, shape]) == ({0: (0, 0), 1: (1, 1)} if is_read else {})
    sums = expected(own, *factors)[0]
    result, _ = jax.jit(lambda *x: computed(own, *x))(*operands)
    one, other = (np.asarray(x, np.float64).reshape(1, -1) for x in cut)
    np.testing.assert_array_equal(np.asarray(result, np.float64), sums + 2 * one + 3 * other)


def test_derivatives_are_those_of_two_arrays() -> None:
    own, operands = case("columns", Options())
    rng = np.random.default_rng(2)
    moved = tuple(reference.normal(rng, x.shape, BF16) for x in operands)
    for one, other in zip(
        jax.jvp(lambda *x: computed(own, *x), operands, moved)[1],
        jax.jvp(own.apart, operands, moved)[1],
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    weights = [jnp.asarray(rng.integers(-1, 2, (M, 192)).astype(F32)) for _ in range(2)]

    def loss(a: Any, both: Any) -> Any:
        return weighted(computed(own, a, both))

    def stock(a: Any, both: Any) -> Any:
        return weighted(joined(*jnp.split(a @ both, 2, 1)))

    def weighted(results: Any) -> Any:
        pairs = zip(weights, results, strict=True)
        return sum(jnp.sum(w * y.astype(F32)) for w, y in pairs)

    found = jax.jit(jax.grad(loss, (0, 1)))(*operands)
    xlas = jax.jit(jax.grad(stock, (0, 1)))(*operands)
    exact = jax.grad(stock, (0, 1))(*(x.astype(F32) for x in operands))
    for one, other, wanted in zip(found, xlas, exact, strict=True):
        reference.assert_as_good_as_xla(one, other, np.asarray(wanted, np.float64))


def test_mapped() -> None:
    own, (a, both) = case("columns", Options())
    several = jnp.stack([a, -a, 2 * a])
    found = jax.vmap(lambda x: computed(own, x, both))(several)
    for i, x in enumerate(several):
        check([y[i] for y in found], expected(own, x, both))


def test_the_kernel_is_that_of_two_arrays() -> None:
    own, operands = case("columns", Options(implementation="hopper", target=H200))
    reports = [
        offline.compile_report(jax.jit(run), *operands, target="h200")
        for run in (lambda *x: computed(own, *x), own.apart)
    ]
    assert [one.spill_store_bytes for one in reports] == [0, 0]
    assert reports[0].registers == reports[1].registers


@pytest.mark.usefixtures("empty_kernels")
def test_nothing_is_cut_where_the_kernel_reads_the_halves() -> None:
    own, operands = case("contracted", Options(implementation="hopper", target=H200))

    def text(run: Any) -> str:
        traced = jax.jit(run).trace(*operands)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert "stablehlo.slice" not in text(lambda *x: computed(own, *x))
    assert "stablehlo.slice" in text(own.apart)
