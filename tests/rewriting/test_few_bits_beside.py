"""Weights of few bits beside other products, and casts that change values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import accelerate, target
from tests.rewriting.test_folds import BF16

pytestmark = pytest.mark.usefixtures("as_users_write")

SIZE = 4096
INT8, SHAPE = jnp.int8, jax.ShapeDtypeStruct


def _adapted(x: Any, q: Any, scale: Any, down: Any, up: Any) -> Any:
    return x @ (q.astype(BF16) * scale) + (x @ down) @ up


def _gated(x: Any, q: Any, w: Any) -> Any:
    return jax.nn.silu(x @ q.astype(BF16)) * (x @ w)


X, Q, W = SHAPE((16, SIZE), BF16), SHAPE((SIZE, SIZE), INT8), SHAPE((SIZE, SIZE), BF16)
LOW = SHAPE((SIZE, 64), BF16), SHAPE((64, SIZE), BF16)


@pytest.mark.parametrize(
    ("f", "args"),
    [(_adapted, (X, Q, SHAPE((SIZE,), BF16), *LOW)), (_gated, (X, Q, W))],
    ids=["adapted", "gated"],
)
def test_others_are_not_joined_with_what_has_become_of_them(f: Any, args: Any) -> None:
    with target("h200"):
        lowered = jax.jit(accelerate(f)).trace(*args).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


CASTS: dict[str, Callable[[Any], Any]] = {
    "truth values": lambda q: q.astype(bool).astype(BF16),
    "without signs": lambda q: q.astype(jnp.uint8).astype(BF16),
    "cut off": lambda q: (q * BF16(1.5)).astype(jnp.float8_e4m3fn).astype(jnp.int32).astype(BF16),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_in_between_are_not_forgotten(name: str) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-2, 3, (16, 512)).astype(BF16))
    q = jnp.asarray(rng.integers(-1, 2, (512, 1024)).astype(INT8))

    def f(x: Any, q: Any) -> Any:
        return x @ CASTS[name](q)

    with target("h200"):
        found = jax.jit(accelerate(f))(x, q)
    np.testing.assert_array_equal(found, f(x, q))


def test_scales_of_what_lies_flat_stay_the_programs() -> None:
    def f(x: Any, q: Any, scale: Any) -> Any:
        return x @ (q.astype(BF16).reshape(-1, 64) * scale).reshape(q.shape).T

    scales = SHAPE((SIZE * SIZE // 64, 1), BF16)
    with target("h200"):
        jax.jit(accelerate(f)).trace(X, Q, scales).lower(lowering_platforms=("cuda",))


SCALES: dict[str, Callable[[Any, Any], Any]] = {
    "a number": lambda q, _: q.astype(BF16) * BF16(0.5),
    "one for all": lambda q, scale: q.astype(BF16) * scale[0],
    "of columns": lambda q, scale: q.astype(BF16) * scale,
}


@pytest.mark.parametrize("name", SCALES)
def test_scales_of_all_weights_are_folded_and_derived(name: str) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-2, 3, (16, 1024)).astype(BF16))
    q = jnp.asarray(rng.integers(-7, 8, (1024, 2048)).astype(INT8))
    scale = jnp.asarray((rng.integers(1, 3, 2048) / 2).astype(BF16))

    def f(x: Any) -> Any:
        return x @ SCALES[name](q, scale)

    def loss(x: Any) -> Any:
        return jnp.sum(jnp.square(f(x).astype(jnp.float32)))

    with target("h200"):
        assert "col_scale=True" in str(jax.make_jaxpr(accelerate(f))(x))
        found = jax.jit(accelerate(f))(x)
        # The gradient contracts over the columns that are scaled.
        derived = jax.jit(accelerate(jax.grad(loss)))(x)
    np.testing.assert_array_equal(found, f(x))
    np.testing.assert_array_equal(derived, jax.jit(jax.grad(loss))(x))
