"""Programs that know nothing of this package, in every construct that calls functions.

Each takes bfloat16 arrays of small integers, whose products are exact in any order.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

N = 256
"""Rows and columns of every matrix: enough for a kernel to be as fast as XLA."""


def _plain(x: Any, w: Any) -> Any:
    return x @ w


def _transposed(x: Any, w: Any) -> Any:
    return (x @ w.T).T


def _heads(x: Any, w: Any) -> Any:
    return jnp.einsum("bsd,dhk->bhsk", x.reshape(2, N // 2, N), w.reshape(N, 2, N // 2))


def _jitted(x: Any, w: Any) -> Any:
    return jax.jit(jnp.matmul)(x, w) + x


def _scanned(x: Any, w: Any) -> Any:
    def body(carry: Any, one: Any) -> Any:
        return jnp.sign(carry @ one), carry

    return lax.scan(body, x, jnp.stack([w, w.T, w]))


def _while(x: Any, w: Any) -> Any:
    def body(state: Any) -> Any:
        return state[0] + 1, jnp.sign(state[1] @ w)

    return lax.while_loop(lambda state: (state[0] < 3) & (state[1] @ w != 7).any(), body, (0, x))


def _cond(x: Any, w: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda a: a @ w, lambda a: w @ a, x)


def _switched(x: Any, w: Any) -> Any:
    return lax.switch(jnp.int32(1), [lambda: x, lambda: x @ w, lambda: w], *())


def _checkpointed(x: Any, w: Any) -> Any:
    return jax.checkpoint(lambda a: jax.nn.relu(a @ w))(x)


def _kept(x: Any, w: Any) -> Any:
    policy = jax.checkpoint_policies.dots_saveable
    return jax.checkpoint(lambda a: jax.nn.relu(a @ w), policy=policy)(x)


@jax.custom_jvp
def _own_jvp(x: Any, w: Any) -> Any:
    return x @ w


@_own_jvp.defjvp
def _rule(primals: Any, tangents: Any) -> Any:
    (x, w), (dx, dw) = primals, tangents
    return x @ w, 2 * (dx @ w + x @ dw)


@jax.custom_vjp
def _own_vjp(x: Any, w: Any) -> Any:
    return x @ w


_own_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (3 * (g @ kept[1].T), kept[0].T @ g))


def _mapped(x: Any, w: Any) -> Any:
    return jax.vmap(lambda a, b: a @ b, (0, None))(jnp.stack([x, -x]), w)


def _sharded(x: Any, w: Any) -> Any:
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
    def part(x: Any, w: Any) -> Any:
        return jnp.concatenate([x, x]) @ w

    return part(x, w)


def _in_groups(x: Any, w: Any) -> Any:
    sizes = jnp.array([100, 0, 150], jnp.int32)
    return lax.ragged_dot(x, jnp.stack([w, w.T, -w]), sizes)


def _tied(x: Any, w: Any) -> Any:
    return (x @ w) @ w.T


def _loop(x: Any, w: Any) -> Any:
    every = lax.fori_loop(0, 2, lambda _, a: a @ w, x)
    return every, x.T @ x


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "plain": _plain,
    "transposed": _transposed,
    "heads": _heads,
    "jitted": _jitted,
    "scanned": _scanned,
    "while": _while,
    "cond": _cond,
    "switched": _switched,
    "checkpointed": _checkpointed,
    "kept": _kept,
    "own_jvp": _own_jvp,
    "own_vjp": _own_vjp,
    "mapped": _mapped,
    "sharded": _sharded,
    "in_groups": _in_groups,
    "tied": _tied,
    "loop": _loop,
}
WITHOUT_REVERSE = frozenset(("while",))
"""JAX has no derivative of it in reverse mode."""
