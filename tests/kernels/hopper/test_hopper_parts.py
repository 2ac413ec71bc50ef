"""Sums in parts have the same bits, whoever makes the parts: one CTA, several, one for each."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import HopperConfig, gemm, numerics

ROWS, COLUMNS, K = 130, 144, 1000
"""16 steps of k, which 5 parts do not divide."""
EARLY: dict[str, Any] = {"late_store": False, "store_columns": 16, "stages": 2}
WAYS = {
    "one CTA": {"tile": (128, 144), "partial_sums": 5},
    "one CTA, narrow": {"tile": (64, 64), "consumers": 1, "partial_sums": 5},
    "several": {"tile": (128, 48), "split_k": 5},
    "several, computed order": {
        "tile": (64, 16),
        "consumers": 1,
        "split_k": 5,
        "schedule": "online_swizzle:8",
    },
}


def computed(**fields: Any) -> np.ndarray:
    rng = np.random.default_rng(1)
    a, b = (jnp.asarray(rng.normal(size=(n, K)).astype(jnp.bfloat16)) for n in (ROWS, COLUMNS))
    config = HopperConfig(**EARLY, **fields)
    kind = jnp.float32
    named = {"implementation": "interpret", "config": config, "preferred_element_type": kind}
    return np.asarray(gemm(a, b, transpose_b=True, **named))


@pytest.fixture(scope="module")
def in_parts() -> np.ndarray:
    return computed(tile=(128, 144), partial_sums=5)


@pytest.mark.parametrize("fields", list(WAYS.values())[1:], ids=list(WAYS)[1:])
def test_parts_make_the_same_bits(fields: dict[str, Any], in_parts: np.ndarray) -> None:
    np.testing.assert_array_equal(computed(**fields), in_parts)


def test_another_number_of_parts_makes_others(in_parts: np.ndarray) -> None:
    whole = computed(tile=(128, 144))
    assert (whole != in_parts).mean() > 0.1
    assert (computed(tile=(128, 144), partial_sums=4) != in_parts).mean() > 0.1


PROMISED = 4 * 1024 + 128
"""Elements of k in four parts of 17, 17, 16 and 16 steps: half of them is not half of the parts."""
SHARED: dict[str, dict[str, Any]] = {
    "one CTA for each": {"split_k": 4},
    "two CTAs make two each": {"split_k": 2, "partial_sums": 2},
    "two CTAs, narrow": {"split_k": 2, "partial_sums": 2, "tile": (64, 96), "consumers": 1},
}


def promised(**fields: Any) -> np.ndarray:
    rng = np.random.default_rng(1)
    a, b = (jnp.asarray(rng.normal(size=(n, PROMISED)).astype(jnp.bfloat16)) for n in (130, 96))
    usual = {"tile": (128, 48), "schedule": "online_swizzle:8", **EARLY}
    config = HopperConfig(**usual | fields)
    named = {"implementation": "interpret", "preferred_element_type": jnp.float32}
    rows = numerics(invariant="rows")
    return np.asarray(gemm(a, b, transpose_b=True, config=config, numerics=rows, **named))


@pytest.fixture(scope="module")
def by_one_cta() -> np.ndarray:
    return promised(partial_sums=4)


@pytest.mark.parametrize("fields", SHARED.values(), ids=SHARED)
def test_promised_parts_make_the_same_bits(fields: dict[str, Any], by_one_cta: np.ndarray) -> None:
    np.testing.assert_array_equal(promised(**fields), by_one_cta)
