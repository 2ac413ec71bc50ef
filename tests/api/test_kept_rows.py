"""Which functions of rows in groups keep rows apart: what the rules say, beside what rows show."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm import grouped_gemm, quantize
from pallas_gemm.api.groups.rows import axes_of_rows
from pallas_gemm.kernels.functions import flat

pytestmark = pytest.mark.usefixtures("as_users_write")

M = N = 6
"""Both have one size, so that no shape tells rows from columns."""
NUMBERS = jnp.arange(M)
PLACES = jnp.array([1, 0, 2, 3, 5, 4])
TABLE = jnp.arange(12.0).reshape(M, 2)
HEADS = jnp.arange(24.0).reshape(2, 3, 4)

KEPT = {
    "all": lambda s: jnp.all(s > 0, -1),
    "argsort": lambda s: jnp.take_along_axis(s, jnp.argsort(s, -1), -1),
    "bits": lambda s: lax.bitcast_convert_type(s, jnp.uint8),
    "concatenate": lambda s: jnp.concatenate([s, s * 2], 1),
    "cumsum": lambda s: jnp.cumsum(s, 1),
    "dot": lambda s: s @ TABLE,
    "dot of each head": lambda s: jnp.einsum("mhd,hde->mhe", s.reshape(M, 2, 3), HEADS),
    "dot of each row": lambda s: jnp.einsum("mi,mj->mij", s, s),
    "dot, turned": lambda s: (TABLE.T @ s.T).T,
    "dynamic slice": lambda s: lax.dynamic_slice(s, (0, 1), (M, 2)),
    "dynamic update": lambda s: lax.dynamic_update_slice(s, s[:, :2] * 2, (0, 1)),
    "flip": lambda s: s[:, ::-1],
    "gather by rows": lambda s: TABLE[jnp.argmax(s, -1)],
    "gather of columns": lambda s: s[:, PLACES],
    "gather of each row": lambda s: jax.vmap(lambda x, i: x[i])(s, NUMBERS),
    "heads": lambda s: s.reshape(1, M, 2, 3)[0],
    "middle": lambda s: jnp.median(s, -1),
    "one row set": lambda s: s.at[0].set(0.0),
    "pad": lambda s: jnp.pad(s, ((0, 0), (1, 1))),
    "prod": lambda s: jnp.prod(s, -1),
    "quantize": lambda s: quantize(s, block=(1, 16)),
    "scatter": lambda s: s.at[:, 1].set(s.sum(-1)),
    "scatter into others": lambda s: jnp.ones((M, N)).at[:, 2].set(s[:, 0]),
    "slice": lambda s: s[:, 1:4],
    "sort": lambda s: jnp.sort(s, 1),
    "split": lambda s: jnp.split(s, 2, 1),
    "stack": lambda s: jnp.stack([s, -s], 1),
    "stack before rows": lambda s: jnp.stack([s, -s], 0).sum(0),
    "tile": lambda s: jnp.tile(s, (1, 2)),
    "top_k": lambda s: lax.top_k(s, 2),
    "turned": lambda s: s.T.sum(0),
    "unstack": lambda s: jnp.stack(list(s.T), -1),
    "what mixes, unused": lambda s: (s.sum(), s)[1],
}
MIXED = {
    "add turned": lambda s: s + s.T,
    "any": lambda s: jnp.where(jnp.any(s > 0, 0)[:, None], s, 0.0),
    "concatenate": lambda s: jnp.concatenate([s[1:], s[:1]], 0),
    "cummax": lambda s: lax.cummax(s, 0),
    "dot": lambda s: TABLE @ (TABLE.T @ s),
    "dot with itself": lambda s: s @ s.T,
    "dynamic update": lambda s: lax.dynamic_update_slice(s, s[:2] * 2, (1, 0)),
    "flip": lambda s: s[::-1],
    "gather": lambda s: s[PLACES],
    "gather of columns by rows": jax.vmap(lambda x: x[jnp.argmax(x)], 1),
    "gather of columns that rows say": lambda s: s[:, jnp.argmax(s, 1)],
    "of all": lambda s: s.reshape(3, 2, N).sum(1).repeat(2, 0),
    "pad": lambda s: jnp.pad(s, ((1, 0), (0, 0)))[:M],
    "quantize": lambda s: quantize(s, block=(2, 16)).scale.repeat(2, 0),
    "reshape": lambda s: s.T.reshape(-1).reshape(M, N),
    "roll": lambda s: jnp.roll(s, 1, 0),
    "scatter": lambda s: s.at[1].set(s.sum(-1)),
    "scatter into turned": lambda s: s.T.at[:, PLACES].add(s),
    "scatter to rows": jnp.zeros((M, N)).at[PLACES].set,
    "sort": lambda s: jnp.sort(s, 0),
    "split": lambda s: jnp.concatenate(jnp.split(s, 2, 0)[::-1]),
    "take": lambda s: jnp.take_along_axis(s, jnp.argsort(s, 0), 0),
    "tile": lambda s: jnp.tile(s, (2, 1))[1 : M + 1],
    "top_k": lambda s: lax.top_k(s.T, 6)[0].T,
    "turned": lambda s: s.T,
    "unstack": lambda s: jnp.stack(list(s)[::-1], 0),
}


def _is_said(f: Any) -> bool:
    """Whether the rules say that all results have the rows of what they are made of."""
    whole = flat.flat(jax.make_jaxpr(f)(jax.ShapeDtypeStruct((M, N), jnp.float32)))
    axes = axes_of_rows(whole, 1, M)
    return all(axes[output] == 0 for output in whole.outputs)


def _is_so(f: Any) -> bool:
    """Whether a row that changes leaves all other rows of the results."""
    rng = np.random.default_rng(0)
    run = jax.jit(f)
    x = rng.standard_normal((M, N)).astype(np.float32)
    before = jax.tree.leaves(run(x))
    for row in range(M):
        others = np.delete(np.arange(M), row)
        for own in rng.standard_normal((3, N)) * 3:
            changed = x.copy()
            changed[row] = own
            after = jax.tree.leaves(run(changed))
            if not all(_equal(y, z, others) for y, z in zip(before, after, strict=True)):
                return False
    return True


def _equal(x: Any, y: Any, rows: Any) -> bool:
    return np.asarray(x)[rows].tobytes() == np.asarray(y)[rows].tobytes()


@pytest.mark.parametrize("name", KEPT)
def test_what_keeps_rows_apart_is_known(name: str) -> None:
    assert _is_so(KEPT[name])
    assert _is_said(KEPT[name])


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_rows_is_known(name: str) -> None:
    assert not _is_so(MIXED[name])
    assert not _is_said(MIXED[name])


def test_what_xla_computes_of_each_row() -> None:
    rng = np.random.default_rng(0)
    a, b, up = (
        jnp.asarray(rng.standard_normal(x), jnp.float32) for x in ((9, 8), (2, 8, 32), (2, 8, 32))
    )
    sizes = np.array([4, 3])

    def hidden(gate: Any, up: Any) -> Any:
        z = jax.nn.silu(gate) * up
        first, second = jnp.split(z, 2, -1)
        turned = jnp.concatenate([-second, first], -1)
        return tuple(quantize(turned.astype(jnp.bfloat16), block=(1, 16))), jnp.any(z > 1, -1)

    found = grouped_gemm(a, b, sizes, up=up, epilogue=hidden)
    rows = [slice(0, 4), slice(4, 7)]
    each = [hidden(a[own] @ b[i], a[own] @ up[i]) for i, own in enumerate(rows)]
    for x, *parts in zip(*map(jax.tree.leaves, (found, *each)), strict=True):
        assert not np.asarray(x[7:], np.float32).any()
        for own, y in zip(rows, parts, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(*(np.asarray(z, np.float32) for z in (x[own], y)), rtol=2e-2)


def test_what_nothing_is_known_of_is_named() -> None:
    a, b = jnp.ones((9, 8)), jnp.ones((2, 8, 32))
    with pytest.raises(ValueError, match=r"while .* of epilogue may mix groups: nothing says that"):
        grouped_gemm(
            *(a, b, np.array([4, 3])),
            epilogue=lambda s: lax.while_loop(lambda x: x.sum() < 0, lambda x: 2 * x, s),
        )
