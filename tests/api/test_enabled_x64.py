"""Kernels in programs that turn on numbers of 64 bits."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import (
    accelerate,
    gated_gemm,
    gemm,
    grouped_gemm,
    linear_cross_entropy,
    linear_log_probs,
    target,
)
from tests import reference

N, WORDS, GROUPS = 1024, 32000, 4


def _of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _masked(a: Any, b: Any, **how: Any) -> Any:
    def f(s: Any) -> Any:
        # These are of 64 bits.
        places = jnp.arange(len(s))
        return jnp.where(places[:, None] >= places[None], s, 0.0).sum(-1)

    return gemm(a, b, epilogue=f, **how)


def _chosen(s: Any, u: Any) -> Any:
    # One of 64 bits is compared.
    return jnp.where(u.astype(jnp.int64) > 0, s, 2 * s)


def _of_groups(a: Any, b: Any, sizes: Any) -> Any:
    return grouped_gemm(a, b, sizes, activation="gelu").astype(jnp.float32).sum()


PROGRAMS: Mapping[str, tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]] = {
    "largest": (
        lambda a, b: gemm(a, b, epilogue=lambda s: (jnp.argmax(s, -1), jnp.max(jnp.abs(s), 0))),
        (_of(N, N), _of(N, N)),
    ),
    "masked": (_masked, (_of(N, N), _of(N, N))),
    "gradients of groups": (
        jax.grad(_of_groups, (0, 1)),
        (_of(N, N), _of(GROUPS, N, N), _of(GROUPS, dtype=jnp.int32)),
    ),
    "log-probabilities": (
        linear_log_probs,
        (_of(2 * N, N), _of(N, WORDS), _of(2 * N, dtype=jnp.int32)),
    ),
    "logits that wait": (
        jax.grad(functools.partial(linear_cross_entropy, memory="least"), (0, 1)),
        # All of its chunks are whole: kernels of a last one that is not would be lowered, too.
        (_of(2 * N, 2 * N), _of(2 * N, 2 * WORDS), _of(2 * N, dtype=jnp.int32)),
    ),
    "a truth value": (
        lambda a, b, u: gemm(a, b, epilogue=_chosen, operands=(u,)),
        (_of(N, N), _of(N, N), _of(dtype=jnp.bool_)),
    ),
    "four bits": (
        lambda x, w, scale: gemm(x, w, col_scale=scale),
        (_of(16, N), _of(N, N, dtype=jnp.int4), _of(N // 128, N)),
    ),
    "accelerated": (
        accelerate(jax.grad(lambda a, b: jnp.sum(jax.nn.gelu(a @ b).astype(jnp.float32)))),
        (_of(N, N), _of(N, N)),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_kernel_is_made(name: str) -> None:
    f, operands = PROGRAMS[name]
    with jax.enable_x64(True), target("h200"):
        lowered = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_what_a_kernel_masks_and_adds_up_is_exact() -> None:
    rng = np.random.default_rng(0)
    a, b = (reference.integers(rng, (128, 128), jnp.bfloat16) for _ in range(2))
    with jax.enable_x64(True):
        found = jax.jit(functools.partial(_masked, implementation="interpret"))(a, b)
    assert found.dtype == jnp.float32
    product = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_array_equal(found, np.tril(product).sum(-1))


def test_a_number_of_pythons_has_the_type_of_the_sums() -> None:
    a = b = jnp.ones((8, 8), jnp.bfloat16)
    with jax.enable_x64(True):
        one = gemm(a, b, epilogue=lambda s, x: s + x, operands=(0.5,))
        two = gated_gemm(a, b, b, epilogue=lambda s, t, x: (s + x, t), operands=(0.5,))
    for found, expected in zip((one, *two), (8.5, 8.5, 8), strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, expected)


def test_what_is_computed_in_64_bits_is_left_to_xla() -> None:
    def f(s: Any) -> Any:
        return (s.astype(jnp.float64) / 3).astype(jnp.float32)

    a = b = jnp.ones((128, 128), jnp.bfloat16)
    with jax.enable_x64(True):
        with pytest.raises(ValueError, match=r"convert_element_type .* is left to XLA"):
            gemm(a, b, epilogue=f, implementation="interpret")
        np.testing.assert_array_equal(gemm(a, b, epilogue=f), np.float32(128 / 3))
