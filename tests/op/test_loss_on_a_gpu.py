"""On a GPU: gradients of a last layer by parts of arrays, and logits that wait."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

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


# As many tokens as a weight has rows, more, and fewer; the last two end within a tile.
SIZES = [(1024, 1024, 100_096), (3072, 1024, 40_000), (512, 1024, 200_064)]
WAYS = ["least", None, "fastest", 110_000_000]
SEEDS = 8
MOST = float(special.stdtrit(SEEDS - 1, 1 - 1e-4))
"""A mean of this many standard errors is no chance: one judgement in 10,000 is."""


def _operands(size: tuple[int, int, int], seed: int) -> tuple[Any, ...]:
    tokens, width, words = size
    keys = jax.random.split(jax.random.key(seed), 4)
    hidden = jax.random.normal(keys[0], (tokens, width), BF16)
    weight = (jax.random.normal(keys[1], (width, words)) * 2 / width**0.5).astype(BF16)
    bias = jax.random.normal(keys[3], (words,), F32) if tokens < width else None
    return hidden, weight, jax.random.randint(keys[2], (tokens,), 0, words), bias


def _ours(hidden: Any, weight: Any, labels: Any, bias: Any, *, memory: Any) -> Any:
    losses = linear_cross_entropy(
        hidden, weight, labels, bias=bias, memory=memory, reduction="none"
    )
    return jnp.mean(losses), losses


def _stock(hidden: Any, weight: Any, labels: Any, bias: Any, *, dtype: Any = F32) -> Any:
    logits = jnp.matmul(hidden, weight).astype(dtype)
    logits = logits if bias is None else logits + bias[None].astype(dtype)
    own = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - own
    return jnp.mean(losses), losses


@functools.cache
def _compiled(size: tuple[int, int, int], loss: Any, **how: Any) -> Any:
    """Compiles what computes the losses of tokens, and the gradients of their mean."""
    both = jax.value_and_grad(functools.partial(loss, **how), (0, 1), has_aux=True)

    def computed(*operands: Any) -> list[Any]:
        (_, losses), slopes = both(*operands)
        return [losses, *slopes]

    operands = _operands(size, 0)
    if loss is _ours:
        (said,) = explain(computed, *operands).last_layers
        assert ("wait" in said) == (how["memory"] == "least")
    lowered = jax.jit(computed).lower(*operands)
    assert ("mosaic_gpu" in lowered.as_text()) == (loss is _ours)
    return lowered.compile()


@functools.partial(jax.jit, static_argnames="dtype")
def _exact(hidden: Any, weight: Any, *others: Any, dtype: Any) -> list[Any]:
    both = jax.value_and_grad(functools.partial(_stock, dtype=dtype), (0, 1), has_aux=True)
    (_, losses), slopes = both(hidden.astype(dtype), weight.astype(dtype), *others)
    return [losses, *slopes]


@jax.jit
def _squares(found: Any, exact: Any) -> list[Any]:
    """Returns the mean square of the errors of each result."""
    pairs = zip(found, exact, strict=True)
    return [jnp.mean(jnp.square(own.astype(F64) - value)) for own, value in pairs]


def errors(size: tuple[int, int, int], memory: Any) -> np.ndarray:
    """Returns the mean square of errors: by seed, of ours and stock, of each result."""
    both = _compiled(size, _ours, memory=memory), _compiled(size, _stock)
    found = []
    for seed in range(SEEDS):
        operands = _operands(size, seed)
        with jax.enable_x64(True):
            exact = _exact(*operands, dtype=F64)
            found.append([_squares(run(*operands), exact) for run in both])
    return np.array(found, np.float64)


@pytest.mark.parametrize("memory", WAYS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_errors_are_at_most_those_of_stock(size: tuple[int, int, int], memory: Any) -> None:
    """Judges a mean of independent inputs: sums in another order round some numbers otherwise."""
    ours, stock = np.moveaxis(errors(size, memory), 1, 0)
    more = ours - stock
    room = MOST * np.std(more, 0, ddof=1) / SEEDS**0.5
    assert np.all(np.mean(more, 0) <= room), (ours, stock)


@pytest.mark.parametrize("memory", WAYS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_same_operands_give_the_same_bits(size: tuple[int, int, int], memory: Any) -> None:
    run = _compiled(size, _ours, memory=memory)

    def bits(seed: int) -> list[Any]:
        found = run(*_operands(size, seed))
        return [x.view(jnp.uint32 if x.dtype == F32 else jnp.uint16) for x in found]

    first, others = bits(0), bits(1)
    assert not any(jnp.array_equal(x, y) for x, y in zip(first, others, strict=True))
    for _ in range(10):
        assert all(jnp.array_equal(x, y) for x, y in zip(first, bits(0), strict=True))


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
