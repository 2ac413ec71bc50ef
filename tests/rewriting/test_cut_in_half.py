"""Products whose result is cut in half, and both halves joined, are gated products."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_gemm import accelerate, explain, target
from pallas_gemm.op.product import product_p
from pallas_gemm.op.side_by_side import side_by_side_p
from pallas_gemm.rewriting import folds
from pallas_gemm.rewriting.level import Level
from tests.rewriting.test_folds import rewritten

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
M, K, N = 192, 128, 128


def _joined(gate: Any, up: Any) -> Any:
    return jax.nn.relu(gate) + up


def _split(x: Any, w: Any) -> Any:
    return _joined(*jnp.split(x @ w, 2, -1))


def _sliced(x: Any, w: Any) -> Any:
    y = x @ w
    return _joined(y[:, N:], y[:, :N])


def _told_apart(x: Any, w: Any) -> Any:
    y = (x @ w).reshape(M, 2, N)
    return _joined(y[:, 0], y[:, 1])


def _biased(x: Any, w: Any, bias: Any) -> Any:
    return _joined(*jnp.split(x @ w + bias[None], 2, -1))


def _scaled(x: Any, w: Any, scale: Any) -> Any:
    return _joined(*jnp.split(2 * (x @ w) * scale[:, None], 2, -1))


def _biased_apart(x: Any, w: Any, bias: Any, rows: int = M) -> Any:
    y = (x @ w + 1).reshape(rows, 2, N) + bias.reshape(1, 2, N)
    return _joined(y[:, 0], y[:, 1])


def _biased_everywhere(x: Any, w: Any, bias: Any) -> Any:
    y = (x @ w).reshape(M, 2, N) + bias[None, None, :N]
    return _joined(y[:, 0], y[:, 1])


def _broadcast(x: Any, w: Any, bias: Any) -> Any:
    y = (x @ w).reshape(M, 2, N)
    y = y + jnp.broadcast_to(bias.reshape(1, 2, N), y.shape)
    y = y * lax.broadcast_in_dim(bias[:M], y.shape, (0,)) + lax.broadcast_in_dim(
        bias[:N], y.shape, (2,)
    )
    return _joined(y[:, 0], y[:, 1])


def _broadcast_whole(x: Any, w: Any, bias: Any) -> Any:
    y = x @ w
    y = (
        y
        + lax.broadcast_in_dim(bias, y.shape, (1,))
        + lax.broadcast_in_dim(bias[:M], y.shape, (0,))
    )
    return _joined(*jnp.split(y, 2, -1))


def _of_numbers(x: Any, w: Any, bias: Any) -> Any:
    y = jnp.einsum("mk,kgn->mgn", x, w) + bias[None, :2, None]
    return _joined(y[:, 0], y[:, 1])


def _einsum(letters: str, batch: int = 2) -> Callable[..., Any]:
    def f(x: Any, w: Any) -> Any:
        lead = (batch, -1) if batch > 1 else (-1,)
        y = jnp.einsum(letters, x.reshape(*lead, x.shape[-1]), w)
        return _joined(y[..., 0, :], y[..., 1, :])

    return f


def _derived(x: Any, w: Any) -> Any:
    return jax.vjp(_split, x, w)[0]


CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    # The function, the shape of w, and that of what it takes beside.
    "split": (_split, (K, 2 * N), ()),
    "sliced": (_sliced, (K, 2 * N), ()),
    "told apart": (_told_apart, (K, 2 * N), ()),
    "k, 2, n": (_einsum("bmk,kgn->bmgn"), (K, 2, N), ()),
    "2, k, n": (_einsum("bmk,gkn->bmgn"), (2, K, N), ()),
    "2, n, k": (_einsum("bmk,gnk->bmgn"), (2, N, K), ()),
    "bias": (_biased, (K, 2 * N), (2 * N,)),
    "bias of 2, n": (_biased_apart, (K, 2 * N), (2 * N,)),
    "bias of n": (_biased_everywhere, (K, 2 * N), (2 * N,)),
    "broadcast": (_broadcast, (K, 2 * N), (2 * N,)),
    "broadcast, not told apart": (_broadcast_whole, (K, 2 * N), (2 * N,)),
    "bias of 2": (_of_numbers, (K, 2, N), (2 * N,)),
    "scaled rows": (_scaled, (K, 2 * N), (M,)),
    "under a derivative": (_derived, (K, 2 * N), ()),
}


def drawn(*shapes: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns arrays of small integers: all that is computed of them is exact in bfloat16."""
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.integers(-1, 2, shape).astype(BF16)) for shape in shapes)


def names(program: core.ClosedJaxpr) -> list[str]:
    return [e.primitive.name for e in program.eqns]


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_computes_what_the_program_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    monkeypatch.setattr("pallas_gemm.rewriting.side_by_side.LEAST_SAVED", -99.0)
    # A bias alone is folded sooner into so small a product.
    monkeypatch.setattr(folds.Folder, "fold", lambda *_: None)
    f, stored, beside = CASES[name]
    args = drawn((M, K), stored, *filter(None, (beside,)))
    program, found = rewritten(f, *args, implementation="interpret")
    assert [e.primitive for e in program.eqns].count(side_by_side_p) == 1
    assert not {"dot_general", "split"} & set(names(program))
    (one,) = found
    assert "both halves of its result" in one.folded
    (result,) = jax.jit(core.jaxpr_as_fun(program))(*args)
    np.testing.assert_array_equal(result, f(*(x.astype(F32) for x in args)).astype(BF16))


def _thirds(x: Any, w: Any) -> Any:
    y = x @ w
    return _joined(y[:, :N], y[:, 2 * N :])


def _overlapping(x: Any, w: Any) -> Any:
    y = x @ w
    return _joined(y[:, :-64], y[:, 64:])


def _with_steps(x: Any, w: Any) -> Any:
    y = x @ w
    return _joined(y[:, ::2], y[:, 1::2])


def _shifted(x: Any, w: Any) -> Any:
    y = x @ w
    return _joined(y[:, :N], y[:, 1 : N + 1])


def _every_other_first(x: Any, w: Any) -> Any:
    y = x @ w
    return _joined(y[:, ::2], y[:, N:])


def _rows(x: Any, w: Any) -> Any:
    return _joined(*jnp.split(x @ w, 2, 0))


def _returned(x: Any, w: Any) -> Any:
    y = x @ w
    return _joined(*jnp.split(y, 2, 1)), y


def _read_again(x: Any, w: Any) -> Any:
    y = x @ w
    return _joined(*jnp.split(y, 2, 1)), jnp.sum(y)


def _with_residual(x: Any, w: Any) -> Any:
    return _joined(*jnp.split(x @ w + jnp.cumsum(w, 0)[:1] * x[:, :1], 2, 1))


def _between(x: Any, w: Any) -> Any:
    # The last dimension is not the one that is cut, and the one that is cut is not whole columns.
    y = jnp.einsum("mk,kng->mng", x, w.reshape(K, -1, 4))
    return _joined(y[..., :2], y[..., 2:])


def _one_half(x: Any, w: Any) -> Any:
    return jax.nn.relu(jnp.split(x @ w, 2, 1)[0])


def _apart(x: Any, w: Any) -> Any:
    gate, up = jnp.split(x @ w, 2, 1)
    return jax.nn.relu(gate), jnp.sort(up)


def _integers(x: Any, w: Any) -> Any:
    # A kernel would add them up in float32, which does not hold all.
    dims = (((1,), (1,)), ((), ()))
    y = lax.dot_general(x.astype(jnp.int8), w.astype(jnp.int8), dims, preferred_element_type=I32)
    gate, up = jnp.split(y, 2, 1)
    return (jnp.maximum(gate, up) + up).astype(F32)


OTHERS = {
    "thirds": (_thirds, (K, 3 * N)),
    "overlapping": (_overlapping, (K, 2 * N)),
    "every other": (_with_steps, (K, 2 * N)),
    "shifted": (_shifted, (K, 2 * N)),
    "every other, and a half": (_every_other_first, (K, 2 * N)),
    "rows": (_rows, (K, 2 * N)),
    "returned": (_returned, (K, 2 * N)),
    "read again": (_read_again, (K, 2 * N)),
    "another array": (_with_residual, (K, 2 * N)),
    "parts of columns": (_between, (K, 2 * N)),
    "one half": (_one_half, (K, 2 * N)),
    "integers": (_integers, (2 * N, K)),
    "not joined": (_apart, (K, 2 * N)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_is_cut_stays_one_product(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "LEAST_SAVED", -9.0)
    monkeypatch.setattr("pallas_gemm.rewriting.side_by_side.LEAST_SAVED", -99.0)
    f, stored = OTHERS[name]
    args = drawn((M, K), stored)
    program, found = rewritten(f, *args, implementation="interpret")
    assert side_by_side_p not in [e.primitive for e in program.eqns]
    assert len(found) == 1
    results = jax.jit(core.jaxpr_as_fun(program))(*args)
    for one, other in zip(results, jax.tree.leaves(jax.jit(f)(*args)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_exchange_can_be_taken_back() -> None:
    shapes = [jax.ShapeDtypeStruct(x, BF16) for x in ((M, K), (K, N), (M, N))]
    jaxpr = jax.make_jaxpr(lambda x, w, z: jnp.tanh(x @ w + z) @ w.T)(*shapes).jaxpr
    level = Level(jaxpr, jaxpr.eqns)
    dot, add, tanh, *_ = jaxpr.eqns
    (product,), (total,) = dot.outvars, add.outvars
    new = dot.replace(primitive=product_p, outvars=[core.Var(product.aval)])
    plus = add.replace(invars=[new.outvars[0], add.invars[1]])
    level.exchange([dot, add], [new, plus], product)
    assert level.equations == [new, plus, *jaxpr.eqns[2:]]
    assert level.maker(total) is plus
    assert level.readers(new.outvars[0]) == [plus]
    assert not level.readers(product)
    bits = level.bit(new.outvars[0])
    assert bits == level.bit(product) == level.above(new.outvars[0])
    assert level.above(total) & bits
    assert level.in_order() == [new, plus, *jaxpr.eqns[2:]]
    level.put_back([dot, add], [new, plus])
    assert level.equations == list(jaxpr.eqns)
    assert level.maker(total) is add
    assert level.readers(product) == [add]
    assert not level.readers(new.outvars[0])
    assert level.only_reader(total) is tanh


def test_a_trial_leaves_no_trace() -> None:
    # Nothing is saved where the product takes so much longer than the pass after it.
    shapes = [jax.ShapeDtypeStruct(x, BF16) for x in ((8192, 65536), (65536, 2 * 4096))]
    program, (found,) = rewritten(_split, *shapes)
    assert found.folded == ()
    assert names(program)[1:] == ["split", "custom_jvp_call", "add"]


def test_both_halves_of_a_bias_are_read_where_they_lie() -> None:
    shapes = [jax.ShapeDtypeStruct(x, BF16) for x in ((4096, 320), (320, 2 * 1280), (2 * 1280,))]
    program, _ = rewritten(_biased, *shapes)
    assert names(program) == ["broadcast_in_dim", "pallas_gemm_side_by_side"]


def _scaled_apart(x: Any, w: Any, scale: Any) -> Any:
    y = jnp.einsum("mk,kgn->mgn", x, w) * scale[..., None]
    return _joined(y[:, 0], y[:, 1])


def test_the_time_to_cut_other_operands_is_counted() -> None:
    def program(rows: int, f: Callable[..., Any], *beside: tuple[int, ...]) -> list[str]:
        shapes = ((rows, 640), (640, 2, 64), *beside)
        return names(rewritten(f, *(jax.ShapeDtypeStruct(x, BF16) for x in shapes))[0])

    name = "pallas_gemm_side_by_side"
    assert name in program(53, _einsum("mk,kgn->mgn", 1))
    assert name not in program(53, _scaled_apart, (53, 2))
    assert name in program(65536, _scaled_apart, (65536, 2))


def test_halves_that_a_derivative_keeps_are_those_of_one_array() -> None:
    def block(x: Any, w: Any, v: Any) -> Any:
        gate, up = jnp.split(x @ w, 2, -1)
        return (jax.nn.gelu(gate) * up) @ v

    def step(*args: Any) -> Any:
        return jax.grad(lambda *x: jnp.mean(block(*x).astype(F32) ** 2), (0, 1, 2))(*args)

    sizes = ((8192, 768), (768, 2 * 1152), (1152, 768))
    shapes = [jax.ShapeDtypeStruct(x, BF16) for x in sizes]
    assert "pallas_gemm_side_by_side" in names(rewritten(block, *shapes)[0])
    assert "pallas_gemm_side_by_side" not in names(rewritten(step, *shapes)[0])


def test_it_is_explained() -> None:
    shapes = [jax.ShapeDtypeStruct(x, BF16) for x in ((4096, 320), (320, 2 * 1280))]
    with target("h200"):
        text = str(explain(accelerate(_split), *shapes))
    assert "m=4096 n=1280 k=320 NN bfloat16 x bfloat16 -> bfloat16 gated" in text
    assert "by a kernel, with both halves of its result" in text


@pytest.mark.parametrize("within", [False, True])
def test_on_a_part_of_a_mesh(within: bool) -> None:
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    split: Any = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("i"), P(), P()), out_specs=P("i")
    )
    args = drawn((M, K), (K, 2 * N), (2 * N,))
    f = functools.partial(_biased_apart, rows=M // 2)
    stock, ours = split(f), split(accelerate(f)) if within else accelerate(split(f))

    def gradients(g: Any) -> Any:
        return jax.jit(jax.grad(lambda *x: jnp.sum(g(*x).astype(F32)), (0, 1, 2)))

    with target("h200"):
        assert "pallas_gemm_side_by_side" in str(jax.make_jaxpr(ours)(*args))
        found = (jax.jit(ours)(*args), *gradients(ours)(*args))
    for one, other in zip(found, (stock(*args), *gradients(stock)(*args)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=["x", "w", "both"])
def test_mapped(axes: tuple[int | None, ...]) -> None:
    x, w = drawn((M, K), (K, 2 * N))
    args = [a if axis is None else jnp.stack([a, -a]) for a, axis in zip((x, w), axes, strict=True)]
    with target("h200"):
        found = jax.jit(jax.vmap(accelerate(_split), axes))(*args)
    np.testing.assert_array_equal(found, jax.jit(jax.vmap(_split, axes))(*args))


def test_products_that_devices_share() -> None:
    mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2)
    args = drawn((M, K), (K, 2 * N), (2 * N,))
    shared = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(args, (P("i"), P(None, "j"), P("j")), strict=True)
    ]
    with target("h200"):
        assert "pallas_gemm_side_by_side" in str(jax.make_jaxpr(accelerate(_biased))(*args))
        found = jax.jit(accelerate(_biased))(*shared)
    np.testing.assert_array_equal(found, jax.jit(_biased)(*args))


@pytest.mark.parametrize("wanted", [(0, 1), (0,), (1,)])
def test_it_is_derived_from_outside(wanted: tuple[int, ...]) -> None:
    args = drawn((M, K), (K, 2 * N))

    def loss(f: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda x, w: jnp.sum(f(x, w).astype(F32)), wanted)

    with target("h200"):
        inside = jax.make_jaxpr(accelerate(_split))(*args)
        found = loss(accelerate(_split))(*args)
    assert "pallas_gemm_side_by_side" in str(inside)
    for one, other in zip(found, loss(_split)(*args), strict=True):
        np.testing.assert_array_equal(one, other)
