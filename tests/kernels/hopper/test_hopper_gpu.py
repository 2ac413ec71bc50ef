"""The Hopper kernel on a real GPU: what the simulator cannot show."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.problem import Epilogue, Problem
from pallas_gemm.proving import products
from tests.kernels.taken import as_taken

pytestmark = pytest.mark.gpu("hopper")

WIDE = HopperConfig()
EARLY = dataclasses.replace(WIDE, late_store=False)
TALL = dataclasses.replace(EARLY, tile=(256, 192), stages=3, store_columns=32)
PINGPONG = dataclasses.replace(EARLY, tile=(128, 192), pingpong=True)
SMALL = HopperConfig(tile=(128, 64), stages=6)
CONFIGS = {"wide": WIDE, "early": EARLY, "tall": TALL, "pingpong": PINGPONG, "small": SMALL}
# What an epilogue takes of the registers leaves room for fewer accumulators.
FINISHING = CONFIGS | {
    "tall": dataclasses.replace(TALL, tile=(256, 128)),
    "pingpong": dataclasses.replace(PINGPONG, tile=(128, 128)),
}
CLUSTERS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]


def compiled(problem, config):
    return jax.jit(hopper.build(HopperPlan(problem, config, H200)))


def check_exact(problem, config, rng):
    """Small integers: every element must be right to the last bit."""
    operands = products.small_integers(problem, rng)
    expected = products.rounded(problem, products.exact(problem, operands))
    # What an earlier product left in the memory that the result will get must not pass for it.
    poison = jnp.full(problem.out_shape, 123, problem.out_dtype).block_until_ready()
    del poison
    arrays = as_taken(problem, operands)
    out = np.asarray(compiled(problem, config)(*arrays)).astype(np.float64)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize(
    "config",
    [
        WIDE,
        dataclasses.replace(EARLY, cluster=(2, 1), persistence="dynamic"),
        dataclasses.replace(PINGPONG, cluster=(1, 2)),
        dataclasses.replace(WIDE, mirrored=True),
    ],
    ids=["late", "claimed", "pingpong", "mirrored"],
)
@pytest.mark.parametrize("terms", [(640, 64), (64, 1024, 320)], ids=len)
def test_sums_of_products(terms, config, layout, rng):
    m, n = 1088 if layout[0] == "T" else 1001, 1088 if layout[1] == "N" else 1000
    problem = Problem(m, n, sum(terms), terms=terms)
    check_exact(products.transposed(problem, layout), config, rng)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(EARLY, split_k=7, cluster=(2, 1)),
        dataclasses.replace(EARLY, split_k=7, mirrored=True, schedule="online_swizzle:2"),
        dataclasses.replace(WIDE, split_k=7, split_last=5),
    ],
    ids=["clusters", "mirrored", "last"],
)
def test_tiles_that_are_cut_along_k(config, layout, rng):
    problem = products.transposed(Problem(576, 576, 5000, batch=2), layout)
    check_exact(problem, config, rng)
    operands = as_taken(problem, products.normal(problem, rng))
    run = compiled(problem, config)
    first = np.asarray(run(*operands))
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(run(*operands)), first)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_layouts_with_ragged_edges(layout, config, rng):
    n = 1088 if layout[1] == "N" else 1000
    m = 1001 if layout[0] == "N" else 1000
    check_exact(products.transposed(Problem(m, n, 1000), layout), config, rng)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("persistence", ["none", "static", "dynamic"])
@pytest.mark.parametrize(
    "config", [WIDE, EARLY, TALL, PINGPONG], ids=["wide", "early", "tall", "pp"]
)
def test_modes(config, persistence, cluster, rng):
    if config.pingpong and persistence == "dynamic":
        pytest.skip("refused: ping-pong consumers cannot claim tiles")
    config = dataclasses.replace(config, persistence=persistence, cluster=cluster)
    check_exact(Problem(3001, 2752, 520), config, rng)


@pytest.mark.parametrize(
    ("a", "b", "out", "config"),
    [
        (jnp.float16, jnp.float16, jnp.float16, WIDE),
        (jnp.bfloat16, jnp.bfloat16, jnp.float32, dataclasses.replace(EARLY, store_columns=32)),
        (jnp.float32, jnp.float32, jnp.float32, dataclasses.replace(EARLY, store_columns=32)),
        (jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.bfloat16, WIDE),
        (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, WIDE),
        (jnp.float8_e5m2, jnp.float8_e5m2, jnp.float16, WIDE),
        (jnp.int8, jnp.int8, jnp.int32, dataclasses.replace(EARLY, store_columns=32)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_dtypes(a, b, out, config, rng):
    problem = Problem(1001, 1008, 1040, a_dtype=a, b_dtype=b, out_dtype=out, transpose_b=True)
    check_exact(problem, config, rng)


@pytest.mark.parametrize(
    ("epilogue", "config"),
    [
        (Epilogue(alpha=0.5), WIDE),
        (Epilogue(bias=True, activation=jax.nn.relu), WIDE),
        (Epilogue(bias=True, activation=jax.nn.relu), PINGPONG),
        (Epilogue(bias=True, activation=jax.nn.relu), TALL),
        (Epilogue(residual=True, beta=0.5), EARLY),
        (Epilogue(residual=True, beta=2.0), PINGPONG),
        (Epilogue(residual=True, beta=2.0), TALL),
        (Epilogue(0.5, 2.0, bias=True, residual=True, activation=jax.nn.relu), EARLY),
    ],
    ids=["alpha", "late", "pingpong", "tall", "residual", "residual-pp", "residual-tall", "all"],
)
def test_epilogues(epilogue, config, rng):
    check_exact(Problem(2001, 1984, 520, epilogue=epilogue), config, rng)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("config", [WIDE, EARLY, PINGPONG], ids=["late", "early", "pingpong"])
@pytest.mark.parametrize("epilogue", [Epilogue(), Epilogue(0.5, bias=True, activation=jax.nn.relu)])
def test_mirrored_with_ragged_edges(epilogue, config, layout, rng):
    m = 1088 if layout[0] == "T" else 1001
    problem = products.transposed(Problem(m, 1000, 520, epilogue=epilogue), layout)
    check_exact(problem, dataclasses.replace(config, mirrored=True), rng)


@pytest.mark.parametrize("columns", [16, 48, 144])
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2)])
def test_mirrored_few_rows(cluster, columns, rng):
    config = dataclasses.replace(SMALL, tile=(64, columns), consumers=1, cluster=cluster, stages=8)
    config = dataclasses.replace(config, mirrored=True)
    check_exact(Problem(13, 2000, 1000), config, rng)
    check_exact(Problem(70, 200, 264, batch=3), config, rng)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("config", [WIDE, EARLY], ids=["late", "early"])
def test_gated(layout, config, rng):
    epilogue = Epilogue(alpha=0.5, gated=True, activation=jax.nn.relu)
    problem = products.transposed(Problem(1000, 1088, 520, epilogue=epilogue), layout)
    check_exact(problem, config, rng)


@pytest.mark.parametrize("shared", ["shared_a", "shared_b"])
@pytest.mark.parametrize("config", [*FINISHING.values()], ids=[*FINISHING])
def test_products_of_a_batch_share_operands(shared, config, rng):
    epilogue = Epilogue(bias=True, residual=not config.late_store)
    problem = Problem(700, 704, 264, batch=5, epilogue=epilogue, **{shared: True})
    check_exact(problem, config, rng)
    plain = dataclasses.replace(problem, epilogue=Epilogue(bias=True))
    check_exact(plain, dataclasses.replace(config, mirrored=True), rng)


SCALED = Epilogue(None, row_scale=True, col_scale=True, bias=True)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "types",
    [(jnp.int8, jnp.bfloat16), (jnp.float8_e4m3fn, jnp.bfloat16), (jnp.bfloat16, jnp.float32)],
    ids=["int8", "float8", "bfloat16"],
)
@pytest.mark.parametrize("name", ["wide", "early", "pingpong"])
def test_scales(name, types, batch, rng):
    config = FINISHING[name]
    operand, out = types
    epilogue = SCALED
    if config.late_store and out == jnp.float32:
        config = EARLY
    if not config.late_store:
        config = dataclasses.replace(config, store_columns=32)
        epilogue = dataclasses.replace(SCALED, beta=None, residual=True, activation=jax.nn.relu)
    problem = Problem(
        1001, 1000, 528, operand, operand, out, transpose_b=True, batch=batch, epilogue=epilogue
    )
    check_exact(problem, config, rng)
    if out == jnp.bfloat16 and config.late_store:
        check_exact(problem, dataclasses.replace(config, mirrored=True), rng)
        gated = dataclasses.replace(epilogue, gated=True, up_scale=True, up_bias=True)
        check_exact(dataclasses.replace(problem, epilogue=gated), config, rng)


@pytest.mark.parametrize("schedule", ["hilbert", "raster:cols", "online_swizzle:8"])
@pytest.mark.parametrize("config", [EARLY, PINGPONG], ids=["cooperative", "pingpong"])
def test_batches(schedule, config, rng):
    check_exact(
        Problem(700, 704, 264, batch=5), dataclasses.replace(config, schedule=schedule), rng
    )


@pytest.mark.parametrize("config", [WIDE, EARLY, PINGPONG], ids=["late", "early", "pingpong"])
@pytest.mark.parametrize("columns", [64, 128, 192])
@pytest.mark.parametrize("k", [64, 128])
def test_store_slots_are_not_reused_too_early(k, columns, config, rng):
    # A few steps per tile make the stores follow each other closely; 3 chunks are odd for 2 slots.
    config = dataclasses.replace(config, tile=(128, columns))
    check_exact(Problem(4096, 4096, k), config, rng)


@pytest.mark.parametrize("columns", [80, 112, 176, 208])
def test_odd_tile_widths(columns, rng):
    config = dataclasses.replace(EARLY, tile=(128, columns), store_columns=32)
    check_exact(Problem(1000, 1000, 520, transpose_b=True), config, rng)


@pytest.mark.parametrize("persistence", ["none", "static", "dynamic"])
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1)])
def test_a_thousand_runs_give_the_same_bits(persistence, cluster, rng):
    problem = Problem(2048, 2048, 1024)
    config = dataclasses.replace(WIDE, persistence=persistence, cluster=cluster)
    kernel = compiled(problem, config)
    operands = products.normal(problem, rng).present()
    first = kernel(*operands)
    same = jax.jit(lambda x, y: jnp.all(x.view(jnp.int16) == y.view(jnp.int16)))
    results = [same(kernel(*operands), first) for _ in range(1000)]
    assert all(map(bool, results))


# A division spills where a consumer has more than 128 accumulators.
@pytest.mark.parametrize(
    "config",
    [WIDE, dataclasses.replace(PINGPONG, tile=(64, 192))],
    ids=["late", "pingpong"],
)
@pytest.mark.parametrize("activation", [jax.nn.gelu, jax.nn.silu, jnp.tanh, jax.nn.softplus])
def test_activations_err_at_most_twice_as_much_as_those_of_xla(activation, config, rng):
    epilogue = Epilogue(alpha=0.03125, bias=True, activation=activation)
    problem = Problem(1024, 1536, 1024, epilogue=epilogue)
    config = dataclasses.replace(config, store_columns=64 if config.late_store else 32)
    operands = products.normal(problem, rng)
    exact = products.exact(problem, operands)

    def reference(a, b, bias):
        total = jnp.matmul(a, b, preferred_element_type=jnp.float32) * 0.03125
        return activation(total + bias[None, :]).astype(jnp.bfloat16)

    theirs = np.asarray(jax.jit(reference)(*operands.present())).astype(np.float64)
    ours = np.asarray(compiled(problem, config)(*operands.present())).astype(np.float64)
    assert np.abs(ours - exact).max() <= 2 * np.abs(theirs - exact).max()


def test_errors_are_at_most_twice_those_of_xla(rng):
    problem = Problem(2056, 2048, 4096)
    operands = products.normal(problem, rng)
    exact = products.exact(problem, operands)
    tiles = list(itertools.product(range(0, 2056, 128), range(0, 2048, 256)))
    theirs = np.abs(np.asarray(jax.jit(jnp.matmul)(*operands.present())).astype(np.float64) - exact)
    for config in CONFIGS.values():
        ours = np.asarray(compiled(problem, config)(*operands.present())).astype(np.float64)
        ours = np.abs(ours - exact)
        for row, col in tiles:
            tile = np.s_[row : row + 128, col : col + 256]
            assert ours[tile].max() <= 2 * theirs[tile].max()
