"""The last layer and its loss: values and gradients beside float64, every option, bad input."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special

from pallas_gemm import (
    explain,
    linear_cross_entropy,
    linear_log_probs,
    softmax_cross_entropy_with_integer_labels,
    target,
)
from tests import covering, reference

F32, BF16 = jnp.float32, jnp.bfloat16
WIDTH = 8
# More than two chunks of the fewest words, and no multiple of anything.
WORDS = 13001
IGNORED = -100

OPTIONS: dict[str, list[Any]] = {
    "dtype": [F32, BF16],
    "tokens": [(96,), (4, 30), (1,), ()],
    "words": [WORDS, 301],
    "memory": [None, "least", "fastest", 3_500_000],
    "bias": [False, True],
    "transpose_weight": [False, True],
    "ignore_index": [None, IGNORED, 7],
    "label_smoothing": [0, 0.1],
    "z_loss": [0, 0.01],
    "softcap": [None, 3.0],
    "scale": [1, 0.7],
    "reduction": ["mean", "sum", "none"],
}
CASES = covering.pairs(OPTIONS, lambda case: case, 400)


def _drawn(case: covering.Case) -> tuple[list[Any], Any]:
    """Hidden, weight and bias, and the labels."""
    rng = np.random.default_rng(0)
    tokens, words, dtype = case["tokens"], case["words"], case["dtype"]
    stored = (words, WIDTH) if case["transpose_weight"] else (WIDTH, words)
    operands = [reference.normal(rng, shape, dtype) for shape in ((*tokens, WIDTH), stored)]
    if case["bias"]:
        operands.append(reference.normal(rng, (words,), F32))
    labels = np.asarray(rng.integers(0, words, tokens))
    if case["ignore_index"] is not None and labels.size > 2:
        labels[..., :2] = case["ignore_index"]
    return operands, jnp.asarray(labels, jnp.int32)


def _exact(case: covering.Case, operands: Any, labels: Any, g: Any) -> list[np.ndarray]:
    """The value and the gradients, by hand and in float64."""
    h, w, *bias = map(reference.wide, operands)
    lead, w = h.shape[:-1], (w.T if case["transpose_weight"] else w)
    h, labels = h.reshape(-1, WIDTH), np.asarray(labels).reshape(-1)
    before = case["scale"] * h @ w + (bias[0] if bias else 0)
    cap = case["softcap"]
    z = before if cap is None else cap * np.tanh(before / cap)
    lse = special.logsumexp(z, axis=-1)
    counts = np.ones(labels.shape, bool)
    if case["ignore_index"] is not None:
        counts = labels != case["ignore_index"]
    one_hot = np.arange(z.shape[1]) == np.where(counts, labels, 0)[:, None]
    share, z_loss = case["label_smoothing"], case["z_loss"]
    aim = (1 - share) * one_hot + share / z.shape[1]
    losses = np.where(counts, lse - np.sum(aim * z, -1) + z_loss * lse**2, 0)
    each = np.broadcast_to(np.asarray(g, np.float64), lead).reshape(-1)
    value: Any = losses.reshape(lead)
    if case["reduction"] != "none":
        number = max(counts.sum(), 1) if case["reduction"] == "mean" else 1
        value, each = losses.sum() / number, each / number
    slopes = special.softmax(z, axis=-1) * (1 + 2 * z_loss * lse)[:, None] - aim
    slopes = slopes * (counts * each)[:, None]
    if cap is not None:
        slopes = slopes * (1 - (z / cap) ** 2)
    of_weight = case["scale"] * h.T @ slopes
    found = [value, (case["scale"] * slopes @ w.T).reshape(*lead, WIDTH)]
    found.append(of_weight.T if case["transpose_weight"] else of_weight)
    return [*found, slopes.sum(0)] if bias else found


def _stock(case: covering.Case, labels: Any) -> Callable[..., Any]:
    """The same in JAX's own words, with logits, and their gradients, rounded to the operands' type.

    XLA would leave such a rounding out if it came of conversions.
    """
    bits = jnp.finfo(case["dtype"])

    def loss(h: Any, w: Any, *bias: Any) -> Any:
        w = w.T if case["transpose_weight"] else w
        z = jnp.matmul(h, w, preferred_element_type=F32)
        z = case["scale"] * jax.lax.reduce_precision(z, bits.nexp, bits.nmant)
        z = z + bias[0] if bias else z
        z = z if case["softcap"] is None else case["softcap"] * jnp.tanh(z / case["softcap"])
        counts = jnp.ones(labels.shape, bool)
        if case["ignore_index"] is not None:
            counts = labels != case["ignore_index"]
        picked = jnp.take_along_axis(z, jnp.where(counts, labels, 0)[..., None], -1)[..., 0]
        lse, share = jax.nn.logsumexp(z, axis=-1), case["label_smoothing"]
        losses = lse - (1 - share) * picked - share * z.mean(-1) + case["z_loss"] * lse**2
        losses = jnp.where(counts, losses, 0)
        if case["reduction"] == "none":
            return losses
        number = jnp.maximum(counts.sum(), 1) if case["reduction"] == "mean" else 1
        return losses.sum() / number

    return loss


def _ours(case: covering.Case, labels: Any) -> Callable[..., Any]:
    names = (
        *("ignore_index", "label_smoothing", "z_loss", "softcap"),
        *("scale", "reduction", "memory", "transpose_weight"),
    )
    how = {name: case[name] for name in names}

    def loss(h: Any, w: Any, bias: Any = None) -> Any:
        return linear_cross_entropy(h, w, labels, bias=bias, **how)

    return loss


def _value_and_gradients(loss: Any, operands: Any, g: Any) -> list[Any]:
    def run(*operands: Any) -> Any:
        value, pull = jax.vjp(loss, *operands)
        return [value, *pull(jnp.broadcast_to(g, value.shape).astype(value.dtype))]

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.jit(run)(*operands)


@pytest.mark.every_other
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_value_and_gradients_are_as_near_float64_as_jaxs_own(case):
    operands, labels = _drawn(case)
    g = F32(1.5)
    if case["reduction"] == "none":
        g = reference.normal(np.random.default_rng(1), case["tokens"], F32)
    found = _value_and_gradients(_ours(case, labels), operands, g)
    stock = _value_and_gradients(_stock(case, labels), operands, g)
    exact = _exact(case, operands, labels, g)
    for own, xlas, true in zip(found, stock, exact, strict=True):
        assert (own.shape, own.dtype) == (xlas.shape, xlas.dtype)
        largest = np.max(np.abs(true), initial=0)
        error, allowed = (np.max(np.abs(reference.wide(x) - true)) for x in (own, xlas))
        assert error <= 2 * allowed + 2e-6 * largest, (error, allowed, largest)


def _small(words: int = 40, tokens: int = 12) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(2)
    h, w, b = (
        reference.normal(rng, shape, F32) for shape in ((tokens, WIDTH), (WIDTH, words), (words,))
    )
    return h, w, b, jnp.asarray(rng.integers(0, words, tokens).astype(jnp.int32))


def test_slopes_of_a_confident_token_are_of_the_logits_that_were_kept():
    # Its gradient is what is left of 1 - 1: a log-sum-exp of other logits would be all of it.
    case = dict.fromkeys(OPTIONS, 0) | {"dtype": BF16, "tokens": (96,), "words": 301}
    case |= {"memory": "fastest", "softcap": None, "ignore_index": None, "bias": False}
    case |= {"scale": 1, "reduction": "sum", "transpose_weight": False}
    (h, w), _ = _drawn(case)
    h = 4 * h
    labels = jnp.argmax(jnp.matmul(h.astype(F32), w.astype(F32)), axis=-1).astype(jnp.int32)
    both = (_ours(case, labels), _stock(case, labels))
    found, stock = (_value_and_gradients(f, (h, w), F32(1)) for f in both)
    exact = _exact(case, (h, w), labels, F32(1))
    for own, xlas, true in zip(found[1:], stock[1:], exact[1:], strict=True):
        error, allowed = (np.max(np.abs(reference.wide(x) - true)) for x in (own, xlas))
        assert error <= 1.2 * allowed, (error, allowed)


def test_log_probs_and_their_gradients():
    h, w, b, labels = _small()

    def ours(h: Any, w: Any, b: Any) -> Any:
        return linear_log_probs(h, w, labels, bias=b, softcap=3.0)

    def stock(h: Any, w: Any, b: Any) -> Any:
        z = 3.0 * jnp.tanh((h @ w + b[None]) / 3.0)
        picked = jnp.take_along_axis(z, labels[:, None], -1)[:, 0]
        lse = jax.nn.logsumexp(z, axis=-1)
        return picked - lse, lse, picked

    for own, expected in zip(ours(h, w, b), stock(h, w, b), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-5)

    def mixed(f: Any) -> Any:
        return lambda *x: sum(k * jnp.sum(jnp.sin(y)) for k, y in enumerate(f(*x), 1))

    gradients = (jax.jit(jax.grad(mixed(f), (0, 1, 2)))(h, w, b) for f in (ours, stock))
    for own, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)


def _optax(h: Any, w: Any, labels: Any) -> Any:
    return optax.losses.softmax_cross_entropy_with_integer_labels(h @ w, labels)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int32, jnp.uint32])
def test_labels_are_what_they_are_to_optax_in_range_and_out_of_it(dtype):
    h, w, _, labels = _small()
    odd = [-1, -40, -41, 40, 100, 127] if jnp.issubdtype(dtype, jnp.signedinteger) else [40, 255]
    labels = labels.at[: len(odd)].set(jnp.array(odd, jnp.int32)).astype(dtype)
    ours = functools.partial(linear_cross_entropy, reduction="none")
    np.testing.assert_allclose(ours(h, w, labels), _optax(h, w, labels), rtol=1e-5)

    def summed(f: Any) -> Any:
        # Gradients of what is NaN are not: a label that is no word has none.
        return lambda h, w: jnp.nansum(f(h, w, labels))

    gradients = (jax.grad(summed(f), (0, 1))(h, w) for f in (ours, _optax))
    for own, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)


def test_labels_beyond_32_bits_are_no_words():
    h, w, _, labels = _small()
    with jax.enable_x64(True):
        wide = labels.astype(jnp.int64).at[0].set(1 << 32).at[1].set(-(1 << 32))
        losses = linear_cross_entropy(h, w, wide, reduction="none")
    assert np.isnan(losses[:2]).all()
    assert np.isfinite(losses[2:]).all()


def test_ignored_tokens_have_exactly_no_loss_and_no_gradient():
    h, w, b, labels = _small()
    labels = labels.at[3:5].set(IGNORED)

    def loss(h: Any, w: Any, b: Any, labels: Any) -> Any:
        how = {"ignore_index": IGNORED, "z_loss": 0.1, "label_smoothing": 0.1}
        return linear_cross_entropy(h, w, labels, bias=b, **how)

    value, found = jax.value_and_grad(loss, (0, 1, 2))(h, w, b, labels)
    np.testing.assert_array_equal(found[0][3:5], 0)
    kept = np.r_[0:3, 5:12]
    alone, expected = jax.value_and_grad(loss, (0, 1, 2))(h[kept], w, b, labels[kept])
    np.testing.assert_allclose(value, alone, rtol=1e-6)
    np.testing.assert_allclose(found[0][kept], expected[0], rtol=1e-5, atol=1e-7)
    for own, other in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tokens", [0, 12])
def test_without_a_token_that_counts_all_is_zero(reduction, tokens):
    h, w, _, labels = _small(tokens=tokens)

    def loss(h: Any, w: Any) -> Any:
        how = {"ignore_index": IGNORED, "z_loss": 0.1, "reduction": reduction}
        return linear_cross_entropy(h, w, jnp.full_like(labels, IGNORED), **how)

    value, gradients = jax.value_and_grad(loss, (0, 1))(h, w)
    assert value == 0
    for own in gradients:
        np.testing.assert_array_equal(own, 0)


@pytest.mark.parametrize("words", [40, WORDS])
def test_infinite_logits_are_what_they_are_to_optax(words):
    h, w, _, labels = _small(words, tokens=96)
    masked = jnp.zeros(words).at[5].set(-jnp.inf).at[words - 1].set(-jnp.inf)
    labels = labels.at[0].set(5).at[1].set(6)

    @jax.jit
    def ours(h: Any, w: Any, bias: Any) -> Any:
        return linear_cross_entropy(h, w, labels, bias=bias, reduction="none")

    @jax.jit
    def stock(h: Any, w: Any, bias: Any) -> Any:
        logits = h @ w + bias[None]
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)

    # A token whose logits are all infinite, or none.
    for bias in (masked, masked.at[7].set(jnp.inf), jnp.full(words, -jnp.inf)):
        np.testing.assert_allclose(ours(h, w, bias), stock(h, w, bias), rtol=1e-5)
    found, expected = (
        jax.jit(jax.grad(lambda h, f=f: f(h, w, masked)[2:].sum()))(h) for f in (ours, stock)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_softcap_bounds_the_logit_of_a_word_that_a_bias_would_leave_out():
    h, w, b, labels = _small()
    bias = b.at[-1].set(-jnp.inf)
    found = linear_cross_entropy(h, w, labels % 39, bias=bias, softcap=3.0)
    z = 3 * np.tanh((reference.wide(h) @ reference.wide(w) + reference.wide(bias)) / 3)
    picked = np.take_along_axis(z, np.asarray(labels % 39)[:, None], -1)[:, 0]
    np.testing.assert_array_equal(z[:, -1], -3)
    np.testing.assert_allclose(found, np.mean(special.logsumexp(z, -1) - picked), rtol=1e-5)


def test_optaxs_name_and_arguments():
    h, w, _, labels = _small()
    where = labels % 3 > 0
    for how in ({}, {"axis": -1}, {"axis": 1}, {"where": where}):
        found = softmax_cross_entropy_with_integer_labels(h, w, labels, **how)
        stock = optax.losses.softmax_cross_entropy_with_integer_labels(h @ w, labels, **how)
        np.testing.assert_allclose(found, stock, rtol=1e-5)


H, W, _, LABELS = _small()
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "float labels": (
        lambda: linear_cross_entropy(H, W, LABELS.astype(F32)),
        TypeError,
        "labels must be integers, .* got float32",
    ),
    "shape of labels": (
        lambda: linear_cross_entropy(H, W, LABELS[:3]),
        ValueError,
        r"labels must have a value for each token, shape \[12\], got \[3\]",
    ),
    "width": (
        lambda: linear_cross_entropy(H, W.T, LABELS),
        ValueError,
        r"hidden\[12, 8\] and weight\[40, 8\], .* got 8 and 40; transpose_weight=True would fit",
    ),
    "weight of another rank": (
        lambda: linear_cross_entropy(H, W[0], LABELS),
        ValueError,
        r"weight must be \[width, words\], got shape \[40\]",
    ),
    "no words": (lambda: linear_cross_entropy(H, W[:, :0], LABELS), ValueError, "at least one"),
    "a number": (lambda: linear_cross_entropy(F32(1), W, LABELS), ValueError, "one dimension"),
    "types": (
        lambda: linear_cross_entropy(H, W.astype(BF16), LABELS),
        TypeError,
        "weight must be of the type of hidden, float32, got bfloat16: weight.astype",
    ),
    "integers": (
        lambda: linear_cross_entropy(H.astype(jnp.int8), W, LABELS),
        TypeError,
        "hidden must be of bfloat16, .* got int8",
    ),
    "bias": (
        lambda: linear_cross_entropy(H, W, LABELS, bias=W[:, 0]),
        ValueError,
        r"bias must have a value for each word, shape \[40\], got \[8\]",
    ),
    "a bias of integers": (
        lambda: linear_cross_entropy(H, W, LABELS, bias=jnp.ones(40, jnp.int32)),
        TypeError,
        "bias must be of a floating-point type",
    ),
    "smoothing": (
        lambda: linear_cross_entropy(H, W, LABELS, label_smoothing=1.5),
        ValueError,
        "label_smoothing must be a number from 0 to 1, got 1.5",
    ),
    "an array as a number": (
        lambda: linear_cross_entropy(H, W, LABELS, z_loss=H[0, 0]),
        TypeError,
        "z_loss must be a number, got",
    ),
    "softcap": (
        lambda: linear_log_probs(H, W, LABELS, softcap=0),
        ValueError,
        r"softcap must be a number from 1.17549e-38 to 8.50706e\+37, got 0",
    ),
    "a softcap whose reciprocal is 0 in float32": (
        lambda: linear_log_probs(H, W, LABELS, softcap=1e38),
        ValueError,
        "softcap must be .* got 1e",
    ),
    "an infinite softcap": (
        lambda: linear_log_probs(H, W, LABELS, softcap=math.inf),
        ValueError,
        "softcap must be .* got inf",
    ),
    "a z_loss beyond float32": (
        lambda: linear_cross_entropy(H, W, LABELS, z_loss=1e39),
        ValueError,
        r"z_loss must be a number from 0 to 3.40282e\+38, got 1e\+39",
    ),
    "a scale beyond float32": (
        lambda: linear_cross_entropy(H, W, LABELS, scale=-1e39),
        ValueError,
        r"scale must be a number from -3.40282e\+38 to 3.40282e\+38, got -1e\+39",
    ),
    "a scale that is no number": (
        lambda: linear_cross_entropy(H, W, LABELS, scale=math.nan),
        ValueError,
        "scale must be .* got nan",
    ),
    "a scale beyond any float": (
        lambda: linear_cross_entropy(H, W, LABELS, scale=10**400),
        ValueError,
        "scale must fit into a float, got 1000",
    ),
    "reduction": (
        lambda: linear_cross_entropy(H, W, LABELS, reduction="avg"),
        ValueError,
        "reduction='avg' is unknown; legal: 'mean', 'sum', 'none'",
    ),
    "memory": (
        lambda: linear_cross_entropy(H, W, LABELS, memory="most"),
        ValueError,
        "memory='most' is unknown; legal: None, 'least', 'fastest', bytes",
    ),
    "memory of no bytes": (
        lambda: linear_cross_entropy(H, W, LABELS, memory=0.5),
        TypeError,
        "memory must be None, 'least', 'fastest' or a number of bytes, got float",
    ),
    "too few bytes": (
        lambda: jax.grad(linear_cross_entropy)(H, W, LABELS, memory=100),
        ValueError,
        "memory=100 bytes are too few for these sizes: the least is 1920, which memory='least'",
    ),
    "ignore_index": (
        lambda: linear_cross_entropy(H, W, LABELS, ignore_index=0.0),
        TypeError,
        "ignore_index must be an integer or None, got float",
    ),
    "axes of no mesh": (
        lambda: linear_cross_entropy(H, W, LABELS, axis_name=("data", "model")),
        ValueError,
        r"axis_name=\('data', 'model'\) must name one axis or a tuple of axes of a `jax.shard_map`",
    ),
    "a number as an axis": (
        lambda: linear_log_probs(H, W, LABELS, axis_name=1),
        ValueError,
        "axis_name=1 must name one axis or a tuple of axes",
    ),
    "a list as an axis": (
        lambda: linear_log_probs(H, W, LABELS, axis_name=[["model"]]),
        ValueError,
        r"axis_name=\[\['model'\]\] must name one axis or a tuple of axes",
    ),
    "weights of examples": (
        lambda: softmax_cross_entropy_with_integer_labels(H, W, LABELS, where=H[:, 0]),
        TypeError,
        "where must be of bool, got float32: where != 0 is; weights are multiplied with the losses",
    ),
    "axis": (
        lambda: softmax_cross_entropy_with_integer_labels(H, W, LABELS, axis=0),
        ValueError,
        "axis must be the last one of the logits, -1 or 1, got 0",
    ),
    "where": (
        lambda: softmax_cross_entropy_with_integer_labels(H, W, LABELS, where=W > 0),
        ValueError,
        r"where must have a value for each token, shape \[12\], got \[8, 40\]; words are left out",
    ),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_input_is_named(case):
    run, kind, message = case
    with pytest.raises(kind, match=message):
        run()


def _shapes(transposed: bool) -> list[jax.ShapeDtypeStruct]:
    stored = (32768, 512) if transposed else (512, 32768)
    types = (((4096, 512), BF16), (stored, BF16), ((4096,), jnp.int32))
    return [jax.ShapeDtypeStruct(*own) for own in types]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("memory", "products", "text"),
    [
        ("fastest", 3, "3 products with gradients, all logits kept: 268 MB"),
        (None, 7, "4 products with gradients, logits computed again in 2 chunks of 16896"),
        (60_000_000, 19, "4 products with gradients, logits computed again in 6 chunks of"),
    ],
)
def test_explain_says_how_many_products_and_bytes(transposed, memory, products, text):
    how = {"memory": memory, "transpose_weight": transposed}
    loss = functools.partial(linear_cross_entropy, **how)
    with target("h200"):
        found = explain(jax.value_and_grad(loss, (0, 1)), *_shapes(transposed))
    assert found.last_layers[0].startswith(text)
    assert text in " ".join(str(found).split())
    assert sum(entry.times for entry in found.entries) == products


def test_nothing_waits_in_a_weight_that_is_transposed():
    loss = functools.partial(linear_cross_entropy, memory="least", transpose_weight=True)
    with target("h200"):
        found = explain(jax.value_and_grad(loss, (0, 1)), *_shapes(True))
    text = "4 products with gradients, logits computed again in 2 chunks of 16896"
    assert found.last_layers[0].startswith(text)


@pytest.mark.parametrize("wanted", [(0, 1), (1,), (0,)])
def test_explain_says_which_logits_wait(wanted: tuple[int, ...]) -> None:
    loss = jax.value_and_grad(functools.partial(linear_cross_entropy, memory="least"), wanted)
    with target("h200"):
        found = explain(loss, *_shapes(False))
    (text,) = found.last_layers
    if 1 not in wanted:
        # There is no gradient of the weight that they could wait in.
        assert text.startswith("4 products with gradients, logits computed again")
        return
    assert text.startswith("3.88 products with gradients, logits of 512 tokens wait")
    rows = [(entry.decision.problem.m, entry.times) for entry in found.entries]
    # Of the first tokens and of the others, forward; in two chunks, of the others alone.
    assert sum(times for m, times in rows if m == 3584) == 3
    assert sum(times for _, times in rows) == 2 + 2 + 2 * len(wanted)


def test_what_has_no_gradient_takes_no_product():
    loss = functools.partial(linear_cross_entropy, memory="fastest")
    with target("h200"):
        of_hidden = explain(jax.value_and_grad(loss, 0), *_shapes(False))
        of_weight = explain(jax.value_and_grad(loss, 1), *_shapes(False))
        nothing = explain(loss, *_shapes(False))
    assert [len(own.entries) for own in (of_hidden, of_weight, nothing)] == [2, 2, 1]


def test_one_token_and_scalars():
    h, w, _, labels = _small()
    found = linear_cross_entropy(h[0], w, labels[0])
    np.testing.assert_allclose(found, _optax(h[:1], w, labels[:1])[0], rtol=1e-5)


@pytest.mark.parametrize(("dtype", "ignored"), [(jnp.uint32, 2**32 - 1), (jnp.int32, 2**31 - 1)])
def test_any_label_of_its_type_may_not_count(dtype: Any, ignored: int) -> None:
    rng = np.random.default_rng(0)
    hidden, weight = (jnp.asarray(rng.normal(size=own).astype(F32)) for own in ((4, 8), (8, 11)))
    labels = jnp.asarray([3, ignored, 0, 10], dtype)
    found = linear_cross_entropy(hidden, weight, labels, ignore_index=ignored, reduction="none")
    own = linear_cross_entropy(hidden, weight, jnp.asarray([3, 1, 0, 10]), reduction="none")
    np.testing.assert_array_equal(found, own.at[1].set(0))
    # A number that the labels' type does not have is none of them.
    some = labels.at[1].set(1)
    all_count = linear_cross_entropy(hidden, weight, some, ignore_index=-(2**40), reduction="none")
    np.testing.assert_array_equal(all_count, own)


def test_it_is_mapped_over_no_examples() -> None:
    hidden, weight = jnp.ones((0, 5, 8)), jnp.ones((8, 11))
    found = jax.vmap(lambda x: linear_cross_entropy(x, weight, jnp.arange(5)))(hidden)
    assert found.shape == (0,)
