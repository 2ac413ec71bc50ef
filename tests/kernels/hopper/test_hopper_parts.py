"""Sums in parts have the same bits, whoever makes the parts: one CTA, or one for each."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import HopperConfig, gemm

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
    a, b = (jnp.asarray(rng.normal(size=(n, K)), jnp.bfloat16) for n in (ROWS, COLUMNS))
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
