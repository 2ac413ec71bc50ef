"""Attention as people write it: where the largest values and sums of its softmax are a kernel's.

XLA reads the rows of a softmax once, unless they are long or masked. Then a kernel saves nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from pallas_gemm import accelerate, explain, target
from pallas_gemm.device import H200
from pallas_gemm.planning import prediction
from pallas_gemm.planning.by_xla import xla_time
from pallas_gemm.problem import Problem
from pallas_gemm.rewriting import folds, products
from tests.reference import normal
from tests.rewriting.test_folds import BF16, SHAPE, _check, count, exact, rewritten, step

pytestmark = pytest.mark.usefixtures("as_users_write")

F32 = jnp.float32


def attention(*, heads_first: bool, causal: bool, rounds: bool) -> Callable[..., Any]:
    """Returns the probabilities of queries and keys, as a function of both."""
    letters = "bhtd,bhsd->bhts" if heads_first else "bthd,bshd->bhts"

    def probabilities(q: Any, k: Any) -> Any:
        wide = jnp.promote_types(q.dtype, F32)
        s = jnp.einsum(letters, q, k, preferred_element_type=q.dtype if rounds else wide)
        z = s * np.asarray(0.125, s.dtype)
        if causal:
            z = jnp.where(jnp.tril(jnp.ones(z.shape[-2:], bool)), z, np.asarray(-1e30, z.dtype))
        return jax.nn.softmax(z.astype(wide), -1).astype(q.dtype)

    return probabilities


def seconds_saved(f: Callable[..., Any], *shapes: Any) -> float:
    """Returns how many seconds the first fold is predicted to save that is asked about."""
    found: list[float] = []
    plan = folds.Folder._saved

    def note(*args: Any) -> float | None:
        seconds = plan(*args)
        found.append(seconds or 0.0)
        return seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folds.Folder, "_saved", note)
        rewritten(f, *shapes)
    return found[0]


def _is_folded(found: Any) -> bool:
    return any("exp" in own.folded for own in found)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
def test_a_masked_softmax_is_the_kernels(heads_first: bool, rounds: bool) -> None:
    shape = (4, 16, 2048, 128) if heads_first else (4, 2048, 16, 128)
    f = attention(heads_first=heads_first, causal=True, rounds=rounds)
    program, found = rewritten(f, SHAPE(shape, BF16), SHAPE(shape, BF16))
    assert _is_folded(found)
    assert found[0].why is None
    assert (count(program, "pallas_gemm_fused"), count(program, "dot_general")) == (1, 0)


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("shape", [(4, 16, 2048, 128), (8, 12, 1024, 64), (1, 2, 8192, 128)])
def test_a_softmax_that_one_pass_reads_is_xlas(shape: Any, rounds: bool) -> None:
    f = attention(heads_first=True, causal=False, rounds=rounds)
    _, found = rewritten(f, SHAPE(shape, BF16), SHAPE(shape, BF16))
    assert not _is_folded(found)


def test_a_softmax_of_long_rows_is_the_kernels() -> None:
    shape = SHAPE((1, 2, 16384, 128), BF16)
    _, found = rewritten(attention(heads_first=True, causal=False, rounds=False), shape, shape)
    assert _is_folded(found)


def test_a_softmax_whose_derivative_reads_its_exponents_is_the_kernels() -> None:
    f = attention(heads_first=True, causal=False, rounds=False)

    def attended(q: Any, k: Any, v: Any) -> Any:
        return jnp.einsum("bhts,bhsd->bhtd", f(q, k), v)

    shape = SHAPE((4, 16, 2048, 128), BF16)
    _, found = rewritten(attended, shape, shape, shape)
    assert not _is_folded(found)
    _, found = rewritten(step(attended), shape, shape, shape)
    assert _is_folded(found)


def test_a_product_that_xla_computes_sooner_alone_is_left_with_the_reason() -> None:
    shape = SHAPE((4, 16, 2048, 128), BF16)
    f = attention(heads_first=True, causal=False, rounds=False)
    program, found = rewritten(f, shape, shape)
    assert "with our kernel" in str(found[0].why)
    assert count(program, "dot_general") == 1
    with target("h200"):
        said = str(explain(accelerate(f), shape, shape))
    assert "1 product left" in said
    masked = attention(heads_first=True, causal=True, rounds=False)
    with target("h200"):
        said = str(explain(accelerate(masked), shape, shape))
    assert "1 product by a kernel, with mul" in " ".join(said.split())


def test_a_gate_of_products_that_are_xlas_alone_is_the_kernels() -> None:
    def f(x: Any, gate: Any, up: Any) -> Any:
        return jax.nn.silu(x @ gate) * (x @ up)

    w = SHAPE((128, 8192), BF16)
    program, found = rewritten(f, SHAPE((8192, 128), BF16), w, w)
    assert (count(program, "pallas_gemm_fused"), count(program, "dot_general")) == (1, 0)
    assert [own.why for own in found] == [None, None]
    _, found = rewritten(lambda x, gate: x @ gate, SHAPE((8192, 128), BF16), w)
    assert "XLA is faster" in str(found[0].why)


def test_the_pass_of_a_softmax_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    regions: list[Any] = []
    plan = folds.Folder._saved

    def note(self: Any, products: Any, region: Any, *args: Any) -> float | None:
        regions.append(region)
        return plan(self, products, region, *args)

    monkeypatch.setattr(folds.Folder, "_saved", note)
    shape = SHAPE((4, 16, 2048, 128), BF16)
    rewritten(attention(heads_first=True, causal=True, rounds=False), shape, shape)
    assert [region.is_pass for region in regions] == [False]


def test_sizes_that_are_symbols_are_left_alone() -> None:
    (batch,) = jax.export.symbolic_shape("batch")
    shape = SHAPE((batch, 4, 2048, 128), BF16)
    f = attention(heads_first=True, causal=True, rounds=False)
    program = jax.make_jaxpr(f)(shape, shape)
    (dot,) = (e for e in program.eqns if e.primitive.name == "dot_general")
    # Nothing is predicted of it, with what follows or without.
    assert isinstance(products.dense(dot, products.How(H200)), str)
    _, found = rewritten(f, shape, shape)
    assert "a size is a symbol" in str(found[0].why)


@pytest.mark.parametrize("out", [jnp.float8_e4m3fn, BF16, F32])
def test_results_of_any_width_are_predicted(out: Any) -> None:
    sizes, types = {"m": 577, "n": 577, "k": 64, "batch": 8}, {"out_dtype": np.dtype(out)}
    assert (xla_time.seconds(Problem(**sizes, **types, transpose_b=True), H200) or 0) > 0


def test_what_a_fold_copies_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPE((4, 2048, 16, 128), BF16)
    f = attention(heads_first=False, causal=True, rounds=False)

    with_copies = seconds_saved(f, shape, shape)
    monkeypatch.setattr(folds, "copy_seconds", lambda *_: 0.0)
    copied = 2 * 2 * np.prod(shape.shape) * 2
    assert seconds_saved(f, shape, shape) - with_copies == pytest.approx(
        prediction.pass_seconds(copied, H200)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
def test_values_are_as_good_as_the_programs(
    heads_first: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    rng = np.random.default_rng(0)
    shape = (1, 2, 64, 64) if heads_first else (1, 64, 2, 64)
    args = normal(rng, shape, BF16), normal(rng, shape, BF16)
    f = attention(heads_first=heads_first, causal=causal, rounds=False)
    program, found = rewritten(f, *args, implementation="interpret")
    assert _is_folded(found)
    _check(jax.jit(core.jaxpr_as_fun(program))(*args), jax.jit(f)(*args), exact(f, args))
