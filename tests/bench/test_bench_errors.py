"""The programs that compare numbers: errors of each choice, and losses of training steps."""

import jax.numpy as jnp
import numpy as np
import pytest

from bench import error_bench, loss_curve
from bench.loss_curve import Sizes


def test_an_error_is_relative_to_the_size_of_the_results() -> None:
    exact = np.array([3.0, -4.0, 0.0, 0.0])
    found = error_bench.error(jnp.array([3.0, -4.5, 0.0, 0.0]), exact)
    assert (found.largest, found.mean_square) == (0.5 / 2.5, 0.25 / 2.5)


def test_more_precision_errs_less_in_the_simulator() -> None:
    size = 64, 64, 256
    found = {
        own.name: error_bench.errors(own, size, 0, simulate=True)[0].mean_square
        for own in error_bench.choices(simulate=True)
        if (own.dtype, own.result) == (jnp.float32, jnp.float32)
    }
    tf32, three, six, highest = found.values()
    assert tf32 > 20 * three > 200 * six
    assert highest < 2e-7


def test_every_choice_is_compared_with_xla() -> None:
    every = error_bench.choices(simulate=False)
    assert {own.name for own in every} >= {"default", "part=k", "part=k/16"}
    assert all(own.promise for own in error_bench.choices(simulate=True))


@pytest.mark.parametrize("memory", ["least", "fastest"])
def test_losses_follow_those_of_stock_jax(memory: str) -> None:
    sizes = Sizes(tokens=64, width=32, words=9000, dtype=jnp.float32)
    found = loss_curve.curves(loss_curve.losses_of(memory), sizes, 12)
    assert found["stock"][-1] < found["stock"][0] - 1
    for own in found.values():
        np.testing.assert_allclose(own, found["stock"], rtol=2e-5)
