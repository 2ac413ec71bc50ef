"""Products on a mesh: each device computes its part, and nothing large is gathered."""

import contextlib
import functools
import math
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import pallas_gemm
from pallas_gemm import (
    dot_general,
    explain,
    explain_on_mesh,
    gated_gemm,
    gemm,
    projections,
    reduce_in,
    target,
)
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.op.mesh import partition
from pallas_gemm.op.mesh.parts import part_p
from schedules import build, split_k
from tests import meshes, reference

M, N, K = 16, 32, 64


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    """A mesh whose arrays are split as XLA finds best."""
    return meshes.make_mesh()


@pytest.fixture(scope="module")
def explicit() -> Mesh:
    """A mesh whose arrays are split as their types say."""
    return meshes.make_mesh(AxisType.Explicit)


@contextlib.contextmanager
def _parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[tuple[int, ...]]]]:
    """Collects the shapes of the operands of every product that one device computes."""
    found: list[list[tuple[int, ...]]] = []

    def watch(multiply: Any) -> Any:
        def spy(share: Any, call: Any, *operands: Any) -> Any:
            found.append([x.shape for x in operands])
            return multiply(share, call, *operands)

        return spy

    with monkeypatch.context() as patch:
        for name in ("_multiply", "_scattered"):
            patch.setattr(partition._Share, name, watch(getattr(partition._Share, name)))
        yield found


def _integers(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return reference.integers(np.random.default_rng(seed), shape, dtype)


def _assert_same(ours: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(reference.wide(x), reference.wide(y))


REDUCED = {"all-reduce": 1}


@pytest.mark.parametrize(
    ("a_spec", "b_spec", "out", "parts", "sent"),
    [
        ((None, None), (None, None), None, (16, 64, 32), {}),
        (("x", None), (None, None), None, (8, 64, 32), {}),
        ((None, None), (None, "y"), None, (16, 64, 8), {}),
        (("x", None), (None, "y"), None, (8, 64, 8), {}),
        ((("x", "y"), None), (None, None), None, (2, 64, 32), {}),
        ((None, "y"), ("y", None), None, (16, 16, 32), REDUCED),
        (("x", "y"), ("y", None), None, (8, 16, 32), REDUCED),
        ((None, "x"), ("x", "y"), None, (16, 32, 8), REDUCED),
        ((None, ("x", "y")), (("x", "y"), None), None, (16, 8, 32), REDUCED),
        # Reduced and split again in one step.
        (("x", "y"), ("y", None), ("x", "y"), (8, 16, 32), {"reduce-scatter": 1}),
        (("x", "y"), ("y", None), (("x", "y"), None), (8, 16, 32), {"reduce-scatter": 1}),
        (
            (None, ("x", "y")),
            (("x", "y"), None),
            (("x", "y"), None),
            (16, 8, 32),
            {"reduce-scatter": 1},
        ),
        (
            (None, ("x", "y")),
            (("x", "y"), None),
            ("x", "y"),
            (16, 8, 32),
            {"reduce-scatter": 2},
        ),
        # One operand is whole along k, and each device takes what it needs of it.
        ((None, "y"), (None, None), None, (16, 16, 32), REDUCED),
        # An axis cannot split rows and columns: the smaller operand is gathered.
        (("x", None), (None, "x"), (None, "x"), (16, 64, 16), {"all-gather": 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["NN", "TT"])
def test_parts(
    mesh: Mesh,
    monkeypatch: pytest.MonkeyPatch,
    a_spec: Any,
    b_spec: Any,
    out: Any,
    parts: tuple[int, int, int],
    sent: dict[str, int],
    layout: str,
) -> None:
    flip = layout == "TT"
    shapes, specs = ((M, K), (K, N)), (a_spec, b_spec)
    if flip:
        shapes, specs = ((K, M), (N, K)), (a_spec[::-1], b_spec[::-1])
    a, b = (
        meshes.place(mesh, _integers(*shape, seed=i), *spec)
        for i, (shape, spec) in enumerate(zip(shapes, specs, strict=True))
    )
    product = functools.partial(gemm, transpose_a=flip, transpose_b=flip)
    goal = None if out is None else NamedSharding(mesh, PartitionSpec(*out))
    with _parts(monkeypatch) as found:
        result, counted = meshes.run(product, a, b, out=goal)
    m, k, n = parts
    assert found == [[(k, m) if flip else (m, k), (n, k) if flip else (k, n)]]
    assert counted == sent
    _assert_same(result, (a.T if flip else a) @ (b.T if flip else b))


EPILOGUES = [
    {"bias": True, "activation": "relu"},
    {"bias": True, "activation": "gelu", "residual": True, "beta": 2.0, "alpha": 0.5},
]


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.parametrize(
    ("a_spec", "b_spec", "out_spec", "sent"),
    [
        (("x", None), (None, "y"), ("x", "y"), {}),
        (("x", "y"), ("y", None), ("x", None), REDUCED),
        (("x", "y"), ("y", None), ("x", "y"), {"reduce-scatter": 1}),
    ],
    ids=["columns", "contracted", "scattered"],
)
def test_the_epilogue_follows_the_sum(
    mesh: Mesh, epilogue: dict[str, Any], a_spec: Any, b_spec: Any, out_spec: Any, sent: Any
) -> None:
    rng = np.random.default_rng(0)
    dtype = jnp.bfloat16
    a = meshes.place(mesh, reference.normal(rng, (128, K), dtype), *a_spec)
    b = meshes.place(mesh, reference.normal(rng, (K, 128), dtype), *b_spec)
    options = dict(epilogue)
    given: dict[str, Any] = {}
    if options.pop("bias", False):
        given["bias"] = meshes.place(mesh, reference.normal(rng, (128,), jnp.float32), out_spec[1])
    if options.pop("residual", False):
        given["residual"] = meshes.place(mesh, reference.normal(rng, (128, 128), dtype), *out_spec)

    def product(a: Any, b: Any, given: Any) -> jax.Array:
        return gemm(a, b, **given, **options)

    out = NamedSharding(mesh, PartitionSpec(*out_spec))
    result, counted = meshes.run(product, a, b, given, out=out)
    assert counted == sent
    exact = reference.Formula(**options)(a, b, **given)
    whole = gemm(*(jnp.asarray(np.asarray(x)) for x in (a, b)), **options, **jax.device_get(given))
    reference.assert_as_good_as_xla(result, whole, exact)


@pytest.mark.parametrize("a_spec", [("x", None), ("x", "y")], ids=["columns", "contracted"])
def test_gated_products(mesh: Mesh, a_spec: Any) -> None:
    contracted = a_spec[1] is not None
    w_spec = ("y", None) if contracted else (None, "y")
    a = meshes.place(mesh, _integers(M, K), *a_spec)
    gate, up = (meshes.place(mesh, _integers(K, N, seed=i), *w_spec) for i in (1, 2))
    result, counted = meshes.run(functools.partial(gated_gemm, activation="relu"), a, gate, up)
    # XLA may send both sums in one message.
    assert set(counted) == ({"all-reduce"} if contracted else set())
    _assert_same(result, jax.nn.relu(a @ gate) * (a @ up))


def test_sums_of_integers(mesh: Mesh) -> None:
    a = meshes.place(mesh, _integers(M, K, dtype=jnp.int8), None, "y")
    b = meshes.place(mesh, _integers(K, N, seed=1, dtype=jnp.int8), "y", None)
    product = functools.partial(gemm, preferred_element_type=jnp.int32)
    result, counted = meshes.run(product, a, b)
    assert counted == REDUCED
    np.testing.assert_array_equal(result, np.asarray(a, np.int32) @ np.asarray(b, np.int32))


def test_the_type_in_which_sums_travel(mesh: Mesh) -> None:
    rng = np.random.default_rng(0)
    a = meshes.place(mesh, reference.normal(rng, (M, K), jnp.bfloat16), None, "y")
    b = meshes.place(mesh, reference.normal(rng, (K, N), jnp.bfloat16), "y", None)

    def traveling() -> set[str]:
        found = set()
        bind = partition.lax.psum

        def spy(x: Any, axes: Any) -> Any:
            found.add(str(x.dtype))
            return bind(x, axes)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(partition.lax, "psum", spy)
            jax.jit(functools.partial(gemm)).lower(a, b).compile()
        return found

    assert traveling() == {"bfloat16"}
    with pallas_gemm.reduce_in("f32"):
        assert traveling() == {"float32"}
    for none in (jnp.int8, "int9"):
        with pytest.raises(ValueError, match="must be a float"), pallas_gemm.reduce_in(none):
            pass


@pytest.mark.parametrize("size", [30, 33])
def test_uneven_parts_are_padded_and_the_padding_counts_for_nothing(mesh: Mesh, size: int) -> None:
    a, b = _integers(size, size), _integers(size, size, seed=1)
    # What lies beyond the end of the last part is whatever was there before.
    a = a.at[0, 0].set(jnp.inf)

    def product(a: jax.Array, b: jax.Array, spec: Any) -> jax.Array:
        split = NamedSharding(mesh, PartitionSpec(*spec))
        a = jax.lax.with_sharding_constraint(a, split)
        b = jax.lax.with_sharding_constraint(b, NamedSharding(mesh, PartitionSpec(*spec[::-1])))
        return gemm(a, b)

    for spec in (("x", None), (None, "y")):
        result = jax.jit(product, static_argnums=2)(a, b, spec)
        np.testing.assert_array_equal(result, a @ b)


ROWS, COLUMNS, BOTH = ("x", None), (None, "x"), ("x", "y")
EVERY_ROW, EVERY_COLUMN = (("x", "y"), None), (None, ("x", "y"))


@pytest.mark.parametrize(
    ("a_spec", "b_spec", "out_spec"),
    [
        # How the result is split anew.
        ((None, None), ROWS, EVERY_COLUMN),
        ((None, None), BOTH, EVERY_ROW),
        # How sums are scattered.
        (COLUMNS, ROWS, EVERY_ROW),
        (COLUMNS, ROWS, EVERY_COLUMN),
        (COLUMNS, BOTH, COLUMNS),
        # How each operand is.
        (EVERY_ROW, BOTH, (None, None)),
        (BOTH, EVERY_COLUMN, ROWS),
        (EVERY_COLUMN, EVERY_ROW, BOTH),
        (EVERY_COLUMN, EVERY_COLUMN, EVERY_COLUMN),
    ],
    ids=str,
)
def test_sizes_that_each_axis_divides_but_not_both(a_spec: Any, b_spec: Any, out_spec: Any) -> None:
    """Six rows in four parts: three, or two with a last part that is empty."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    a, b = _integers(6, 6), _integers(6, 6, seed=1)

    def split(x: jax.Array, spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))

    @jax.jit
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return split(gemm(split(a, a_spec), split(b, b_spec)), out_spec)

    np.testing.assert_array_equal(product(a, b), a @ b)


def test_a_sequence_that_is_split_twice(mesh: Mesh) -> None:
    x = meshes.place(mesh, _integers(4, 8, K), "x", "y", None)
    w = meshes.place(mesh, _integers(K, N, seed=1), None, None)
    for f in (gemm, jax.vmap(gemm, (0, None)), jax.vmap(jax.vmap(gemm, (0, None)), (0, None))):
        result, counted = meshes.run(f, x, w)
        assert counted == {}
        assert result.sharding.spec[:2] == ("x", "y")
        _assert_same(result, x @ w)


@pytest.mark.parametrize("transpose_b", [False, True])
def test_gradients_with_a_sequence_that_is_split_twice(mesh: Mesh, transpose_b: bool) -> None:
    x = meshes.place(mesh, _integers(4, 8, K), "x", "y", None)
    w = meshes.place(mesh, _integers(*((N, K) if transpose_b else (K, N)), seed=1), None, None)

    def loss(f: Callable[..., Any], x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(f(x, w)))

    def ours(x: jax.Array, w: jax.Array) -> jax.Array:
        return gemm(x, w, activation="relu", transpose_b=transpose_b)

    def stock(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ (w.T if transpose_b else w))

    gradients, counted = meshes.run(jax.grad(functools.partial(loss, ours), (0, 1)), x, w)
    assert counted == REDUCED
    _assert_same(gradients, jax.grad(functools.partial(loss, stock), (0, 1))(x, w))


def test_batches(mesh: Mesh) -> None:
    a = meshes.place(mesh, _integers(4, 8, K), "x", None, "y")
    b = meshes.place(mesh, _integers(4, K, N, seed=1), "x", "y", None)
    result, counted = meshes.run(gemm, a, b)
    assert counted == REDUCED
    _assert_same(result, a @ b)
    result, counted = meshes.run(jax.vmap(gemm), a, b)
    assert counted == REDUCED
    _assert_same(result, a @ b)


def test_heads(mesh: Mesh) -> None:
    numbers = (((2, 3), (0, 1)), ((), ()))
    x = meshes.place(mesh, _integers(4, 8, 4, 16), "x", None, "y", None)
    w = meshes.place(mesh, _integers(4, 16, N, seed=1), "y", None, None)
    result, counted = meshes.run(lambda x, w: dot_general(x, w, numbers), x, w)
    assert counted == REDUCED
    _assert_same(result, jax.lax.dot_general(x, w, numbers))


def test_fewer_heads_than_devices_split_an_axis() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    a = meshes.place(mesh, _integers(8, K), "x", None)
    b = _integers(K, N, seed=1)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        # Four rows for eight devices: a half of the axis splits them.
        return gemm(a.reshape(4, 2, K).sum(1), b)

    result, _ = meshes.run(product, a, b)
    _assert_same(result, a.reshape(4, 2, K).sum(1) @ b)


def _layers(f: Callable[..., Any], x: jax.Array, weights: Any) -> jax.Array:
    def layer(x: jax.Array, pair: Any) -> tuple[jax.Array, None]:
        hidden = jnp.maximum(f(x, pair[0]), 0)
        return x + f(hidden, pair[1]) % 5, None

    return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, weights)[0])


@pytest.mark.parametrize("own", [None, "x"], ids=["replicated", "sharded"])
def test_a_stack_of_layers_sends_no_more_than_jaxs_own(mesh: Mesh, own: str | None) -> None:
    """Data and tensor parallel, under scan, checkpoint and grad; with weights split over both."""
    x = meshes.place(mesh, _integers(M, K), "x", None)
    weights = (
        meshes.place(mesh, _integers(2, K, N, seed=1), None, own, "y"),
        meshes.place(mesh, _integers(2, N, K, seed=2), None, "y", own),
    )
    ours, stock = (
        meshes.run(jax.grad(functools.partial(_layers, f), (0, 1)), x, weights)
        for f in (gemm, jnp.matmul)
    )
    assert ours[1].pop("all-gather", 0) == stock[1].pop("all-gather", 0)
    assert sum(ours[1].values()) <= sum(stock[1].values())
    _assert_same(ours[0], stock[0])


def test_second_order(mesh: Mesh) -> None:
    a = meshes.place(mesh, _integers(8, 16) / 4, "x", None)
    b = meshes.place(mesh, _integers(16, 8, seed=1) / 4, None, "y")

    def second(f: Callable[..., Any]) -> Any:
        gradient = jax.grad(lambda a: jnp.sum(jnp.tanh(f(a, b))))
        return jax.jit(lambda a: jax.jvp(gradient, (a,), (a,))[1])(a)

    np.testing.assert_allclose(second(gemm), second(jnp.matmul), rtol=1e-5, atol=1e-5)


def _per_example(f: Callable[..., Any]) -> Callable[..., Any]:
    gradient = jax.grad(lambda w, x: jnp.sum(jnp.tanh(f(x, w))))
    return lambda x, w: jax.vmap(gradient, (None, 0))(w, x)


def _twice(f: Callable[..., Any]) -> Callable[..., Any]:
    gradient = jax.grad(lambda w, x: jnp.sum(jnp.tanh(f(x, w))))
    return lambda x, w: jax.grad(lambda w: jnp.sum(jnp.square(gradient(w, x))))(w)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("derive", [_per_example, _twice], ids=["per example", "twice"])
def test_derivatives_of_derivatives_and_of_maps(kind: AxisType, derive: Callable[..., Any]) -> None:
    mesh = meshes.make_mesh(kind)
    x = meshes.place(mesh, _integers(4, 2, 8, 16) / 8, "x", None, "y", None)
    w = meshes.place(mesh, _integers(16, 8, seed=1) / 8, None, None)
    ours, stock = (jax.jit(derive(f))(x, w) for f in (gemm, jnp.matmul))
    np.testing.assert_allclose(ours, stock, rtol=1e-4, atol=1e-4)


def test_shardings_that_only_jit_knows(mesh: Mesh) -> None:
    a, b = np.asarray(_integers(M, K)), np.asarray(_integers(K, N, seed=1))
    shardings = tuple(
        NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("x", None), (None, "y"))
    )
    compiled = jax.jit(gemm, in_shardings=shardings).lower(a, b).compile()
    assert meshes.sent_in(compiled.as_text()) == {}
    assert compiled.output_shardings.spec == PartitionSpec("x", "y")


def test_what_several_products_share_is_split_where_only_jit_knows_how(mesh: Mesh) -> None:
    """Examples along one axis, positions along the other: no rows that are merged have both."""
    x = jax.ShapeDtypeStruct((4, 8, K), jnp.float32)
    w = jax.ShapeDtypeStruct((K, N), jnp.float32)
    split = tuple(NamedSharding(mesh, PartitionSpec(*own)) for own in (("x", "y"), (), ()))

    def gated(x: Any, gate: Any, up: Any) -> jax.Array:
        return gated_gemm(x, gate, up, activation="relu")

    def several(x: Any, *weights: Any) -> jax.Array:
        return functools.reduce(jnp.multiply, projections(x, weights))

    def sent(f: Callable[..., Any]) -> dict[str, int]:
        gradient = jax.grad(lambda *operands: jnp.sum(f(*operands)), (0, 1, 2))
        step = jax.jit(gradient, in_shardings=split, out_shardings=split)
        return meshes.sent_in(step.lower(x, w, w).compile().as_text())

    # The sums of both weights' gradients, in one message or two.
    assert set(sent(gated)) == set(sent(several)) == {"all-reduce"}


@pytest.mark.parametrize("entered", [False, True], ids=["outside", "entered"])
def test_explicit_meshes(explicit: Mesh, entered: bool) -> None:
    a = meshes.place(explicit, _integers(M, K), "x", None)
    b = meshes.place(explicit, _integers(K, N, seed=1), None, "y")
    bias = meshes.place(explicit, _integers(N, seed=2), "y")
    left = meshes.place(explicit, _integers(M, K), "x", "y")
    right = meshes.place(explicit, _integers(K, N, seed=1), "y", None)
    x = meshes.place(explicit, _integers(4, 8, K), "x", "y", None)

    def fused(a: Any, b: Any, bias: Any) -> jax.Array:
        return gemm(a, b, bias=bias, activation="relu")

    def to(*spec: Any) -> Callable[..., jax.Array]:
        goal = NamedSharding(explicit, PartitionSpec(*spec))
        return functools.partial(gemm, out_sharding=goal)

    with jax.set_mesh(explicit) if entered else contextlib.nullcontext():
        for f, operands, spec, sent in (
            (fused, (a, b, bias), ("x", "y"), {}),
            (gemm, (x, meshes.place(explicit, b, None, None)), ("x", "y", None), {}),
            (to("x", None), (left, right), ("x", None), REDUCED),
            (to("x", "y"), (left, right), ("x", "y"), {"reduce-scatter": 1}),
        ):
            result, counted = meshes.run(f, *operands)
            assert jax.typeof(result).sharding.spec == PartitionSpec(*spec)
            assert counted == sent
        _assert_same(gemm(a, b), np.asarray(a) @ np.asarray(b))
        # As for JAX's own product, the result has to be told what it is to be.
        with pytest.raises(Exception, match="ambiguous"):
            gemm(left, right)


@pytest.mark.parametrize("entered", [False, True], ids=["outside", "entered"])
def test_gradients_on_explicit_meshes(explicit: Mesh, entered: bool) -> None:
    goal = NamedSharding(explicit, PartitionSpec("x", None))
    x = meshes.place(explicit, _integers(M, K), "x", None)
    w = meshes.place(explicit, _integers(K, N, seed=1), None, "y")
    v = meshes.place(explicit, _integers(N, K, seed=2), "y", None)

    def loss(f: Callable[..., Any], x: Any, w: Any, v: Any) -> jax.Array:
        hidden = jnp.maximum(f(x, w), 0)
        return jnp.sum(f(hidden, v, out_sharding=goal))

    def gradient(f: Callable[..., Any]) -> Any:
        return jax.grad(functools.partial(loss, f), (0, 1, 2))

    with jax.set_mesh(explicit) if entered else contextlib.nullcontext():
        (ours, counted), (stock, _) = (meshes.run(gradient(f), x, w, v) for f in (gemm, jnp.matmul))
    # Of x over y, of both weights over x; XLA may send several in one message.
    assert set(counted) == {"all-reduce"}
    assert [jax.typeof(x).sharding.spec for x in ours] == [
        jax.typeof(x).sharding.spec for x in stock
    ]
    _assert_same(ours, stock)


@pytest.mark.parametrize(
    ("axes", "checked"),
    # JAX wants `check_vma` where only some axes are manual.
    [({"x", "y"}, True), ({"x", "y"}, False), ({"x"}, True)],
    ids=["checked", "unchecked", "some axes"],
)
def test_inside_shard_map(mesh: Mesh, axes: set[str], checked: bool) -> None:
    a = meshes.place(mesh, _integers(M, K), "x", None)
    b = meshes.place(mesh, _integers(K, N, seed=1), None, "y")
    y = "y" if "y" in axes else None

    def loss(f: Callable[..., Any], a: jax.Array, b: jax.Array) -> jax.Array:
        mapped = jax.shard_map(
            f,
            mesh=mesh,
            in_specs=(PartitionSpec("x"), PartitionSpec(None, y)),
            out_specs=PartitionSpec("x", y),
            axis_names=axes,
            check_vma=checked,
        )
        return jnp.sum(jnp.square(mapped(a, b)))

    ours, stock = (
        meshes.run(jax.value_and_grad(functools.partial(loss, f), (0, 1)), a, b)
        for f in (gemm, jnp.matmul)
    )
    assert ours[1] == stock[1]
    _assert_same(ours[0], stock[0])


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize(
    ("shape", "axes", "is_there"),
    [((4, 2), {"x", "y"}, True), ((4, 2), {"x"}, False), ((1, 1), {"x"}, True)],
)
def test_a_kernel_is_in_a_shard_map_where_all_axes_are_manual(
    shape: tuple[int, int], axes: set[str], is_there: bool
) -> None:
    """XLA cannot divide one among the devices of an axis that it is left to, but for one device."""
    mesh = Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), ("x", "y"))
    y = "y" if "y" in axes else None
    specs = PartitionSpec("x"), PartitionSpec(None, y)
    mapped = jax.shard_map(
        gemm, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("x", y), axis_names=axes
    )
    whole = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    with target("h200"):
        lowered = jax.jit(mapped).trace(whole, whole).lower(lowering_platforms=("cuda",))
    assert ("mosaic_gpu" in lowered.as_text()) == is_there


def test_exported_for_several_devices_xla_shares_its_own_product_out(mesh: Mesh) -> None:
    a = meshes.place(mesh, _integers(M, K), "x", None)
    b = meshes.place(mesh, _integers(K, N, seed=1), None, "y")
    exported = jax.export.export(jax.jit(gemm))(a, b)
    loaded = jax.export.deserialize(exported.serialize())
    result, counted = meshes.run(loaded.call, a, b)
    assert counted == {}
    _assert_same(result, a @ b)


def test_meshes_that_do_not_match_are_left_to_xla(mesh: Mesh) -> None:
    other = jax.make_mesh((8,), ("z",), axis_types=(AxisType.Auto,))
    a = meshes.place(mesh, _integers(M, K), "x", None)
    b = meshes.place(other, _integers(K, N, seed=1), None, None)
    text = str(explain(gemm, a, b))
    assert "the operands are on different meshes" in text
    first, second = (Mesh(np.array(jax.devices()[:1]), (name,)) for name in "pq")
    for left, right in ((mesh, other), (first, second)):
        a = meshes.place(left, _integers(M, K))
        b = meshes.place(right, _integers(K, N, seed=1))
        # JAX's own product allows it, so ours does.
        _assert_same(jax.jit(gemm)(a, b), jax.jit(jnp.matmul)(a, b))


def test_a_mesh_of_six_and_devices_out_of_order() -> None:
    a, b = _integers(12, 48), _integers(48, 8, seed=1)
    devices = np.array(jax.devices())
    for order, axes in (
        (devices[:6].reshape(3, 2), "xy"),
        (devices[[3, 1, 4, 0, 5, 7, 2, 6]], "y"),
    ):
        odd = Mesh(order, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
        left = meshes.place(odd, a, None, tuple(axes))
        right = meshes.place(odd, b, tuple(axes), None)
        result, counted = meshes.run(gemm, left, right)
        assert counted == REDUCED
        _assert_same(result, a @ b)


# It is compiled for a CPU, where no kernel has an order.
@pytest.mark.filterwarnings("ignore:schedule=.* has no effect")
@pytest.mark.parametrize("parts", [None, 4])
def test_what_is_named_is_for_one_devices_part(mesh: Mesh, parts: int | None) -> None:
    a = meshes.place(mesh, _integers(1024, 1024, dtype=jnp.bfloat16), "x", None)
    b = meshes.place(mesh, _integers(1024, 1024, seed=1, dtype=jnp.bfloat16), None, "y")

    def product(a: jax.Array, b: jax.Array, rows: int) -> jax.Array:
        order = build("raster", rows=rows, cols=1)
        return gemm(a, b, schedule=split_k(order, 16, parts) if parts else order)

    with pallas_gemm.target("h200"):
        # 512 x 256 for each device, in tiles of 128 x 256.
        jax.jit(product, static_argnums=2).lower(a, b, 4).compile()
        with pytest.raises(Exception, match=r"the mesh splits m along x, n along y.*\(7, 1\)"):
            jax.jit(product, static_argnums=2).lower(a, b, 7).compile()


def test_the_simulator_says_that_it_is_for_one_device(mesh: Mesh) -> None:
    a = meshes.place(mesh, _integers(128, 128, dtype=jnp.bfloat16), "x", None)
    with pytest.raises(ValueError, match=r"interpret.*several"):
        gemm(a, a, implementation="interpret")


def test_explain_says_what_a_mesh_makes_of_it(mesh: Mesh) -> None:
    a = meshes.place(mesh, _integers(M, K), "x", None)
    b = meshes.place(mesh, _integers(K, N, seed=1), None, "y")
    assert "each device's part" in str(explain(gemm, a, b))
    assert "each device's part" not in str(explain(gemm, jnp.ones((4, 4)), jnp.ones((4, 4))))
    abstract = jax.sharding.AbstractMesh((8,), ("x",))
    shape = jax.ShapeDtypeStruct(
        (M, M), jnp.float32, sharding=NamedSharding(abstract, PartitionSpec("x"))
    )
    assert "the mesh is abstract and names no device" in str(explain(gemm, shape, shape))


def test_explain_on_mesh_says_what_a_device_computes(mesh: Mesh) -> None:
    x = meshes.place(mesh, _integers(M, K), "x", None)
    w = meshes.place(mesh, _integers(K, N, seed=1), None, "y")
    v = meshes.place(mesh, _integers(N, K, seed=2), "y", None)
    explained = explain_on_mesh(lambda x, w, v: gemm(gemm(x, w, activation="relu"), v), x, w, v)
    found = [(d.problem.m, d.problem.n, d.problem.k, d.mesh) for d in explained.products]
    part = "one device's part; the mesh splits m along x"
    # Three quarters of 8 x 64 sums, twice: once to add them up, and once more for all.
    sent = "0.00307 MB arrive at each device, 0.00307 MB with XLA's product"
    assert found == [
        (8, 8, K, f"{part}, n along y; nothing is sent"),
        (8, K, 8, f"{part}, k along y; {sent}"),
    ]
    nothing = str(explain_on_mesh(gemm, jnp.ones((4, 4)), jnp.ones((4, 4))))
    assert nothing.startswith("no product that a mesh splits; explain has what each device")


def test_programs_whose_products_differ_are_cached_apart(mesh: Mesh) -> None:
    a = meshes.place(mesh, _integers(M, K), "x", None)
    b = meshes.place(mesh, _integers(K, N, seed=1), None, "y")

    def name(**options: Any) -> set[str]:
        text = jax.jit(lambda a, b: gemm(a, b, **options)).lower(a, b).as_text()
        return {word for word in text.split('"') if len(word) == 64}

    names = [
        name(),
        name(alpha=2),
        name(activation="relu"),
        name(activation="silu"),
        name(activation=lambda x: x * 0.5),
        name(activation=lambda x: x * 0.25),
    ]
    assert all(len(found) == 1 for found in names)
    assert len(frozenset.union(*map(frozenset, names))) == len(names)
    assert name(activation="silu") == names[3]


def test_programs_of_other_configs_orders_and_sums_are_cached_apart(mesh: Mesh) -> None:
    a, b = (
        jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for spec in (PartitionSpec("x", None), PartitionSpec(None, "y"))
    )

    def name(**options: Any) -> set[str]:
        with target("h200"):
            traced = jax.jit(lambda a, b: gemm(a, b, **options)).trace(a, b)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return {word for word in text.split('"') if len(word) == 64}

    config = HopperConfig(tile=(128, 128))
    names = [
        name(),
        name(schedule="hilbert"),
        name(schedule="swizzle:3"),
        name(config=config),
        name(config=config, schedule="hilbert"),
        name(implementation="hopper"),
        name(precision="highest"),
    ]
    with reduce_in(jnp.float32):
        names.append(name())
    assert all(len(found) == 1 for found in names)
    assert len(frozenset.union(*map(frozenset, names))) == len(names)


def test_nothing_is_added_for_a_single_device() -> None:
    text = jax.jit(gemm).lower(jnp.ones((4, 8)), jnp.ones((8, 4))).as_text()
    assert "custom_call" not in text
    assert text.count("stablehlo.") == 1
    assert part_p.name not in str(jax.make_jaxpr(gemm)(jnp.ones((4, 8)), jnp.ones((8, 4))))


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = (pathlib.Path(__file__).parent.parent.parent.parent / "docs" / "parallel.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    printed = capsys.readouterr().out
    # Two of four examples for each half, and a quarter of the columns.
    assert "m=512 n=256 k=512" in printed
    assert "the mesh splits m1 along data, n along model" in printed
    np.testing.assert_array_equal(
        reference.wide(names["z"]).reshape(names["y"].shape), reference.wide(names["y"])
    )
