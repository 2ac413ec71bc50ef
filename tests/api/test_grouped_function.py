"""`grouped_gemm(..., epilogue=f)`: a function of rows in groups, beside a loop over the groups."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import grouped_gemm

pytestmark = pytest.mark.usefixtures("as_users_write")

M, N, K, GROUPS = 24, 20, 16, 3
SIZES = np.array([5, 0, 12])
"""The last seven rows are in no group."""


def _drawn(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape).astype(jnp.float32)) for shape in shapes]


def _row_by_row(f: Any, a: Any, rights: Any, given: Any, of_groups: Any) -> list[Any]:
    """Computes each row by itself, with what its group has."""
    found: list[list[Any]] = []
    group = np.repeat(np.arange(GROUPS), SIZES)
    for row in range(M):
        own = group[row] if row < len(group) else 0
        sums = [a[row : row + 1] @ b[own] for b in rights]
        args = [x[own][None] if many else x for x, many in zip(given, of_groups, strict=True)]
        args = [x[row : row + 1] if x.shape[:1] == (M,) else x for x in args]
        results = jax.tree.leaves(f(*sums, *args))
        found.append([x if row < len(group) else jnp.zeros_like(x) for x in results])
    return [jnp.concatenate(rows) for rows in zip(*found, strict=True)]


def _one(s: Any, bias: Any, scale: Any, residual: Any) -> Any:
    z = jax.nn.gelu(s * scale + bias) + residual
    return z.astype(jnp.bfloat16), jnp.sum(z * z, -1), jax.nn.logsumexp(z, -1, keepdims=True)


def _two(s: Any, up: Any, bias: Any, scale: Any, residual: Any) -> Any:
    return {"y": jax.nn.silu(s + bias) * up * scale + residual}


CASES = {"one": (_one, 1), "two": (_two, 2)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["eager", "jit"])
def test_values(case: str, how: str) -> None:
    f, count = CASES[case]
    a, b, up = _drawn((M, K), (GROUPS, K, N), (GROUPS, K, N))
    given = _drawn((GROUPS, N), (GROUPS, 1), (M, N))
    rights = [b, up][:count]

    def run(a: Any, b: Any, up: Any, sizes: Any, *x: Any) -> Any:
        more = {"up": up} if count == 2 else {}
        return grouped_gemm(a, b, sizes, epilogue=f, operands=x, **more)

    found = (jax.jit(run) if how == "jit" else run)(a, b, up, jnp.asarray(SIZES), *given)
    expected = _row_by_row(f, a, rights, given, (True, True, False))
    for x, y in zip(jax.tree.leaves(found), expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=2e-2, atol=1e-3
        )


def test_derivatives_in_both_modes_and_vmap() -> None:
    a, b = _drawn((M, K), (GROUPS, K, N))
    given = _drawn((GROUPS, N), (GROUPS, 1), (M, N))

    def ours(a: Any, b: Any, *x: Any) -> Any:
        _, squares, largest = grouped_gemm(a, b, SIZES, epilogue=_one, operands=x)
        return jnp.sum(squares) / 10 + jnp.sum(largest)

    def rows(a: Any, b: Any, *x: Any) -> Any:
        _, squares, largest = _row_by_row(_one, a, [b], x, (True, True, False))
        return jnp.sum(squares) / 10 + jnp.sum(largest)

    every = (0, 1, 2, 3, 4)
    found, expected = (jax.jit(jax.grad(f, every))(a, b, *given) for f in (ours, rows))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)
    changes = [jnp.cos(x) for x in (a, b, *given)]
    given_and_changes = (a, b, *given), tuple(changes)
    found, expected = (
        jax.jit(lambda *x, f=f: jax.jvp(f, *x)[1])(*given_and_changes) for f in (ours, rows)
    )
    np.testing.assert_allclose(found, expected, rtol=2e-4)
    stacked = jnp.stack([a, 2 * a])
    mapped = jax.vmap(lambda a: ours(a, b, *given))(stacked)
    alone = [ours(x, b, *given) for x in stacked]
    np.testing.assert_allclose(mapped, jnp.stack(alone), rtol=1e-5)


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda s: jnp.sum(s, 0), "reduce_sum .* of epilogue is over rows, which would mix groups"),
        (lambda s: (s, jnp.sum(s)), "reduce_sum .* of epilogue is over rows"),
        # What is added up is given back to each row.
        (lambda s: s / 2 + s.sum(), "reduce_sum .* of epilogue is over rows"),
        (lambda s: s - s.max(0, keepdims=True), "reduce_max .* of epilogue is over rows"),
        (lambda s: jnp.cumsum(s, 0), "cumsum .* of epilogue is over rows"),
        (lambda s: s.sum(1)[:, None] * s.sum(1), "mul .* of epilogue is over rows"),
        (lambda s: s.T, r"result 0 of epilogue, of shape \[20, 24\]"),
    ],
)
def test_what_mixes_groups_is_refused(f: Any, words: str) -> None:
    a, b = _drawn((M, K), (GROUPS, K, N))
    with pytest.raises(ValueError, match=words):
        grouped_gemm(a, b, SIZES, epilogue=f)


def test_refusals() -> None:
    a, b, of_either = _drawn((GROUPS, K), (GROUPS, K, N), (GROUPS, N))
    sizes = np.array([1, 1, 1])
    with pytest.raises(ValueError, match=r"operands\[0\] of shape \[3, 20\] has a row for each"):
        grouped_gemm(a, b, sizes, epilogue=lambda s, x: s + x, operands=(of_either,))
    with pytest.raises(ValueError, match="bias= has no meaning beside"):
        grouped_gemm(a, b, sizes, epilogue=jnp.tanh, bias=jnp.ones(N))
    with pytest.raises(ValueError, match="operands has no meaning without epilogue"):
        grouped_gemm(a, b, sizes, operands=(of_either,))
