"""Kernels that take parts of larger arrays, and write into arrays that there are: simulated."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.windows import WHOLE, Window
from pallas_gemm.problem import Epilogue, Problem

F32, BF16 = jnp.float32, jnp.bfloat16
TOKENS, WIDTH, WORDS = 192, 128, 512
SIZE = 192
"""Words of a part: no whole number of tiles, so that the last one reaches beyond it."""
SIMULATOR = plgpu.InterpretGPUParams(detect_races=True)
PLAIN = HopperConfig(tile=(128, 128), stages=2, ctas=2, store_columns=64, late_store=False)
CONFIGS = {
    "plain": PLAIN,
    "late": dataclasses.replace(PLAIN, late_store=True),
    "turns": dataclasses.replace(PLAIN, tile=(64, 128), pingpong=True),
    "cluster": dataclasses.replace(PLAIN, cluster=(2, 1), ctas=4),
}
STARTS = {"first": 0, "inner": 128, "last": WORDS - SIZE}


def _built(problem: Problem, config: HopperConfig, window: Window) -> Any:
    plan = HopperPlan(problem, config, H200, window=window, interpret=SIMULATOR)
    return functools.partial(hopper.build(plan))


def _drawn(seed: int, *shape: int, dtype: Any = BF16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _part(x: jax.Array, axis: int, start: int) -> jax.Array:
    return jax.lax.slice_in_dim(x, start, start + SIZE, axis=axis)


def _check(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found.astype(F32), expected.astype(F32), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("transposed", [False, True])
def test_an_operand_is_a_part_of_a_larger_one(transposed: bool, start: int) -> None:
    h, w = _drawn(0, TOKENS, WIDTH), _drawn(1, *((WORDS, WIDTH) if transposed else (WIDTH, WORDS)))
    axis = 0 if transposed else 1
    run = _built(Problem(TOKENS, SIZE, WIDTH, transpose_b=transposed), PLAIN, Window(right=axis))
    part = _part(w, axis, start)
    _check(run(jnp.array([start]), h, w), jnp.matmul(h, part.T if transposed else part))


def test_the_operand_of_a_mirrored_product_changes_sides():
    h, w = _drawn(0, TOKENS, WIDTH), _drawn(1, WIDTH, WORDS)
    config = dataclasses.replace(PLAIN, tile=(128, 64), store_columns=32, mirrored=True)
    run = _built(Problem(TOKENS, SIZE, WIDTH), config, Window(right=1))
    _check(run(jnp.array([128]), h, w), jnp.matmul(h, w[:, 128 : 128 + SIZE]))


@pytest.mark.parametrize("name", ["plain", "turns", "cluster"])
def test_a_sum_takes_the_place_of_what_is_added_to(name: str) -> None:
    g, w, before = _drawn(0, TOKENS, SIZE), _drawn(1, WIDTH, WORDS), _drawn(2, TOKENS, WIDTH)
    epilogue = Epilogue(residual=True)
    problem = Problem(TOKENS, WIDTH, SIZE, out_dtype=F32, transpose_b=True, epilogue=epilogue)
    config = dataclasses.replace(CONFIGS[name], store_columns=32)
    run = _built(problem, config, Window(right=1, in_place=True))
    start, before = STARTS["inner"], before.astype(F32)
    product = jnp.matmul(g, _part(w, 1, start).T, preferred_element_type=F32)
    _check(run(jnp.array([start]), g, w, before), before + product)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_result_is_written_where_it_belongs(config: HopperConfig, transposed: bool) -> None:
    h, g, start = _drawn(0, TOKENS, WIDTH), _drawn(1, TOKENS, SIZE), STARTS["inner"]
    problem = Problem(WIDTH, SIZE, TOKENS, transpose_a=True)
    product, axis = jnp.matmul(h.T, g), 1
    before = _drawn(2, WIDTH, WORDS)
    if transposed:
        # As the words are rows then, they are the left operand's.
        problem, axis = dataclasses.replace(problem, m=SIZE, n=WIDTH), 0
        product, before, (h, g) = product.T, before.T, (g, h)
    run = _built(problem, config, Window(result=axis))
    found = run(jnp.array([start]), h, g, before)
    _check(_part(found, axis, start), product)
    np.testing.assert_array_equal(
        found.take(np.arange(start), axis), before.take(np.arange(start), axis)
    )
    # A tile that reaches beyond writes what the next part replaces, and nothing after that.
    beyond = np.arange(start + 2 * PLAIN.tile[0], WORDS)
    np.testing.assert_array_equal(found.take(beyond, axis), before.take(beyond, axis))


def test_parts_in_order_are_the_whole():
    h, g = _drawn(0, TOKENS, WIDTH), _drawn(1, TOKENS, WORDS)
    found = jnp.zeros((WIDTH, WORDS), BF16)
    for start, size in ((0, SIZE), (SIZE, SIZE), (2 * SIZE, WORDS - 2 * SIZE)):
        problem = Problem(WIDTH, size, TOKENS, transpose_a=True)
        run = _built(problem, PLAIN, Window(result=1))
        found = run(jnp.array([start]), h, g[:, start : start + size], found)
    _check(found, jnp.matmul(h.T, g))


def test_parts_are_not_taken_where_tiles_are_cut():
    config = dataclasses.replace(PLAIN, split_k=2)
    assert HopperPlan(Problem(TOKENS, SIZE, WIDTH), config, H200).window == WHOLE
    with pytest.raises(ValueError, match="split_k must be 1 where parts of arrays are taken"):
        HopperPlan(Problem(TOKENS, SIZE, WIDTH), config, H200, window=Window(right=1))
