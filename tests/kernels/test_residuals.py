"""A residual of another type than the result's: added in float32, and not rounded before."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import explain, gemm
from tests import reference


@pytest.mark.parametrize(
    ("target", "out", "kind"),
    [
        ("h200", jnp.bfloat16, jnp.float32),
        ("h200", jnp.float32, jnp.bfloat16),
        ("b200", jnp.bfloat16, jnp.float32),
        pytest.param("", jnp.bfloat16, jnp.float32, marks=pytest.mark.gpu("hopper")),
        pytest.param("", jnp.float8_e4m3fn, jnp.float32, marks=pytest.mark.gpu("hopper")),
    ],
    ids=str,
)
def test_a_residual_of_another_type_is_added_in_the_kernel(
    target: str, out: Any, kind: Any
) -> None:
    rng = np.random.default_rng(0)
    # The edge cuts tiles, and slots are used again.
    a, b = (reference.integers(rng, shape, jnp.bfloat16) for shape in ((70, 16), (16, 80)))
    # More digits than the result has, as far as its type has them.
    residual = jnp.asarray((rng.integers(-(2**13), 2**13, (70, 80)) / 2**12).astype(kind))

    def product(a: Any, b: Any, residual: Any) -> jax.Array:
        return gemm(
            *(a, b),
            residual=residual,
            beta=0.5,
            activation="relu",
            preferred_element_type=out,
            implementation="interpret" if target else "hopper",
        )

    with pallas_gemm.target(target) if target else contextlib.nullcontext():
        plan = explain(product, a, b, residual).plan
        result = product(a, b, residual)
    assert plan is not None
    assert plan.realigned.unfused is None
    exact = np.maximum(reference.wide(a) @ reference.wide(b), 0) + 0.5 * reference.wide(residual)
    reference.assert_exact(result, exact)


def test_what_no_kernel_adds_is_added_by_xla() -> None:
    a, residual = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16), jnp.ones((512, 512), jnp.int32)
    with pallas_gemm.target("h200"):
        plan = explain(lambda a: gemm(a, a, residual=residual), a).plan
    assert plan is not None
    assert "the residual must be one of bfloat16, " in (plan.realigned.unfused or "")
