"""On a GPU: gradients of a last layer by parts of arrays, and logits that wait."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import explain, linear_cross_entropy, linear_log_probs
from pallas_gemm.call import Call
from pallas_gemm.op import lowering
from pallas_gemm.op.loss import loss_chunks, loss_plan, loss_windows
from pallas_gemm.op.loss.loss_layer import Given, Layer, Slopes, Wanted
from pallas_gemm.op.loss.loss_plan import Chunks

BF16, F32, F64 = jnp.bfloat16, jnp.float32, jnp.float64
WIDTH, WORDS, EACH = 128, 1344, 512
PARTS = Chunks(WORDS, EACH, False, 0, True)
pytestmark = pytest.mark.gpu("hopper")


def _integers(rng: Any, *shape: int) -> Any:
    return rng.integers(-2, 3, shape).astype(np.float64)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "waits"), [(192, False), (192, True), (128, True), (64, True), (64, False)]
)
def test_sums_of_integers_are_exact(tokens: int, waits: bool, transposed: bool, bias: bool) -> None:
    if waits and transposed:
        pytest.skip("logits wait in a weight of [width, words] alone")
    rng = np.random.default_rng(0)
    hidden, weight = _integers(rng, tokens, WIDTH), _integers(rng, WIDTH, WORDS)
    of_label, of_total = _integers(rng, tokens), _integers(rng, tokens)
    labels = rng.integers(0, WORDS, tokens)
    # The probabilities count nothing, so that every slope is an integer.
    g = np.repeat(of_total[:, None], WORDS, 1)
    g[np.arange(tokens), labels] += of_label
    call = lowering.planned(Call(np.float32), gpu=True)
    layer = Layer(call, transposed, bias, total=True)
    operands = (
        jnp.asarray(hidden, BF16),
        jnp.asarray(weight.T if transposed else weight, BF16),
        jnp.asarray(labels, jnp.int32),
        *((jnp.zeros(WORDS, F32),) * bias),
    )
    log_sum_exp, none, *others = (
        jnp.asarray(x, F32) for x in (np.full(tokens, 600.0), 0 * of_label, of_label, of_total)
    )
    slopes = Slopes(log_sum_exp, none, others[0], (others[1],))
    parts = loss_plan.waiting(PARTS, tokens, WIDTH) if waits else PARTS
    assert parts.waits == waits

    @jax.jit
    def run(operands: Any, slopes: Any, waiting: Any) -> Any:
        given, wanted = Given.of(operands), Wanted(True, True, bias)
        way = loss_windows.planned(layer, parts, wanted, given, slopes)
        assert isinstance(way, loss_windows.Windows), way
        return loss_chunks.gradients(layer, wanted, given, slopes, None, way, waiting)

    logits = hidden[:WIDTH] @ weight
    # With fewer tokens than that, nothing is read below their logits.
    below = np.full((WIDTH - len(logits), WORDS), np.nan)
    waiting = jnp.asarray(np.concatenate([logits, below]), BF16) if waits else None
    found = run(operands, slopes, waiting)
    of_weight = hidden.T @ g
    expected = [g @ weight.T, of_weight.T if transposed else of_weight]
    for own, exact in zip(found, expected, strict=False):
        rounded = jnp.asarray(exact, F32).astype(BF16)
        np.testing.assert_array_equal(np.asarray(own, np.float32), np.asarray(rounded, np.float32))
    if bias:
        np.testing.assert_array_equal(found[2], np.sum(g, 0))


def _ours(hidden: Any, weight: Any, labels: Any, bias: Any, *, memory: Any) -> Any:
    return linear_cross_entropy(hidden, weight, labels, bias=bias, memory=memory)


def _stock(hidden: Any, weight: Any, labels: Any, bias: Any, *, dtype: Any = F32) -> Any:
    logits = jnp.matmul(hidden, weight).astype(dtype)
    logits = logits if bias is None else logits + bias[None].astype(dtype)
    own = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - own)


@pytest.mark.parametrize("memory", ["least", None, "fastest", 110_000_000])
@pytest.mark.parametrize(
    "size",
    # As many tokens as a weight has rows, more, and fewer; the last two end within a tile.
    [(1024, 1024, 100_096), (3072, 1024, 40_000), (512, 1024, 200_064)],
    ids=str,
)
def test_errors_are_at_most_those_of_stock(size: tuple[int, int, int], memory: Any) -> None:
    tokens, width, words = size
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (tokens, width), BF16)
    weight = (jax.random.normal(keys[1], (width, words)) * 2 / width**0.5).astype(BF16)
    bias = jax.random.normal(keys[3], (words,), F32) if tokens < width else None
    operands = hidden, weight, jax.random.randint(keys[2], (tokens,), 0, words), bias
    ours = functools.partial(_ours, memory=memory)
    (how,) = explain(jax.value_and_grad(ours, (0, 1)), *operands).last_layers
    assert ("wait" in how) == (memory == "least")

    def run(loss: Any) -> Any:
        lowered = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*operands)
        assert ("mosaic_gpu" in lowered.as_text()) == (loss is ours)
        return jax.tree.leaves(lowered.compile()(*operands))

    found, stock = run(ours), run(_stock)
    with jax.enable_x64(True):
        wide = [x.astype(F64) for x in operands[:2]]
        exact = jax.jit(jax.value_and_grad(functools.partial(_stock, dtype=F64), (0, 1)))
        expected = jax.tree.leaves(exact(*wide, *operands[2:]))
        for own, of_stock, value in zip(found, stock, expected, strict=True):
            apart = (x.astype(F64) - value for x in (own, of_stock))
            errors = [jnp.sqrt(jnp.mean(jnp.square(x))) for x in apart]
            if value.ndim:
                # By chance, the same roundings of both differ by parts in a million.
                most = errors[1] * (1 + 1e-5)
            else:
                # Of a mean, rounding leaves one number, which may be good by chance.
                most = jnp.maximum(errors[1], 2e-6 * jnp.abs(value))
            assert float(errors[0]) <= float(most)


def test_some_tokens_after_the_others_have_the_statistics_of_all(monkeypatch: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (1000, 256), BF16)
    weight = jax.random.normal(keys[1], (256, 20_032), BF16) / 16
    operands = hidden, weight, jax.random.randint(keys[2], (1000,), 0, 20_032)

    def run(kernels: int) -> Any:
        # Nothing in a call says how many tokens are together.
        jax.clear_caches()
        lowered = jax.jit(linear_log_probs).lower(*operands)
        assert lowered.as_text().count("call @pallas_gemm") == kernels
        return lowered.compile()(*operands)

    whole = run(1)
    monkeypatch.setattr(loss_plan, "LEFT_BYTES", 500_000)
    assert loss_plan.together(1000, 20_032, 2) == 384
    for own, expected in zip(run(3), whole, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-6, atol=1e-6)
