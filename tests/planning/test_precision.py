"""What `precision=` asks for."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_gemm import (
    dot_general,
    einsum,
    gated_gemm,
    gemm,
    gram,
    grouped_gemm,
    matmul,
    projections,
    ragged_dot,
    symmetric_matmul,
)
from pallas_gemm.api.collective import all_gather_gemm, gemm_reduce_scatter
from pallas_gemm.planning import precision

DEFAULT, HIGH, HIGHEST = lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST
PRESET = lax.DotAlgorithmPreset
BF16, F16, F32, E4M3, I8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.int8


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, (DEFAULT, DEFAULT)),
        ("high", (HIGH, HIGH)),
        (HIGHEST, (HIGHEST, HIGHEST)),
        ((DEFAULT, HIGHEST), (DEFAULT, HIGHEST)),
        (["default", "high"], (DEFAULT, HIGH)),
        ("TF32_TF32_F32", PRESET.TF32_TF32_F32),
        (PRESET.BF16_BF16_F32, PRESET.BF16_BF16_F32),
    ],
    ids=str,
)
def test_it_is_read_as_jax_reads_it(given: Any, read: Any) -> None:
    assert precision.resolve(given) == read


def test_none_is_the_default_of_the_moment() -> None:
    with jax.default_matmul_precision("float32"):
        assert precision.resolve(None) == (HIGHEST, HIGHEST)
    assert precision.resolve(None) == (DEFAULT, DEFAULT)


@pytest.mark.parametrize("given", ["exact", 3, ("high",), {}], ids=repr)
def test_anything_else_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="precision="):
        precision.resolve(given)


@pytest.mark.parametrize(
    ("asked", "dtype", "exact"),
    [
        ((DEFAULT, DEFAULT), F32, True),
        ((HIGH, HIGH), F32, True),
        ((DEFAULT, HIGHEST), F32, False),
        ((HIGHEST, HIGHEST), BF16, True),
        ((HIGHEST, HIGHEST), I8, True),
        ((HIGHEST, HIGHEST), E4M3, False),
        (PRESET.DEFAULT, F32, True),
        (PRESET.BF16_BF16_F32, BF16, True),
        (PRESET.BF16_BF16_F32, F32, False),
        (PRESET.F16_F16_F32, F16, True),
        (PRESET.F16_F16_F16, F16, False),
        (PRESET.TF32_TF32_F32, F32, True),
        (PRESET.TF32_TF32_F32_X3, F32, False),
        (PRESET.BF16_BF16_F32_X3, F32, False),
        (PRESET.ANY_F8_ANY_F8_F32_FAST_ACCUM, E4M3, True),
        (PRESET.ANY_F8_ANY_F8_F32, E4M3, False),
    ],
    ids=str,
)
def test_kernels_compute_exactly_what_is_asked_for_or_nothing(
    asked: Any, dtype: Any, exact: bool
) -> None:
    reason = precision.kernel_refusal(asked, (dtype, dtype))
    assert (reason is None) == exact
    assert exact or str(np.dtype(dtype)) in str(reason)


def test_8_bit_floats_that_are_widened_are_multiplied_exactly() -> None:
    assert precision.kernel_refusal((HIGHEST, HIGHEST), (BF16, E4M3)) is None


def _on_two_devices(collective: Any, first: P, second: P, out: P) -> Any:
    run = functools.partial(collective, axis_name="x", precision="highest")

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
        return jax.shard_map(run, mesh=mesh, in_specs=(first, second), out_specs=out)(a, b)

    return product


ROWS, COLUMNS = P("x", None), P(None, "x")
PRODUCTS: dict[str, Any] = {
    "gemm": lambda a, b: gemm(a, b, precision="highest"),
    "gemm by XLA": lambda a, b: gemm(a, b, precision="highest", implementation="xla"),
    "matmul": lambda a, b: matmul(a, b, precision="highest"),
    "dot_general": lambda a, b: dot_general(a, b, (((1,), (0,)), ((), ())), precision="highest"),
    "einsum": lambda a, b: einsum("ij,jk->ik", a, b, precision="highest"),
    "gated": lambda a, b: gated_gemm(a, b, b, precision="highest"),
    "gated by XLA": lambda a, b: gated_gemm(a, b, b, precision="highest", implementation="xla"),
    "projections": lambda a, b: projections(a, [b, b], precision="highest"),
    "gram": lambda a, b: gram(a, precision="highest") + symmetric_matmul(a, b, precision="highest"),
    "groups": lambda a, b: ragged_dot(a, b[None], jnp.array([8]), precision="highest"),
    "groups, gated": lambda a, b: grouped_gemm(
        *(a, b[None], jnp.array([8])), up=b[None], precision="highest"
    ),
    "gathered": _on_two_devices(all_gather_gemm, ROWS, COLUMNS, COLUMNS),
    "scattered": _on_two_devices(gemm_reduce_scatter, COLUMNS, ROWS, ROWS),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_it_reaches_every_product_of_xla_and_of_gradients(name: str) -> None:
    a, b = (jax.ShapeDtypeStruct((8, 8), jnp.float32),) * 2

    def both(a: jax.Array, b: jax.Array) -> Any:
        result, pull = jax.vjp(PRODUCTS[name], a, b)
        return result, pull(result)

    text = jax.jit(both).lower(a, b).as_text()
    asked = re.findall(r"precision = \[(\w+, \w+)\]", text)
    assert len(asked) == text.count("stablehlo.dot_general") >= 3
    assert set(asked) == {"HIGHEST, HIGHEST"}


def test_the_default_is_jaxs_setting() -> None:
    a = jnp.ones((8, 8))
    with jax.default_matmul_precision("high"):
        text = jax.jit(lambda a: gemm(a, a)).lower(a).as_text()
    assert "precision = [HIGH, HIGH]" in text
