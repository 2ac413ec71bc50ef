"""The Hopper kernel in the GPU simulator, which also records races: exact numbers, every mode."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import schedules
from pallas_gemm.config import STEP_BYTES
from pallas_gemm.device import H200
from pallas_gemm.kernels import joining
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper.along_k.product import CutAlongK
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.dense.product import Product
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.problem import Epilogue, Problem
from pallas_gemm.proving import products
from tests import covering, group_products, races
from tests.kernels.taken import as_taken

# Small tiles simulate fast; two stages make the ring wrap after two steps, and four CTAs make each
# worker compute several tiles.
SIMULATOR = plgpu.InterpretGPUParams(detect_races=True)
SMALL = HopperConfig(tile=(128, 64), stages=2, ctas=4, store_columns=32)
PINGPONG = dataclasses.replace(SMALL, late_store=False, tile=(64, 64), pingpong=True)
MIRRORED = dataclasses.replace(SMALL, mirrored=True)


def run(problem: Problem, config: HopperConfig, operands: products.Operands) -> np.ndarray:
    """Simulates the kernel; fails if it raced."""
    plan = HopperPlan(problem, config, H200, interpret=SIMULATOR)
    return run_plan(plan, as_taken(problem, operands))


def run_plan(plan: HopperPlan, taken: Sequence[jax.Array]) -> np.ndarray:
    """Simulates the kernel of a plan with the arrays that it takes, likewise."""
    kernel = hopper.build(plan)
    with races.recorded() as raced:
        out = np.asarray(jax.jit(kernel)(*taken)).astype(np.float64)
        assert not raced()
    return out


def check_exact(problem: Problem, config: HopperConfig, rng: np.random.Generator) -> None:
    operands = products.small_integers(problem, rng)
    expected = products.rounded(problem, products.exact(problem, operands))
    np.testing.assert_array_equal(run(problem, config, operands), expected)


MOST_THREADS = 12
"""Of a cluster, with which the simulator still has a thread of the CPU for each on a small machine.
"""
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
OPTIONS: dict[str, Sequence[Any]] = {
    # Rows, columns, and the warpgroups that share a tile, or take turns.
    "tile": ((128, 64, 2), (64, 128, 2), (192, 64, 3), (64, 32, 1), (64, 64, "in turns")),
    "late_store": (True, False),
    "mirrored": (False, True),
    "cluster": ((1, 1), (2, 1), (1, 2), (2, 2)),
    "persistence": ("static", "dynamic", "none"),
    # Of all tiles, or of the last one alone.
    "split_k": ((1, None), (2, None), (2, 1)),
    "schedule": ("hilbert", "shuffled", "online_swizzle:3:cols"),
    # Two make the ring wrap after two steps.
    "stages": (2, 3),
    "store_slots": (1, 2),
    "layout": ("NN", "NT", "TN", "TT"),
    "types": (
        (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
        (jnp.bfloat16, jnp.bfloat16, jnp.float32),
        (jnp.float32, jnp.float32, jnp.float32),
        (E4M3, E5M2, jnp.bfloat16),
        (jnp.int8, jnp.int8, jnp.int32),
    ),
    "epilogue": (
        Epilogue(),
        Epilogue(bias=True, activation=jax.nn.relu),
        Epilogue(residual=True, beta=0.5),
        Epilogue(0.5, 3.0, bias=True, residual=True, activation=jnp.square),
        Epilogue(gated=True, activation=jax.nn.relu),
    ),
    "batch": ("one", "two", "shared_a", "shared_b"),
    # Of the k loop, for each piece of the operands.
    "steps": ((1.125,), (4,), (1, 2)),
    # How far the result reaches into its last tiles.
    "edge": (0, 16, 3),
}


def built(case: covering.Case) -> tuple[Problem, HopperConfig] | None:
    """Returns what a case computes, with one to four tiles for each worker; None if illegal."""
    rows, columns, shared_by = case["tile"]
    a, b, out = case["types"]
    epilogue, cluster, batch = case["epilogue"], case["cluster"], case["batch"]
    # Two columns of tiles, and two rows unless the first ends with the result.
    tall = rows * cluster[0] + case["edge"]
    wide = columns * cluster[1] * (1 if case["edge"] else 2) + case["edge"]
    terms = tuple(int(steps * STEP_BYTES) // jnp.dtype(a).itemsize for steps in case["steps"])
    try:
        problem = Problem(
            wide if case["mirrored"] else tall,
            tall if case["mirrored"] else wide,
            sum(terms),
            *(a, b, out),
            batch=1 if batch == "one" else 2,
            epilogue=epilogue,
            terms=terms if len(terms) > 1 else (),
            shared_a=batch == "shared_a",
            shared_b=batch == "shared_b",
        )
        config = HopperConfig(
            tile=(rows, columns * problem.sums),
            consumers=2 if shared_by == "in turns" else shared_by,
            pingpong=shared_by == "in turns",
            ctas=2 * math.prod(cluster),
            store_columns=32,
            **{name: case[name] for name in ("late_store", "mirrored", "cluster", "persistence")},
            **{name: case[name] for name in ("stages", "store_slots")},
            **dict(zip(("split_k", "split_last"), case["split_k"], strict=True)),
        )
        if case["edge"] == 16 and not config.late_store and not config.pingpong:
            # An edge has nothing to do with it, so that it takes no cases of its own.
            config = dataclasses.replace(config, partial_sums=2)
        problem = products.transposed(problem, case["layout"])
        config = dataclasses.replace(config, schedule=_schedule(case["schedule"], problem, config))
    except ValueError:
        return None
    if config.cluster_size * (config.consumers + 1) > MOST_THREADS:
        return None
    if config.refusals(problem, H200) or (problem.terms and epilogue != Epilogue()):
        return None
    return problem, config


def _settled(case: covering.Case) -> covering.Case:
    """Makes of a case one that is more often legal."""
    (a, _, out), epilogue, changes = case["types"], case["epilogue"], covering.Case()
    wide = jnp.dtype(out).itemsize > 2
    if jnp.dtype(a).itemsize != 2:
        changes["layout"] = "NT"
    if len(case["steps"]) > 1:
        changes["epilogue"] = epilogue = Epilogue()
    if wide or epilogue.residual or epilogue.gated:
        changes["mirrored"] = False
    if wide or case["tile"][2] == "in turns" or case["split_k"] == (2, None):
        changes["late_store"] = False
    return case | changes


def _schedule(name: str, problem: Problem, config: HopperConfig) -> str | schedules.Schedule:
    if name != "shuffled":
        return name
    rows, cols = config.stacked_grid(problem)
    order = np.random.default_rng(3).permutation(rows * cols)
    return schedules.Schedule((rows, cols), np.stack(np.divmod(order, cols), axis=1), name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draws the cases of one test, but not where this module is only imported."""
    if metafunc.function is test_any_two_options:
        cases = list(map(built, covering.pairs(OPTIONS, built, 4000, settled=_settled)))
        metafunc.parametrize(("problem", "config"), cases, ids=range(len(cases)))


def test_any_two_options(problem, config, rng):
    check_exact(problem, config, rng)


EARLY: dict[str, Any] = {"late_store": False}
ALONE: dict[str, tuple[dict[str, Any], Problem]] = {
    "swizzle": ({"schedule": "swizzle:2"}, Problem(512, 256, 136)),
    "raster": ({"schedule": "raster:cols"}, Problem(512, 256, 136)),
    "computed": ({"schedule": "online_raster"} | EARLY, Problem(512, 256, 136)),
    "short": ({}, Problem(264, 128, 8)),
    "long": ({"stages": 3}, Problem(264, 128, 640, epilogue=Epilogue(alpha=0.5))),
    "float16": ({}, Problem(200, 144, 320, *(3 * [jnp.float16]), transpose_b=True)),
    "float8": ({}, Problem(200, 144, 320, *(3 * [E5M2]), transpose_b=True)),
    "tall": ({"tile": (256, 64)} | EARLY, Problem(300, 128, 200)),
    "5 strips": ({"tile": (128, 80)} | EARLY, Problem(200, 160, 200, transpose_b=True)),
    "7 strips": ({"tile": (128, 112)} | EARLY, Problem(200, 224, 200, transpose_b=True)),
    "wide": ({"tile": (128, 208)} | EARLY, Problem(200, 416, 200, transpose_b=True)),
    "4x1": ({"cluster": (4, 1), "ctas": 8}, Problem(1000, 128, 136)),
    "1x4": ({"cluster": (1, 4), "ctas": 8}, Problem(200, 320, 136)),
    "3 products": ({}, Problem(201, 192, 320, terms=(64, 192, 64))),
    "few rows": (
        {"mirrored": True, "tile": (64, 48), "consumers": 1},
        Problem(13, 200, 264, batch=2),
    ),
    # Four parts of three, three, two and two steps.
    "two promised parts a piece": (
        {"schedule": "online_raster", "split_k": 2, "partial_sums": 2, "ctas": 3} | EARLY,
        Problem(140, 128, 640, parts=4),
    ),
    "three promised parts a piece": (
        {"schedule": "online_raster", "split_k": 2, "partial_sums": 3, "ctas": 3} | EARLY,
        Problem(144, 128, 640, batch=2, transpose_a=True, parts=6),
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_no_other_option_bears_on(name, rng):
    changes, problem = ALONE[name]
    check_exact(problem, dataclasses.replace(SMALL, **changes), rng)


@pytest.mark.parametrize(
    ("terms", "own_spans"),
    # One step past the end of k is zeros.
    [((), ((0, 6), (2, 1), (1, 4), (6, 1))), ((64, 192, 128), ((0, 6), (2, 3), (5, 1), (0, 4)))],
    ids=["one", "sum"],
)
def test_pieces_of_work_take_their_own_steps(terms, own_spans, rng, monkeypatch):
    class OwnSteps(HopperPlan):
        spans = np.array(own_spans)

    class StoredAtOnce(CutAlongK):
        ending = Product.ending

    monkeypatch.setattr(hopper, "product_of", lambda _: StoredAtOnce)
    problem = Problem(256, 128, 6 * 64, transpose_a=True, terms=terms)
    config = dataclasses.replace(SMALL, schedule="raster", ctas=2, late_store=False)
    operands = products.small_integers(problem, rng)
    plan = OwnSteps(problem, config, H200, interpret=SIMULATOR)
    out = run_plan(plan, as_taken(problem, operands))
    for number, (first, steps) in enumerate(own_spans):
        row, col = 128 * (number // 2), 64 * (number % 2)
        a, b = (np.asarray(x)[64 * first : 64 * (first + steps)] for x in operands[:2])
        expected = a[:, row : row + 128].astype(float).T @ b[:, col : col + 64].astype(float)
        np.testing.assert_array_equal(out[row : row + 128, col : col + 64], expected)


@pytest.mark.parametrize(
    ("parts", "passes"),
    # Beside the first summand; four fit in registers at a time.
    [(5, (4, 1, 0)), (6, (3, 1, 2)), (8, (4, 1, 3)), (10, (3, 3, 0)), (11, (4, 2, 2))],
)
def test_summands_are_added_up_in_passes_and_a_rest(parts, passes, rng):
    config = HopperConfig(
        tile=(64, 64), consumers=1, stages=2, store_columns=64, split_k=parts, late_store=False
    )
    fit = joining.LOADED_REGISTERS * joining.WARPGROUP_THREADS // (64 * 64)
    together, whole, rest = passes
    assert (together <= fit, together * whole + rest) == (True, parts - 1)
    check_exact(Problem(64, 64, 64 * parts), config, rng)


@pytest.mark.parametrize("layout", ["NT", "TT"])
@pytest.mark.parametrize("last", [None, 1], ids=["all", "last"])
def test_summands_of_chunks_of_two_widths(layout, last, rng):
    # Of 80 columns, 64 are one chunk and 16 another; the second tile has 8 of its own.
    config = HopperConfig(
        tile=(64, 80), consumers=1, stages=2, store_columns=64, split_k=3, late_store=False
    )
    config = dataclasses.replace(config, split_last=last)
    problem = products.transposed(Problem(72, 88, 64 * 4), layout)
    check_exact(problem, config, rng)


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (Problem(136, 128, 136, transpose_a=True, kept=(131, 77)), SMALL),
        (Problem(136, 128, 136, transpose_a=True, kept=(131, 72)), SMALL),
        (Problem(75, 136, 136, kept=(75, 131)), MIRRORED),
        (Problem(75, 136, 136, kept=(75, 135)), dataclasses.replace(MIRRORED, late_store=False)),
        (Problem(3, 5, 136, transpose_b=True), SMALL),
    ],
    ids=["kept", "kept-by-tma", "mirrored", "mirrored-early", "few"],
)
def test_results_shorter_than_a_tile_or_than_the_product(problem, config, rng):
    check_exact(problem, config, rng)


@pytest.mark.parametrize(
    ("shared", "config"),
    [
        ("shared_a", SMALL),
        ("shared_b", PINGPONG),
        ("shared_a", dataclasses.replace(SMALL, mirrored=True)),
        ("shared_b", dataclasses.replace(SMALL, cluster=(2, 1))),
    ],
    ids=["late", "pingpong", "mirrored", "multicast"],
)
def test_products_of_a_batch_share_operands(shared, config, rng):
    epilogue = Epilogue(bias=True, residual=config.pingpong)
    problem = Problem(150, 64, 72, batch=3, epilogue=epilogue, **{shared: True})
    operands = products.small_integers(problem, rng)
    if operands.bias is not None and operands.residual is not None:
        operands = operands._replace(bias=operands.bias[0], residual=operands.residual[0])
    expected = products.rounded(problem, products.exact(problem, operands))
    np.testing.assert_array_equal(run(problem, config, operands), expected)


SCALED = Epilogue(None, row_scale=True, col_scale=True, bias=True)


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({}, SMALL),
        (
            {"epilogue": dataclasses.replace(SCALED, beta=None, residual=True)},
            dataclasses.replace(SMALL, late_store=False),
        ),
        ({"batch": 2, "shared_b": True}, PINGPONG),
        ({}, MIRRORED),
        (
            {"epilogue": dataclasses.replace(SCALED, gated=True, up_scale=True, up_bias=True)},
            dataclasses.replace(SMALL, tile=(128, 128)),
        ),
    ],
    ids=["late", "residual", "batch", "mirrored", "gated"],
)
def test_scales(changes, config, rng):
    problem = Problem(136, 72, 80, jnp.int8, jnp.int8, transpose_b=True, epilogue=SCALED)
    check_exact(dataclasses.replace(problem, **changes), config, rng)


@pytest.mark.parametrize("residual", [False, True], ids=["late", "residual"])
def test_rounds_once(residual, rng):
    # No scale is a power of two, and no sum is exact.
    epilogue = Epilogue(0.3, 0.3, bias=True, residual=residual, activation=jax.nn.gelu)
    problem = Problem(192, 128, 512, epilogue=epilogue)
    operands = products.normal(problem, rng)
    config = dataclasses.replace(SMALL, late_store=not residual)
    exact = products.exact(problem, operands)
    error = np.abs(run(problem, config, operands) - exact)
    # Half a unit in the last place of bfloat16, plus what float32 sums of 512 products are off by.
    assert np.all(error <= 2.0**-8 * np.abs(exact) + 1e-4)


# The simulator multiplies with NumPy, which warns of what this test is about.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nan_and_infinity_stay_in_their_rows_and_columns(rng):
    problem = Problem(200, 128, 200)
    operands = products.small_integers(problem, rng)
    operands = operands._replace(
        a=operands.a.at[3, 5].set(jnp.nan), b=operands.b.at[7, 11].set(jnp.inf)
    )
    out = run(problem, SMALL, operands)
    expected = products.exact(problem, operands)
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(expected))


GROUPED: dict[str, tuple[dict[str, Any], Problem, tuple[int, ...]]] = {
    "late": ({}, Problem(300, 128, 96, groups=4), (37, 0, 140, 1)),
    "in turns": (
        {"tile": (64, 64), "pingpong": True, "late_store": False},
        Problem(200, 128, 96, transpose_b=True, groups=3),
        (63, 65, 72),
    ),
    "multicast": (
        {"cluster": (2, 1), "schedule": "swizzle:2:cols"},
        Problem(150, 64, 64, *(3 * [E4M3]), transpose_b=True, groups=2),
        (0, 9),
    ),
    # Each slot of the ring of pieces is used twice.
    "too many rows": (
        {"tile": (64, 64), "consumers": 1, "ctas": 1},
        Problem(150, 128, 64, groups=6),
        (70, -3, 0, 200, 9, 1),
    ),
    "fewer columns than a panel": (
        {"tile": (128, 64), "late_store": False},
        Problem(300, 24, 96, groups=4),
        (37, 0, 140, 1),
    ),
    "of 32 columns": (
        {"tile": (64, 32), "consumers": 1, "store_columns": 32, "late_store": False},
        Problem(200, 32, 96, transpose_b=True, groups=3),
        (63, 65, 70),
    ),
    "of 16 columns": (
        {"tile": (128, 16), "store_columns": 16, "late_store": False},
        Problem(200, 16, 96, transpose_b=True, groups=3),
        (63, 65, 70),
    ),
}


@pytest.mark.parametrize("name", GROUPED)
def test_rows_in_groups(name, rng):
    changes, problem, sizes = GROUPED[name]
    operands = products.small_integers(problem, rng)
    a, b = np.array(operands.a, np.float32), np.array(operands.b, np.float32)
    b = b.swapaxes(1, 2) if problem.transpose_b else b
    there = np.clip(sizes, 0, problem.m)
    ends = np.minimum(np.cumsum(there), problem.m)
    starts = np.append(0, ends[:-1])
    expected = np.zeros(problem.out_shape)
    for matrix, start, end in zip(b, starts, ends, strict=True):
        expected[start:end] = a[start:end] @ matrix
    # What is in no group shows nowhere.
    unused = starts == ends
    poisoned = operands._replace(
        a=operands.a.at[ends[-1] :].set(jnp.nan), b=operands.b.at[unused].set(jnp.nan)
    )
    plan = HopperPlan(problem, dataclasses.replace(SMALL, **changes), H200, interpret=SIMULATOR)
    out = run_plan(plan, [*poisoned.present(), jnp.array(sizes)])
    np.testing.assert_array_equal(out, products.rounded(problem, expected))


def test_crowded_groups_are_cut_along_k_and_their_sums_handed_on(rng):
    # Of two tiles each; the first group begins and ends within a step.
    sizes = np.array((4300, 30, 0, 70))
    shared = {"batch": len(sizes), "shared_a": True, "shared_b": True}
    problem = Problem(128, 128, 4416, transpose_a=True, ragged_k=True, **shared)
    config = dataclasses.replace(SMALL, tile=(128, 64), ctas=1)
    plan = HopperPlan(problem, config, H200, interpret=SIMULATOR)
    assert plan.relay
    operands = products.small_integers(problem, rng)
    a, b = (np.array(x, np.float32) for x in operands[:2])
    ends = np.cumsum(sizes)
    expected = [
        a[start:end].T @ b[start:end] for start, end in zip(ends - sizes, ends, strict=True)
    ]
    out = run_plan(plan, [*operands[:2], jnp.array(sizes)])
    np.testing.assert_array_equal(out, products.rounded(problem, np.stack(expected)))


@pytest.mark.parametrize("rows", [0, 1, 100, 136])
def test_the_sum_over_one_group_of_one_tile(rows, rng):
    shared = {"batch": 1, "shared_a": True, "shared_b": True}
    problem = Problem(64, 64, 136, transpose_a=True, ragged_k=True, **shared)
    operands = products.small_integers(problem, rng)
    plan = HopperPlan(problem, dataclasses.replace(SMALL, ctas=2), H200, interpret=SIMULATOR)
    out = run_plan(plan, [*operands[:2], jnp.array([rows])])
    exact = group_products.exact(problem, [rows], *operands[:2])
    np.testing.assert_array_equal(out.reshape(exact.shape), products.rounded(problem, exact))


# The simulator multiplies with NumPy, which warns of what this test is about.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("columns", "tile"), [(64, (256, 64)), (40, (64, 64))], ids=str)
def test_sums_over_groups(columns, tile, rng):
    # Groups that end in each 16 of a step, after a whole one or not, at its end or before; of one
    # row, and of none. Three groups are no numbers, nor is what is in no group.
    sizes = np.array((3, 12, 1, 32, 41, 54, 2, 71, 1, 0))
    ends, checked = np.cumsum(sizes), ~np.isin(np.arange(len(sizes)), (0, 2, 6))
    problem = Problem(
        *(128, columns, 224 if columns == 64 else 221),
        transpose_a=True,
        batch=len(sizes),
        shared_a=True,
        shared_b=True,
        ragged_k=True,
    )
    config = dataclasses.replace(SMALL, tile=tile, consumers=tile[0] // 128 or 1, ctas=2)
    operands = products.small_integers(problem, rng)
    a, b = (np.array(x, np.float32) for x in operands[:2])
    expected = np.zeros(problem.out_shape)
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        expected[group] = a[start:end].T @ b[start:end]
    is_number = np.append(np.repeat(checked, sizes), np.zeros(problem.k - ends[-1], bool))
    poisoned = [
        x.at[~is_number].set(value)
        for x, value in zip(operands[:2], (jnp.nan, jnp.inf), strict=True)
    ]
    plan = HopperPlan(problem, config, H200, interpret=SIMULATOR)
    out = run_plan(plan, [*poisoned, jnp.array(sizes)])
    np.testing.assert_array_equal(out[checked], products.rounded(problem, expected)[checked])
