"""The Hopper kernel compiled ahead of time: no spills, nothing serialized, and what it promises.

What is compiled covers the search space without being all of it: a kernel that changed takes two
seconds, one that did not a third of one.

* every tile of the candidates of the heuristics, once: those that take many registers, and a third
  of the others, for a product with few tiles on an H100, cut along k or not, in turn; what is left
  for one with many, in each of the layouts in turn;
* of the candidates that take many registers, the widest of each kind with each epilogue that takes
  some too;
* candidates with one of the other element types, in turn, stored with k last as all types can be:
  those that take many registers, and a third of the others;
* the configs that tuning tries for a product of 4096 cubed with k last, the layout that allows the
  most widths;
* one config for each mode of the kernel.
"""

import collections
import dataclasses
import itertools
import math
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import offline
from pallas_gemm.call import DIMENSIONS
from pallas_gemm.config import CLUSTERS
from pallas_gemm.device import DEVICES, H200
from pallas_gemm.kernels import protocol
from pallas_gemm.kernels.functions.activations import ACTIVATIONS, gelu_tanh
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper.config import CLAIM_SLOTS, HopperConfig
from pallas_gemm.kernels.hopper.groups import warp_loop
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.planning import scheme as schemes
from pallas_gemm.planning.architectures import ARCHITECTURES
from pallas_gemm.planning.candidates.draft import finished
from pallas_gemm.planning.candidates.hopper import drafts
from pallas_gemm.problem import Epilogue, Problem
from pallas_gemm.proving import products
from pallas_gemm.tuning import space as tuning_space
from tests import epilogues, summaries
from tests.kernels.taken import as_taken

Case = tuple[HopperConfig, Problem]

PROBLEM = Problem(4096, 4096, 4096)
NT = products.transposed(PROBLEM, "NT")
LAYOUTS = ("NN", "NT", "TN", "TT")
BIAS_AND_GELU = Epilogue(bias=True, activation=gelu_tanh)
BIAS_AND_RESIDUAL = Epilogue(bias=True, residual=True)
EPILOGUES = (BIAS_AND_GELU, BIAS_AND_RESIDUAL)
MANY_REGISTERS = 96
"""Of an accumulator: with fewer, more are left than the heaviest epilogue here takes."""
DTYPES = (
    (jnp.float16, jnp.float16, jnp.float16),
    (jnp.bfloat16, jnp.bfloat16, jnp.float32),
    (jnp.float32, jnp.float32, jnp.float32),
    (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16),
    (jnp.int8, jnp.int8, jnp.int32),
)

E4M3 = jnp.float8_e4m3fn
LATE = HopperConfig(tile=(128, 256), stages=4)
EARLY = dataclasses.replace(LATE, late_store=False)
SILU = Epilogue(activation=jax.nn.silu)
SILU_AND_RESIDUAL = dataclasses.replace(SILU, residual=True)
WITH_SILU = dataclasses.replace(PROBLEM, epilogue=SILU)
GATED = dataclasses.replace(PROBLEM, epilogue=Epilogue(gated=True, activation=jax.nn.silu))
HALF = dataclasses.replace(NT, symmetric="gram")
SUM = dataclasses.replace(NT, terms=(2048, 1024, 1024))
SPLIT = schemes.Scheme("X3", PROBLEM.a_dtype, schemes.THREE).whole(
    dataclasses.replace(PROBLEM, out_dtype=jnp.float32)
)
EXACT = schemes.HIGHEST.whole(dataclasses.replace(PROBLEM, out_dtype=jnp.float32))
FLOAT32 = {"a_dtype": jnp.float32, "b_dtype": jnp.float32, "out_dtype": jnp.float32}
MODES: dict[str, Case] = {
    **{
        f"cluster {rows}x{cols}": (dataclasses.replace(LATE, cluster=(rows, cols)), PROBLEM)
        for rows, cols in CLUSTERS
    },
    "early": (EARLY, PROBLEM),
    "claimed": (dataclasses.replace(LATE, persistence="dynamic"), PROBLEM),
    "claimed in clusters": (
        dataclasses.replace(EARLY, persistence="dynamic", cluster=(2, 2)),
        PROBLEM,
    ),
    "not persistent": (
        dataclasses.replace(LATE, persistence="none"),
        dataclasses.replace(PROBLEM, epilogue=Epilogue(activation=gelu_tanh)),
    ),
    "float32": (
        dataclasses.replace(EARLY, tile=(128, 128), store_columns=32),
        dataclasses.replace(NT, **FLOAT32, epilogue=Epilogue(activation=gelu_tanh)),
    ),
    "on-line": (
        dataclasses.replace(EARLY, tile=(128, 128), stages=6, schedule="online_swizzle:8"),
        PROBLEM,
    ),
    "in turns": (dataclasses.replace(EARLY, tile=(128, 192), pingpong=True), PROBLEM),
    "tall": (dataclasses.replace(EARLY, tile=(256, 192), stages=3, store_columns=32), PROBLEM),
    "three consumers": (dataclasses.replace(EARLY, tile=(192, 128), consumers=3), PROBLEM),
    "one consumer": (dataclasses.replace(EARLY, tile=(64, 256), consumers=1), PROBLEM),
    "transposed a": (LATE, products.transposed(PROBLEM, "TN")),
    "mirrored": (dataclasses.replace(EARLY, mirrored=True), PROBLEM),
    "gated": (EARLY, GATED),
    "sum": (LATE, SUM),
    "sum in turns": (dataclasses.replace(EARLY, tile=(128, 192), pingpong=True), SUM),
    "split": (dataclasses.replace(EARLY, stages=3, store_columns=32), SPLIT),
    "split in turns": (
        dataclasses.replace(EARLY, tile=(128, 128), pingpong=True, store_columns=32),
        SPLIT,
    ),
    "split, tall": (
        dataclasses.replace(EARLY, tile=(256, 192), stages=3, store_columns=32, store_slots=1),
        SPLIT,
    ),
    "split, short sums": (
        dataclasses.replace(EARLY, tile=(128, 144), store_columns=16, partial_sums=64),
        products.transposed(EXACT, "NT"),
    ),
    "split, two parts": (
        dataclasses.replace(EARLY, tile=(128, 192), store_columns=32, partial_sums=2),
        SPLIT,
    ),
    "half": (dataclasses.replace(LATE, store_slots=1), HALF),
    "half, ragged": (dataclasses.replace(LATE, tile=(128, 144), store_slots=1), HALF),
    "half, early": (
        dataclasses.replace(EARLY, store_slots=1),
        dataclasses.replace(HALF, symmetric="product", epilogue=Epilogue(2.0, 0.5, residual=True)),
    ),
    "half in turns": (
        dataclasses.replace(EARLY, tile=(128, 128), pingpong=True),
        dataclasses.replace(HALF, symmetric="product", epilogue=Epilogue(2.0, 0.5, residual=True)),
    ),
}


def operands(problem: Problem) -> list[jax.ShapeDtypeStruct]:
    if problem.arrays:
        one = dataclasses.replace(problem, k=problem.terms[0], terms=(), arrays=())
        return problem.pairs * operands(one)
    if problem.terms:
        whole = operands(dataclasses.replace(problem, terms=()))
        return jax.eval_shape(
            lambda a, b: as_taken(problem, products.Operands(a, b, None)),
            *whole,
        )
    arrays = [(problem.a_shape, problem.a_dtype)]
    arrays += [(problem.b_shape, problem.b_dtype)] * problem.sums
    if problem.groups or problem.ragged_k:
        arrays.append(((problem.groups or problem.batch,), jnp.int32))
    own = (problem.batch,) if problem.batch > 1 else ()
    sizes = {"m": (problem.m,), "n": (problem.n,), "": ()}
    arrays += [
        (problem.residual_shape, problem.out_dtype)
        if name == "residual"
        else ((*own, *sizes[DIMENSIONS[name]]), jnp.float32)
        for name in problem.epilogue.operands
    ]
    return [jax.ShapeDtypeStruct(*array) for array in arrays]


def build(case: Case, target: str = "h200") -> Callable[..., jax.Array]:
    config, problem = case
    return hopper.build(HopperPlan(problem, config, DEVICES[target]))


def check_sound(cases: Sequence[Case], target: str = "h200") -> None:
    assert cases
    for config, problem in cases:
        kernel = build((config, problem), target)
        found = summaries.KEPT.of(kernel, *operands(problem), target=target)
        assert len([each for each in found if "join" not in each.kernel]) == 1
        case = config, problem.layout, problem.epilogue
        assert not any(each.spill_bytes or each.serialized for each in found), (case, found)


def candidate_cases(problem: Problem, target: str = "h200") -> list[Case]:
    device = DEVICES[target]
    # Where only the last tiles are cut, there is a kernel for those and one for the others.
    configs = [
        config
        for config in finished(drafts(problem, device))
        if not config.refusals(problem, device) and not config.split_last
    ]
    assert configs
    return [(config, problem) for config in configs]


def one_of_each_tile(cases: Sequence[Case], turn: int = 0) -> list[Case]:
    """Returns a case for each tile: one of its configs and layouts, in turn."""
    of_tile = collections.defaultdict(list)
    for case in cases:
        of_tile[tile_of(case)].append(case)
    return [cases[(i + turn) % len(cases)] for i, cases in enumerate(of_tile.values())]


def tile_of(case: Case) -> tuple[tuple[int, int], bool]:
    return case[0].tile, case[0].mirrored


def in_every_layout(problem: Problem) -> list[Case]:
    layouts = (products.transposed(problem, layout) for layout in LAYOUTS)
    return [case for problem in layouts for case in candidate_cases(problem)]


def crowded(cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if case[0].accumulator_registers >= MANY_REGISTERS]


def small_cases() -> list[Case]:
    """Those that are compiled for a product with fewer tiles than SMs, whose order is computed."""
    cases = candidate_cases(Problem(1024, 1024, 1024), "h100")
    assert any(config.is_online for config, _ in cases)
    chosen = one_of_each_tile(cases)
    full = crowded(chosen)
    return full + [case for case in chosen if case not in full][::3]


def test_every_candidate_for_a_small_product_on_an_h100():
    check_sound(small_cases(), "h100")


def test_every_other_candidate():
    compiled_small = {tile_of(case) for case in small_cases()}
    cases = one_of_each_tile(in_every_layout(PROBLEM))
    check_sound([case for case in cases if tile_of(case) not in compiled_small])


def test_float32_results_in_turns():
    wide = dataclasses.replace(PROBLEM, out_dtype=jnp.float32)
    for layout in ("NN", "NT"):
        cases = candidate_cases(products.transposed(wide, layout))
        check_sound([case for case in cases if case[0].pingpong])


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=["gelu", "residual"])
def test_the_widest_candidates_with_an_epilogue(epilogue):
    problem = dataclasses.replace(PROBLEM, epilogue=epilogue)
    alike = collections.defaultdict(list)
    for case in crowded(one_of_each_tile(in_every_layout(problem), EPILOGUES.index(epilogue))):
        config = case[0]
        finished = config.finished_columns(problem)
        # With the same epilogue on as many columns at a time, a narrower tile has registers left.
        kind = (config.tile[0], config.mirrored, config.late_store, config.store_columns, finished)
        alike[kind].append(case)
    check_sound([max(cases, key=lambda case: case[0].tile) for cases in alike.values()])


def test_candidates_with_every_type():
    cases = []
    for turn, (a, b, out) in enumerate(DTYPES):
        problem = dataclasses.replace(NT, a_dtype=a, b_dtype=b, out_dtype=out)
        chosen = candidate_cases(problem)[turn :: len(DTYPES)]
        full = crowded(chosen)
        cases += full + [case for case in chosen if case not in full][turn % 3 :: 3]
    check_sound(cases)


def test_what_tuning_tries():
    tried = [
        # What differs only in its order, or in how many CTAs share it, is the same code.
        dataclasses.replace(config, ctas=None, schedule="swizzle:8")
        for config in tuning_space.configs(NT, H200, ARCHITECTURES[0])
        if isinstance(config, HopperConfig)
    ]
    check_sound([(config, NT) for config in dict.fromkeys(tried)])


def test_what_would_spill_is_refused_and_the_nearest_tile_does_not():
    cases = [
        ("in turns", {}, dataclasses.replace(NT, epilogue=SILU_AND_RESIDUAL)),
        (
            "tall",
            {"tile": (256, 176), "store_columns": 64, "stages": 2},
            dataclasses.replace(NT, epilogue=SILU),
        ),
        ("in turns", {"tile": (256, 96), "stages": 2}, NT),
        ("early", {"cluster": (1, 2)}, products.transposed(WITH_SILU, "TN")),
    ]
    nearest = []
    for mode, changes, problem in cases:
        config = dataclasses.replace(MODES[mode][0], **changes)
        (reason,) = config.refusals(problem, H200)
        columns = re.search(r"registers .* the nearest tile that fits is \(\d+, (\d+)\)", reason)
        assert columns, reason
        tile = config.tile[0], int(columns[1])
        nearest.append((dataclasses.replace(config, tile=tile), problem))
    check_sound(nearest)


def test_heavy_epilogues_are_applied_to_a_few_columns_at_a_time():
    exact = Epilogue(activation=ACTIVATIONS["gelu_exact"])
    check_sound(
        [
            (LATE, dataclasses.replace(PROBLEM, epilogue=exact)),
            (
                dataclasses.replace(EARLY, tile=(128, 96), stages=5, consumers=1, store_columns=32),
                dataclasses.replace(NT, epilogue=exact),
            ),
            (
                dataclasses.replace(EARLY, tile=(256, 64), stages=3),
                dataclasses.replace(NT, epilogue=SILU_AND_RESIDUAL),
            ),
        ]
    )


def test_what_leaves_few_registers_is_accepted_and_does_not_spill():
    def of_four_arrays(x: jax.Array) -> jax.Array:
        return jnp.where(x > 1, jnp.sin(x) * x, jnp.exp(x) + x * x)

    assert epilogues.of_activation(of_four_arrays).live == 4
    residual = dataclasses.replace(PROBLEM, epilogue=Epilogue(residual=True, beta=2.0))
    heavy = dataclasses.replace(PROBLEM, epilogue=Epilogue(activation=of_four_arrays))
    exact = Epilogue(residual=True, activation=ACTIVATIONS["gelu_exact"])
    small = candidate_cases(Problem(64, 64, 64, epilogue=exact))
    check_sound(
        [
            (MODES["in turns"][0], residual),
            (MODES["tall"][0], residual),
            (LATE, heavy),
            (EARLY, heavy),
            (EARLY, products.transposed(heavy, "NT")),
            *[case for case in small if case[0].tile == (64, 64)],
        ]
    )


@pytest.mark.parametrize(("dtype", "k"), [(jnp.bfloat16, 512), (jnp.float8_e4m3fn, 1024)])
def test_a_ring_that_turns_twice_leaves_registers_for_its_addresses(dtype, k):
    bf16, own = np.dtype(jnp.bfloat16), np.dtype(dtype)
    problem = Problem(4096, 8192, k, own, own, bf16, transpose_b=True)
    cases = [case for case in candidate_cases(problem) if case[0].late_store]
    full = [case for case in cases if case[0].accumulator_registers == 128]
    assert 4 in {config.stages for config, _ in full}
    check_sound(full)


def test_groups():
    rows = dataclasses.replace(PROBLEM, groups=8)
    shared = {"batch": 8, "shared_a": True, "shared_b": True}
    sums = dataclasses.replace(PROBLEM, transpose_a=True, ragged_k=True, **shared)
    claimed = dataclasses.replace(LATE, persistence="dynamic")
    crowded = Problem(512, 512, 8192, transpose_a=True, ragged_k=True, **shared)
    others = [
        dataclasses.replace(claimed, tile=tile, consumers=consumers, **changes)
        for tile, consumers, changes in [
            ((64, 256), 1, {}),
            ((256, 128), 2, {"stages": 3}),
            ((256, 192), 2, {"late_store": False, "store_columns": 32, "stages": 3}),
            ((192, 192), 3, {"late_store": False, "stages": 3}),
        ]
    ]
    cut = [(config, crowded) for config in (claimed, *others)]
    assert all(HopperPlan(problem, config, H200).relay for config, problem in cut)
    check_sound(
        [
            (LATE, rows),
            (MODES["in turns"][0], rows),
            (LATE, sums),
            (claimed, sums),
            *cut,
        ]
    )


def test_groups_of_few_columns():
    rows = Problem(2048, 64, 4096, groups=8)
    shared = {"batch": 8, "shared_a": True, "shared_b": True}
    # An odd number of rows, for which matrices of 64 columns or more have no kernel.
    sums = Problem(4096, 32, 2047, transpose_a=True, ragged_k=True, **shared)
    cases = [
        dataclasses.replace(rows, **changes)
        for changes in (
            {},
            {"n": 16},
            {"n": 32, "transpose_b": True},
            {"n": 16, "transpose_b": True},
            {"n": 16, "transpose_b": True, "out_dtype": jnp.float32},
            # Of low rank: the gradient of the rows.
            {"n": 4096, "k": 16, "transpose_b": True},
        )
    ]
    check_sound([case for problem in (*cases, sums) for case in narrowest_cases(problem)])


def narrowest_cases(problem: Problem) -> list[Case]:
    """Returns the cases of candidates with the fewest columns, a case for each tile."""
    cases = one_of_each_tile(candidate_cases(problem))
    fewest = min(config.tile[1] for config, _ in cases)
    return [case for case in cases if case[0].tile[1] == fewest]


def test_ptxas_cannot_know_the_conditions_of_loops_that_a_warp_runs():
    shared = {"batch": 8, "shared_a": True, "shared_b": True}
    sums = dataclasses.replace(PROBLEM, transpose_a=True, ragged_k=True, **shared)
    found = instructions_of((LATE, sums))
    # Each is stored and read in one piece of text, in each of the loops, of two warps.
    assert found["looked"] == 2 * (warp_loop.LOOPS + 1)


def test_a_logistic_function_is_no_division():
    found = instructions_of((LATE, WITH_SILU))
    assert not found["div."]
    assert found["rcp.approx.ftz.f32"] == found["ex2.approx.ftz.f32"] > 0


def read_instructions(report: offline.Report) -> summaries.Findings:
    """Counts instructions. The file knows how many there are until a line here changes."""
    meet, word = r"bar\.warp\.sync 0xffffffff;", r"(%r\d+)"
    stored = rf"st\.volatile\.shared\.b32 \[{word}\], \S+;"
    looked = rf"{meet} {stored} ld\.volatile\S+ \S+ \[\1\]; {meet}"
    names = ("div.", "rcp.approx.f32", "rcp.approx.ftz.f32", "ex2.approx.ftz.f32")
    counts = {name: report.ptx.count(name) for name in names}
    return {**counts, "looked": len(re.findall(looked, report.ptx))}


def instructions_of(case: Case) -> summaries.Findings:
    found = summaries.KEPT.findings
    return found(read_instructions, build(case), *operands(case[1]), target="h200", anew=False)


def test_a_float32_result_has_the_exact_logistic_function():
    silu = Epilogue(activation=jax.nn.silu)
    wide = dataclasses.replace(PROBLEM, out_dtype=jnp.float32, epilogue=silu)
    config = dataclasses.replace(EARLY, tile=(64, 64), consumers=1, store_columns=32)
    found = instructions_of((config, wide))
    # The quick one flushes results below 2**-126 to 0.
    assert not found["rcp.approx.ftz.f32"]
    assert found["rcp.approx.f32"]


def test_tiles_that_are_cut_along_k():
    wide = dataclasses.replace(EARLY, split_k=8, cluster=(2, 1), schedule="online_swizzle:4")
    tall = dataclasses.replace(EARLY, tile=(192, 192), consumers=3, store_columns=32, split_k=3)
    with_residual = dataclasses.replace(PROBLEM, epilogue=BIAS_AND_RESIDUAL)
    check_sound(
        [
            (wide, products.transposed(with_residual, "TN")),
            (tall, dataclasses.replace(SUM, n=4095)),
        ]
    )


def test_last_tiles_are_joined_into_the_result_that_has_the_others():
    config = HopperConfig(tile=(128, 128), split_k=3, split_last=4)
    kernels = hopper.build(HopperPlan(NT, config, H200))
    exported = jax.export.export(jax.jit(kernels), platforms=["cuda"])
    text = exported(*operands(NT)).mlir_module()
    calls = re.findall(r"custom_call @mosaic_gpu.*", text)
    assert ["output_operand_alias" in call for call in calls] == [False, False, True]


def test_tiles_that_are_summed_up_in_parts():
    widest = dataclasses.replace(
        EARLY,
        tile=(64, 192),
        consumers=1,
        store_columns=32,
        partial_sums=3,
        schedule="online_raster",
    )
    sums = dataclasses.replace(NT, out_dtype=jnp.float32, epilogue=BIAS_AND_GELU)
    four = dataclasses.replace(widest, tile=(128, 128), consumers=2, partial_sums=4)
    plain = dataclasses.replace(four, tile=(128, 192), schedule="swizzle:8")
    check_sound([(widest, sums), (four, sums), (plain, NT)])
    check_sound([(plain, dataclasses.replace(NT, transpose_b=False))])


def test_few_rows_of_8_bits_that_are_cut_and_summed_up_in_parts():
    eight = {"a_dtype": jnp.float8_e4m3fn, "b_dtype": jnp.float8_e4m3fn, "transpose_b": True}
    batch = Problem(5, 272, 17520, batch=3, **eight)
    single = Problem(2, 864, 16256, out_dtype=jnp.float32, **eight)
    computed = {"late_store": False, "store_columns": 16, "consumers": 1, "stages": 11}
    mirrored = HopperConfig(
        (64, 16), split_k=8, mirrored=True, schedule="online_swizzle:1", ctas=120, **computed
    )
    upright = HopperConfig((64, 64), split_k=9, schedule="online_swizzle:1:cols", **computed)
    check_sound(
        [
            (dataclasses.replace(config, partial_sums=parts), problem)
            for config, problem in ((mirrored, batch), (upright, single))
            for parts in (2, 3)
        ]
    )


def test_pieces_of_several_promised_parts():
    computed = "online_swizzle:1:cols"
    shared = HopperConfig((128, 96), late_store=False, schedule=computed, split_k=2, partial_sums=2)
    wide = dataclasses.replace(shared, tile=(128, 192), store_columns=32)
    promised = dataclasses.replace(NT, k=8960, parts=4)
    alone = dataclasses.replace(shared, tile=(64, 192), consumers=1, mirrored=True)
    check_sound([(shared, promised), (wide, promised), (alone, promised)])
    check_sound([(wide, dataclasses.replace(promised, transpose_b=False))])


def test_tiles_that_are_no_whole_number_of_strips():
    config = dataclasses.replace(LATE, tile=(128, 112))
    check_sound([(config, dataclasses.replace(NT, epilogue=BIAS_AND_GELU))])


ODD = dataclasses.replace(NT, m=4095, n=4095)
ODD_MODES: dict[str, Case] = {
    "late": (dataclasses.replace(LATE, store_slots=1), ODD),
    "2 bytes": (dataclasses.replace(EARLY, store_slots=1), ODD),
    "4 bytes": (dataclasses.replace(LATE, store_slots=1), dataclasses.replace(ODD, n=4094)),
    "8 bytes": (dataclasses.replace(LATE, store_slots=1), dataclasses.replace(ODD, n=4092)),
    "in turns": (
        dataclasses.replace(EARLY, tile=(128, 192), stages=4, pingpong=True, store_slots=1),
        ODD,
    ),
    "mirrored": (dataclasses.replace(LATE, store_slots=1, mirrored=True), ODD),
    "float32": (
        dataclasses.replace(EARLY, store_columns=32, store_slots=1),
        dataclasses.replace(ODD, out_dtype=jnp.float32),
    ),
    "float8": (
        dataclasses.replace(EARLY, store_slots=1),
        dataclasses.replace(ODD, a_dtype=E4M3, b_dtype=E4M3, out_dtype=E4M3, k=4096),
    ),
    "residual": (
        dataclasses.replace(EARLY, stages=3),
        dataclasses.replace(ODD, epilogue=BIAS_AND_RESIDUAL),
    ),
}


def read(report: offline.Report) -> summaries.Findings:
    """Returns what the checks below are about. The file knows it until a line here changes."""
    ptx = report.ptx

    def constant(operand: str) -> int:
        """The number in an operand, or in the register that is set to it once."""
        if operand.isdigit():
            return int(operand)
        (value,) = re.findall(rf"mov\.b32\s+{re.escape(operand)}, (\d+);", ptx)
        return int(value)

    def constants(pattern: str) -> list[int]:
        return sorted(map(constant, re.findall(pattern, ptx)))

    def distinct(pattern: str) -> list[str]:
        return sorted(set(re.findall(pattern, ptx)))

    texts = (
        *("st.global", "ld.global", "tanh.approx", "@inside ld.global.b32 word, [entry];"),
        *("atom.relaxed.gpu.global.add", "st.relaxed.gpu.global"),
    )
    # Some releases of JAX say shared::cta for the copies that only one CTA gets.
    copies = r"cp\.async\.bulk\.tensor\.(\d)d\.shared::\w+\.global\.(\S+)"
    moves = r"setmaxnreg\.(dec|inc)\.sync\.aligned\.u32 (\d+)"
    steps = re.findall(r"\b(bar\.sync|stmatrix|st\.shared|ld\.shared|wgmma\.mma)", ptx)
    order = ["", *(step for step, _ in itertools.groupby(steps)), ""]
    return {
        "spill_bytes": report.spill_bytes,
        "serialized": list(report.serialized),
        "grid": math.prod(report.grid),
        "cluster": math.prod(report.cluster),
        "moved": [" ".join(move) for move in re.findall(moves, ptx)],
        "loads": [" ".join(load) for load in distinct(copies)],
        "barriers": constants(r"mbarrier\.init\.shared\S* \[\S+\], (\S+);"),
        "bulk_stores": ptx.count("cp.async.bulk.tensor.2d.global.shared::cta"),
        "stores": distinct(r"\bst\.((?:v\d\.)?b\d+)"),
        "texts": [text for text in texts if text in ptx],
        "waits": [int(groups) for groups in distinct(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)")],
        "divisions": distinct(r"(?:mul\.hi|mul\.lo|div|rem)\.[su]64|(?:div|rem)\.[su]32"),
        "bounds": constants(r"setp\.lt\.u32 inside, number, (\S+);\s"),
        "firsts": constants(r"add\.u32 number, number, (\S+);\s"),
        "counters": [
            [int(offset) for offset in re.findall(rf"add\.s64\s+{counter}, %rd\d+, (\d+);", ptx)]
            for counter in re.findall(r"atom\.relaxed\S+ number, \[(%rd\d+)\]", ptx)
        ],
        "comparisons": len(re.findall(r"setp\.eq\.u32 old, tag, (\S+);\s+@old bra RESOLVED", ptx)),
        "rereads": len(re.findall(r"ld\.relaxed\S+ \S+ \[\S+\];\s+bra RESOLVE;", ptx)),
        "around_writes": sorted(
            {
                f"{before} {after}"
                for before, step, after in zip(order, order[1:], order[2:], strict=False)
                if step in ("stmatrix", "st.shared")
            }
        ),
    }


def findings_of(modes: Mapping[str, Case]) -> dict[str, summaries.Findings]:
    """Compiles a sample of the modes, and asks the file for the others."""
    return {
        name: summaries.KEPT.findings(
            read,
            build(case),
            *operands(case[1]),
            target="h200",
            anew=summaries.in_sample(position),
        )
        for position, (name, case) in enumerate(modes.items())
    }


Check = Callable[[dict[str, summaries.Findings]], None]
OF_EVERY_MODE: list[Check] = []
OF_ODD_ROWS: list[Check] = []


def of_every_mode(check: Check) -> Check:
    OF_EVERY_MODE.append(check)
    return check


def of_odd_rows(check: Check) -> Check:
    OF_ODD_ROWS.append(check)
    return check


@of_odd_rows
def odd_rows_are_stored_as_wide_as_they_are_aligned(odd_modes):
    alone = {"4 bytes": "b32", "8 bytes": "v2.b32", "float32": "b32", "float8": "b8"}
    for name, found in odd_modes.items():
        assert not found["spill_bytes"], name
        assert not found["serialized"], name
        assert not found["bulk_stores"], name
        assert found["stores"] == [alone.get(name, "b16")], name


def plan_of(name: str) -> HopperPlan:
    config, problem = MODES[name]
    return HopperPlan(problem, config, H200)


@of_every_mode
def every_mode_is_sound(modes):
    unsound = {
        name: (found["spill_bytes"], found["serialized"])
        for name, found in modes.items()
        if found["spill_bytes"] or found["serialized"]
    }
    assert unsound == {}


@of_every_mode
def registers_are_reallocated_and_suffice(modes):
    for name, found in modes.items():
        config, _ = MODES[name]
        if config.registers is None:
            assert found["moved"] == [], name
            continue
        producer, consumer = config.registers
        assert found["moved"] == [f"dec {producer}", f"inc {consumer}"], name
        assert 128 * (producer + config.consumers * consumer) <= 65_536, name
        assert config.accumulator_registers < consumer, name


@of_every_mode
def each_operand_is_multicast_to_those_that_share_it(modes):
    for cluster in CLUSTERS:
        found = modes["cluster {}x{}".format(*cluster)]
        # In layout NN, a is loaded in boxes of 2 dimensions and b in boxes of 4.
        loads = [load.split() for load in found["loads"]]
        assert {dimensions for dimensions, _ in loads} == {"2", "4"}, cluster
        for dimensions, flags in loads:
            sharers = cluster[1] if dimensions == "2" else cluster[0]
            assert ("multicast::cluster" in flags) == (sharers > 1), cluster
        assert found["cluster"] == math.prod(cluster)


@of_every_mode
def barriers_are_made_with_the_counts_of_the_protocol(modes):
    for name, found in modes.items():
        plan = plan_of(name)
        config = plan.config
        empty = plan.empty_arrivals * (sum(config.cluster) - 1)
        # All 128 threads of a warpgroup arrive on a barrier of one CTA.
        expected = [128 * plan.full_arrivals, empty] * config.ring_barriers
        expected += [128 * protocol.baton_arrivals()] * (config.consumers if config.pingpong else 0)
        if plan.problem.epilogue.residual:
            expected += [128] * config.consumers * config.store_slots
        assert found["barriers"] == sorted(expected), name


@of_every_mode
def results_leave_through_shared_memory_alone(modes):
    for name, found in modes.items():
        plan = plan_of(name)
        # With `late_store`, beside the next tile, and at the end the last tile's.
        times = (2 if plan.config.late_store else 1) * (2 if plan.problem.symmetric else 1)
        assert found["bulk_stores"] == len(plan.chunks) * times, name
        assert "st.global" not in found["texts"], name


@of_every_mode
def a_step_is_in_flight_while_the_next_is_issued(modes):
    for name, found in modes.items():
        assert set(found["waits"]) == {0, plan_of(name).wgmmas_per_step}, name


@of_every_mode
def tiles_are_claimed_by_an_atomic_addition_and_only_then(modes):
    for name, found in modes.items():
        claimed = "atom.relaxed.gpu.global.add" in found["texts"]
        assert claimed == (MODES[name][0].persistence == "dynamic")
        assert ("st.relaxed.gpu.global" in found["texts"]) == claimed


@of_every_mode
def functions_are_approximate_in_results_of_16_bits_alone(modes):
    assert "tanh.approx" in modes["not persistent"]["texts"]
    assert "tanh.approx" not in modes["float32"]["texts"]


@of_every_mode
def claims_end_with_the_last_tile(modes):
    for name, tiles in (("claimed", 512), ("claimed in clusters", 128)):
        claims_are_sound(modes[name], *MODES[name], tiles)


def claims_are_sound(found, config, problem, tiles):
    workers = found["grid"] // config.cluster_size
    assert found["bounds"] == [tiles] == [math.prod(config.stacked_grid(problem))]
    assert found["firsts"] == [workers]
    assert "@inside ld.global.b32 word, [entry];" in found["texts"]
    # The counter is in the row after all mailboxes.
    (offsets,) = found["counters"]
    assert workers * CLAIM_SLOTS * np.dtype(np.int32).itemsize in offsets
    # Producer and consumers both compare the tag of the word that they read.
    assert found["comparisons"] == found["rereads"] == 2


@of_odd_rows
def threads_wait_before_they_write_a_line_slot_and_before_they_read_it(odd_modes):
    # Beside a slot that is written, a residual's is read.
    for name in ODD_MODES.keys() - {"residual"}:
        assert odd_modes[name]["around_writes"] == ["bar.sync bar.sync"], name


@of_every_mode
def the_order_is_read_from_a_table_or_computed(modes):
    assert "ld.global" in modes["early"]["texts"]
    assert "ld.global" not in modes["on-line"]["texts"]


@of_every_mode
def no_slot_of_the_ring_costs_a_division(modes):
    # A divisor that is known when a kernel is traced makes it a multiplication, of 64 bits maybe.
    for name, found in modes.items():
        assert found["divisions"] == [], name


@of_every_mode
def the_grid_is_as_large_as_the_persistence_says(modes):
    tiles = (4096 // 128) * (4096 // 256)
    assert modes["not persistent"]["grid"] == tiles
    assert all(
        found["grid"] <= H200.sms for name, found in modes.items() if name != "not persistent"
    )


# One test each: what is compiled for it is compiled once, whichever worker has it.
def test_every_mode(subtests):
    findings = findings_of(MODES)
    for check in OF_EVERY_MODE:
        with subtests.test(check.__name__):
            check(findings)


def test_odd_rows(subtests):
    findings = findings_of(ODD_MODES)
    for check in OF_ODD_ROWS:
        with subtests.test(check.__name__):
            check(findings)


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for; waiting for a busy computer is free."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = [resource.getrusage(each) for each in who]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


TIMED = ("tall", "in turns")


def compiling_seconds() -> float:
    """Of tracing and compiling some modes with a long epilogue, once."""
    heavy = Epilogue(bias=True, activation=gelu_tanh)
    cases = [
        (MODES[name][0], dataclasses.replace(MODES[name][1], epilogue=heavy)) for name in TIMED
    ]
    kernels = [build(case) for case in cases]

    def every(*arrays: Any) -> list[jax.Array]:
        return [kernel(*some) for kernel, some in zip(kernels, arrays, strict=True)]

    start = cpu_seconds()
    offline.compile_reports(every, *[operands(problem) for _, problem in cases], target="h200")
    return cpu_seconds() - start


def starting_seconds() -> float:
    """Of compiling what needs no compiler: mostly of importing JAX in a new process."""
    start = cpu_seconds()
    with pytest.warns(UserWarning, match="holds no Pallas GPU kernel"):
        offline.compile_reports(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32), target="h200")
    return cpu_seconds() - start


@pytest.mark.stress
@pytest.mark.usefixtures("compiled_anew", "new_processes")
def test_tracing_and_compiling_takes_little_longer_than_starting_the_compiler():
    # 3 seconds each beside 2 on an idle core. A busy one is slower at both, and not by the same.
    most, compiling, starting = 1 + 1.5 * len(TIMED), math.inf, 0.0
    for _ in range(3):
        compiling = min(compiling, compiling_seconds())
        starting = max(starting, starting_seconds())
        if compiling < most * starting:
            return
    assert compiling < most * starting
