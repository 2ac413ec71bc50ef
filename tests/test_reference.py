"""The rule for errors holds results to what rounding may err, not to how lucky XLA was."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference

GELU_OF_2 = np.array([[1.954597694087775]])


def test_the_float_beside_an_exact_value_is_right() -> None:
    nearest = GELU_OF_2.astype(np.float32)
    beside = np.nextafter(nearest, np.float32(0))
    # The nearest one errs by a seventh of a last place, and the one beside by six times as much.
    reference.assert_as_good_as_xla(jnp.asarray(beside), jnp.asarray(nearest), GELU_OF_2)
    below = np.nextafter(beside, np.float32(0))
    with pytest.raises(AssertionError):
        reference.assert_as_good_as_xla(jnp.asarray(below), jnp.asarray(nearest), GELU_OF_2)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
def test_what_is_no_rounding_may_not_err(dtype: np.dtype) -> None:
    exact = np.array([[2.0, 0.0, -3.0]])
    result = exact.astype(dtype)
    reference.assert_as_good_as_xla(jnp.asarray(result), jnp.asarray(result), exact)
    result[0, 0] = np.nextafter(result[0, 0], 3) if dtype != np.int32 else 3
    with pytest.raises(AssertionError):
        reference.assert_as_good_as_xla(
            jnp.asarray(result), jnp.asarray(exact.astype(dtype)), exact
        )
