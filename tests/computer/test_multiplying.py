"""Where NumPy adds up in another order by the place, a simulated promise is refused."""

import os
import platform
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import HopperConfig, gemm, numerics
from pallas_gemm.computer import multiplying

ROWS = numerics(invariant="rows")


def test_this_numpy_adds_up_alike() -> None:
    assert multiplying.adds_up_alike()


def test_a_product_that_is_not_alike_is_noticed() -> None:
    def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        # The last columns are added up in another order.
        sums = a @ b
        sums[:, -8:] = a[:, ::-1] @ b[::-1, -8:]
        return sums

    assert not multiplying.parts_are_alike(multiply)


def test_a_simulated_promise_is_refused_there(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jnp.ones((64, 64), jnp.bfloat16)
    config = HopperConfig(tile=(64, 64), consumers=1)
    simulated = {"implementation": "interpret", "config": config}
    monkeypatch.setattr(multiplying, "adds_up_alike", lambda: False)
    assert (gemm(x, x, **simulated) == 64).all()
    with pytest.raises(ValueError, match=multiplying.ALIKE) as raised:
        gemm(x, x, numerics=ROWS, **simulated)
    assert str(ROWS) in str(raised.value)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names an x86 CPU")
def test_what_the_error_says_helps() -> None:
    name, value = multiplying.ALIKE.split("=")
    code = "from pallas_gemm.computer import multiplying; assert multiplying.adds_up_alike()"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, name: value})
