"""What lowering a kernel takes JAX, in things that can be counted."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import layout_inference

from pallas_gemm import gemm, offline, target
from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper import kernel
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.dense import store
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.hopper.tiling import LATE_STRIP
from pallas_gemm.op import kept_kernels
from pallas_gemm.problem import Epilogue, Problem


def test_a_consumer_is_lowered_once_and_few_values_are_sorted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem(256, 256, 256, epilogue=Epilogue(activation=jax.nn.silu))
    run = kernel.build(HopperPlan(problem, HopperConfig(tile=(128, 128), stages=2), H200))
    operand = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    lowered, named = [], []
    inline, name = store.plgpu.inline_mgpu, layout_inference.ValueSite.__str__

    def noted(**types: Any) -> Callable[..., Any]:
        return lambda emit: inline(**types)(lambda *args: lowered.append(emit) or emit(*args))

    def noted_name(site: Any) -> str:
        named.append(site)
        return name(site)

    monkeypatch.setattr(store.plgpu, "inline_mgpu", noted)
    monkeypatch.setattr(layout_inference.ValueSite, "__str__", noted_name)
    offline.exported(run, operand, operand)
    # Nothing moves before the wait for sums. A tile is taken apart into strips, each of which has
    # its logistic function, and into chunks.
    assert len(lowered) == 3 + 128 // LATE_STRIP
    # To name a value JAX prints its operation, and numbers all others: 71 where slices are taken.
    assert len(named) < 40


def _bias(s: Any, bias: Any) -> Any:
    return s + bias[None]


def _of_rows(s: Any, row: Any, bias: Any) -> Any:
    return s * row[:, None] + bias[None], jnp.max(s, -1), jnp.max(s, 0)


@pytest.mark.parametrize("f", [_bias, _of_rows])
def test_jax_guesses_no_layouts_of_what_strips_load(
    f: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each guess takes as long as the kernel is large: guesses for each strip took most of it."""
    guesses = []
    guess = layout_inference.conjure_assignment

    def noted(*args: Any) -> Any:
        guesses.append(args)
        return guess(*args)

    monkeypatch.setattr(layout_inference, "conjure_assignment", noted)
    m, n, k = 200, 320, 256
    shapes = [(m, k), (k, n), *([(m,)] if f is _of_rows else []), (n,)]
    dtypes = [jnp.bfloat16] * 2 + [jnp.float32] * 2
    a, b, *operands = map(jax.ShapeDtypeStruct, shapes, dtypes)

    def run(a: Any, b: Any, *operands: Any) -> Any:
        with target("h200"):
            return gemm(a, b, epilogue=f, operands=operands, implementation="hopper")

    kept_kernels._lowered.cache_clear()
    offline.exported(run, a, b, *operands)
    # Of the sums of a tile, and of a chunk of them.
    assert 1 <= len(guesses) <= 3
