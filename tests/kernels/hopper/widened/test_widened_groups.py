"""Experts of few bits in the GPU simulator: rows in groups, and batches of products."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper.widened import kernel
from pallas_gemm.kernels.hopper.widened.plan import WidenedPlan
from pallas_gemm.problem import Epilogue, Problem
from tests import group_products, races
from tests.kernels.hopper.widened.test_widened_simulated import SIMULATOR, Config, problem, weights


def operands(asked: Problem, *, groups: int = 1) -> tuple[Any, Any, list[Any], np.ndarray]:
    """Operands of which sums are exact: rows, weights, their scales, and what both come to."""
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.integers(-3, 4, asked.a_shape).astype(asked.a_dtype))
    b = weights(asked.b_shape, asked.b_dtype, rng)
    wide = np.asarray(b).astype(np.float64)
    wide = wide.swapaxes(-1, -2) if asked.transpose_b else wide
    if not asked.blocks:
        return a, b, [], wide
    shape = (*wide.shape[:-2], asked.k // asked.blocks.k, asked.n)
    scale = 2.0 ** rng.integers(-1, 2, shape)
    return a, b, [jnp.asarray(scale.astype(jnp.bfloat16))], wide * scale.repeat(asked.blocks.k, -2)


def run(asked: Problem, config: Any, *given: Any) -> Any:
    """Simulates a kernel without races; returns its results."""
    made = kernel.build(WidenedPlan(asked, config, H200, interpret=SIMULATOR))
    with races.recorded() as raced:
        found = jax.tree.map(lambda x: np.asarray(x, np.float64), jax.jit(made)(*given))
        assert not raced()
    return found


def of_groups(sizes: Sequence[int], **options: Any) -> Problem:
    options = {"out_dtype": jnp.float32, "groups": len(sizes)} | options
    return problem(options.pop("kind", jnp.int4), options.pop("m", sum(sizes)), 192, 384, **options)


@pytest.mark.every_other
@pytest.mark.parametrize(
    ("asked", "sizes", "config"),
    [
        (of_groups((3, 0, 17, 1), group=128), (3, 0, 17, 1), Config()),
        # The last rows are in no group: more than a tile of them, and one.
        (of_groups((5, 4), m=40, transpose_b=True), (5, 4), Config(tile=(64, 8))),
        (of_groups((0, 9), m=10, group=64), (0, 9), Config(step=64, consumers=2)),
        (of_groups((0, 0), m=9), (0, 0), Config()),
        (
            of_groups((2, 19), m=24, kind=jnp.int8, out_dtype=jnp.bfloat16),
            (2, 19),
            Config(tile=(128, 24), step=64, consumers=2, along_k=1, stages=2),
        ),
        # Sizes say more than there are rows.
        (of_groups((4, 30), m=20), (4, 16), Config()),
        (of_groups((1,), m=1, group=128, transpose_b=True), (1,), Config(tile=(64, 8))),
        # CTAs take several tiles each: some have one more, and the last are zeros.
        (
            of_groups((5, 0, 17, 2), m=34, group=128),
            (5, 0, 17, 2),
            Config(tile=(64, 8), persistence="static", ctas=4),
        ),
        (
            of_groups((19, 3), m=22, kind=jnp.int8, out_dtype=jnp.bfloat16),
            (19, 3),
            Config(tile=(128, 8), consumers=2, stages=6, step=64, persistence="static", ctas=3),
        ),
    ],
    ids=[
        *("empty", "rest", "one row", "no group", "16 bits", "too many", "single"),
        *("in turns", "in odd turns"),
    ],
)
def test_each_group_has_its_weights(asked: Problem, sizes: Any, config: Any) -> None:
    a, b, scales, wide = operands(asked)
    said = jnp.array((4, 30) if sizes == (4, 16) else sizes)
    expected = group_products.exact(_stored(asked), sizes, a, wide)
    if asked.out_dtype != np.float32:
        expected = np.asarray(jnp.asarray(expected).astype(asked.out_dtype), np.float64)
    np.testing.assert_array_equal(run(asked, config, a, b, said, *scales), expected)


def _stored(asked: Problem) -> Problem:
    """The same problem of weights that are stored [k, n]."""
    return Problem(asked.m, asked.n, asked.k, groups=asked.groups)


def test_groups_have_biases_of_their_own() -> None:
    epilogue = Epilogue(bias=True, row_scale=True, alpha=None)
    asked, sizes = of_groups((3, 0, 6), m=11, epilogue=epilogue), (3, 0, 6)
    a, b, _, wide = operands(asked)
    rng = np.random.default_rng(1)
    bias = rng.integers(-9, 9, (3, asked.n))
    alpha, scale = 2.0 ** rng.integers(-1, 2, 3), 2.0 ** rng.integers(-1, 2, asked.m)
    given = (jnp.asarray(x, jnp.float32) for x in (bias, alpha, scale))
    found = run(asked, Config(), a, b, jnp.array(sizes), *given)
    expected, group = (
        group_products.exact(_stored(asked), sizes, a, wide),
        np.repeat(range(3), sizes),
    )
    expected[:9] = expected[:9] * alpha[group, None] * scale[:9, None] + bias[group]
    np.testing.assert_array_equal(found, expected)


def test_ctas_take_tiles_of_a_product_in_turns() -> None:
    asked = problem(jnp.int4, 40, 192, 448, group=64, out_dtype=jnp.float32)
    a, b, scales, wide = operands(asked)
    config = Config(tile=(64, 16), step=64, along_k=4, stages=8, persistence="static", ctas=2)
    found = run(asked, config, a, b, *scales)
    np.testing.assert_array_equal(found, np.asarray(a, np.float64) @ wide)


@pytest.mark.parametrize("shared", ["", "a", "b"])
def test_products_of_a_batch_are_one_kernel(shared: str) -> None:
    asked = problem(
        *(jnp.int4, 12, 192, 256), group=128, batch=3, out_dtype=jnp.float32, transpose_b=True,
        **({f"shared_{shared}": True} if shared else {}),
    )  # fmt: skip
    a, b, scales, wide = operands(asked)
    found = run(asked, Config(), a, b, *scales)
    np.testing.assert_array_equal(found, np.asarray(a, np.float64) @ wide)
