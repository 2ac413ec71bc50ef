"""JAX's own attention, which moves dimensions between a product and its softmax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from pallas_gemm.device import H200
from pallas_gemm.kernels.functions.parts import Split
from pallas_gemm.planning import prediction
from pallas_gemm.rewriting import folds, regions
from tests.reference import normal
from tests.rewriting.test_attention import seconds_saved
from tests.rewriting.test_folds import BF16, SHAPE, _check, count, exact, rewritten, step

pytestmark = pytest.mark.usefixtures("as_users_write")

F32 = jnp.float32
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": 24},
    "padded": {"mask": (1, 1, 1)},
    "masked": {"mask": (1, 1, 0)},
    "every": {"mask": (0, 0, 0), "is_causal": True},
}
"""Masks: of those that are given, which of batch, heads and rows are 1."""


def attention(kind: str) -> Callable[..., Any]:
    """Returns JAX's attention, as a function of queries, keys, values, and perhaps a mask."""
    own = dict(KINDS[kind])
    own.pop("mask", None)

    def f(q: Any, k: Any, v: Any, *masks: Any) -> Any:
        # Computed in float64, all is of that.
        mask = masks[0].astype(bool) if masks else None
        return jax.nn.dot_product_attention(q, k, v, mask=mask, **own)

    return f


def operands(kind: str, heads: int, groups: int, tokens: int) -> tuple[Any, ...]:
    """Returns queries, keys, values, and perhaps a mask that leaves each row something."""
    rng = np.random.default_rng(0)
    q = normal(rng, (2, tokens, heads, 64), BF16)
    k, v = (normal(rng, (2, tokens, heads // groups, 64), BF16) for _ in range(2))
    if "mask" not in KINDS[kind]:
        return q, k, v
    whole = (2, heads, tokens, tokens)
    ones = (*KINDS[kind]["mask"], 0)
    shape = [1 if own else size for own, size in zip(ones, whole, strict=True)]
    mask = rng.random(shape) < 0.7
    mask[..., 0] = True
    return q, k, v, jnp.asarray(mask)


@pytest.mark.every_other
@pytest.mark.parametrize(
    ("kind", "groups"), [*((kind, 2) for kind in KINDS), ("plain", 1), ("every", 1)]
)
def test_values_are_as_good_as_the_programs(
    kind: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    args, f = operands(kind, 2, groups, 72), attention(kind)
    program, found = rewritten(f, *args, implementation="interpret")
    assert "exp" in found[0].folded
    _check(jax.jit(core.jaxpr_as_fun(program))(*args), jax.jit(f)(*args), exact(f, args))


def _large(heads: int, *mask: Any) -> tuple[Any, ...]:
    q, k = (SHAPE((4, 2048, own, 128), BF16) for own in (16, heads))
    return (q, k, k, *(SHAPE(own, jnp.bool_) for own in mask))


@pytest.mark.parametrize("heads", [16, 4])
@pytest.mark.parametrize("kind", ["plain", "causal", "window", "padded"])
def test_a_softmax_is_the_kernels(kind: str, heads: int) -> None:
    masks = [(4, 1, 1, 2048)] * (kind == "padded")
    program, found = rewritten(attention(kind), *_large(heads, *masks))
    if (kind, heads) == ("plain", 16):
        # XLA reads each row once.
        assert not found[0].folded
        return
    assert "exp" in found[0].folded
    assert (count(program, "pallas_gemm_fused"), count(program, "dot_general")) == (1, 1)
    (fused,) = (e for e in program.eqns if e.primitive.name == "pallas_gemm_fused")
    # The kernel compares positions; it reads no mask of each element.
    assert all(x.aval.shape[-2:] != (2048, 2048) for x in fused.invars)


def test_what_is_moved_to_load_a_mask_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = attention("masked"), *_large(16, (4, 1, 2048, 2048))
    with_moves = seconds_saved(*given)
    monkeypatch.setattr(Split, "spread_bytes", 0)
    # It becomes 16 bits, once for all heads.
    copied = (4 + 4 * 2) * 2048 * 2048
    moving = prediction.pass_seconds(copied, H200)
    assert seconds_saved(*given) - with_moves == pytest.approx(moving)


@pytest.mark.parametrize("heads", [16, 4])
def test_masks_of_segments_are_compared_in_the_kernel(heads: int) -> None:
    def f(q: Any, k: Any, v: Any, segments: Any) -> Any:
        same = segments[:, None, :, None] == segments[:, None, None, :]
        return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True)

    program, found = rewritten(f, *_large(heads), SHAPE((4, 2048), jnp.int32))
    assert "exp" in found[0].folded
    (fused,) = (e for e in program.eqns if e.primitive.name == "pallas_gemm_fused")
    assert all(x.aval.shape[-2:] != (2048, 2048) for x in fused.invars)


@pytest.mark.parametrize("is_capped", [False, True])
def test_capped_scores_are_xlas(is_capped: bool) -> None:
    def f(q: Any, k: Any, mask: Any) -> Any:
        z = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=F32) * F32(0.125)
        z = jnp.tanh(z) if is_capped else z
        return jax.nn.softmax(jnp.where(mask, z, F32(-1e30))).astype(BF16)

    q = SHAPE((4, 16, 2048, 128), BF16)
    _, found = rewritten(f, q, q, SHAPE((2048, 2048), jnp.bool_))
    # XLA stores them once.
    assert ("exp" in found[0].folded) == (not is_capped)


@pytest.mark.parametrize("heads", [16, 4])
@pytest.mark.parametrize("kind", ["plain", "causal"])
def test_a_derivative_of_scores_is_the_kernels_only_if_something_is_computed(
    kind: str, heads: int
) -> None:
    _, found = rewritten(step(attention(kind)), *_large(heads))
    folded = [set(own.folded) for own in found if own.folded]
    assert all(own - {"broadcast_in_dim", "reshape", "squeeze", "transpose"} for own in folded)
    assert sum("exp" in own for own in folded) == 1
    # XLA computes it sooner.
    assert found[1].why is not None


def test_a_result_that_is_copied_into_another_order_is_xlas() -> None:
    def f(x: Any, w: Any, v: Any) -> Any:
        h = jax.nn.gelu(jnp.transpose(x @ w * 2, (1, 0, 2)))
        return jnp.einsum("sbd,de->sbe", h, v)

    x, w = SHAPE((8, 1024, 4096), BF16), SHAPE((4096, 4096), BF16)
    _, found = rewritten(f, x, w, w)
    assert not any("tanh" in own.folded for own in found)
    # What reads it as it goes through memory reads it in any order.
    _, found = rewritten(lambda *args: jnp.sum(f(*args) ** 2, -1), x, w, w)
    assert "reduce_sum" in found[1].folded


GROUPED = ((3,), (4,)), ((0, 2), (0, 2))
PATTERNS: dict[str, Any] = {
    "heads in groups": (GROUPED, (0, 1, 4, 3, 2), (2, 72, 2, 64), (2, 40, 2, 3, 64)),
    "one group": (GROUPED, (0, 1, 4, 3, 2), (2, 72, 2, 64), (2, 40, 2, 1, 64)),
    "no heads": ((((2,), (2,)), ((0,), (0,))), (0, 2, 1), (2, 72, 64), (2, 40, 64)),
    "no batch": ((((1,), (1,)), ((), ())), (1, 0), (72, 64), (40, 64)),
}
"""Products of keys and queries: dimension numbers, how the result is transposed, and shapes."""


@pytest.mark.every_other
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_a_softmax_along_the_rows_of_a_product_is_a_kernels_of_the_other_order(
    pattern: Any, is_scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, turn, *shapes = pattern

    def f(k: Any, q: Any) -> Any:
        z = lax.dot_general(k, q, numbers, preferred_element_type=F32)
        # What is only transposed is a product that is stored so.
        z = jnp.transpose(z * F32(0.125) if is_scaled else z, turn)
        queries, keys = (jnp.arange(size) for size in z.shape[-2:])
        z = jnp.where(keys[None] <= queries[:, None] + 5, z, F32(-1e30))
        return jax.nn.softmax(z), jnp.max(z, -1, keepdims=True) * F32(0.3)

    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    rng = np.random.default_rng(0)
    args = tuple(normal(rng, shape, BF16) for shape in shapes)
    program, found = rewritten(f, *args, implementation="interpret")
    assert "exp" in found[0].folded
    _check(jax.jit(core.jaxpr_as_fun(program))(*args), jax.jit(f)(*args), exact(f, args))


def _scores(q: Any, k: Any, mask: Any) -> Any:
    z = jnp.einsum("btngd,bsnd->bngts", q, k, preferred_element_type=F32) * F32(0.125)
    return jax.nn.softmax(jnp.where(mask, z, F32(-1e30)))


def _drawn_scores(*lead: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    q = normal(rng, (*lead, 40, 2, 3, 64), BF16)
    k = normal(rng, (*lead, 72, 2, 64), BF16)
    return q, k, jnp.asarray(rng.random((40, 72)) < 0.7)


def test_such_a_kernel_is_derived_and_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    program, found = rewritten(_scores, *_drawn_scores(2), implementation="interpret")
    assert "exp" in found[0].folded
    ours = lambda *args: core.jaxpr_as_fun(program)(*args)[0]  # noqa: E731

    def loss(f: Any) -> Any:
        return lambda *args: jnp.sum(jnp.sin(3 * f(*args)))

    given = _drawn_scores(2)
    each = (jax.jit(jax.grad(loss(f), (0, 1)))(*given) for f in (ours, _scores))
    for x, y in zip(*each, strict=True):
        np.testing.assert_allclose(
            *(np.asarray(z, np.float32) for z in (x, y)), rtol=0.1, atol=0.02
        )
    mapped = _drawn_scores(3, 2)
    every = (jax.jit(jax.vmap(f, (0, 0, None)))(*mapped) for f in (ours, _scores))
    np.testing.assert_allclose(*every, rtol=2e-3, atol=2e-3)


def test_a_softmax_along_some_rows_is_none_of_a_kernels() -> None:
    def f(q: Any, k: Any, mask: Any) -> Any:
        z = jnp.einsum("btnd,bsd->btns", q, k, preferred_element_type=F32)
        # Along heads, which are rows of the product as tokens are.
        return jax.nn.softmax(jnp.where(mask, z, F32(-1e30)), 2).astype(BF16)

    shapes = SHAPE((4, 512, 32, 128), BF16), SHAPE((4, 2048, 128), BF16)
    _, found = rewritten(f, *shapes, SHAPE((2048,), jnp.bool_))
    assert "exp" not in found[0].folded


def test_two_products_with_a_softmax_along_their_rows_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def f(x: Any, gate: Any, up: Any) -> Any:
        return jax.nn.softmax(jax.nn.silu(x @ gate) * (x @ up), 0)

    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    rng = np.random.default_rng(0)
    args = tuple(normal(rng, shape, BF16) * BF16(0.25) for shape in ((72, 64), (64, 40), (64, 40)))
    program, _ = rewritten(f, *args, implementation="interpret")
    found, expected = jax.jit(core.jaxpr_as_fun(program))(*args), jax.jit(f)(*args)
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (found[0], expected)), rtol=0.05, atol=1e-3
    )


def test_a_mask_slows_xla_down_no_further_behind_a_transposition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_kind = {kind: (attention(kind), *_large(4)) for kind in ("causal", "plain")}
    before = {kind: seconds_saved(*given) for kind, given in of_kind.items()}
    monkeypatch.setattr(regions, "TURNED_BYTES", regions.TURNED_BYTES - 1)
    after = {kind: seconds_saved(*given) for kind, given in of_kind.items()}
    assert after["causal"] == before["causal"]
    assert after["plain"] < before["plain"]


@pytest.mark.parametrize("is_turned", [False, True])
def test_xla_reads_scores_once_unless_they_are_transposed(is_turned: bool) -> None:
    # JAX multiplies keys by queries for one of them.
    pattern = "btngd,bsnd->bngts" if is_turned else "btnd,bsnd->bnts"

    def f(q: Any, k: Any) -> Any:
        z = jnp.einsum(pattern, q, k, preferred_element_type=F32) * F32(0.1)
        return jax.nn.softmax(z).astype(BF16)

    q, k = SHAPE((4, 2048, 16, *(1,) * is_turned, 128), BF16), SHAPE((4, 2048, 16, 128), BF16)
    _, found = rewritten(f, q, k)
    assert ("exp" in found[0].folded) == is_turned
