"""Kernels of a program that read each other's results run in an order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import PartitionSpec as P

from pallas_gemm.rewriting import folds
from tests.reference import normal
from tests.rewriting.test_folds import BF16, LARGE, SHAPE, _check, count, exact, rewritten


def test_a_sum_depends_on_all_that_its_kernel_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first kernel reads the second product for another result than its sum.
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)

    def wide(x: Any) -> Any:
        return x.astype(jnp.float32) if x.dtype == BF16 else x

    def f(x: Any, w: Any) -> Any:
        one, other = x @ w, jnp.cos(x) @ w
        total = jnp.sum(jnp.square(wide(one)), -1, keepdims=True)
        return jnp.tanh(one) * other, wide(other) * total

    rng = np.random.default_rng(0)
    args = normal(rng, (64, 64), BF16), normal(rng, (64, 128), BF16)
    program, found = rewritten(f, *args, implementation="interpret")
    assert "reduce_sum" in found[0].folded
    _check(jax.jit(core.jaxpr_as_fun(program))(*args), jax.jit(f)(*args), exact(f, args))


def test_what_is_read_of_a_reference_waits_for_what_was_written() -> None:
    def f(x: Any, w: Any) -> Any:
        largest = jax.new_ref(jnp.zeros(x.shape[:-1], jnp.float32))
        y = x @ w
        largest[...] += jnp.max(y.astype(jnp.float32), -1)
        return jnp.tanh(y) * largest[...][..., None].astype(BF16)

    # The kernel of the product cannot read what follows from its result.
    program, _ = rewritten(f, *LARGE[:2])
    assert count(program, "pallas_gemm") == 1


def test_devices_exchange_arrays_in_any_order() -> None:
    def part(x: Any, w: Any, bias: Any) -> Any:
        y = x @ w
        total = jax.lax.psum(jnp.sum(jnp.square(y.astype(jnp.float32))), "i")
        gathered = jax.lax.all_gather(bias, "i", tiled=True)
        return jnp.tanh(y + gathered[None, None]), total

    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P("i"), P(), P("i")), "out_specs": (P("i"), P())}
    f = jax.shard_map(part, mesh=mesh, **specs)
    program, _ = rewritten(f, *LARGE[:2], SHAPE((4096,), BF16))
    assert count(program, "pallas_gemm_fused") == 1
