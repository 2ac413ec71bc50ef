"""What is around a product is computed by its kernel: what is folded, and whether it is right."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_gemm import accelerate, explain, target
from pallas_gemm.device import H200
from pallas_gemm.rewriting import folds
from pallas_gemm.rewriting.products import How
from pallas_gemm.rewriting.walk import Rewriter
from tests.reference import TILE, assert_as_good_as_xla, normal
from tests.rewriting.test_walk import assert_same, names

pytestmark = pytest.mark.usefixtures("as_users_write")

SHAPE = jax.ShapeDtypeStruct
BF16 = jnp.bfloat16


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _mlp(x: Any, w: Any, v: Any, bias: Any) -> Any:
    return x + jax.nn.gelu(x @ w + bias) @ v


def _relu(x: Any, w: Any, v: Any, bias: Any) -> Any:
    return jax.nn.relu(x @ w + bias) @ v


def _swiglu(x: Any, w: Any, v: Any, bias: Any) -> Any:
    return (jax.nn.silu(x @ w) * (x @ (w + bias))) @ v


def _normed(x: Any, w: Any, v: Any, bias: Any) -> Any:
    z = x + jax.nn.silu(x @ w) @ v
    mean = jnp.mean(jnp.square(_wide(z)), -1, keepdims=True)
    return z, (_wide(z) * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) @ w


def _dropped(x: Any, w: Any, v: Any, bias: Any) -> Any:
    kept = jax.random.bernoulli(jax.random.key(0), 0.9, (*x.shape[:-1], w.shape[1]))
    return jnp.where(kept, jnp.tanh(x @ w + bias) / 0.9, 0) @ v


def _checkpointed(x: Any, w: Any, v: Any, bias: Any) -> Any:
    return jax.checkpoint(_mlp)(x, w, v, bias)


def _scanned(x: Any, w: Any, v: Any, bias: Any) -> Any:
    weights = (jnp.stack([w, -w]), jnp.stack([v, v]), jnp.stack([bias, bias]))
    return jax.lax.scan(lambda y, own: (jax.checkpoint(_mlp)(y, *own), None), x, weights)[0]


PROGRAMS: dict[str, Callable[..., Any]] = {
    "mlp": _mlp,
    "relu": _relu,
    "swiglu": _swiglu,
    "normed": _normed,
    "dropped": _dropped,
    "checkpointed": _checkpointed,
    "scanned": _scanned,
}


def step(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of the results and of the gradients of everything."""

    def both(*args: Any) -> Any:
        results, pull = jax.vjp(f, *args)
        return results, pull(jax.tree.map(lambda y: (_wide(y) / 2).astype(y.dtype), results))

    return both


def drawn(rows: int, width: int, hidden: int) -> tuple[Any, ...]:
    """Returns operands."""
    rng = np.random.default_rng(0)
    x = normal(rng, (2, rows, width), BF16)
    w, v = (normal(rng, own, BF16) * BF16(0.1) for own in ((width, hidden), (hidden, width)))
    return x, w, v, normal(rng, (hidden,), BF16)


def exact(f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Computes a program in float64."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in args]
        return jax.tree.map(np.asarray, jax.jit(f)(*wide))


def rewritten(f: Callable[..., Any], *args: Any, **how: Any) -> tuple[Any, Any]:
    """Returns a program as it is rewritten for an H200, and what was found."""
    program = jax.make_jaxpr(f)(*args)
    new, found = Rewriter(How(H200, **how)).rewritten(program)
    core.check_jaxpr(new)
    return new, found


def count(jaxpr: Any, name: str) -> int:
    """Returns how many operations of a name there are."""
    return names(jaxpr).count(name)


LARGE = (SHAPE((8, 1024, 1024), BF16), SHAPE((1024, 4096), BF16), SHAPE((4096, 1024), BF16))
FOLDED = {
    "mlp": 4,
    "relu": 3,
    "swiglu": 5,
    "normed": 6,
    "dropped": 2,
    "checkpointed": 4,
    "scanned": 4,
}
"""How many of the products, forward and backward, have a pass less around them."""


def _check(found: Any, expected: Any, values: Any) -> None:
    for leaves in zip(*map(jax.tree.leaves, (found, expected, values)), strict=True):
        assert_as_good_as_xla(*(_of_tiles(x) for x in leaves))


def _of_tiles(x: Any) -> Any:
    """Returns a vector as rows of a tile, so that a tile is no fewer elements of it.

    Each of the program's steps rounds. Of a few dozen elements, the largest error is twice the
    stock program's wherever one last bit is the other one.
    """
    return x.reshape(-1, TILE) if x.ndim == 1 else x


@pytest.mark.parametrize("name", FOLDED)
def test_what_is_around_products_is_folded(name: str) -> None:
    program, found = rewritten(step(PROGRAMS[name]), *LARGE, SHAPE((4096,), BF16))
    assert count(program, "pallas_gemm_fused") == FOLDED[name]
    folded = [one for one in found if one.folded and "added" not in one.answer]
    pairs = sum("the other of its gate" in one.folded for one in folded) // 2
    assert len(folded) - pairs == FOLDED[name]
    assert count(program, "dot_general") == 0


@pytest.mark.every_other
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("numerics", [None, "exact"])
def test_values_are_as_good_as_the_programs(name: str, numerics: str | None) -> None:
    args, f = drawn(128, 256, 512), step(PROGRAMS[name])
    with target("h200"):
        found = jax.jit(accelerate(f, numerics=numerics))(*args)
    expected = jax.jit(f)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    _check(found, expected, exact(f, args))


@pytest.mark.parametrize("name", ["mlp", "relu", "swiglu", "normed"])
def test_the_kernels_compute_what_is_folded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    args, f = drawn(64, 64, 128), step(PROGRAMS[name])
    program, found = rewritten(f, *args, implementation="interpret")
    assert sum(bool(one.folded) for one in found) >= FOLDED[name]
    _check(jax.jit(core.jaxpr_as_fun(program))(*args), jax.jit(f)(*args), exact(f, args))


def test_what_others_read_is_one_more_result() -> None:
    def f(x: Any, w: Any) -> Any:
        hidden = x @ w
        return jax.nn.gelu(hidden) @ w.T, hidden @ w.T

    program, _ = rewritten(f, *LARGE[:2])
    (fused,) = (e for e in program.eqns if e.primitive.name == "pallas_gemm_fused")
    assert len(fused.outvars) == 2


def test_what_can_be_computed_again_is_not_stored() -> None:
    # The derivative reads the hyperbolic tangent, which follows from the product.
    program, _ = rewritten(step(PROGRAMS["mlp"]), *LARGE, SHAPE((4096,), BF16))
    first = next(e for e in program.eqns if e.primitive.name == "pallas_gemm_fused")
    assert [x.aval.dtype for x in first.outvars] == [BF16] * 2


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_derivative_sees_the_sign_of_the_sum_with_its_bias(
    is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each sum is 257, which bfloat16 rounds to 256: with the bias, that is 1 or 0.
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    x, v = jnp.ones((64, 64), BF16), jnp.ones((128, 64), BF16)
    w = jnp.full((64, 128), 4, BF16).at[0].set(5)
    bias = jnp.full((128,), -256, BF16)

    def loss(bias: Any, v: Any) -> Any:
        return jnp.sum(jnp.square(_wide(_relu(x, w, v, bias))))

    derived = jax.grad(loss, (0, 1))
    program, found = rewritten(derived, bias, v, exact=is_exact, implementation="interpret")
    assert "add" in found[0].folded
    gradient, _ = jax.jit(core.jaxpr_as_fun(program))(bias, v)
    assert_same(gradient, jnp.full((128,), 0 if is_exact else 2**20, BF16))


@pytest.mark.parametrize("dtype", [BF16, jnp.float32])
def test_a_bias_is_read_as_it_is_stored(dtype: Any) -> None:
    def f(x: Any, w: Any, bias: Any) -> Any:
        return jax.nn.gelu(x @ w + bias.astype(x.dtype)[None])

    program, _ = rewritten(f, *LARGE[:2], SHAPE((LARGE[1].shape[1],), dtype))
    (fused,) = program.eqns
    # XLA would make a pass of its own to round it, or to widen it.
    assert fused.invars[2] is program.jaxpr.invars[2]


def test_what_only_reads_the_product_is_not_folded() -> None:
    # One pass reads it, whatever the kernel stores.
    program, _ = rewritten(lambda x, w: jnp.prod(jnp.tanh(_wide(x @ w)), -1), *LARGE[:2])
    assert count(program, "pallas_gemm") == 1
    assert count(program, "pallas_gemm_fused") == 0


def _squares(x: Any, w: Any, y: Any) -> Any:
    return jnp.mean(jnp.square(_wide(x @ w) - _wide(y)))


def _sigmoids(x: Any, w: Any, y: Any) -> Any:
    return -jnp.sum(jax.nn.log_sigmoid(_wide(x @ w) * _wide(y)), (1, 2))


LOSSES = {"squares": _squares, "sigmoids": _sigmoids}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_all_elements_stores_none(name: str) -> None:
    args = (*LARGE[:2], SHAPE((8, 1024, 4096), BF16))
    program, _ = rewritten(LOSSES[name], *args)
    (fused,) = (e for e in program.eqns if e.primitive.name == "pallas_gemm_fused")
    assert [x.aval.shape for x in fused.outvars] == [() if name == "squares" else (8,)]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_all_elements_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    x, w, _, _ = drawn(72, 64, 136)
    y = normal(np.random.default_rng(1), (2, 72, 136), BF16)
    f = jax.value_and_grad(lambda *own: jnp.sum(LOSSES[name](*own)), (0, 1))
    program, found = rewritten(f, x, w, y, implementation="interpret")
    assert "reduce_sum" in found[0].folded
    given = jax.jit(core.jaxpr_as_fun(program))(x, w, y)
    expected, values = jax.jit(f)(x, w, y), exact(f, (x, w, y))
    np.testing.assert_allclose(given[0], values[0], rtol=1e-5)
    _check(given[1:], jax.tree.leaves(expected[1]), jax.tree.leaves(values[1]))


def test_what_would_have_to_run_before_itself_is_not_folded() -> None:
    def f(x: Any, w: Any, v: Any) -> Any:
        hidden = x @ w
        return (hidden + (jnp.tanh(hidden) @ v) @ w) @ v

    args = (SHAPE((8192, 1024), BF16), *LARGE[1:])
    program, _ = rewritten(f, *args)
    assert count(program, "pallas_gemm_fused") >= 1
    assert not any(
        e.primitive.name == "pallas_gemm_fused" and len(e.invars) > 3 and e.invars[0] is x
        for e in program.eqns
        for x in program.invars[:1]
    )


def test_two_products_that_would_read_each_other_are_in_an_order() -> None:
    def f(x: Any, w: Any, v: Any) -> Any:
        one, other = x @ w, x @ (w + w)
        return (jnp.tanh(one) * other) @ v, (jnp.exp(other) + one) @ v

    args = drawn(128, 256, 512)[:3]
    with target("h200"):
        found = jax.jit(accelerate(f))(*args)
    _check(found, jax.jit(f)(*args), exact(f, args))


def _kept_gate(x: Any, w: Any, v: Any, bias: Any) -> Any:
    gate, up = x @ w, x @ (w + bias)
    return (jax.nn.silu(gate) * up + bias) @ v, gate


def _of_the_gate(x: Any, w: Any, v: Any, bias: Any) -> Any:
    # What is multiplied second depends on what is multiplied first.
    gate = x @ w
    up = x @ (w + gate.reshape(-1, w.shape[0], w.shape[1])[0])
    return (jax.nn.silu(gate) * up) @ v, bias


@pytest.mark.parametrize(
    ("f", "sums", "results"), [(_swiglu, 2, 1), (_kept_gate, 2, 2), (_of_the_gate, 1, 1)]
)
def test_gate_and_up_are_one_kernel(
    f: Callable[..., Any], sums: int, results: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    args = drawn(64, 64, 128)
    program, found = rewritten(f, *args, implementation="interpret")
    fused = next(e for e in program.eqns if e.primitive.name == "pallas_gemm_fused")
    assert fused.params["function"].sums == sums
    assert len(fused.outvars) == results
    assert sum("the other of its gate" in one.folded for one in found) == 2 * (sums == 2)
    given, expected = jax.jit(core.jaxpr_as_fun(program))(*args), jax.jit(f)(*args)
    _check(given, jax.tree.leaves(expected), jax.tree.leaves(exact(f, args)))


def test_gate_and_up_are_two_kernels_where_both_are_kept() -> None:
    # One kernel would store three results with no product left to store them beside.
    program, found = rewritten(step(_swiglu), *LARGE, SHAPE((4096,), BF16))
    assert not any("the other of its gate" in one.folded for one in found[:2])
    assert count(program, "pallas_gemm_fused") == FOLDED["swiglu"]


def test_effects_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first product waits for the second, which its kernel reads.
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    seen: list[int] = []

    def f(x: Any, w: Any, v: Any) -> Any:
        one = x @ w
        jax.debug.callback(lambda _: seen.append(1), one[0, 0, 0], ordered=True)
        jax.debug.callback(lambda _: seen.append(2), x[0, 0, 0], ordered=True)
        other = x @ (w + w)
        y = jnp.tanh(one) * other
        jax.debug.callback(lambda _: seen.append(3), y[0, 0, 0], ordered=True)
        return y @ v

    args = drawn(128, 256, 512)[:3]
    with target("h200"):
        assert any(len(one.folded) > 1 for one in explain(accelerate(f), *args).rewritten or ())
        found = jax.jit(accelerate(f))(*args)
    jax.effects_barrier()
    assert seen == [1, 2, 3]
    _check(found, jax.jit(f)(*args), exact(f, args))


def test_exact_folds_only_what_is_rounded_exactly() -> None:
    def of(f: Callable[..., Any]) -> int:
        return count(rewritten(f, *LARGE, exact=True)[0], "pallas_gemm_fused")

    assert of(lambda x, w, v: jnp.maximum(x @ w, 0) @ v) == 1
    assert of(lambda x, w, v: jnp.tanh(x @ w) @ v) == 0
    assert of(lambda x, w, v: (x @ w, jnp.sum(_wide(x @ w), -1), v)) == 0


def test_exact_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)

    def f(x: Any, w: Any, bias: Any) -> Any:
        return jax.nn.relu(x @ w * BF16(1.7) + bias) * BF16(0.3)

    x, w, _, bias = drawn(64, 64, 128)
    folded, found = rewritten(f, x, w, bias, exact=True, implementation="interpret")
    assert found[0].folded
    monkeypatch.setattr(folds.Folder, "fold", lambda *_: None)
    apart, _ = rewritten(f, x, w, bias, exact=True, implementation="interpret")
    with jax.disable_jit():
        expected = core.jaxpr_as_fun(apart)(x, w, bias)
    assert_same(jax.jit(core.jaxpr_as_fun(folded))(x, w, bias), expected)


def test_what_cannot_save_enough_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []
    saved = folds.Folder._saved
    monkeypatch.setattr(folds.Folder, "_saved", lambda *own: planned.append(1) or saved(*own))

    def f(x: Any, w: Any) -> Any:
        return jax.nn.gelu(x @ w)

    for k, is_planned in ((1024, True), (65536, False)):
        planned.clear()
        _, found = rewritten(f, SHAPE((4096, k), BF16), SHAPE((k, 4096), BF16))
        assert (bool(planned), bool(found[0].folded)) == (is_planned, is_planned)


def test_equal_blocks_have_one_function() -> None:
    def f(x: Any, w: Any, v: Any, bias: Any) -> Any:
        for _ in range(4):
            x = _mlp(x, w, v, bias)
        return x

    program, _ = rewritten(f, *LARGE, SHAPE((4096,), BF16))
    fused = [e for e in program.eqns if e.primitive.name == "pallas_gemm_fused"]
    assert len(fused) >= 7
    assert len({e.params["function"] for e in fused}) <= 3


def test_products_that_devices_share_are_right() -> None:
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    args = drawn(128, 256, 512)
    split = (jax.device_put(args[0], rows), *args[1:])
    with target("h200"):
        found = jax.jit(accelerate(_mlp))(*split)
    _check(found, jax.jit(_mlp)(*args), exact(_mlp, args))


def _derived(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *args: jnp.sum(_wide(f(*args))), (0, 1, 2, 3))


def _moved(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: jax.jvp(f, args, args)


def _mapped(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args: jax.vmap(f, (0, None, None, None))(x.reshape(2, -1, x.shape[-1]), *args)


@pytest.mark.parametrize("change", [_derived, _moved, _mapped])
@pytest.mark.parametrize("name", ["mlp", "swiglu"])
def test_a_kernel_goes_on_in_float32_in_derivatives_and_batches(name: str, change: Any) -> None:
    shapes = (*LARGE, SHAPE((4096,), BF16))
    with target("h200"):
        program = jax.make_jaxpr(change(accelerate(PROGRAMS[name])))(*shapes)
    functions = list(_functions(program.jaxpr))
    assert functions
    for function in functions:
        # XLA stores its sums as the program does.
        assert function.rounds_to == BF16
        short = [e for e in function.closed.eqns if any(x.aval.dtype == BF16 for x in e.outvars)]
        assert {e.primitive.name for e in short} <= {"convert_element_type", "broadcast_in_dim"}


def _functions(jaxpr: core.Jaxpr) -> Iterator[Any]:
    """Yields the functions of products."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_gemm_fused":
            yield equation.params["function"]
        for inner in core.jaxprs_in_params(equation.params):
            yield from _functions(inner)


def test_derivatives_from_outside_have_kernels() -> None:
    # In bfloat16, the logistic function has no instruction.
    with target("h200"):
        traced = jax.jit(_derived(accelerate(PROGRAMS["swiglu"]))).trace(
            *LARGE, SHAPE((4096,), BF16)
        )
        lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("mosaic_gpu_v2") >= 4


def _relu6(z: Any) -> Any:
    return jax.nn.relu6(z) + 1


def _softplus(z: Any) -> Any:
    return 2 * jax.nn.softplus(z)


def _silu_of_relu(z: Any) -> Any:
    return jax.nn.silu(jnp.square(jax.nn.relu(z)))


ACTIVATIONS = [jax.nn.gelu, jax.nn.leaky_relu, _relu6, _softplus, _silu_of_relu]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("within", [False, True])
def test_calls_are_folded_on_a_part_of_a_mesh(activation: Any, within: bool) -> None:
    # Types tell there which values differ between devices, also those of calls.
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    split: Any = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("i"), P(), P()), out_specs=P("i")
    )

    def f(x: Any, w: Any, bias: Any) -> Any:
        return activation(x @ w + bias[None, None])

    x, w, _, bias = drawn(512, 64, 512)
    stock = split(f)
    ours = split(accelerate(f)) if within else accelerate(stock)
    with target("h200"):
        assert "pallas_gemm_fused" in str(jax.make_jaxpr(ours)(x, w, bias))
        found = jax.jit(step(ours))(x, w, bias)
    _check(found, jax.jit(step(stock))(x, w, bias), exact(step(f), (x, w, bias)))


def test_derivatives_of_what_is_folded_are_the_programs() -> None:
    args = drawn(128, 256, 512)
    with target("h200"):
        found = jax.jit(step(accelerate(_mlp)))(*args)
        mapped = jax.jit(jax.vmap(accelerate(_mlp), (0, None, None, None)))(*args)
    _check(found, jax.jit(step(_mlp))(*args), exact(step(_mlp), args))
    _check(mapped, jax.jit(_mlp)(*args), exact(_mlp, args))
