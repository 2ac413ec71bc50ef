"""Weights of few bits that a program widens are multiplied as they are stored."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from pallas_gemm.rewriting import few_bits
from tests.reference import assert_as_good_as_xla, normal, wide
from tests.rewriting.test_folds import BF16, SHAPE, rewritten

pytestmark = pytest.mark.usefixtures("as_users_write")

ROWS, N, K, GROUPS = 16, 4096, 4096, 32
F32 = jnp.float32


def _cast(x: Any, w: Any, _: Any) -> Any:
    return x @ w.astype(x.dtype)


def _columns(x: Any, w: Any, scale: Any) -> Any:
    return x @ (w.astype(x.dtype) * scale)


def _in_float32(x: Any, w: Any, scale: Any) -> Any:
    return x @ (w.astype(F32) * scale.astype(F32)).astype(x.dtype)


def _transposed(x: Any, w: Any, scale: Any) -> Any:
    return x @ (w.astype(x.dtype) * scale[:, None]).T


def _on_the_left(x: Any, w: Any, scale: Any) -> Any:
    return jnp.einsum("nk,mk->mn", w.astype(x.dtype) * scale[:, None], x)


def _in_groups(x: Any, w: Any, scale: Any) -> Any:
    each = w.reshape(scale.shape[0], -1, w.shape[1]).astype(x.dtype) * scale[:, None]
    return x @ each.reshape(w.shape)


def _repeated(x: Any, w: Any, scale: Any) -> Any:
    each = jnp.repeat(scale.astype(F32), w.shape[0] // scale.shape[0], axis=0)
    return x @ (w.astype(F32) * each).astype(x.dtype)


def _tiled(x: Any, w: Any, scale: Any) -> Any:
    # Its scales are in turns, not in groups.
    shape = (w.shape[0] // scale.shape[0], *scale.shape)
    each = jnp.broadcast_to(scale.astype(F32), shape).reshape(w.shape)
    return x @ (w.astype(F32) * each).astype(x.dtype)


def _rows(x: Any, w: Any, scale: Any) -> Any:
    return x @ (w.astype(x.dtype) * scale[:, None])


FORMS = (_cast, _columns, _in_float32, _transposed, _on_the_left)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4])
@pytest.mark.parametrize("f", FORMS)
def test_they_are_not_widened_in_memory(f: Callable[..., Any], dtype: Any) -> None:
    args = SHAPE((ROWS, K), BF16), SHAPE((K, N), dtype), SHAPE((N,), BF16)
    program, (found,) = rewritten(f, *args)
    (product,) = (e for e in program.eqns if e.primitive.name == "pallas_gemm")
    assert product.invars[1].aval.dtype == dtype
    assert not any(e.primitive.name == "mul" for e in program.eqns)
    assert found.answer == f"by a kernel, with weights of {np.dtype(dtype)}"


@pytest.mark.parametrize("f", [_in_groups, _repeated])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4])
def test_scales_of_groups_are_those_of_the_kernel(f: Callable[..., Any], dtype: Any) -> None:
    args = SHAPE((ROWS, K), BF16), SHAPE((K, N), dtype), SHAPE((GROUPS, N), BF16)
    program, (found,) = rewritten(f, *args)
    assert [e.primitive.name for e in program.eqns] == ["reshape", "reshape", "pallas_gemm"]
    assert found.answer == f"by a kernel, with weights of {np.dtype(dtype)}"


def test_exact_folds_no_scale() -> None:
    args = SHAPE((ROWS, K), BF16), SHAPE((K, N), jnp.int8), SHAPE((N,), BF16)
    for f, is_folded in ((_cast, True), (_columns, False)):
        _, (found,) = rewritten(f, *args, exact=True)
        assert ("weights of" in found.answer) == is_folded


@pytest.mark.parametrize(("f", "shape"), [(_rows, (K,)), (_tiled, (GROUPS, N))])
def test_scales_of_rows_stay_the_programs(f: Callable[..., Any], shape: tuple[int, ...]) -> None:
    args = SHAPE((ROWS, K), BF16), SHAPE((K, N), jnp.int8), SHAPE(shape, BF16)
    _, (found,) = rewritten(f, *args)
    assert found.answer == "by a kernel"


def test_weights_that_others_read_stay() -> None:
    def f(x: Any, w: Any) -> Any:
        weights = w.astype(x.dtype)
        return x @ weights, weights

    program, _ = rewritten(f, SHAPE((ROWS, K), BF16), SHAPE((K, N), jnp.int8))
    core.check_jaxpr(program)
    assert [e.primitive.name for e in program.eqns].count("convert_element_type") == 1


@pytest.mark.parametrize("f", [*FORMS, _in_groups, _repeated])
def test_values_are_as_good_as_the_programs(
    f: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever computes it.
    wanted = few_bits._priced

    def always(level: Any, own: Any, *args: Any) -> Any:
        return wanted(level, dataclasses.replace(own, seconds=1.0), *args)

    monkeypatch.setattr(few_bits, "_priced", always)
    rng = np.random.default_rng(0)
    x = normal(rng, (ROWS, 2048), BF16)
    w = jnp.asarray(rng.integers(-127, 128, (2048, 2048)).astype(jnp.int8))
    scale = jnp.asarray(
        (0.5 + rng.random((16, 2048) if f in (_in_groups, _repeated) else (2048,))).astype(BF16)
    )
    program, _ = rewritten(f, x, w, scale)
    assert not any(e.primitive.name == "mul" for e in program.eqns)
    (found,) = jax.jit(core.jaxpr_as_fun(program))(x, w, scale)
    with jax.enable_x64(True):
        exact = np.asarray(f(*(jnp.asarray(wide(each)) for each in (x, w, scale))))
    assert_as_good_as_xla(found, jax.jit(f)(x, w, scale), exact)
