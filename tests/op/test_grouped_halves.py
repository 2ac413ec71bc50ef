"""Products of groups of float32 by arrays of float16, simulated and planned."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import explain, group_sums, grouped_gemm, ragged_dot, target
from pallas_gemm.call import GroupedCall
from pallas_gemm.planning import halves, implementation
from pallas_gemm.planning.plans import Plan

M, N, K = 88, 64, 192
SIZES = jnp.asarray([21, 0, 43, 16], jnp.int32)
ENDS = np.cumsum(SIZES)
GROUPS = [slice(end - size, end) for end, size in zip(ENDS, np.asarray(SIZES), strict=True)]
FACTORS = ((M, K), 0), ((4, K, N), 2), ((4, K, N), 2)
F32 = jnp.float32
SHAPE = functools.partial(jax.ShapeDtypeStruct, dtype=F32)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes arrays of float16 for small products, too."""
    monkeypatch.setattr(halves, "DECIDING_SECONDS", -1.0)


def drawn(*shape: int, seed: int, free: int) -> np.ndarray:
    """Returns small integers times powers of two along a free dimension, up to 2**30 apart."""
    rng = np.random.default_rng(seed)
    powers = 2.0 ** rng.integers(
        -15, 15, [size if axis == free else 1 for axis, size in enumerate(shape)]
    )
    return (rng.integers(-3, 4, shape) * powers).astype(np.float32)


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    found = np.zeros((len(a), b.shape[-1]), np.float32)
    for own, group in zip(b, GROUPS, strict=True):
        found[group] = a[group] @ own
    return found


def planned(f: Any, *operands: Any) -> Plan | None:
    with target("h200"):
        (found,) = explain(f, *operands).products
    return found.plan


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("transpose_b", [False, True])
def test_rows_in_groups_are_scaled_before_and_after(transpose_b: bool) -> None:
    a, b = drawn(M, K, seed=0, free=0), drawn(4, K, N, seed=1, free=2)
    bias, scale = drawn(4, N, seed=2, free=1), drawn(N, seed=3, free=0)

    def product(a: Any, b: Any, bias: Any, scale: Any, how: str) -> jax.Array:
        given = {"bias": bias, "col_scale": scale, "activation": "relu", "implementation": how}
        return grouped_gemm(a, b, SIZES, transpose_b=transpose_b, **given)

    given = a, b.swapaxes(1, 2) if transpose_b else b, bias, scale
    plan = planned(functools.partial(product, how="hopper"), *given)
    assert plan is not None
    assert plan.otherwise is not None
    wanted = exact(a, b) * scale
    for own, group in zip(bias, GROUPS, strict=True):
        wanted[group] = np.maximum(wanted[group] + own, 0)
    np.testing.assert_array_equal(product(*given, how="interpret"), wanted)


@pytest.mark.usefixtures("always")
def test_gates_have_scales_of_their_own() -> None:
    a, b, up = (drawn(*shape, seed=i, free=free) for i, (shape, free) in enumerate(FACTORS))
    own = drawn(4, N, seed=3, free=1)

    def product(a: Any, b: Any, up: Any, own: Any, how: str) -> jax.Array:
        given = {"up": up, "up_scale": own, "activation": "relu", "implementation": how}
        return grouped_gemm(a, b, SIZES, **given)

    plan = planned(functools.partial(product, how="hopper"), a, b, up, own)
    assert plan is not None
    assert plan.otherwise is not None
    wanted = np.maximum(exact(a, b), 0) * exact(a, up * own[:, None])
    np.testing.assert_array_equal(product(a, b, up, own, how="interpret"), wanted)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("what", ["too far apart", "infinite"])
# The simulator multiplies with NumPy, which warns of what this test is about.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_gate_and_its_other_factor_are_looked_at(which: int, what: str) -> None:
    a, *right = (drawn(*shape, seed=i, free=free) for i, (shape, free) in enumerate(FACTORS))
    if what == "infinite":
        right[which][0, 5, 3] = np.inf
    else:
        # All elements but the first count, which is the largest.
        a = np.where(a == 0, np.abs(a).max(1, keepdims=True), a)
        a[:, 0], right[which][:, 0], right[which][:, 1:] = 0, 1, right[which][:, 1:] * 2.0**-40
    result = grouped_gemm(a, right[0], SIZES, up=right[1], implementation="interpret")
    np.testing.assert_array_equal(result, exact(a, right[0]) * exact(a, right[1]))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("m", "n"), [(72, 64), (61, 128)])
def test_sums_over_groups_are_scaled_before_and_after(m: int, n: int) -> None:
    a, b = drawn(m, M, seed=0, free=0), drawn(M, n, seed=1, free=1)
    plan = planned(group_sums, a, b, SIZES)
    assert plan is not None
    assert plan.otherwise is not None
    result = group_sums(a, b, SIZES, implementation="interpret")
    np.testing.assert_array_equal(result, [a[:, own] @ b[own] for own in GROUPS])


@pytest.mark.usefixtures("always")
def test_elements_that_differ_too_much_are_of_tf32() -> None:
    a, b = drawn(M, K, seed=0, free=0), drawn(4, K, N, seed=1, free=2)
    a[3, 7], a[3, 8] = 1, 2.0**-40
    b[0, :8] = b[0, 9:] = 0
    result = grouped_gemm(a, b, SIZES, implementation="interpret")
    np.testing.assert_array_equal(result, exact(a, b))
    assert np.any(np.asarray(result)[3])


@pytest.mark.parametrize(
    ("rows", "groups", "k", "n", "how", "found"),
    [
        (65536, 8, 4096, 14336, {}, True),
        # To cast the matrices of many groups takes longer than is gained.
        (4096, 64, 4096, 2048, {}, False),
        (65536, 8, 4096, 14336, {"precision": "highest"}, None),
        (65536, 8, 4096, 14336, {"precision": "BF16_BF16_F32_X3"}, False),
        (65536, 8, 4096, 14336, {"precision": "TF32_TF32_F32"}, False),
    ],
)
def test_large_products_are_of_float16(
    rows: int, groups: int, k: int, n: int, how: Any, found: bool | None
) -> None:
    operands = SHAPE((rows, k)), SHAPE((groups, k, n)), SHAPE((groups,), dtype=jnp.int32)
    plan = planned(functools.partial(ragged_dot, **how), *operands)
    assert (plan and plan.otherwise is not None) == found
    if plan is not None:
        # XLA takes ten times as long.
        assert not implementation.by_xla_otherwise(plan, GroupedCall(F32))


def test_what_gains_little_stays_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements that do not fit cost more: float16 takes 4373 us on an H200, and TF32 4960."""
    operands = SHAPE((16384, 14336)), SHAPE((8, 4096, 14336)), SHAPE((8,), dtype=jnp.int32)

    def product(a: Any, b: Any, sizes: Any, bias: Any = None) -> jax.Array:
        return grouped_gemm(a, b, sizes, bias=bias, transpose_b=True)

    plan = planned(product, *operands)
    assert plan is not None
    assert plan.otherwise is None
    monkeypatch.setattr(halves, "ALONE_AT_MOST", 1)
    other = planned(product, *operands, SHAPE((8, 4096)))
    assert other is not None
    assert other.otherwise is not None
