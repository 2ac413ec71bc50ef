"""The Hopper kernel in the GPU simulator, which also records races: exact numbers, every mode."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # noqa: TID251 - the only way to ask
from jax.experimental.pallas import mosaic_gpu as plgpu

import schedules
from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.problem import Epilogue, Problem
from tests import products

# Small tiles simulate fast; two stages make the ring wrap after two steps, and four CTAs make each
# worker compute several tiles.
SMALL = HopperConfig(tile=(128, 64), stages=2, ctas=4, store_columns=32)
EARLY = dataclasses.replace(SMALL, late_store=False)
SHUFFLED = schedules.Schedule(
    (4, 4), np.stack(np.divmod(np.random.default_rng(3).permutation(16), 4), axis=1), "shuffled"
)
PINGPONG = dataclasses.replace(EARLY, tile=(64, 64), pingpong=True)


def run(problem: Problem, config: HopperConfig, operands: products.Operands) -> np.ndarray:
    """Simulates the kernel; fails if it raced."""
    simulator = plgpu.InterpretGPUParams(detect_races=True)
    kernel = hopper.build(HopperPlan(problem, config, H200, interpret=simulator))
    try:
        out = np.asarray(jax.jit(kernel)(*products.as_taken(problem, operands))).astype(np.float64)
        assert not gpu_callbacks.get_races().races_found
    except Exception:
        gpu_callbacks.reset_gpu_interpret_mode_state()
        raise
    return out


def check_exact(problem: Problem, config: HopperConfig, rng: np.random.Generator) -> None:
    operands = products.small_integers(problem, rng)
    expected = products.rounded(problem, products.exact(problem, operands))
    np.testing.assert_array_equal(run(problem, config, operands), expected)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("config", [SMALL, EARLY, PINGPONG], ids=["late", "early", "pingpong"])
def test_layouts_with_ragged_edges(layout, config, rng):
    n = 192 if layout[1] == "N" else 200
    problem = products.transposed(Problem(328, n, 264), layout)
    check_exact(problem, config, rng)


@pytest.mark.parametrize("cluster", [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("config", [SMALL, PINGPONG], ids=["cooperative", "pingpong"])
def test_clusters(cluster, config, rng):
    config = dataclasses.replace(config, cluster=cluster, ctas=2 * cluster[0] * cluster[1])
    check_exact(Problem(500, 320, 200), config, rng)


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("persistence", ["none", "static", "dynamic"])
def test_persistence(persistence, cluster, rng):
    config = dataclasses.replace(SMALL, persistence=persistence, cluster=cluster)
    check_exact(Problem(500, 256, 200), config, rng)


@pytest.mark.parametrize(
    "schedule",
    [
        "raster:cols",
        "hilbert",
        "online_raster",
        "online_swizzle:2",
        "online_swizzle:3:cols",
        SHUFFLED,
    ],
    ids=lambda schedule: getattr(schedule, "name", schedule),
)
def test_any_schedule(schedule, rng):
    config = dataclasses.replace(EARLY, schedule=schedule)
    check_exact(Problem(512, 256, 136), config, rng)


@pytest.mark.parametrize("k", [8, 64, 72, 640])
def test_k_from_less_than_a_step_to_many(k, rng):
    check_exact(Problem(264, 128, k), dataclasses.replace(SMALL, stages=3), rng)
    check_exact(Problem(264, 128, k), PINGPONG, rng)


@pytest.mark.parametrize(
    "tile", [(64, 64), (64, 128), (128, 128), (192, 64), (256, 64)], ids="{0[0]}x{0[1]}".format
)
def test_tiles_shared_by_rows_or_columns(tile, rng):
    consumers = {(192, 64): 3, (64, 64): 1}.get(tile, 2)
    config = dataclasses.replace(EARLY, tile=tile, consumers=consumers)
    check_exact(Problem(300, 256, 200), config, rng)


def test_one_consumer(rng):
    check_exact(
        Problem(300, 256, 200), dataclasses.replace(SMALL, tile=(64, 128), consumers=1), rng
    )


@pytest.mark.parametrize("columns", [80, 112, 208])
def test_tiles_that_are_no_whole_number_of_chunks(columns, rng):
    config = dataclasses.replace(EARLY, tile=(128, columns))
    check_exact(Problem(200, 2 * columns, 200, transpose_b=True), config, rng)


@pytest.mark.parametrize("config", [SMALL, PINGPONG], ids=["cooperative", "pingpong"])
@pytest.mark.parametrize("schedule", ["swizzle:2", "online_raster"])
def test_batches_are_part_of_the_schedule(schedule, config, rng):
    late = config.late_store and schedule == "swizzle:2"
    config = dataclasses.replace(config, schedule=schedule, late_store=late)
    check_exact(Problem(150, 128, 136, batch=3), config, rng)


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


@pytest.mark.parametrize(
    ("a", "b", "out", "config"),
    [
        (jnp.float16, jnp.float16, jnp.float16, SMALL),
        (jnp.bfloat16, jnp.bfloat16, jnp.float32, EARLY),
        (jnp.float32, jnp.float32, jnp.float32, EARLY),
        (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, SMALL),
        (jnp.float8_e5m2, jnp.float8_e5m2, jnp.float16, SMALL),
        (jnp.int8, jnp.int8, jnp.int32, EARLY),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_dtypes(a, b, out, config, rng):
    problem = Problem(200, 144, 320, a_dtype=a, b_dtype=b, out_dtype=out, transpose_b=True)
    check_exact(problem, config, rng)


@pytest.mark.parametrize(
    ("epilogue", "config"),
    [
        (Epilogue(alpha=0.5), SMALL),
        (Epilogue(bias=True, activation=jax.nn.relu), SMALL),
        (Epilogue(bias=True, activation=jax.nn.relu), PINGPONG),
        (Epilogue(residual=True, beta=0.5), EARLY),
        (Epilogue(residual=True, beta=2.0), PINGPONG),
        (Epilogue(0.5, 3.0, bias=True, residual=True, activation=jnp.square), EARLY),
    ],
    ids=["alpha", "late", "pingpong", "residual", "residual-pingpong", "all"],
)
def test_epilogues(epilogue, config, rng):
    check_exact(Problem(328, 192, 200, epilogue=epilogue), config, rng)


MIRRORED = dataclasses.replace(SMALL, mirrored=True)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_mirrored_with_ragged_edges(layout, late, rng):
    # Stored [k, n], the right operand becomes the left one, and n may be any multiple of 8.
    m = 256 if layout[0] == "T" else 201
    problem = products.transposed(Problem(m, 200, 264), layout)
    check_exact(problem, dataclasses.replace(MIRRORED, late_store=late), rng)


@pytest.mark.parametrize("columns", [16, 48, 80])
def test_mirrored_few_rows(columns, rng):
    config = dataclasses.replace(MIRRORED, tile=(64, columns), consumers=1)
    check_exact(Problem(13, 200, 264, batch=2), config, rng)


def test_mirrored_epilogue_and_tall_tiles(rng):
    problem = Problem(77, 328, 200, epilogue=Epilogue(0.5, bias=True, activation=jax.nn.relu))
    check_exact(problem, MIRRORED, rng)
    check_exact(problem, dataclasses.replace(MIRRORED, tile=(256, 64), late_store=False), rng)
    check_exact(problem, dataclasses.replace(MIRRORED, cluster=(2, 1)), rng)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_gated(layout, rng):
    epilogue = Epilogue(gated=True, activation=jax.nn.relu)
    problem = products.transposed(Problem(264, 192, 200, epilogue=epilogue), layout)
    check_exact(problem, dataclasses.replace(SMALL, tile=(128, 128)), rng)
    if layout == "NT":
        check_exact(problem, dataclasses.replace(PINGPONG, tile=(64, 128)), rng)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize(
    ("pieces", "config"),
    [
        ((128, 64), dataclasses.replace(SMALL, stages=3)),
        ((64, 64, 320), dataclasses.replace(EARLY, cluster=(2, 1))),
        ((64, 192), PINGPONG),
        ((64, 64), dataclasses.replace(SMALL, persistence="dynamic", cluster=(1, 2))),
        ((192, 64, 64), MIRRORED),
    ],
    ids=["late", "cluster", "pingpong", "claimed", "mirrored"],
)
def test_operands_in_pieces(layout, pieces, config, rng):
    m, n = 264 if layout[0] == "T" else 201, 192 if layout[1] == "N" else 200
    if config.mirrored:
        m, n = 256 if layout[0] == "T" else 201, 200
    problem = products.transposed(Problem(m, n, sum(pieces), pieces=pieces), layout)
    check_exact(problem, config, rng)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float32], ids=["float8", "float32"])
def test_pieces_of_other_types(dtype, rng):
    problem = Problem(200, 144, 512, dtype, dtype, jnp.float32, transpose_b=True, pieces=(384, 128))
    check_exact(problem, EARLY, rng)


def _of_odd_rows(m: int, n: int, **changes: Any) -> Problem:
    return Problem(m, n, 136, transpose_b=True, **changes)


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        # One row and one column are left for the last tiles; chunks are 32 columns wide.
        (_of_odd_rows(129, 129), SMALL),
        (_of_odd_rows(3, 5), SMALL),
        (_of_odd_rows(131, 127), dataclasses.replace(EARLY, store_slots=1)),
        (_of_odd_rows(70, 130), dataclasses.replace(EARLY, tile=(64, 128))),
        (_of_odd_rows(131, 111), dataclasses.replace(EARLY, tile=(128, 112))),
        (_of_odd_rows(131, 100), PINGPONG),
        (_of_odd_rows(70, 67, batch=3), SMALL),
        (_of_odd_rows(131, 131), dataclasses.replace(SMALL, cluster=(2, 1))),
        (_of_odd_rows(69, 131), dataclasses.replace(PINGPONG, cluster=(1, 2))),
        (_of_odd_rows(131, 70, out_dtype=jnp.float32), EARLY),
        (_of_odd_rows(131, 67, out_dtype=jnp.float8_e5m2), EARLY),
        (
            _of_odd_rows(131, 67, epilogue=Epilogue(gated=True)),
            dataclasses.replace(SMALL, tile=(128, 128)),
        ),
        (_of_odd_rows(131, 67, epilogue=Epilogue(bias=True, residual=True)), EARLY),
        (_of_odd_rows(131, 67, epilogue=Epilogue(residual=True)), PINGPONG),
        (Problem(136, 128, 136, transpose_a=True, kept=(131, 77)), SMALL),
        (Problem(136, 128, 136, transpose_a=True, kept=(131, 72)), SMALL),
        (Problem(75, 136, 136, kept=(75, 131)), MIRRORED),
        (Problem(75, 136, 136, kept=(75, 135)), dataclasses.replace(MIRRORED, late_store=False)),
    ],
    ids=[
        *("late", "few", "one-slot", "by-columns", "chunks", "pingpong", "batch"),
        *("cluster", "cluster-pingpong", "float32", "float8", "gated"),
        *("residual", "residual-pingpong", "kept", "kept-by-tma", "mirrored", "mirrored-early"),
    ],
)
def test_results_whose_rows_are_no_multiple_of_16_bytes(problem, config, rng):
    check_exact(problem, config, rng)


def test_rounds_once(rng):
    problem = Problem(
        192, 128, 512, epilogue=Epilogue(alpha=0.3, bias=True, activation=jax.nn.gelu)
    )
    operands = products.normal(problem, rng)
    error = np.abs(run(problem, SMALL, operands) - products.exact(problem, operands))
    # Half a unit in the last place of bfloat16, plus what float32 sums of 512 products are off by.
    assert np.all(error <= 2.0**-8 * np.abs(products.exact(problem, operands)) + 1e-4)


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
