"""Losses in 8 bits beside those in bfloat16: a few steps of each, and what is said of them."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from examples import recipe_losses


@pytest.fixture(autouse=True)
def _types_as_users_have_them() -> Iterator[None]:
    """Flax's norms mix types, which the other tests do not allow."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_each_seed_is_trained_in_both() -> None:
    small = dataclasses.replace(recipe_losses.SETTINGS, blocks=1, width=64, hidden=64, sequence=8)
    found = recipe_losses.curves(small, [0, 3], 2)
    first, second = found["bfloat16"], found["8 bits"]
    assert first.shape == second.shape == (2, 2)
    # Seeds differ, and so do the kinds; all learn.
    assert len({*first[:, 0], *second[:, 0]}) == 4
    assert (first[:, 1] < first[:, 0]).all()
    assert (second[:, 1] < second[:, 0]).all()
    np.testing.assert_allclose(second, first, rtol=0.05)


def test_the_end_is_compared_with_the_noise_of_the_seeds() -> None:
    found = {"bfloat16": np.full((2, 16), 1.0), "8 bits": np.full((2, 16), 1.5)}
    found["bfloat16"][1, -2:] = 1.25
    assert recipe_losses.table(found)[-1] == "| 16 | 1.0000 1.2500 | 1.5000 1.5000 |"
    assert recipe_losses.verdict(found) == (
        "8 bits - bfloat16: +0.3750 at the end; seeds of bfloat16 differ by 0.2500"
    )
