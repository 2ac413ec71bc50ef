"""The Blackwell kernel in the GPU simulator, which also records races: exact numbers, every mode.

What the simulator lacks for pairs of CTAs and launch control, `blackwell_simulator.py` adds.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import schedules
from bench.blackwell_ladder import STEPS
from pallas_gemm.device import B200
from pallas_gemm.kernels import work
from pallas_gemm.kernels.blackwell import kernel as blackwell
from pallas_gemm.kernels.blackwell import launch_control, store
from pallas_gemm.kernels.blackwell.config import ACTIVATED_COLUMNS, PAIR, BlackwellConfig
from pallas_gemm.kernels.blackwell.plan import BlackwellPlan
from pallas_gemm.problem import Epilogue, Problem
from pallas_gemm.proving import products
from tests import blackwell_simulator

# Small tiles simulate fast; two stages make the ring wrap after two steps, and two workers make
# each compute so many tiles that the accumulators are used in turn.
SINGLE = BlackwellConfig(
    tile=(128, 64), stages=2, cluster=(1, 1), ctas=2, store_columns=32, schedule="swizzle:2"
)
PAIRED = dataclasses.replace(SINGLE, tile=(128, 128), cluster=PAIR, ctas=4)
DYNAMIC = dataclasses.replace(PAIRED, persistence="dynamic")
SHUFFLED = schedules.Schedule(
    (3, 3), np.stack(np.divmod(np.random.default_rng(3).permutation(9), 3), axis=1), "shuffled"
)

EPILOGUES = {
    "none": Epilogue(),
    "bias": Epilogue(0.5, bias=True, activation=jax.nn.relu),
    "gated": Epilogue(gated=True, activation=jax.nn.relu),
    "all": Epilogue(0.5, 3.0, bias=True, residual=True, activation=jnp.square),
}
# Every layout with every epilogue; a residual comes through store slots, of the last two steps.
STEPS_EACH_TWICE = (
    ("1 initial", "NN", "none"),
    ("1 initial", "TT", "bias"),
    ("2 2-CTA MMA", "NT", "bias"),
    ("2 2-CTA MMA", "TN", "gated"),
    ("3 pipelining", "TN", "none"),
    ("3 pipelining", "NN", "gated"),
    ("4 warp specialisation", "TT", "gated"),
    ("4 warp specialisation", "NT", "none"),
    ("5 persistent", "NT", "gated"),
    ("5 persistent", "TT", "none"),
    ("6 two accumulators", "TN", "bias"),
    ("6 two accumulators", "NN", "bias"),
    ("7 TMA stores, Hilbert", "TT", "all"),
    ("7 TMA stores, Hilbert", "NN", "all"),
    ("8 launch control", "NT", "all"),
    ("8 launch control", "TN", "all"),
)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> Any:
    """Simulates a product of small integers: the result is exact, and nothing raced."""

    def run(problem: Problem, config: BlackwellConfig) -> None:
        started = 2 if config.persistence == "dynamic" else None
        blackwell_simulator.install(monkeypatch, started=started)
        operands = products.small_integers(problem, rng)
        out = simulate(problem, config, operands)
        expected = products.rounded(problem, products.exact(problem, operands))
        np.testing.assert_array_equal(out, expected)

    return run


def simulate(problem: Problem, config: BlackwellConfig, operands: products.Operands) -> np.ndarray:
    kernel = blackwell.build(
        BlackwellPlan(problem, config, B200, interpret=blackwell_simulator.PARAMS)
    )
    out, raced = blackwell_simulator.simulate(kernel, operands.present())
    assert not raced
    return out.astype(np.float64)


def shrunk(config: BlackwellConfig) -> BlackwellConfig:
    """A step of the ladder with tiles that simulate fast, and as few workers as make them many."""
    return dataclasses.replace(
        config,
        tile=(128, 64 * config.cluster_size),
        stages=min(config.stages, 3),
        store_columns=32,
        ctas=2 * config.cluster_size,
    )


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_layouts_with_ragged_edges(layout, check):
    m = 192 if layout[0] == "T" else 200
    n = 192 if layout[1] == "N" else 200
    check(products.transposed(Problem(m, n, 136), layout), SINGLE)


@pytest.mark.every_other
@pytest.mark.parametrize(("name", "layout", "epilogue"), STEPS_EACH_TWICE)
def test_every_step_of_the_ladder(name, layout, epilogue, check):
    """Ragged in m, n and k; a worker has three tiles or more, and a tile more steps than slots."""
    config, options = shrunk(STEPS[name]), EPILOGUES[epilogue]
    if options.gated:
        config = dataclasses.replace(config, tile=(128, 2 * config.tile[1]))
    # Stored with k first, an operand is whole atoms wide; its tiles hang over all the same.
    m = (584 if layout[0] == "N" else 576) if config.cluster_size == 2 else 320
    n = 200 if layout[1] == "T" else 192
    check(products.transposed(Problem(m, n, 200, epilogue=options), layout), config)


@pytest.mark.parametrize(
    ("persistence", "accumulators"), [("none", 2), ("static", 1), ("dynamic", 1)]
)
def test_persistence(persistence, accumulators, check):
    config = dataclasses.replace(SINGLE, persistence=persistence, accumulators=accumulators)
    check(Problem(520, 128, 136, transpose_b=True), config)


@pytest.mark.parametrize(
    ("schedule", "persistence"),
    [
        ("by_die:2:raster:cols", "static"),
        ("hilbert", "dynamic"),
        ("online_swizzle:2", "static"),
        (SHUFFLED, "dynamic"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_any_schedule(schedule, persistence, check):
    config = dataclasses.replace(SINGLE, schedule=schedule, persistence=persistence)
    check(Problem(384, 192, 72, transpose_b=True), config)


@pytest.mark.parametrize("refused", [0, 1], ids="request {}".format)
def test_what_was_asked_before_a_refusal_and_granted_after_it_is_computed(
    refused, monkeypatch, rng
):
    """A refusal need not mean that no cluster is left."""
    blackwell_simulator.install(monkeypatch, started=2, refused=frozenset({refused}))
    problem = Problem(256 * 7, 64, 72, transpose_b=True)
    config = dataclasses.replace(DYNAMIC, tile=(128, 64))
    operands = products.small_integers(problem, rng)
    expected = products.rounded(problem, products.exact(problem, operands))
    np.testing.assert_array_equal(simulate(problem, config, operands), expected)


@pytest.mark.parametrize(
    ("granted", "events"),
    [
        # Before tile 0 nothing is waited for; before each other one, the answer to what follows it.
        ((3, 1, 4), ["tile 0", 0, 1, "tile 3", 2, "tile 1", 3, "tile 4"]),
        ((3, None), ["tile 0", 0, 1, "tile 3"]),
        ((None, 2), ["tile 0", 0, 1, "tile 2"]),
        ((None, None), ["tile 0", 0, 1]),
    ],
)
def test_a_role_knows_before_it_computes_a_tile_which_comes_next(granted, events, monkeypatch):
    answers = [(number or 0, number is not None) for number in (*granted, None)]
    numbers, grants = (jnp.asarray(column) for column in zip(*answers, strict=True))
    done: list[Any] = []

    def answer(_: Any, request: Any) -> Any:
        jax.debug.callback(lambda request: done.append(int(request)), request, ordered=True)
        return numbers[request], grants[request]

    def compute(_turn: Any, piece: work.Piece, carry: None) -> None:
        jax.debug.callback(lambda col: done.append(f"tile {col}"), piece.col, ordered=True)
        return carry

    monkeypatch.setattr(launch_control, "answer", answer)
    monkeypatch.setattr(launch_control, "release", lambda *_, **__: None)
    order = launch_control.order_operand(schedules.raster(1, 6))
    role = launch_control.scratch(3), jnp.int32(0), work.Coding(), False, True
    turns, _ = launch_control.walk(order, *role, compute, None)
    jax.effects_barrier()
    assert done == events
    assert turns == sum(isinstance(event, str) for event in events)


@pytest.mark.parametrize(("k", "stages"), [(8, 3), (64, 1), (72, 1), (640, 3)])
def test_k_from_less_than_a_step_to_many(k, stages, check):
    check(Problem(264, 128, k, transpose_b=True), dataclasses.replace(PAIRED, stages=stages))


@pytest.mark.parametrize(
    ("layout", "k", "config"),
    # Of the last step, both atoms are whole, or the second is ragged, or lies beyond the end of k.
    [("NT", 256, DYNAMIC), ("TN", 328, SINGLE), ("NN", 136, PAIRED)],
    ids=["dynamic pair", "single", "pair"],
)
def test_steps_of_two_atoms(layout, k, config, check):
    problem = products.transposed(Problem(320, 128, k), layout)
    check(problem, dataclasses.replace(config, step_bytes=256))


@pytest.mark.parametrize(
    ("layout", "k", "config"),
    [
        ("NT", 264, dataclasses.replace(DYNAMIC, tile=(128, 512), accumulators=1)),
        ("TN", 72, dataclasses.replace(SINGLE, tile=(128, 384), accumulators=1)),
    ],
    ids=["dynamic pair", "single with fewer steps than slots"],
)
def test_wide_tiles_are_freed_half_by_half(layout, k, config, check):
    problem = products.transposed(Problem(576, 448, k, epilogue=EPILOGUES["bias"]), layout)
    check(problem, dataclasses.replace(config, store_columns=64, stages=3))


@pytest.mark.parametrize(
    ("columns", "store_columns", "slots", "residual"),
    [(96, 32, 2, False), (64, 64, 2, False), (128, 64, 1, True), (96, 32, 2, True)],
)
def test_chunks_take_the_store_slots_in_turn(columns, store_columns, slots, residual, check):
    config = dataclasses.replace(
        SINGLE, tile=(128, columns), store_columns=store_columns, store_slots=slots
    )
    problem = Problem(384, 2 * columns, 72, transpose_b=True, epilogue=Epilogue(residual=residual))
    check(problem, config)


@pytest.mark.parametrize("config", [SINGLE, DYNAMIC], ids=["single", "dynamic pair"])
# With more rows of tiles than columns: on a square grid, one in place of the other passes.
@pytest.mark.parametrize("m", [152, 280])
def test_batches_are_part_of_the_schedule(m, config, check):
    check(Problem(m, 128, 72, batch=3), config)


@pytest.mark.parametrize(("shared", "config"), [("shared_a", SINGLE), ("shared_b", DYNAMIC)])
def test_products_of_a_batch_share_operands(shared, config, check):
    epilogue = Epilogue(bias=True, residual=True)
    check(Problem(152, 64, 72, batch=3, epilogue=epilogue, **{shared: True}), config)


@pytest.mark.parametrize(
    ("a", "b", "out", "store_columns"),
    [
        (jnp.float16, jnp.float16, jnp.float16, 32),
        (jnp.bfloat16, jnp.bfloat16, jnp.float32, 32),
        (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, 64),
        (jnp.float8_e5m2, jnp.float8_e5m2, jnp.float8_e4m3fn, 64),
        (jnp.int8, jnp.int8, jnp.int32, 32),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_dtypes(a, b, out, store_columns, check):
    problem = Problem(264, 144, 272, a_dtype=a, b_dtype=b, out_dtype=out, transpose_b=True)
    check(problem, dataclasses.replace(PAIRED, store_columns=store_columns))


@pytest.mark.parametrize(
    ("epilogue", "config"),
    [
        (Epilogue(bias=True, activation=jax.nn.relu), SINGLE),
        (Epilogue(residual=True, beta=0.5), PAIRED),
        (Epilogue(0.5, 3.0, bias=True, residual=True, activation=jnp.square), DYNAMIC),
    ],
    ids=["bias", "residual", "all"],
)
def test_epilogues(epilogue, config, check):
    check(Problem(328, 192, 136, epilogue=epilogue), config)


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({"residual": True, "beta": None}, SINGLE),
        (
            {"gated": True, "up_scale": True, "up_bias": True},
            dataclasses.replace(DYNAMIC, tile=(128, 128)),
        ),
    ],
    ids=["residual", "gated"],
)
def test_scales(changes, config, check):
    epilogue = Epilogue(None, row_scale=True, col_scale=True, bias=True, **changes)
    problem = Problem(136, 72, 80, jnp.int8, jnp.int8, transpose_b=True, batch=2, epilogue=epilogue)
    check(problem, config)


@pytest.mark.parametrize(
    ("layout", "config"),
    [("NT", SINGLE), ("NN", PAIRED), ("NT", DYNAMIC)],
    ids=["single", "pair", "dynamic"],
)
def test_gated(layout, config, check):
    epilogue = Epilogue(gated=True, activation=jax.nn.relu)
    problem = products.transposed(Problem(264, 192, 136, epilogue=epilogue), layout)
    check(problem, dataclasses.replace(config, tile=(128, 2 * config.tile[1])))


@pytest.mark.parametrize("activation", [None, jnp.square], ids=["in one read", "in several"])
def test_an_accumulator_is_freed_when_it_is_read_and_before_it_is_stored(activation, monkeypatch):
    done = []

    def noted(module: Any, name: str) -> None:
        call = getattr(module, name)

        def note(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            return call(*args, **kwargs)

        monkeypatch.setattr(module, name, note)

    for name in ("async_load_tmem", "wait_load_tmem", "commit_smem", "copy_smem_to_gmem"):
        noted(plgpu, name)
    noted(store, "free_accumulator")
    problem = Problem(256, 256, 64, transpose_b=True, epilogue=Epilogue(activation=activation))
    plan = BlackwellPlan(problem, SINGLE, B200)
    jax.eval_shape(
        blackwell.build(plan),
        *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (problem.a_shape, problem.b_shape)),
    )
    reads = 1 if activation is None else SINGLE.store_columns // ACTIVATED_COLUMNS
    assert done == [
        *["async_load_tmem"] * reads,
        "free_accumulator",
        "wait_load_tmem",
        "commit_smem",
        "copy_smem_to_gmem",
    ]


def test_rounds_once(monkeypatch, rng):
    blackwell_simulator.install(monkeypatch)
    epilogue = Epilogue(0.3, 0.3, bias=True, residual=True, activation=jax.nn.gelu)
    problem = Problem(256, 128, 512, epilogue=epilogue, transpose_b=True)
    operands = products.normal(problem, rng)
    exact = products.exact(problem, operands)
    error = np.abs(simulate(problem, PAIRED, operands) - exact)
    # Half a unit in the last place of bfloat16, plus what float32 sums of 512 products are off by.
    assert np.all(error <= 2.0**-8 * np.abs(exact) + 1e-4)


def test_nan_and_infinity_stay_in_their_rows_and_columns(monkeypatch, rng):
    blackwell_simulator.install(monkeypatch)
    problem = Problem(200, 128, 200)
    operands = products.small_integers(problem, rng)
    operands = operands._replace(
        a=operands.a.at[3, 5].set(jnp.nan), b=operands.b.at[7, 11].set(jnp.inf)
    )
    out = simulate(problem, PAIRED, operands)
    with np.errstate(invalid="ignore"):
        expected = products.exact(problem, operands)
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(expected))


@pytest.mark.parametrize("persistence", ["static", "dynamic"])
def test_single_ctas_run_in_the_simulator_as_it_is(persistence, rng):
    """It refuses every request for a tile, so that each cluster computes its own and leaves."""
    problem = Problem(264, 128, 136)
    operands = products.small_integers(problem, rng)
    out = simulate(problem, dataclasses.replace(SINGLE, persistence=persistence), operands)
    expected = products.rounded(problem, products.exact(problem, operands))
    np.testing.assert_array_equal(out, expected)
