"""Scales, biases and residuals of every shape: alone, per example, mapped and differentiated."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pallas_gemm
from pallas_gemm import gated_gemm, gemm, projections
from pallas_gemm.api import request
from pallas_gemm.call import DIMENSIONS, Operands, Options
from pallas_gemm.planning.by_xla import xla
from pallas_gemm.problem import Epilogue
from tests import reference

M, N, K, BATCH = 72, 40, 16, 3
SHAPES: Mapping[str, tuple[int, ...]] = {
    "a": (M, K),
    "b": (K, N),
    "alpha": (),
    "beta": (),
    "row_scale": (M,),
    "col_scale": (N,),
    "bias": (N,),
    "residual": (M, N),
}
IMPLEMENTATIONS = (
    pytest.param(None, id="default"),
    pytest.param("hopper", id="hopper", marks=pytest.mark.gpu("hopper")),
)


def _drawn(dtype: Any = jnp.float32, front: tuple[int, ...] = ()) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    found = {
        name: reference.integers(rng, (*front, *shape), dtype if name in "ab" else jnp.float32)
        for name, shape in SHAPES.items()
    }
    # Nothing would be tested of what is multiplied by zero.
    return found | {name: jnp.where(found[name] == 0, 3, found[name]) for name in ("alpha", "beta")}


@jax.jit
def _formula(x: Mapping[str, Any]) -> jax.Array:
    """What `gemm` is to compute, of operands that are alone or all have a batch in front."""
    value = jnp.matmul(x["a"].astype(jnp.float32), x["b"].astype(jnp.float32))
    scales = x["row_scale"][..., :, None] * x["col_scale"][..., None, :]
    value = x["alpha"][..., None, None] * scales * value + x["bias"][..., None, :]
    return jax.nn.relu(value) + x["beta"][..., None, None] * x["residual"]


def _gemm(
    x: Mapping[str, Any], implementation: str | None = None, out_sharding: Any = None
) -> jax.Array:
    return gemm(
        **x,
        activation="relu",
        preferred_element_type=jnp.float32,
        implementation=implementation,
        out_sharding=out_sharding,
    )


def _check(ours: jax.Array, expected: Any) -> None:
    reference.assert_exact(ours, reference.wide(expected))


def _product(a: jax.Array, b: jax.Array) -> np.ndarray:
    return reference.wide(a) @ reference.wide(b)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn], ids=str)
def test_what_only_the_running_program_knows(dtype: Any, implementation: str | None) -> None:
    x = _drawn(dtype)
    traced = []

    @jax.jit
    def run(x: Any) -> jax.Array:
        traced.append(x)
        return _gemm(x, implementation)

    _check(run(x), _formula(x))
    # Other numbers are no other program.
    _check(run(x | {"alpha": -x["alpha"]}), _formula(x | {"alpha": -x["alpha"]}))
    assert len(traced) == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shared", [(), ("b",), ("a", "row_scale", "residual"), ("b", "bias")])
def test_each_product_of_a_batch_has_its_own(
    shared: tuple[str, ...], implementation: str | None
) -> None:
    x = _drawn(jnp.bfloat16, (BATCH,))
    x |= {name: x[name][0] for name in shared}
    expected = _formula({name: v[None] if name in shared else v for name, v in x.items()})
    _check(_gemm(x, implementation), expected)
    axes = ({name: None if name in shared else 0 for name in x},)
    _check(jax.vmap(lambda x: _gemm(x, implementation), axes)(x), expected)


@pytest.mark.parametrize("shared", [("alpha", "bias"), ("beta", "row_scale"), ()], ids=str)
def test_a_simulated_batch_reads_its_own_numbers_or_those_of_all(shared: tuple[str, ...]) -> None:
    x = _drawn(jnp.bfloat16, (BATCH,))
    x |= {name: x[name][0] for name in shared}
    expected = _formula({name: v[None] if name in shared else v for name, v in x.items()})
    _check(_gemm(x, "interpret"), expected)


@pytest.mark.parametrize("shared", [("b", "bias", "col_scale"), ("b", "alpha", "bias"), ("a",), ()])
def test_a_kernel_gets_what_belongs_to_each_product(shared: tuple[str, ...]) -> None:
    x = _drawn(jnp.float32, (BATCH,))
    x |= {name: x[name][0] for name in shared}
    epilogue = Epilogue(activation="relu", alpha=x["alpha"], beta=x["beta"])  # type: ignore[arg-type]
    given = {name: v for name, v in x.items() if name not in ("alpha", "beta")}
    asked = request.of_gemm(Operands(**given), epilogue, Options())
    matrices = asked.merged
    multiply = matrices.around(functools.partial(xla.product, matrices.call))
    expected = _formula({name: v[None] if name in shared else v for name, v in x.items()})
    _check(multiply(*asked.operands.present()), expected)


def test_residuals_broadcast_as_in_numpy() -> None:
    x, rng = _drawn(jnp.float32, (BATCH,)), np.random.default_rng(1)
    shapes = ((), (N,), (1, N), (M, 1), (M, N), (1, M, N), (BATCH, 1, 1))
    residuals = [reference.integers(rng, shape, jnp.float32) for shape in shapes]

    @jax.jit
    def added(b: jax.Array) -> list[jax.Array]:
        return [gemm(x["a"], b, residual=residual, beta=0.5) for residual in residuals]

    for b in (x["b"], x["b"][0]):
        for result, residual in zip(added(b), residuals, strict=True):
            _check(result, _product(x["a"], b) + 0.5 * reference.wide(residual))


def test_biases_are_added_to_all_rows() -> None:
    x, rng = _drawn(jnp.float32, (BATCH,)), np.random.default_rng(1)
    shapes = ((), (1, N), (BATCH, N), (BATCH, 1, N), (1, 1, N))
    biases = [reference.integers(rng, shape, jnp.float32) for shape in shapes]
    results = jax.jit(lambda: [gemm(x["a"], x["b"], bias=bias) for bias in biases])()
    for result, bias in zip(results, biases, strict=True):
        own = bias if bias.shape != (BATCH, N) else bias[:, None]
        _check(result, _product(x["a"], x["b"]) + reference.wide(own))


@pytest.mark.parametrize("moving", [("a",), ("alpha", "row_scale"), ("b", "col_scale", "beta"), ()])
def test_derivatives_in_both_modes(moving: tuple[str, ...]) -> None:
    x = _drawn()
    own = {name: x[name] for name in moving or x}

    def ours(own: Any) -> jax.Array:
        return jnp.sum(jnp.square(_gemm(x | own)))

    def exact(own: Any) -> jax.Array:
        return jnp.sum(jnp.square(_formula(x | own)))

    @jax.jit
    def both(own: Any) -> Any:
        return [(jax.grad(f)(own), jax.jvp(f, (own,), (own,))) for f in (ours, exact)]

    jax.tree.map(np.testing.assert_array_equal, *both(own))


def test_gradients_of_scales_take_no_second_product() -> None:
    x = _drawn()

    def loss(own: Any) -> jax.Array:
        return jnp.sum(_gemm(x | own))

    own = {name: x[name] for name in SCALES}
    text = str(jax.make_jaxpr(jax.grad(loss))(own))
    assert text.count("pallas_gemm[") + text.count("pallas_gemm_fused[") == 1


def test_gradients_in_a_scan_with_checkpoint() -> None:
    x = _drawn(front=(BATCH,))

    def total(run: Any) -> Any:
        def step(carry: jax.Array, own: Any) -> Any:
            return carry + jnp.sum(jax.checkpoint(run)(own)), None

        return jax.jit(jax.grad(lambda x: jax.lax.scan(step, jnp.float32(0), x)[0]))(x)

    jax.tree.map(np.testing.assert_array_equal, total(_gemm), total(_formula))


MESHES: dict[str, tuple[str | None, ...]] = {
    # Which axis splits the batch, the rows, the columns, and what is contracted.
    "rows and columns": (None, "x", "y", None),
    "contracted": (None, None, None, "x"),
    "batch and rows": ("x", "y", None, None),
}


@pytest.mark.parametrize("kind", ["auto", "explicit", "shard_map"])
@pytest.mark.parametrize("split", MESHES)
def test_on_a_mesh(split: str, kind: str) -> None:
    batch, rows, columns, deep = MESHES[split]
    # Each product of a batch has its own of everything but these.
    shared = ("b", "col_scale") if batch else tuple(SHAPES)
    x = _drawn(front=(BATCH - 1,))
    x |= {name: x[name][0] for name in shared}
    axes = {"m": rows, "n": columns, "k": deep}
    specs = {
        name: PartitionSpec(*([] if name in shared else [batch]), *(axes[d] for d in own))
        for name, own in DIMENSIONS.items()
        if name in x
    }
    lead = () if set(shared) == set(SHAPES) else (batch,)
    result = PartitionSpec(*lead, rows, columns)

    def local(x: Any) -> jax.Array:
        if deep is None:
            return _gemm(x)
        # A sum of parts has what scales it, and nothing else.
        part = gemm(*(x[name] for name in "ab"), **{name: x[name] for name in SCALES})
        return jax.lax.psum(part, deep)

    def run(x: Any) -> jax.Array:
        if kind == "shard_map":
            return jax.shard_map(local, in_specs=(specs,), out_specs=result)(x)
        return _gemm(x, out_sharding=result if kind == "explicit" else None)

    def formula(x: Any) -> jax.Array:
        whole = {name: x[name][None] if name in shared and lead else x[name] for name in x}
        if deep is None or kind != "shard_map":
            return _formula(whole)
        scales = x["alpha"] * x["row_scale"][:, None] * x["col_scale"][None, :]
        return scales * jnp.matmul(x["a"], x["b"])

    kinds = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    expected = jax.jit(jax.value_and_grad(lambda x: jnp.sum(formula(x))))(x)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kinds, kinds))
    with jax.set_mesh(mesh):
        placed = {
            name: jax.device_put(v, NamedSharding(mesh, specs[name])) for name, v in x.items()
        }
        found = jax.jit(jax.value_and_grad(lambda x: jnp.sum(run(x))))(placed)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


SCALES = ("alpha", "row_scale", "col_scale")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gated_products_have_everything(implementation: str | None) -> None:
    x = _drawn(jnp.bfloat16)
    other = {name: v + 1 for name, v in x.items()}
    result = gated_gemm(
        x["a"],
        x["b"].T,
        other["b"].T,
        transpose_b=True,
        activation="relu",
        gate_bias=x["bias"],
        up_bias=other["bias"],
        alpha=x["alpha"],
        row_scale=x["row_scale"],
        gate_scale=x["col_scale"],
        up_scale=other["col_scale"],
        residual=x["residual"],
        beta=x["beta"],
        preferred_element_type="f32",
        implementation=implementation,
    )
    none = {"beta": jnp.zeros(()), "residual": x["residual"]}
    gate = _formula(x | none)
    up = x | none | {name: other[name] for name in ("b", "bias", "col_scale")}
    # Without the activation: relu(v) - relu(-v) is v.
    negated = up | {"bias": -up["bias"], "alpha": -up["alpha"]}
    expected = gate * (_formula(up) - _formula(negated)) + x["beta"] * x["residual"]
    _check(result, expected)


def test_projections_have_activations_and_what_is_named() -> None:
    x = _drawn()
    weights = [x["b"], x["b"] + 1]
    results = projections(x["a"], weights, biases=[x["bias"], None], activations=["relu", None])
    _check(results[0], np.maximum(_product(x["a"], x["b"]) + reference.wide(x["bias"]), 0))
    _check(results[1], _product(x["a"], weights[1]))
    both = projections(x["a"], weights, activations="relu", implementation="xla")
    _check(both[1], np.maximum(_product(x["a"], weights[1]), 0))


@pytest.mark.parametrize("name", ["bf16", "f32", "e4m3", "float16"])
def test_types_by_name(name: str) -> None:
    x = _drawn()
    long = {"bf16": jnp.bfloat16, "f32": jnp.float32, "e4m3": jnp.float8_e4m3fn}
    for multiply in (gemm, pallas_gemm.matmul):
        run = functools.partial(multiply, preferred_element_type=name)
        assert jax.eval_shape(run, x["a"], x["b"]).dtype == long.get(name, np.float16)
