"""What is promised of the bits of a product decides how its sums are cut, whatever the rows."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pallas_gemm import HopperConfig
from pallas_gemm.call import Call, GroupedCall, Numerics, Options
from pallas_gemm.device import B200, H100, H200
from pallas_gemm.planning import dispatch, numerics, plans, tables
from pallas_gemm.planning.architectures import ARCHITECTURES
from pallas_gemm.planning.candidates import cuts
from pallas_gemm.planning.sums import Sums
from pallas_gemm.planning.tables import Entry, Key, Table
from pallas_gemm.problem import Epilogue, Problem
from pallas_gemm.tuning import space
from schedules import raster, split_k

E4M3 = jnp.float8_e4m3fn
ROWS = Numerics("rows")
PRECISIONS = [None, (lax.Precision.HIGHEST,) * 2, lax.DotAlgorithmPreset.BF16_BF16_F32_X3]
EPILOGUES = [
    Epilogue(),
    Epilogue(bias=True, activation=jax.nn.gelu),
    Epilogue(residual=True, beta=0.5),
    Epilogue(gated=True, activation=jax.nn.silu),
]


def call(n: int, k: int, dtype: Any = jnp.bfloat16, asked: Any = ROWS, **fields: Any) -> Call:
    options = numerics.resolved(Options(target=H200, numerics=asked), n, k, dtype)
    out = fields.pop("out_dtype", jnp.bfloat16)
    return Call(out, **{"transpose_b": True} | fields, options=options)


def sums(call: Call, m: int, n: int, k: int, dtype: Any = jnp.bfloat16) -> Sums:
    dtype, epilogue = np.dtype(dtype), call.epilogue
    a, b = (k, m) if call.transpose_a else (m, k), (n, k) if call.transpose_b else (k, n)
    shapes = {"bias": ((n,), np.dtype(np.float32)), "residual": ((m, n), call.out_dtype)}
    extras = [shapes[name] for name in epilogue.operands]
    factors = [(a, dtype), (b, dtype), *([(b, dtype)] if epilogue.gated else [])]
    return Sums.of(dispatch.decide(call, (*factors, *extras)))


@settings(max_examples=120)
@given(
    st.integers(1, 20000),
    st.integers(1, 20000),
    st.sampled_from([(128, 576), (768, 3072), (1152, 6912), (1536, 8960), (2048, 8192)])
    | st.sampled_from([(2056, 8192), (4096, 4096), (4096, 14336), (14336, 4096), (1000, 1000)]),
    st.sampled_from([jnp.bfloat16, jnp.float16, jnp.float32, E4M3]),
    st.sampled_from([jnp.bfloat16, jnp.float32]),
    st.sampled_from(["NN", "NT", "TN", "TT"]),
    st.sampled_from(EPILOGUES),
    st.sampled_from(PRECISIONS),
)
def test_sums_do_not_depend_on_how_many_rows_there_are(
    first, second, columns, dtype, out, layout, epilogue, precision
) -> None:
    n, k = columns
    form = {"transpose_a": layout[0] == "T", "transpose_b": layout[1] == "T"}
    if dtype == jnp.float32:
        form["precision"] = precision
    own = call(n, k, dtype, out_dtype=out, **form, epilogue=epilogue)
    one, other = (sums(own, m, n, k, dtype) for m in (first, second))
    assert one == other
    assert (one.invariant, one.by, sum(one.parts)) == ("rows", "hopper", -(-k // one.step))


@pytest.mark.parametrize("m", [8, 64, 4096])
def test_a_gated_product_of_float32_in_parts_of_64_has_registers(m: int) -> None:
    highest = {"precision": PRECISIONS[1], "transpose_a": True, "transpose_b": False}
    own = call(128, 576, jnp.float32, **highest, epilogue=EPILOGUES[3])
    assert sums(own, m, 128, 576, jnp.float32).parts == (1,) * 9


def test_without_a_promise_they_do() -> None:
    found = {sums(call(1152, 6912, asked=None), m, 1152, 6912) for m in (1, 64, 512, 4096)}
    assert len(found) > 1


@pytest.mark.parametrize(
    ("n", "k", "dtype", "parts"),
    [
        (512, 4096, jnp.bfloat16, 4),
        (513, 4096, jnp.bfloat16, 3),
        (1024, 4096, jnp.bfloat16, 4),
        (1025, 4096, jnp.bfloat16, 3),
        (1536, 4096, jnp.bfloat16, 4),
        (2047, 4096, jnp.bfloat16, 2),
        (2048, 4096, jnp.bfloat16, 1),
        (2047, 4095, jnp.bfloat16, 1),
        (512, 8192, E4M3, 4),
        (512, 4096, E4M3, 1),
        (1, 2048, jnp.float32, 4),
    ],
)
def test_few_columns_and_a_long_k_are_cut(n: int, k: int, dtype: Any, parts: int) -> None:
    assert call(n, k, dtype).options.parts == parts


@pytest.mark.parametrize(
    ("n", "k", "dtype", "out", "parts"),
    [
        (4096, 4096, jnp.bfloat16, jnp.float32, 1),
        (4096, 8192, jnp.bfloat16, jnp.float32, 2),
        (4096, 8256, E4M3, jnp.float32, 3),
        (4096, 8192, jnp.bfloat16, jnp.bfloat16, 1),
        (4096, 8192, jnp.float32, jnp.float32, 1),
        (4096, 8192, jnp.int8, jnp.int32, 1),
        (512, 32768, jnp.bfloat16, jnp.float32, 8),
        (512, 8192, jnp.bfloat16, jnp.float32, 4),
    ],
)
def test_results_of_float32_are_summed_up_in_short_parts(
    n: int, k: int, dtype: Any, out: Any, parts: int
) -> None:
    own = Call(np.dtype(out), options=Options(target=H200, numerics=ROWS))
    assert numerics.resolved_call(own, n, k, dtype).options.parts == parts
    # A function takes the registers that another part needs.
    assert numerics.resolved_call(own, 4096, k, dtype, finished=True).options.parts == 1


def test_a_gated_product_counts_both_of_its_right_operands() -> None:
    own = Call(
        jnp.bfloat16,
        epilogue=Epilogue(gated=True),
        options=Options(target=H200, numerics=ROWS),
    )
    assert numerics.resolved_call(own, 1023, 8192, jnp.bfloat16).options.parts == 2
    assert numerics.resolved_call(own, 1024, 8192, jnp.bfloat16).options.parts == 1


@pytest.mark.parametrize(
    ("size", "parts", "pieces"),
    [
        ((512, 1024, 16384), 16, [16, 8]),
        ((512, 1024, 24576), 6, [6, 3]),
        ((512, 1024, 24576), 3, [3]),
        # 63 sums of 512 x 1024 are more than the L2 holds, and three of 8192 x 1024.
        ((512, 1024, 65536), 64, []),
        ((8192, 1024, 16384), 4, []),
    ],
)
def test_pieces_have_two_parts_at_most_and_leave_what_the_l2_holds(
    size: tuple[int, int, int], parts: int, pieces: list[int]
) -> None:
    problem = Problem(*size, transpose_b=True, parts=parts)
    assert list(cuts.promised_pieces(problem, H200)) == pieces


def test_the_fewer_rows_the_more_ctas_make_the_parts_of_a_tile() -> None:
    own = call(1536, 8960)
    ways = {}
    for m in (8, 512, 8192):
        signature = (((m, 8960), np.dtype(jnp.bfloat16)), ((1536, 8960), np.dtype(jnp.bfloat16)))
        plan = dispatch.decide(own, signature).plan
        assert plan is not None
        assert isinstance(plan.config, HopperConfig)
        ways[m] = plan.config.split_k, plan.config.partial_sums
    assert ways == {8: (4, 1), 512: (2, 2), 8192: (1, 4)}


def test_parts_and_chunks_can_be_stated() -> None:
    own = call(4096, 4096, asked=Numerics("run", part=1024))
    assert sums(own, 300, 4096, 4096).parts == (16,) * 4
    assert call(4096, 1000, asked=Numerics("run", part=1024)).options.parts == 1
    over_rows = numerics.over_rows(call(4096, 4096, asked=Numerics("rows", chunk=512)), 2048, "f4")
    assert over_rows.options.parts == 4
    with pytest.raises(ValueError, match=r"multiple of 64 elements of k.* got 1000; the next is 1"):
        call(4096, 4000, asked=Numerics("run", part=1000))
    with pytest.raises(ValueError, match="whole number of parts of 1024; the next is a sum over 5"):
        call(4096, 4097, asked=Numerics("run", part=1024))


CONTRADICTIONS = {
    "config": {"config": HopperConfig(split_k=2, late_store=False)},
    "both ways": {"config": HopperConfig((128, 128), split_k=4, partial_sums=4, late_store=False)},
    "last tiles": {"config": HopperConfig(split_k=4, split_last=1, late_store=False)},
    "pieces": {"schedule": split_k(raster(8, 8), 128, 2)},
}


@pytest.mark.parametrize("named", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_config_that_contradicts_a_promise_is_refused(named: Any) -> None:
    own = call(1536, 8192)
    own = dataclasses.replace(own, options=dataclasses.replace(own.options, **named))
    with pytest.raises(ValueError, match=r"each sum over k=8192 is made in 4 parts") as raised:
        sums(own, 1024, 1536, 8192)
    assert "numerics(invariant='rows')" in str(raised.value)
    assert next(iter(named)) in str(raised.value)


KEPT: list[dict[str, Any]] = [
    {"split_k": 4},
    {"partial_sums": 4},
    {"split_k": 2, "partial_sums": 2, "schedule": "online_swizzle:8"},
]


@pytest.mark.parametrize("split", KEPT, ids=str)
def test_a_config_that_keeps_it_is_taken(split: dict[str, Any]) -> None:
    config = HopperConfig((128, 128), late_store=False, **split)
    own = call(1536, 8192)
    named = dataclasses.replace(own, options=dataclasses.replace(own.options, config=config))
    assert sums(named, 1024, 1536, 8192) == sums(own, 7, 1536, 8192)


def test_xla_computes_nothing_of_which_something_is_promised() -> None:
    tiny = 5, 448, 512
    assert sums(call(448, 512, asked=None), *tiny).by == "xla"
    for asked in (ROWS, Numerics("run")):
        assert sums(call(448, 512, asked=asked), *tiny).by == "hopper"
    with pytest.raises(ValueError, match=r"numerics\(invariant='rows'\) .* int32"):
        sums(call(512, 512, jnp.int32), 64, 512, 512, jnp.int32)


def test_a_gpu_without_a_kernel_that_is_trusted_is_an_error() -> None:
    own = call(512, 512).with_target(B200)
    with pytest.raises(ValueError, match=r"numerics\(invariant='rows'\)"):
        sums(own, 64, 512, 512)
    assert sums(call(512, 512).with_target(H100), 64, 512, 512).device == H100.kind


def _planned(own: Call, signature: Any) -> plans.Plan:
    plan = dispatch.decide(own, signature).plan
    assert plan is not None
    return plan


def test_tables_are_asked_for_what_keeps_a_promise() -> None:
    own, size = call(1536, 8192), (1024, 1536, 8192)
    signature = ((size[::2], np.dtype(jnp.bfloat16)), (size[1:], np.dtype(jnp.bfloat16)))
    plain = dataclasses.replace(own.problem(signature), parts=0)
    whole = HopperConfig((128, 128), late_store=False, stages=3)
    cut = dataclasses.replace(whole, split_k=4)
    with Table.of(H200.kind, {Key.of(plain): Entry(whole)}):
        assert _planned(own, signature).source == "heuristics"
    with Table.of(H200.kind, {Key.of(plain): Entry(cut)}):
        assert _planned(own, signature).config == cut
    kept = Table.of(H200.kind, {Key.of(own.problem(signature)): Entry(cut)})
    with kept:
        assert _planned(own, signature).source == "tuned (context)"
        free = dataclasses.replace(own, options=Options(target=H200))
        assert _planned(free, signature).config != cut
    assert Table.loads(kept.dumps()) == kept
    with tables.recording() as record:
        dispatch.decide(own, signature)
    assert [problem.parts for problem, _ in record.problems.values()] == [4]


def test_a_scheme_says_in_which_parts_its_largest_term_is_summed_up() -> None:
    form = {"dtype": jnp.float32, "out_dtype": jnp.float32, "precision": PRECISIONS[1]}
    highest = sums(call(1024, 4096, **form), 64, 1024, 4096, jnp.float32)
    assert highest.parts == (1,) * 64
    assert len(highest.terms) == 6
    assert "6 terms, the largest in 64 x 1 steps of 64" in str(highest)
    stated = call(1024, 4096, asked=Numerics("run", part=1024), **form)
    with pytest.raises(ValueError, match="HIGHEST says itself in which parts"):
        sums(stated, 64, 1024, 4096, jnp.float32)


def test_tuning_tries_what_keeps_a_promise() -> None:
    problem = Problem(1024, 1536, 8192, transpose_b=True, parts=4)
    tried = space.configs(problem, H200, ARCHITECTURES[0])
    assert len(tried) > 3
    assert {(math.prod(c.summed_in), c.split_last) for c in tried} == {(4, None)}


def test_records_say_what_runs_without_a_promise_too() -> None:
    one = sums(call(4096, 4096, asked=None), 4096, 4096, 4096)
    assert (one.invariant, one.parts, one.step) == ("run", (64,), 64)
    cut = HopperConfig((128, 256), split_k=4, split_last=3)
    named = call(4096, 4096, asked=None)
    named = dataclasses.replace(named, options=dataclasses.replace(named.options, config=cut))
    last = sums(named, 4096, 4096, 4096)
    assert last.whole is not None
    assert "as the config cuts them" in str(last)
    by_xla = sums(call(448, 512, asked=None), 5, 448, 512)
    assert (by_xla.invariant, by_xla.by) == (None, "xla")
    assert str(by_xla) == "bfloat16 by XLA, which says nothing of its sums"
    assert sums(call(512, 512, jnp.float32), 9, 512, 512, jnp.float32).multiplied[0] == "tf32"


def _of_groups(asked: Numerics | None, **fields: Any) -> GroupedCall:
    return GroupedCall(jnp.bfloat16, options=Options(target=H200, numerics=asked), **fields)


@pytest.mark.parametrize(("turned", "parts"), [(False, 4), (True, 1)])
def test_groups_are_cut_by_the_columns_of_their_matrices(turned: bool, parts: int) -> None:
    a = jax.ShapeDtypeStruct((100, 4096), jnp.bfloat16)
    b = jax.ShapeDtypeStruct((3, 4096, 512), jnp.bfloat16)
    own = numerics.resolved_groups(_of_groups(ROWS, transpose_b=turned), a, b)
    assert own.options.parts == parts
    assert numerics.resolved_groups(_of_groups(None), a, b).options.parts == 0
    wide = dataclasses.replace(_of_groups(ROWS), out_dtype=np.dtype(np.float32))
    deep = jax.ShapeDtypeStruct((100, 32768), jnp.bfloat16)
    large = jax.ShapeDtypeStruct((3, 32768, 4096), jnp.bfloat16)
    assert numerics.resolved_groups(wide, deep, large).options.parts == 8
    assert numerics.resolved_groups(wide, deep, large, finished=True).options.parts == 1


def test_sums_over_groups_are_the_same_in_every_run_and_have_no_chunks() -> None:
    a = b = jax.ShapeDtypeStruct((100, 512), jnp.bfloat16)
    own = numerics.resolved_groups(_of_groups(ROWS, contracted=True), a, b)
    assert (own.options.numerics, own.options.parts) == (Numerics("run"), 0)
    free = _of_groups(None, contracted=True)
    assert numerics.resolved_groups(free, a, b) == free
    in_chunks = _of_groups(Numerics("rows", chunk=64), contracted=True)
    with pytest.raises(ValueError, match=r"no chunks.*numerics\(invariant='rows', chunk=64\)"):
        numerics.resolved_groups(in_chunks, a, b)


def test_sums_over_rows_are_cut_into_chunks() -> None:
    own = Call(jnp.bfloat16, options=Options(numerics=Numerics("rows", part=512, chunk=256)))
    found = numerics.over_rows(own, 4096, jnp.bfloat16)
    assert (found.options.numerics, found.options.parts) == (Numerics("run", part=256), 16)
    assert numerics.over_rows(own, 256, jnp.bfloat16).options.parts == 1
    free = Call(jnp.bfloat16)
    assert numerics.over_rows(free, 4096, jnp.bfloat16) == free


@pytest.mark.parametrize(
    ("problem", "asked"),
    [
        (Problem(64, 512, 8192), None),
        (Problem(64, 512, 8192, parts=4), ROWS),
        (Problem(64, 2048, 8192, parts=1), ROWS),
        (Problem(64, 2048, 8192, parts=4), Numerics("run", part=2048)),
        (Problem(64, 4096, 8192, out_dtype=np.float32, parts=2), ROWS),
        (Problem(64, 4096, 8192, parts=2), Numerics("run", part=4096)),
        (Problem(64, 512, 8192, parts=4, epilogue=EPILOGUES[3]), ROWS),
        (Problem(64, 1024, 8192, parts=4, epilogue=EPILOGUES[3]), Numerics("run", part=2048)),
    ],
)
def test_parts_of_a_problem_tell_what_asks_for_them(problem: Problem, asked: Any) -> None:
    assert numerics.stating(problem) == asked


def test_a_promise_that_is_stated_counts_before_that_of_a_block() -> None:
    nothing = Numerics(None)
    assert numerics.stated(Options()).numerics is None
    assert numerics.stated(Options(numerics=nothing)).numerics is None
    with numerics.STATED(ROWS):
        assert numerics.stated(Options()).numerics == ROWS
        assert numerics.stated(Options(numerics=Numerics("run"))).numerics == Numerics("run")
        assert numerics.stated(Options(numerics=nothing)).numerics is None
        with pytest.raises(ValueError, match=r"numerics\(invariant='rows'\).*: it is odd$"):
            numerics.refuse("it is odd")
        numerics.refuse("it is odd", nothing)
    numerics.refuse("it is odd")
    with pytest.raises(ValueError, match=r"\(invariant='run'\) is a promise.*: it is odd$"):
        numerics.refuse("it is odd", Numerics("run"))
    many = numerics.why_not_kept(ROWS, "it is odd", ["one", "two"])
    assert many.endswith("computes this product: it is odd (one; two)")


def test_what_xla_sums_up_is_known_by_its_product_alone() -> None:
    own = sums(call(448, 512, asked=None), 5, 448, 512)
    problem = Problem(5, 448, 512, transpose_b=True)
    types = "bfloat16", "bfloat16"
    assert own == Sums(
        *(None, "xla", None, types, "float32", 0, (), Epilogue(), ("bfloat16",)), whole=problem
    )


@pytest.mark.parametrize(("k", "parts"), [(64, 1), (100, 1)])
def test_a_sum_that_is_no_longer_than_a_part_is_one(k: int, parts: int) -> None:
    # 100 elements are no whole number of steps, and need not be.
    asked = Options(numerics=Numerics("run", part=100))
    assert numerics.resolved(asked, 512, k, jnp.bfloat16).parts == parts
    with pytest.raises(ValueError, match="multiple of 64 elements"):
        numerics.resolved(asked, 512, 101, jnp.bfloat16)
