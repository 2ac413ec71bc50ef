"""Functions as epilogues in the simulated Hopper kernel: exact numbers, no races, every layout."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm import HopperConfig, explain, gated_gemm, gemm, offline, target
from pallas_gemm.planning import implementation
from tests import covering, races, summaries

pytestmark = pytest.mark.usefixtures("as_users_write")

BF16, F32 = jnp.bfloat16, jnp.float32


def _kept(s: Any, bias: Any) -> Any:
    z = s + bias
    return jnp.maximum(z, 0).astype(BF16), z


def _rows(s: Any, residual: Any) -> Any:
    z = s + residual.astype(F32)
    return z.astype(BF16), jnp.sum(jnp.abs(z) + 1, -1), jnp.min(z, -1)


def _columns(s: Any, residual: Any) -> Any:
    z = s - residual.astype(F32)
    return jnp.max(z, -2), z.astype(BF16), jnp.sum(jnp.abs(z) + 1, -2)


def _loaded(s: Any, x: Any, y: Any, scale: Any) -> Any:
    g = s * x.astype(F32) + y * scale
    return g.astype(BF16), jnp.max(jnp.abs(g))


def _reduced(s: Any, bias: Any) -> Any:
    z = s + bias
    size = jnp.abs(z)
    return z.astype(BF16), jnp.max(size, -1), jnp.sum(size + 1, -1), jnp.sum(size + 1, -2)


def _picked(s: Any, label: Any) -> Any:
    hit = jnp.arange(s.shape[-1]) == label.astype(jnp.int32)
    return jnp.sum(jnp.where(hit, s, 0.0), -1), jnp.max(s, -1)


def _placed(s: Any, bias: Any) -> Any:
    # Some rows have no values but minus infinity. Elsewhere several are as large.
    z = jnp.where(jnp.abs(s) > 30, -jnp.inf, s - bias)
    z = jnp.where(jnp.arange(s.shape[-2])[:, None] < 5, -jnp.inf, z)
    return jnp.argmax(z, -1), jnp.max(z, -1), jnp.argmin(s, -1)


# Elements beyond an edge are 0. Each adds 1 to such a sum if it is counted.
FUNCTIONS: dict[str, tuple[Any, tuple[tuple[str, Any], ...]]] = {
    "kept": (_kept, (("n", F32),)),
    "rows": (_rows, (("mn", BF16),)),
    "columns": (_columns, (("mn", F32),)),
    "loaded": (_loaded, (("mn", BF16), ("mn", F32), ("m", BF16))),
    "picked": (_picked, (("m", F32),)),
    "placed": (_placed, (("n", F32),)),
    "reduced": (_reduced, (("n", F32),)),
}
OPTIONS: dict[str, Sequence[Any]] = {
    "function": tuple(FUNCTIONS),
    # Rows, columns, and the warpgroups that share a tile or take turns.
    "tile": ((128, 64, 2), (64, 128, 2), (64, 32, 1), (64, 64, "in turns")),
    "cluster": ((1, 1), (2, 1), (1, 2)),
    "persistence": ("static", "dynamic", "none"),
    "store_slots": (1, 2),
    "late_store": (False, True),
    "layout": ("NN", "NT", "TN"),
    "batch": ((), (2,)),
    # How far the result reaches into its last tiles.
    "edge": ((0, 0), (8, 16), (24, 40), (8, 5)),
}


def _config(case: covering.Case) -> HopperConfig | None:
    rows, columns, shared_by = case["tile"]
    try:
        return HopperConfig(
            tile=(rows, columns),
            consumers=2 if shared_by == "in turns" else shared_by,
            pingpong=shared_by == "in turns",
            late_store=case["late_store"],
            stages=2,
            ctas=2 * case["cluster"][0] * case["cluster"][1],
            store_columns=32,
            cluster=case["cluster"],
            persistence=case["persistence"],
            store_slots=case["store_slots"],
        )
    except ValueError:
        return None


def _is_legal(case: covering.Case) -> bool:
    # Consumers in turns claim nothing. A right operand stored [k, n] needs whole panels of columns:
    # in a tile, and at the edge.
    claims_in_turns = case["persistence"] == "dynamic" and case["tile"][2] == "in turns"
    # One result of 16 bits waits in registers, and nothing that is loaded.
    in_turns, late = case["tile"][2] == "in turns", case["late_store"]
    # Rows of an odd length are stored by threads, at once, and loaded by nobody.
    is_odd, kinds = case["edge"][1] % 8 > 0, [kind for kind, _ in FUNCTIONS[case["function"]][1]]
    return (
        not claims_in_turns
        and not (is_odd and (late or "mn" in kinds))
        and not (late and (in_turns or case["function"] != "reduced"))
        and _config(case) is not None
        and (case["layout"][1] == "T" or not (case["tile"][1] % 64 or case["edge"][1] % 64))
    )


def _of(kind: str, lead: tuple[int, ...], m: int, n: int) -> tuple[int, ...]:
    return {"mn": (*lead, m, n), "m": (*lead, m, 1), "n": (n,)}[kind]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_left_to_xla(name: str) -> None:
    function, kinds = FUNCTIONS[name]
    operands = [jax.ShapeDtypeStruct(_of(kind, (), 512, 1024), dtype) for kind, dtype in kinds]
    a, b = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((512, 256), (256, 1024)))
    with target("h200"):
        found = explain(lambda a, b, *x: gemm(a, b, epilogue=function, operands=x), a, b, *operands)
    assert "left to XLA" not in str(found)


@pytest.mark.every_other
@pytest.mark.parametrize("case", covering.pairs(OPTIONS, _is_legal, 3000), ids=str)
def test_exact(case: covering.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    racing = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(implementation, "_simulator", lambda _: racing)
    config = _config(case)
    assert config is not None
    function, kinds = FUNCTIONS[case["function"]]
    (rows, columns, _), cluster = case["tile"], case["cluster"]
    m, n, k = rows * cluster[0] + case["edge"][0], 128 * cluster[1] + case["edge"][1], 144
    n = max(n, columns * cluster[1] + case["edge"][1])
    rng = np.random.default_rng(0)

    def ints(*shape: int, dtype: Any = BF16) -> Any:
        return jnp.asarray(rng.integers(-3, 4, shape).astype(dtype))

    transposed = [letter == "T" for letter in case["layout"]]
    lead = case["batch"]
    a = ints(*lead, *((k, m) if transposed[0] else (m, k)))
    b = ints(*lead, *((n, k) if transposed[1] else (k, n)))
    operands = [ints(*_of(kind, lead, m, n), dtype=dtype) for kind, dtype in kinds]
    if case["function"] == "picked":
        # Some columns are none, and then the sum is 0.
        operands = [jnp.asarray(rng.integers(-9, n + 9, (*lead, m, 1)).astype(F32))]
    how = {"transpose_a": transposed[0], "transpose_b": transposed[1], "config": config}
    with races.recorded() as raced:
        found = jax.jit(
            lambda a, b, *x: gemm(
                a, b, epilogue=function, operands=x, implementation="interpret", **how
            )
        )(a, b, *operands)
        jax.block_until_ready(found)
        assert not raced()
    left, right = (
        np.swapaxes(np.asarray(x, np.float32), -1, -2) if t else np.asarray(x, np.float32)
        for x, t in zip((a, b), transposed, strict=True)
    )
    expected = jax.jit(function)(jnp.asarray(left @ right), *operands)
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(np.asarray(x, F32), np.asarray(y, F32))


@pytest.mark.each_value
@pytest.mark.parametrize("late_store", [False, True])
@pytest.mark.parametrize("cluster", [(2, 1), (1, 2)])
@pytest.mark.parametrize(("rows", "columns"), [(192, 160), (264, 104), (320, 64), (64, 264)])
def test_nothing_beyond_the_result_is_counted(
    rows: int, columns: int, cluster: tuple[int, int], late_store: bool
) -> None:
    """The result ends within a strip, between two, or between tiles of a cluster."""
    form: Any = {"cluster": cluster, "late_store": late_store, "stages": 2, "ctas": 2}
    config = HopperConfig((128, 64), consumers=2, store_columns=32, store_slots=2, **form)
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-3, 4, (size, 72)).astype(BF16)) for size in (rows, columns))
    bias = jnp.asarray(rng.integers(4, 9, columns).astype(F32))
    how: Any = {"transpose_b": True, "implementation": "interpret", "config": config}
    found = gemm(a, b, epilogue=_reduced, operands=(bias,), **how)
    product = np.asarray(a, np.float32) @ np.asarray(b, np.float32).T
    for x, y in zip(found, _reduced(jnp.asarray(product), bias), strict=True):
        np.testing.assert_array_equal(np.asarray(x, F32), np.asarray(y, F32))


def _derivative(s: Any, pre: Any, scale: Any) -> Any:
    g = jnp.where(pre > 0, s, 0.0) * scale
    return g.astype(BF16), g, (g + pre.astype(F32)).astype(BF16)


CUT = {
    "kept": (117, *FUNCTIONS["kept"]),
    "loaded": (120, _derivative, (("mn", BF16), ("m", F32))),
}


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("last", [None, 1], ids=["all", "last"])
def test_several_results_of_tiles_that_are_cut(
    name: str, last: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    racing = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(implementation, "_simulator", lambda _: racing)
    config = HopperConfig(
        tile=(64, 64),
        consumers=1,
        late_store=False,
        stages=2,
        ctas=2,
        store_columns=32,
        split_k=2,
        split_last=last,
    )
    n, function, kinds = CUT[name]
    m, k = 72, 144
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-3, 4, shape).astype(BF16)) for shape in ((m, k), (n, k)))
    operands = [
        jnp.asarray(rng.integers(-3, 4, _of(kind, (), m, n)).astype(dtype)) for kind, dtype in kinds
    ]
    how = {"transpose_b": True, "config": config, "implementation": "interpret"}
    with races.recorded() as raced:
        found = jax.jit(lambda a, b, *x: gemm(a, b, epilogue=function, operands=x, **how))(
            a, b, *operands
        )
        jax.block_until_ready(found)
        assert not raced()
    product = np.asarray(a, np.float32) @ np.asarray(b, np.float32).T
    for x, y in zip(found, function(jnp.asarray(product), *operands), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(np.asarray(x, F32), np.asarray(y, F32))


@pytest.mark.parametrize("n", [117, 120])
def test_mirrored(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    racing = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(implementation, "_simulator", lambda _: racing)
    config = HopperConfig(tile=(64, 64), stages=2, ctas=2, store_columns=32, mirrored=True)
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-3, 4, shape).astype(BF16)) for shape in ((72, 144), (n, 144)))

    def function(s: Any, bias: Any) -> Any:
        return jnp.maximum(s + bias, 0).astype(BF16)

    bias = jnp.asarray(rng.integers(-3, 4, n).astype(F32))
    how = {"transpose_b": True, "config": config, "implementation": "interpret"}
    with races.recorded() as raced:
        found = jax.jit(lambda a, b, x: gemm(a, b, epilogue=function, operands=(x,), **how))(
            a, b, bias
        )
        jax.block_until_ready(found)
        assert not raced()
    product = np.asarray(a, np.float32) @ np.asarray(b, np.float32).T
    expected = function(jnp.asarray(product), bias)
    np.testing.assert_array_equal(np.asarray(found, F32), np.asarray(expected, F32))


def test_few_tiles_are_cut_along_k_where_there_are_several_results() -> None:
    a, b = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((512, 16384), (16384, 512)))
    bias = jax.ShapeDtypeStruct((512,), F32)
    with target("h200"):
        found = explain(lambda a, b, bias: gemm(a, b, epilogue=_kept, operands=(bias,)), a, b, bias)
        assert found.plan is not None
        assert found.plan.config.split_k > 1
        assert "after it" not in str(found)


def test_two_results_leave_a_ring_of_three_slots() -> None:
    # With two, 2560 x 2560 x 16384 takes 436 us on an H200, and 275 are predicted.
    for m, n, k in ((2048, 6144, 8192), (6144, 6144, 6144)):
        a, b = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((m, k), (k, n)))

        def both(s: Any) -> Any:
            return jnp.maximum(s, 0).astype(BF16), s.astype(BF16)

        with target("h200"):
            found = explain(functools.partial(gemm, epilogue=both), a, b)
        assert found.plan is not None
        assert found.plan.config.stages >= 3


def _loss(s: Any, label: Any) -> Any:
    position = lax.broadcasted_iota(jnp.int32, s.shape, 1)
    picked = jnp.sum(jnp.where(position == label[:, None], s, 0.0), -1)
    return jax.nn.logsumexp(s, -1) - picked, s.astype(BF16)


@pytest.mark.parametrize("pingpong", [False, True])
@pytest.mark.parametrize("store_slots", [1, 2])
def test_log_sum_exp_in_one_pass(
    pingpong: bool, store_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    racing = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(implementation, "_simulator", lambda _: racing)
    config = HopperConfig(
        tile=(64 if pingpong else 128, 64),
        consumers=2,
        pingpong=pingpong,
        late_store=False,
        stages=2,
        ctas=2,
        store_columns=32,
        store_slots=store_slots,
    )
    m, n, k = 136, 168, 144
    rng = np.random.default_rng(0)
    a = rng.standard_normal((m, k))
    # Rows whose values are far from 0, and one without a number.
    a[3] *= 1000
    a[5] = 0
    a[7] = np.nan
    b = rng.standard_normal((n, k))
    labels = jnp.asarray(rng.integers(-9, n + 9, m).astype(jnp.int32))
    operands = [jnp.asarray(x, BF16) for x in (a, b)]
    with races.recorded() as raced:
        found, kept = jax.jit(
            lambda a, b, x: gemm(
                *(a, b),
                transpose_b=True,
                epilogue=_loss,
                operands=(x,),
                implementation="interpret",
                config=config,
            )
        )(*operands, labels)
        jax.block_until_ready(found)
        assert not raced()
    product = np.asarray(operands[0], np.float32) @ np.asarray(operands[1], np.float32).T
    expected, rounded = _loss(jnp.asarray(product), labels)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-5)
    np.testing.assert_allclose(
        np.asarray(kept, F32), np.asarray(rounded, F32), rtol=2**-7, atol=1e-3
    )


def test_a_value_that_is_no_sum_is_picked_as_well() -> None:
    config = HopperConfig(
        tile=(64, 64), consumers=1, late_store=False, stages=2, ctas=2, store_columns=32
    )
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-2, 3, x).astype(BF16)) for x in ((64, 64), (104, 64)))
    labels = jnp.asarray(rng.integers(0, 104, 64).astype(jnp.int32))

    def f(s: Any, label: Any) -> Any:
        hit = lax.broadcasted_iota(jnp.int32, s.shape, 1) == label[:, None]
        return jnp.sum(jnp.where(hit, jnp.maximum(s + 1, 0), 0), -1), jnp.max(s, -1)

    how: Any = {"transpose_b": True, "implementation": "interpret", "config": config}
    found = gemm(a, b, epilogue=f, operands=(labels,), **how)
    sums = np.asarray(a, np.float32) @ np.asarray(b, np.float32).T
    for own, expected in zip(found, f(jnp.asarray(sums), labels), strict=True):
        np.testing.assert_array_equal(own, expected)


@pytest.mark.parametrize("late_store", [False, True])
def test_strips_beyond_the_last_column_are_left_out_of_tall_results_too(late_store: bool) -> None:
    # The last rows have higher numbers than any column; the last tile has three strips of columns.
    m, n, k = 192, 88, 64
    config = HopperConfig(
        tile=(64, 64), consumers=1, late_store=late_store, stages=2, ctas=2, store_columns=32
    )
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-2, 3, shape).astype(BF16)) for shape in ((m, k), (n, k)))

    def f(s: Any) -> Any:
        return s.astype(BF16), jnp.sum(s, -1), jnp.max(s, -1)

    found = gemm(a, b, transpose_b=True, epilogue=f, implementation="interpret", config=config)
    sums = jnp.asarray(np.asarray(a, np.float32) @ np.asarray(b, np.float32).T)
    for own, expected in zip(found, f(sums), strict=True):
        np.testing.assert_array_equal(np.asarray(own, np.float32), np.asarray(expected, np.float32))


def test_infinite_rows_in_the_kernel() -> None:
    config = HopperConfig(
        tile=(64, 64), consumers=1, late_store=False, stages=2, ctas=2, store_columns=32
    )
    a, b = jnp.ones((64, 64), BF16), jnp.ones((64, 128), BF16)
    rows = np.zeros((64, 128), np.float32)
    rows[0], rows[1, 3], rows[2, 70], rows[3, 5] = -np.inf, np.inf, np.nan, -np.inf
    # A tile without a number but minus infinity, beside one of very small numbers.
    rows[4, :64], rows[4, 64:] = -np.inf, -2000

    def f(s: Any, x: Any) -> Any:
        return jax.nn.logsumexp(s + x, -1)

    found = gemm(a, b, epilogue=f, operands=(rows,), implementation="interpret", config=config)
    np.testing.assert_allclose(found, f(64.0, rows), rtol=1e-6)


def _read(report: offline.Report) -> summaries.Findings:
    ptx = report.ptx
    return {
        "spill_bytes": report.spill_bytes,
        "serialized": list(report.serialized),
        "stored by TMA": "cp.async.bulk.tensor.2d.global.shared" in ptx,
        "pairs are loaded": "ld.v2.b32" in ptx,
        "fences": ptx.count("fence.proxy.async"),
        "exchanges": ptx.count("shfl.sync.bfly"),
        "exponentials": ptx.count("ex2.approx"),
        "additions": ptx.count("add.rn.f32"),
    }


def _found_in(f: Any, *shapes: Any, anew: bool = False) -> summaries.Findings:
    """Returns what the file of summaries says of the kernel of a program, or else the compiler."""
    with target("h200"):
        return summaries.KEPT.findings(_read, f, *shapes, target="h200", anew=anew)


def test_reductions_along_columns_add_two_barriers_each_and_no_copy_of_one() -> None:
    """LLVM copied those between two branches into both: half of a warp waited for the other."""

    def barriers(count: int) -> int:
        def f(s: jax.Array) -> Any:
            return s.astype(BF16), *(jnp.sum(s, 0), jnp.min(s, 0), jnp.max(s, 0))[:count]

        # Each CTA computes one tile: there is no loop around the branches.
        form = {"late_store": False, "schedule": "online_swizzle:1", "ctas": 5, "store_columns": 16}
        config = HopperConfig((64, 16), stages=2, consumers=1, store_slots=4, **form)
        given = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((64, 64), (80, 64))]
        with target("h200"):
            own = functools.partial(gemm, transpose_b=True, epilogue=f, config=config)
            return offline.compile_report(own, *given, target="h200").ptx.count("bar.sync %")

    one, two, three = map(barriers, (1, 2, 3))
    assert two - one == three - two == 2


@pytest.mark.each_value
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("shape", [(8192, 32768, 4096), (4096, 4096, 4096)])
def test_log_sum_exp_spills_nothing_and_has_no_array_in_memory(keeps: bool, shape: Any) -> None:
    m, n, k = shape
    shapes = [jax.ShapeDtypeStruct(x, BF16) for x in ((m, k), (k, n))]

    def f(a: Any, b: Any, label: Any) -> Any:
        epilogue = _loss if keeps else lambda *x: _loss(*x)[0]
        return gemm(a, b, epilogue=epilogue, operands=(label,))

    label = jax.ShapeDtypeStruct((m,), jnp.int32)
    found = _found_in(f, *shapes, label, anew=keeps and n == 4096)
    assert (found["spill_bytes"], found["serialized"]) == (0, [])
    assert found["stored by TMA"] == keeps


def _loss_and_total(s: Any, label: Any) -> Any:
    return *_loss(s, label)[:1], jnp.sum(s, -1)


def _slopes(s: Any, lse: Any, of_lse: Any, of_label: Any, label: Any) -> Any:
    g = jnp.exp(s - lse[:, None]) * of_lse[:, None]
    position = lax.broadcasted_iota(jnp.int32, s.shape, 1)
    return (g + jnp.where(position == label[:, None], of_label[:, None], 0)).astype(BF16)


def _found_of(function: Any, shape: Any, vectors: int, config: Any = None) -> summaries.Findings:
    m, n, k = shape
    shapes = [jax.ShapeDtypeStruct(x, BF16) for x in ((m, k), (k, n))]
    given = [jax.ShapeDtypeStruct((m,), F32)] * vectors + [jax.ShapeDtypeStruct((m,), jnp.int32)]

    def f(a: Any, b: Any, *operands: Any) -> Any:
        return gemm(a, b, epilogue=function, operands=operands, config=config)

    return _found_in(f, *shapes, *given)


@pytest.mark.parametrize(
    ("function", "vectors", "shape"),
    [
        # The last tile reaches beyond the edge, so that values are masked.
        (_loss_and_total, 0, (8192, 151936, 2048)),
        # In mirrored tiles that are stored late, this spilled.
        (_slopes, 3, (8192, 4480, 2048)),
    ],
)
def test_many_vectors_of_rows_spill_nothing(function: Any, vectors: int, shape: Any) -> None:
    found = _found_of(function, shape, vectors)
    assert (found["spill_bytes"], found["serialized"]) == (0, [])


def test_rows_that_are_compared_with_columns_are_not_stored_late_and_mirrored() -> None:
    config = HopperConfig(tile=(128, 256), late_store=True, mirrored=True)
    with pytest.raises(ValueError, match="a consumer has at most 232 registers"):
        _found_of(_slopes, (8192, 4480, 2048), 3, config)


def test_a_kernel_counts_columns_and_waits_for_no_load_of_them() -> None:
    found = _found_of(lambda *x: _loss(*x)[0], (4096, 32768, 4096), 0)
    assert not found["pairs are loaded"]
    # Nothing is stored by TMA, so that consumers need no barrier of their own either.
    assert not found["fences"]


def test_threads_of_a_row_exchange_values_once_for_a_tile() -> None:
    # With tiles that reach beyond the edge, the strips are in the kernel twice.
    config = HopperConfig(tile=(128, 256), late_store=False)
    for columns in (24576, 24640):
        shape = (4096, columns, 2048)
        found = _found_of(lambda *x: _loss(*x)[0], shape, 0, config)
        # A thread has values of two rows, and exchanges those of three vectors twice.
        assert found["exchanges"] == 2 * 2 * 3


def test_labels_are_compared_only_where_a_tile_has_some() -> None:
    labels = _found_of(lambda *x: _loss(*x)[0], (4096, 24576, 2048), 0)
    only = _found_of(lambda s, _: jax.nn.logsumexp(s, -1), (4096, 24576, 2048), 0)
    # In no strip of the others: as many exponentials, and about as many additions.
    assert labels["exponentials"] == only["exponentials"] > 0
    assert labels["additions"] - only["additions"] < 32


@pytest.mark.usefixtures("empty_kernels")
def test_columns_are_reduced_by_a_warpgroup() -> None:
    def f(s: Any) -> Any:
        return s.astype(BF16), jnp.sum(s, 0)

    shapes = [jax.ShapeDtypeStruct((4096, 4096), BF16)] * 2
    with target("h200"):
        program = jax.jit(lambda a, b: gemm(a, b, epilogue=f)).trace(*shapes)
        text = program.lower(lowering_platforms=("cuda",)).as_text()
    # One vector of each consumer's 64 rows is left for XLA.
    assert "tensor<64x4096xf32>" in text
    assert "tensor<256x4096xf32>" not in text


@pytest.mark.parametrize("words", [32768, 151936])
def test_consumers_take_turns_where_nothing_but_sums_of_exp_is_left(words: int) -> None:
    shapes = [jax.ShapeDtypeStruct(x, BF16) for x in ((8192, 2048), (2048, words))]

    def f(a: Any, b: Any) -> Any:
        return gemm(a, b, epilogue=lambda s: jax.nn.logsumexp(s, -1))

    with target("h200"):
        plan = explain(f, *shapes).entries[-1].decision.plan
    assert plan is not None
    assert (plan.config.tile, plan.config.overlap) == ((128, 192), "turns")


def _of_both(gate: Any, up: Any, residual: Any) -> Any:
    z = jnp.maximum(gate, 0) * up + residual.astype(F32)
    return z.astype(BF16), jnp.sum(z, -1), jnp.max(z, -2), up


@pytest.mark.parametrize("pingpong", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_function_of_both_sums_of_a_gated_product(
    pingpong: bool, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    racing = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(implementation, "_simulator", lambda _: racing)
    config = HopperConfig(
        tile=(64 if pingpong else 128, 128),
        consumers=2,
        pingpong=pingpong,
        late_store=False,
        stages=2,
        ctas=2,
        store_columns=32,
    )
    m, n, k = 136, 128, 144
    rng = np.random.default_rng(0)
    shapes = ((m, k), (k, n), (k, n), (m, n))
    a, gate, up, residual = (
        jnp.asarray(rng.integers(-3, 4, (*batch, *shape)).astype(BF16)) for shape in shapes
    )
    with races.recorded() as raced:
        found = jax.jit(
            lambda a, gate, up, x: gated_gemm(
                *(a, gate, up),
                epilogue=_of_both,
                operands=(x,),
                implementation="interpret",
                config=config,
            )
        )(a, gate, up, residual)
        jax.block_until_ready(found)
        assert not raced()
    left, of_gate, of_up = (np.asarray(x, np.float32) for x in (a, gate, up))
    expected = _of_both(jnp.asarray(left @ of_gate), jnp.asarray(left @ of_up), residual)
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(np.asarray(x, F32), np.asarray(y, F32))
