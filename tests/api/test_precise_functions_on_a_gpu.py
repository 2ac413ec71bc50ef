"""On a GPU: functions that are blocks of PTX, on numbers of any size. The simulator asks XLA."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import gemm

F32, BF16 = jnp.float32, jnp.bfloat16
pytestmark = pytest.mark.gpu("hopper")


def _away(x: Any) -> Any:
    return lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO)


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], float, float]] = {
    "expm1": (jnp.expm1, np.expm1, 88.7, 2e-7),
    "elu": (jax.nn.elu, lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), 1e4, 2e-7),
    "log2": (lambda x: jnp.log2(jnp.abs(x)), lambda x: np.log2(np.abs(x)), 1e30, 4e-7),
    "round": (jnp.round, np.rint, 1e9, 0),
    "floor": (jnp.floor, np.floor, 1e9, 0),
    "ceil": (jnp.ceil, np.ceil, 1e9, 0),
    "away": (_away, lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5), 1e9, 0),
    "sin": (jnp.sin, np.sin, 1e6, 2e-7),
    "cos": (jnp.cos, np.cos, 1e6, 2e-7),
}
"""The function, the same in float64, the largest argument, and the largest error."""
EDGES = (0.5, 1.5, 2.5, 0.49999997, 8388607.5, 1e-30, 2.0**-126, 1.0, 3.0)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_precise(name: str, dtype: Any) -> None:
    function, wide, largest, error = FUNCTIONS[name]
    rng, size = np.random.default_rng(0), (256, 512)
    spread = largest * 10.0 ** rng.uniform(-35, 0, size) * rng.choice([-1, 1], size)
    x = np.where(rng.random(size) < 0.5, spread, rng.uniform(-1, 1, size) * largest)
    own = [edge for edge in EDGES if edge < largest]
    x[0, : len(own)], x[1, : len(own)] = own, np.negative(own)
    x = x.astype(np.float32)
    a, b = jnp.zeros((256, 64), BF16), jnp.zeros((64, 512), BF16)

    def product(x: Any) -> Any:
        return gemm(
            *(a, b),
            epilogue=lambda s, x: function(s + x).astype(dtype),
            operands=(x,),
            implementation="hopper",
        )

    found, exact = np.asarray(product(jnp.asarray(x)), np.float64), wide(x.astype(np.float64))
    of_its_size = np.abs(exact) if name not in ("sin", "cos") else 1.0
    rounding = 2.0**-8 if dtype == BF16 else 0.0
    # Sums of 0 flush what is below the smallest normal number.
    least = 2.0**-126
    if name == "log2" and dtype == BF16:
        # An instruction of the GPU errs by as much near 1.
        least = 1e-6
    assert (np.abs(found - exact) <= (error + rounding) * of_its_size + least).all()
