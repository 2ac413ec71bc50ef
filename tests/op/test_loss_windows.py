"""Gradients of a last layer by kernels that take their words of whole arrays."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import explain, linear_cross_entropy, target
from pallas_gemm.call import Call, Options
from pallas_gemm.device import H200
from pallas_gemm.kernels.windows import Window
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.loss import loss_chunks, loss_plan, loss_windows
from pallas_gemm.op.loss.loss_layer import Given, Layer, Slopes, Wanted
from pallas_gemm.op.loss.loss_plan import Chunks
from pallas_gemm.op.part_kernels import Part, part_kernel_p
from pallas_gemm.planning import targeting
from tests import reference

BF16, F32 = jnp.bfloat16, jnp.float32
TOKENS, WIDTH, WORDS, EACH = 128, 64, 320, 128
PARTS = Chunks(WORDS, EACH, False, 0, True)
LAYERS = {
    "plain": {},
    "bias": {"bias": True},
    "transposed": {"transposed": True},
    "all": {"bias": True, "softcap": 3.0, "scale": 0.7, "total": True, "transposed": True},
}


def _drawn(layer: Layer) -> tuple[Given, Slopes]:
    rng = np.random.default_rng(0)
    stored = (WORDS, WIDTH) if layer.transposed else (WIDTH, WORDS)
    hidden, weight = (reference.normal(rng, x, BF16) for x in ((TOKENS, WIDTH), stored))
    bias = (reference.normal(rng, (WORDS,), F32),) * layer.bias
    labels = jnp.asarray(rng.integers(0, WORDS, TOKENS).astype(jnp.int32))
    given = Given(hidden, weight * 0.3, labels, bias)
    sums = layer.contraction.by_xla(layer.call, given.hidden, given.weight)
    log_sum_exp = jax.nn.logsumexp(layer.logits(sums, bias), axis=-1)
    others = [jnp.asarray(rng.uniform(0.5, 1, TOKENS).astype(F32)) for _ in range(2 + layer.total)]
    return given, Slopes(log_sum_exp, others[0], -others[1], tuple(others[2:]))


def _exact(layer: Layer) -> tuple[Given, Slopes]:
    """Draws tokens and words whose products are not rounded in bfloat16."""
    given, slopes = _drawn(layer)
    hidden, weight = jnp.round(given.hidden), jnp.round(4 * given.weight) / 4
    return given._replace(hidden=hidden.clip(-1, 1), weight=weight.clip(-0.5, 0.5)), slopes


@functools.cache
def _simulation(part: Part) -> Any:
    """Returns the simulation of a kernel, which all tests share."""
    return jax.jit(part.run())


def _simulated(monkeypatch: Any) -> Options:
    """Has kernels simulated, and returns the options that ask for it."""

    def simulate(*operands: Any, part: Part) -> list[jax.Array]:
        return jax.tree.leaves(_simulation(part)(*operands))

    monkeypatch.setattr(part_kernel_p, "bind", simulate)
    # A loop of the program would run the simulator from within.
    monkeypatch.setattr(loss_chunks, "_over", _in_turn)
    return Options(implementation="interpret", target=H200)


@pytest.mark.parametrize("options", [LAYERS[x] for x in ("plain", "transposed", "all")])
def test_they_are_those_of_slices(options: dict[str, Any], monkeypatch: Any) -> None:
    layer = Layer(Call(np.float32, options=_simulated(monkeypatch)), **options)
    given, slopes = _drawn(layer)
    wanted = Wanted(True, True, layer.bias)
    windows = loss_windows.planned(layer, PARTS, wanted, given, slopes)
    assert isinstance(windows, loss_windows.Windows), windows
    assert set(windows.of) == {PARTS.first, EACH}
    found = loss_chunks.gradients(layer, wanted, given, slopes, None, windows)
    for x, y in zip(found[: 2 + layer.bias], _by_slices(layer, given, slopes), strict=False):
        _close(x, y)


@pytest.mark.parametrize("name", ["plain", "bias"])
@pytest.mark.parametrize("tokens", [TOKENS, WIDTH])
def test_logits_that_wait_are_not_computed_again(tokens: int, name: str, monkeypatch: Any) -> None:
    layer = Layer(Call(np.float32, options=_simulated(monkeypatch)), **LAYERS[name])
    given, slopes = _exact(layer)
    given, slopes = given.of_tokens(0, tokens), slopes.of_tokens(0, tokens)
    wanted, parts = Wanted(True, True, layer.bias), loss_plan.waiting(PARTS, tokens, WIDTH)
    assert parts.waiting == (WIDTH, tokens)
    windows = loss_windows.planned(layer, parts, wanted, given, slopes)
    assert isinstance(windows, loss_windows.Windows), windows
    assert (windows.of[EACH].slopes is None) == (tokens == WIDTH)
    sums = layer.contraction.by_xla(Call(np.float32), given.hidden[:WIDTH], given.weight)
    # Other tokens show whether what waits is read: the slopes are still those of the old ones.
    own = given._replace(hidden=given.hidden.at[:WIDTH].mul(2))
    found = loss_chunks.gradients(layer, wanted, own, slopes, None, windows, sums.astype(BF16))
    expected = _by_slices(layer, given, slopes)
    of_first = _by_slices(layer, given.of_tokens(0, WIDTH), slopes.of_tokens(0, WIDTH))
    _close(found[0], expected[0])
    _close(found[1], expected[1] + of_first[1])
    for x, y in zip(found[2:], expected[2:], strict=True):
        if x is not None:
            _close(x, y)


@pytest.mark.parametrize("name", ["plain", "bias"])
def test_a_kernel_stores_logits_into_an_array_like_the_weight(name: str, monkeypatch: Any) -> None:
    layer = Layer(Call(np.float32, options=_simulated(monkeypatch)), **LAYERS[name])
    given, slopes = _exact(layer)
    given, slopes = given.of_tokens(0, 40), slopes.of_tokens(0, 40)
    assert loss_plan.waiting(PARTS, 40, WIDTH).waiting == (40, 40)
    found = loss_windows.statistics(layer, given)
    assert found is not None
    *statistics, kept = found
    sums = layer.contraction.by_xla(Call(np.float32), given.hidden, given.weight).astype(BF16)
    assert kept.shape == given.weight.shape
    np.testing.assert_array_equal(kept[:40].astype(F32), sums.astype(F32))
    logits = layer.logits(sums.astype(F32), given.bias)
    expected = jax.nn.logsumexp(logits, -1), logits[jnp.arange(40), given.labels]
    for x, y in zip(statistics, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    # What waits is enough for the gradients.
    parts, wanted = loss_plan.waiting(PARTS, 40, WIDTH), Wanted(True, True, layer.bias)
    windows = loss_windows.planned(layer, parts, wanted, given, slopes)
    assert isinstance(windows, loss_windows.Windows), windows
    gradients = loss_chunks.gradients(layer, wanted, given, slopes, None, windows, kept)
    for x, y in zip(gradients, _by_slices(layer, given, slopes), strict=True):
        if y is not None:
            _close(x, y)


def _by_slices(layer: Layer, given: Given, slopes: Slopes) -> list[Any]:
    by_xla = dataclasses.replace(layer, call=Call(np.float32))
    slices = loss_chunks.Slices(by_xla, dataclasses.replace(PARTS, in_place=False))
    wanted = Wanted(True, True, layer.bias)

    @jax.jit
    def gradients(given: Given, slopes: Slopes) -> list[Any]:
        return loss_chunks.gradients(by_xla, wanted, given, slopes, None, slices)

    return gradients(given, slopes)


def _close(x: Any, y: Any) -> None:
    assert x.dtype == y.dtype
    scale = float(jnp.max(jnp.abs(y)))
    np.testing.assert_allclose(x.astype(F32), y.astype(F32), rtol=2e-2, atol=1e-2 * scale)


def _in_turn(parts: Chunks, step: Any, together: int) -> Any:
    del together
    left = step(None, 0, parts.first)
    for start in range(parts.first, parts.words, parts.each):
        left = step(left, start, parts.each)
    return left


@pytest.mark.parametrize("sizes", [(4096, 4096, 128256), (65536, 4096, 128256)])
def test_kernels_take_parts_even_where_xla_is_faster_for_a_product(sizes: Any) -> None:
    tokens, width, words = sizes
    layer = Layer(Call(np.float32, options=Options(target=H200)))
    shapes = (((tokens, width), BF16), ((width, words), BF16), ((tokens,), jnp.int32))
    given = Given.of([jax.ShapeDtypeStruct(*own) for own in shapes])
    of_token: Any = jax.ShapeDtypeStruct((tokens,), F32)
    slopes = Slopes(of_token, of_token, of_token, ())
    parts = layer.chunks(given.hidden, given.weight)
    assert parts.in_place
    found = loss_windows.planned(layer, parts, Wanted(True, True, False), given, slopes)
    assert isinstance(found, loss_windows.Windows), found


def test_the_larger_operand_changes_sides_with_the_product() -> None:
    call = Call(np.float32, options=Options(implementation="interpret", target=H200))
    # The result is transposed, so that the right operand becomes the left one.
    contraction, types = Contraction("mk", "kn", "nm"), (((128, 64), BF16), ((64, 256), BF16))
    signature = tuple((shape, np.dtype(dtype)) for shape, dtype in types)
    part = loss_windows._part(call, contraction, signature, Window(right=1))
    assert isinstance(part, Part)
    assert (part.swapped, part.window) == (True, Window(left=1))


@pytest.mark.parametrize(("stored", "beyond"), [(768, False), (832, True)])
def test_tiles_beyond_a_full_chunk_are_seen(stored: int, beyond: bool) -> None:
    call = Call(np.dtype(BF16), options=Options(implementation="interpret", target=H200))
    types = (((TOKENS, WIDTH), np.dtype(BF16)), ((TOKENS, stored), np.dtype(BF16)))
    of_weight = Contraction("mk", "kn", "mn").of_right
    part = loss_windows._part(call, of_weight, types, Window(result=1))
    assert isinstance(part, Part), part
    assert loss_windows._reaches_beyond(part, loss_plan.STEP) == beyond


def _types(words: int, dtype: Any = BF16) -> list[jax.ShapeDtypeStruct]:
    shapes = (((2048, 2048), dtype), ((2048, words), dtype), ((2048,), jnp.int32))
    return [jax.ShapeDtypeStruct(*own) for own in shapes]


def _lowered(words: int, platform: str, memory: Any = None) -> str:
    loss = jax.value_and_grad(functools.partial(linear_cross_entropy, memory=memory), (0, 1))
    with target("h200"):
        traced = jax.jit(loss).trace(*_types(words))
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("tokens", "words", "each"),
    [(4096, 128256, 4096), (8192, 151936, 4096), (65536, 128256, 6016), (9000, 151936, 4608)],
)
def test_tiles_leave_few_bytes_at_a_time(tokens: int, words: int, each: int) -> None:
    assert loss_plan.together(tokens, words, 2) == each
    tiles = -(-words // loss_plan.NARROWEST)
    assert 4 * 2 * each * tiles <= loss_plan.LEFT_BYTES + 4 * 2 * loss_plan.TILE_TOKENS * tiles
    assert loss_plan.together(tokens, words, 3) <= each


@pytest.mark.parametrize("keep", [False, True])
def test_statistics_are_those_of_some_tokens_after_the_others(keep: bool, monkeypatch: Any) -> None:
    layer = Layer(Call(np.float32), bias=True, total=True)
    given, _ = _drawn(dataclasses.replace(layer, transposed=False))
    own = (given.hidden, given.weight, given.labels, *given.bias)
    monkeypatch.setattr(loss_plan, "TILE_TOKENS", 24)
    monkeypatch.setattr(loss_plan, "LEFT_BYTES", 800)
    assert loss_plan.together(TOKENS, WORDS, 3) == 24
    found = loss_chunks.by_kernel(layer, keep, *own)
    expected = loss_chunks.at_once(layer, keep, *own)
    assert len(found) == len(expected) == 3 + keep
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x.astype(F32), y.astype(F32), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("empty_kernels")
def test_nothing_is_sliced_between_kernels_where_words_are_whole_blocks():
    # The weight, and its gradient, are as wide as all words.
    text = _lowered(100_032, "cuda")
    assert "dynamic_update_slice" not in text
    assert not re.search(r"dynamic_slice.*x\d+xbf16", text)
    assert text.count("@mosaic_gpu_v2(") == 7


@pytest.mark.usefixtures("empty_kernels")
def test_no_logits_are_computed_again_where_all_wait():
    text = _lowered(100_032, "cuda", "least")
    assert "dynamic_update_slice" not in text
    # Forward, and of the first chunk and of others: the gradient of the tokens and of the weight.
    assert text.count("@mosaic_gpu_v2(") == 5


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize(("device", "kernels"), [(H200, 5), (None, 0)])
def test_logits_wait_where_the_gpu_is_not_known_while_tracing(
    device: Any, kernels: int, monkeypatch: Any
) -> None:
    loss = jax.value_and_grad(functools.partial(linear_cross_entropy, memory="least"), (0, 1))
    traced = jax.jit(loss).trace(*_types(100_032))
    # As in most programs: JAX is asked for a GPU when one is lowered for it.
    monkeypatch.setattr(targeting, "first_gpu", lambda: device)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == kernels
    assert ("dynamic_update_slice" in text) == (device is None)


@pytest.mark.usefixtures("empty_kernels")
def test_logits_that_are_less_than_a_chunk_are_kept_where_the_gpu_is_not_known(
    monkeypatch: Any,
) -> None:
    shapes = (((4096, 1024), BF16), ((1024, 20_032), BF16), ((4096,), jnp.int32))
    types = [jax.ShapeDtypeStruct(*own) for own in shapes]
    # Slices would be of fewer words.
    assert loss_plan.chunks(4096, 1024, 20_032, 2, None, in_place=True).kept
    assert not loss_plan.chunks(4096, 1024, 20_032, 2, None).kept
    program = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1))).trace(*types)
    monkeypatch.setattr(targeting, "first_gpu", lambda: H200)
    assert program.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2(") == 3


@pytest.mark.usefixtures("empty_kernels")
def test_bytes_that_only_kernels_do_with_are_taken_where_the_gpu_is_not_known(
    monkeypatch: Any,
) -> None:
    # The slopes of 5376 words, for the first has half of that, and the sums of the tokens.
    least = 5376 * 2048 * 2 + 2048 * 2048 * 4
    assert loss_plan.chunks(2048, 2048, 100_032, 2, "least").bytes > least

    def traced(memory: int) -> Any:
        loss = functools.partial(linear_cross_entropy, memory=memory)
        return jax.jit(jax.value_and_grad(loss, (0, 1))).trace(*_types(100_032))

    program = traced(least)
    monkeypatch.setattr(targeting, "first_gpu", lambda: H200)
    assert program.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2(") == 7
    with pytest.raises(ValueError, match=f"are too few for these sizes: the least is {least}"):
        traced(least - 1)


def test_none_wait_on_a_cpu(monkeypatch: Any) -> None:
    monkeypatch.setattr(loss_plan, "SLOPES_BYTES", 0)
    loss_plan.chunks.cache_clear()
    rng = np.random.default_rng(0)
    hidden, weight = (reference.normal(rng, x, BF16) for x in ((64, 64), (64, 12_800)))
    operands = hidden, weight / 8, jnp.asarray(rng.integers(0, 12_800, 64).astype(jnp.int32))
    losses = (functools.partial(linear_cross_entropy, memory=x) for x in ("least", "fastest"))
    runs = [jax.jit(jax.value_and_grad(loss, (0, 1))) for loss in losses]
    assert "loss_waiting" in str(runs[0].trace(*operands).jaxpr)
    # What is given for the logits is the weight, which no gradient may be made of.
    found, expected = (jax.tree.leaves(run(*operands)) for run in runs)
    for x, y in zip(found, expected, strict=True):
        scale = float(jnp.max(jnp.abs(y)))
        np.testing.assert_allclose(x.astype(F32), y.astype(F32), rtol=2e-2, atol=1e-2 * scale)
    # Nor is a logit rounded that is not kept.
    sums = jnp.matmul(hidden, operands[1], preferred_element_type=F32)
    exact = jax.nn.logsumexp(sums, -1) - sums[jnp.arange(64), operands[2]]
    np.testing.assert_allclose(found[0], exact.mean(), rtol=1e-6)


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize(("words", "platform"), [(100_040, "cuda"), (100_032, "cpu")])
def test_elsewhere_chunks_are_slices(words: int, platform: str) -> None:
    assert "dynamic_update_slice" in _lowered(words, platform)


def test_explain_says_the_bytes_of_parts():
    loss = jax.value_and_grad(functools.partial(linear_cross_entropy, memory="least"), (0, 1))
    with target("h200"):
        (of_parts,) = explain(loss, *_types(100_032)).last_layers
        (of_slices,) = explain(loss, *_types(100_032, F32)).last_layers
    own = loss_plan.chunks(2048, 2048, 100_032, 2, "least", in_place=True)
    assert of_parts == str(loss_plan.waiting(own, 2048, 2048))
    assert of_slices == str(loss_plan.chunks(2048, 2048, 100_032, 4, "least"))


@pytest.mark.parametrize(
    ("tokens", "width", "words", "memory", "each", "megabytes"),
    [
        (4096, 4096, 128256, "least", 21504, 243),
        (4096, 2048, 151936, "least", 19200, 191),
        # With 9216, the first chunk would have fewer than half of that.
        (8192, 2048, 151936, "least", 8448, 206),
        (8192, 2048, 151936, None, 8448, 206),
        (65536, 4096, 128256, None, 7680, 2080),
        # Sums in float32 take most of it.
        (65536, 4096, 128256, "least", 6144, 1879),
        (65536, 4096, 128256, 3_000_000_000, 14592, 2986),
        (16, 4096, 128256, "least", 128256, 4),
    ],
)
def test_chunks_are_as_large_as_memory_allows(
    tokens: int, width: int, words: int, memory: Any, each: int, megabytes: int
) -> None:
    found = loss_plan.chunks(tokens, width, words, 2, memory, in_place=True)
    assert (found.each, round(found.bytes / 1e6)) == (each, megabytes)
    assert found.each / 2 <= found.first <= found.each
    assert found.first % 64 == 0
    if isinstance(memory, int):
        assert found.bytes <= memory


def test_chunks_are_hardly_smaller_than_memory_allows_for_a_larger_first_one() -> None:
    # There is memory for 6912 words, with which the first chunk has 1920. In chunks of 4608 words
    # it would have more than half, but all of these would be too small, and three more.
    memory = 6912 * 2048 * 2 + 2048 * 2048 * 4
    found = loss_plan.chunks(2048, 2048, 50_304, 2, memory, in_place=True)
    assert (found.count, found.each, found.first) == (10, 5376, 1920)


def test_it_is_16_bits_and_whole_blocks_that_kernels_take_parts_of():
    takes = loss_plan.takes_parts
    assert takes(H200, 100, 128, 640, 2)
    assert not takes(None, 100, 128, 640, 2)
    assert not takes(H200, 100, 128, 640, 4)
    assert not takes(H200, 100, 128, 648, 2)
    assert not takes(H200, 100, 72, 640, 2)
