"""The statistics of a last layer under JAX's transformations, on meshes, and in what memory."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_gemm import linear_cross_entropy, target
from pallas_gemm.op.loss import loss_chunks, loss_layer, loss_partition, loss_plan
from tests import covering, meshes, reference

F32, BF16 = jnp.float32, jnp.bfloat16
TOKENS, WIDTH, WORDS = 64, 8, 15008
LEAST = loss_plan.chunks(TOKENS, WIDTH, WORDS, 4, "least")
HOWS = {"recomputed": "least", "kept": "fastest", "waiting": LEAST.bytes}


@pytest.fixture(autouse=True)
def _logits_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has logits wait, as they do for a GPU, where this many bytes are allowed."""
    own = loss_layer.Layer.waiting

    def waiting(layer: Any, hidden: Any, weight: Any) -> Any:
        if layer.memory != LEAST.bytes:
            return own(layer, hidden, weight)
        parts, (tokens, width) = layer.chunks(hidden, weight), hidden.shape
        return dataclasses.replace(parts, waiting=(width, tokens))

    monkeypatch.setattr(loss_layer.Layer, "waiting", waiting)


def _operands() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = ((TOKENS, WIDTH), (WIDTH, WORDS), (WORDS,))
    h, w, b = (reference.normal(rng, shape, F32) for shape in shapes)
    return h, w, b, jnp.asarray(rng.integers(0, WORDS, TOKENS).astype(jnp.int32))


H, W, B, LABELS = _operands()


def _ours(h: Any, w: Any, b: Any, labels: Any = LABELS, **how: Any) -> Any:
    return linear_cross_entropy(h, w, labels, bias=b, z_loss=0.01, **how)


def _stock(h: Any, w: Any, b: Any, labels: Any = LABELS) -> Any:
    z = h @ w + b[None]
    picked = jnp.take_along_axis(z, labels[..., None], -1)[..., 0]
    lse = jax.nn.logsumexp(z, axis=-1)
    return (lse - picked + 0.01 * lse**2).mean()


def _check(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        largest = float(jnp.max(jnp.abs(y)))
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=tolerance * largest)


def test_the_statistics_of_devices_do_not_overflow():
    """Exponents of these do: 1000 is far beyond what float32 has an exp of."""
    log_sums = jnp.array([[1000.0, -1000.0, -jnp.inf, 3.0], [999.0, -1001.0, -jnp.inf, -jnp.inf]])
    picked = jnp.arange(8.0).reshape(2, 4)
    run = jax.vmap(lambda x, y: loss_chunks.over_words([x, y], "words"), axis_name="words")
    found, sums = run(log_sums, picked)
    for own in found:
        np.testing.assert_allclose(own, jax.nn.logsumexp(log_sums, axis=0), rtol=1e-6)
    np.testing.assert_array_equal(sums[0], picked.sum(0))


def test_the_sizes_of_these_tests_have_several_chunks():
    assert (LEAST.count, LEAST.first, LEAST.products) == (3, 2720, 4)
    assert not LEAST.kept


def _every(f: Any) -> Any:
    return jax.value_and_grad(f, (0, 1, 2))


def _second(f: Any) -> Any:
    def moved(*x: Any) -> Any:
        return sum(jnp.sum(jnp.sin(y)) for y in jax.grad(f, (0, 1, 2))(*x))

    return jax.grad(moved, (0, 1, 2))


def _changes(x: Any) -> Any:
    return tuple(map(jnp.cos, x))


TRANSFORMED: dict[str, Callable[[Any], Any]] = {
    "grad": _every,
    "remat": lambda f: _every(jax.checkpoint(f)),
    "jvp": lambda f: lambda *x: jax.jvp(f, x, _changes(x)),
    "jvp of grad": lambda f: lambda *x: jax.jvp(jax.grad(f, (0, 1, 2)), x, _changes(x)),
    "grad of grad": _second,
    "grad of jvp": lambda f: jax.grad(lambda *x: jax.jvp(f, x, _changes(x))[1], (0, 1, 2)),
    "grad of a scaled loss": lambda f: _every(lambda *x: 1024 * f(*x)),
}


@functools.cache
def _of_stock(transformed: Any) -> Any:
    return jax.jit(transformed(_stock))(H, W, B)


@pytest.mark.each_value
@pytest.mark.parametrize("memory", HOWS.values(), ids=HOWS)
@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_derivatives_of_both_modes_and_orders(transformed, memory):
    found = jax.jit(transformed(functools.partial(_ours, memory=memory)))(H, W, B)
    _check(found, _of_stock(transformed), 1e-4)


@pytest.mark.parametrize("axes", [(0, None, None, 0), (0, 0, None, 0), (None, None, 0, None)])
@pytest.mark.parametrize("inner", [False, True])
def test_vmap(axes: Any, inner: bool) -> None:
    several = [
        x if axis is None else jnp.stack([x, x[::-1]])
        for x, axis in zip((H, W, B, LABELS), axes, strict=True)
    ]
    ours = functools.partial(_ours, memory="least")

    def mapped(f: Any) -> Any:
        if inner:
            return jax.vmap(jax.grad(f, (0, 1, 2)), axes)
        return jax.grad(lambda *x: jax.vmap(f, axes)(*x, several[3]).sum(), (0, 1, 2))

    given = several if inner else several[:3]
    _check(jax.jit(mapped(ours))(*given), jax.jit(mapped(_stock))(*given))


def test_tokens_that_vmap_adds_share_the_products_of_a_weight():
    several = jnp.stack([H, H + 1])

    def loss(h: Any, w: Any) -> Any:
        one = functools.partial(_ours, memory="fastest")
        return jax.vmap(one, (0, None, None))(h, w, B).sum()

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(several, W))
    shapes = re.findall(r":f32\[([\d,]+)\] = pallas_gemm\[", text)
    assert sorted(shapes) == sorted([f"{2 * TOKENS},{WIDTH}", f"{WIDTH},{WORDS}"])


def test_scan_with_accumulated_gradients():
    h, labels = H.reshape(4, -1, WIDTH), LABELS.reshape(4, -1)

    def summed(f: Any) -> Any:
        def step(total: Any, own: Any) -> Any:
            new = jax.value_and_grad(lambda w, b: f(own[0], w, b, own[1]), (0, 1))(W, B)
            return jax.tree.map(jnp.add, total, new), None

        zeros = (jnp.zeros(()), (jnp.zeros_like(W), jnp.zeros_like(B)))
        return jax.jit(lambda: jax.lax.scan(step, zeros, (h, labels))[0])()

    _check(summed(functools.partial(_ours, memory="least")), summed(_stock))


def test_export_with_a_size_that_is_a_symbol():
    (tokens,) = jax.export.symbolic_shape("tokens")
    shapes = [jax.ShapeDtypeStruct((tokens, WIDTH), F32), W, B]
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def both(h: Any, w: Any, b: Any, labels: Any) -> Any:
        return _every(functools.partial(_ours, labels=labels))(h, w, b)

    exported = jax.export.export(jax.jit(both), platforms=["cpu", "cuda"])(*shapes, labels)
    again = jax.export.deserialize(exported.serialize())
    _check(again.call(H, W, B, LABELS), _wanted())


SPLIT: dict[str, tuple[P, ...]] = {
    "tokens": (P("x"), P(), P(), P("x")),
    "words": (P(), P(None, "y"), P("y"), P()),
    "tokens and words": (P("x"), P(None, "y"), P("y"), P("x")),
    "hidden": (P("x", "y"), P("y"), P(), P("x")),
}


@functools.cache
def _wanted() -> Any:
    return jax.jit(_every(_stock))(H, W, B)


PLACED = {
    "specs": tuple(SPLIT),
    "memory": tuple(HOWS),
    "kind": (AxisType.Auto, AxisType.Explicit),
}


@pytest.mark.parametrize("case", covering.pairs(PLACED, bool, 100), ids=str)
def test_on_a_mesh(case: covering.Case) -> None:
    specs, memory, kind = SPLIT[case["specs"]], HOWS[case["memory"]], case["kind"]
    mesh = meshes.make_mesh(kind)
    with jax.set_mesh(mesh):
        h, w, b, labels = (
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip((H, W, B, LABELS), specs, strict=True)
        )
        ours = functools.partial(_ours, labels=labels, memory=memory)
        compiled = jax.jit(_every(ours)).lower(h, w, b).compile()
        found = jax.device_get(compiled(h, w, b))
    _check(found, _wanted())
    if kind == AxisType.Auto and specs is not SPLIT["hidden"]:
        # Nobody gathers the weight or logits.
        assert set(meshes.sent_in(compiled.as_text())) <= {"all-reduce"}


@pytest.mark.parametrize("memory", HOWS.values(), ids=HOWS)
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_words_are_split_in_shard_map(inner: bool, check_vma: bool, memory: Any) -> None:
    specs = SPLIT["tokens and words"]

    def own(h: Any, w: Any, b: Any, labels: Any) -> Any:
        loss = _ours(h, w, b, labels, axis_name="y", memory=memory)
        return jax.lax.pmean(loss, "x")

    run = functools.partial(jax.shard_map, mesh=meshes.make_mesh(), in_specs=specs)
    if inner and not check_vma:
        pytest.skip("without types of what varies, a gradient inside is that of one device")
    if inner:
        spread: dict[str, Any] = {"out_specs": (P(), specs[:3]), "check_vma": check_vma}
        program = run(
            lambda h, w, b, x: _every(functools.partial(own, labels=x))(h, w, b), **spread
        )
    else:
        whole = run(own, out_specs=P(), check_vma=check_vma)

        def program(h: Any, w: Any, b: Any, labels: Any) -> Any:
            return _every(lambda h, w, b: whole(h, w, b, labels))(h, w, b)

    compiled = jax.jit(program).lower(H, W, B, LABELS).compile()
    _check(compiled(H, W, B, LABELS), _wanted())
    # Nobody gathers the weight or logits.
    assert "all-gather" not in meshes.sent_in(compiled.as_text())


def test_labels_count_all_words_where_words_are_split():
    specs = SPLIT["words"]
    odd = LABELS.at[:4].set(jnp.array([-1, -WORDS, WORDS, -WORDS - 1]))

    def own(h: Any, w: Any, b: Any, labels: Any) -> Any:
        return _ours(h, w, b, labels, axis_name="y", reduction="none")

    run = jax.shard_map(own, mesh=meshes.make_mesh(), in_specs=specs, out_specs=P())
    found = jax.jit(run)(H, W, B, odd)
    np.testing.assert_allclose(found, _ours(H, W, B, odd, reduction="none"), rtol=1e-5)
    assert np.isnan(found[2:4]).all()


def test_words_that_devices_cannot_share_are_padded_without_a_change():
    def own(h: Any, w: Any, b: Any, labels: Any) -> Any:
        return _ours(h, w, b, labels, axis_name="y")

    run = jax.shard_map(own, mesh=meshes.make_mesh(), in_specs=SPLIT["words"], out_specs=P())
    few = WORDS - 1
    h, w, b, labels = H, W[:, :few], B[:few], LABELS % few
    with pytest.raises(ValueError, match="evenly divisible"):
        run(h, w, b, labels)

    def padded(h: Any, w: Any, b: Any) -> Any:
        w = jnp.pad(w, ((0, 0), (0, 1)))
        return run(h, w, jnp.pad(b, (0, 1), constant_values=-jnp.inf), labels)

    expected = jax.jit(_every(functools.partial(_stock, labels=labels)))(h, w, b)
    _check(jax.jit(_every(padded))(h, w, b), expected)


def test_a_mesh_that_is_manual_along_some_axes_only():
    run = jax.shard_map(
        lambda *x: jax.lax.pmean(_ours(*x, memory="least"), "x"),
        mesh=meshes.make_mesh(),
        in_specs=SPLIT["tokens"],
        out_specs=P(),
        axis_names={"x"},
    )
    found = jax.jit(_every(lambda *x: run(*x, LABELS)))(H, W, B)
    _check(found, _wanted())


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in (H, W, B)]
        found = jax.jit(_every(functools.partial(_ours, memory="least")))(*wide)
        expected = jax.jit(_every(_stock))(*wide)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert x.dtype == jnp.float64
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-15)


def _compiled(memory: Any, dtype: Any, *, gradients: bool = True) -> jax.stages.Compiled:
    tokens, width, words = 512, 32, 40_000
    shapes = (((tokens, width), dtype), ((width, words), dtype), ((tokens,), jnp.int32))
    loss = functools.partial(linear_cross_entropy, memory=memory)
    run = jax.value_and_grad(loss, (0, 1)) if gradients else loss
    return jax.jit(run).lower(*(jax.ShapeDtypeStruct(*own) for own in shapes)).compile()


def _temporary(compiled: jax.stages.Compiled) -> int:
    found: Any = compiled.memory_analysis()
    return found.temp_size_in_bytes


def test_the_least_memory_is_a_chunks_and_more_is_what_was_allowed():
    logits = 512 * 40_000 * 4
    least, usual, most = (
        loss_plan.chunks(512, 32, 40_000, 4, memory) for memory in ("least", None, "fastest")
    )
    assert least.bytes < usual.bytes < most.bytes == logits
    # Without a kernel XLA has logits of a chunk beside their slopes.
    for memory, plan in (("least", least), (None, usual)):
        found = _temporary(_compiled(memory, F32))
        assert found < 3 * plan.bytes < logits, (found, plan)
    assert _temporary(_compiled(None, F32, gradients=False)) < 2 * usual.bytes
    # Here XLA has the logits in float32 beside those that are kept, as it has no kernel.
    assert _temporary(_compiled("fastest", F32)) < 2.1 * logits


@pytest.mark.parametrize("memory", [None, "least"])
def test_no_array_has_all_logits(memory):
    text = _compiled(memory, BF16).as_text()
    assert text is not None
    assert not re.search(r"\[512,40000\]|\[40000,512\]", text)


@pytest.mark.parametrize(
    ("tokens", "width", "words", "memory", "each", "products"),
    [
        (4096, 4096, 128256, "least", 6144, 4),
        (4096, 4096, 128256, None, 8192, 4),
        (4096, 4096, 128256, "fastest", 128256, 3),
        (4096, 4096, 128256, 4096 * 128256 * 2, 128256, 3),
        (4096, 4096, 128256, 4096 * 128256 * 2 - 1, 55296, 4),
        # So few tokens that all logits are less than what a chunk takes.
        (16, 4096, 128256, "least", 128256, 3),
        (16, 4096, 128256, None, 128256, 3),
    ],
)
def test_the_plan(
    tokens: int, width: int, words: int, memory: Any, each: int, products: int
) -> None:
    found = loss_plan.chunks(tokens, width, words, 2, memory)
    assert (found.each, found.products) == (each, products)
    assert found.first + (found.count - 1) * found.each == words
    assert 0 < found.first <= found.each
    if isinstance(memory, int):
        assert found.bytes <= memory


def _forward(words: int, platform: str) -> str:
    shapes = (((256, 256), BF16), ((256, words), BF16), ((256,), jnp.int32))
    operands = [jax.ShapeDtypeStruct(*own) for own in shapes]
    with target("h200"):
        traced = jax.jit(linear_cross_entropy).trace(*operands)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.usefixtures("empty_kernels")
def test_statistics_are_one_kernel_on_a_gpu_and_chunks_elsewhere():
    kernel, loop = "@mosaic_gpu_v2(", "stablehlo.while"
    text = _forward(40_064, "cuda")
    assert (text.count(kernel), text.count(loop)) == (1, 0)
    text = _forward(40_064, "cpu")
    assert (text.count(kernel), text.count(loop)) == (0, 1)


def test_an_axis_splits_tokens_or_words_into_parts_of_one_size():
    mesh = AbstractMesh((4, 2), ("x", "y"))

    def shared_out(tokens: int, words: int, **placed: tuple[str, ...]) -> Any:
        return loss_partition._shared_out(mesh, {"t": tokens, "w": words}, placed)

    assert shared_out(64, 128, t=("x",), w=("y",)) == {"t": ("x",), "w": ("y",)}
    assert shared_out(64, 128, t=("x", "y"), w=()) == {"t": ("x", "y"), "w": ()}
    # The larger has it.
    assert shared_out(64, 128, t=("x",), w=("x", "y")) == {"t": (), "w": ("x", "y")}
    assert shared_out(256, 128, t=("x",), w=("x", "y")) == {"t": ("x",), "w": ("y",)}
    # 4 do not divide 66, and 8 do not divide 68.
    assert shared_out(66, 128, t=("x", "y"), w=()) == {"t": ("y",), "w": ()}
    assert shared_out(68, 128, t=("x", "y"), w=()) == {"t": ("x",), "w": ()}
