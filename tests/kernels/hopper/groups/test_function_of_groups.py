"""Functions of rows in groups in the simulated Hopper kernel: exact numbers, no races or spills."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm import HopperConfig, explain, grouped_gemm, target
from pallas_gemm.planning import implementation
from tests import covering, races, summaries

pytestmark = pytest.mark.usefixtures("as_users_write")

BF16, F32 = jnp.bfloat16, jnp.float32
K, N, GROUPS = 96, 128, 4


def _kept(s: Any, bias: Any) -> Any:
    z = s + bias
    return jnp.maximum(z, 0).astype(BF16), z


def _rows(s: Any, residual: Any, scale: Any) -> Any:
    z = s * scale + residual.astype(F32)
    return z.astype(BF16), jnp.sum(jnp.abs(z), -1), jnp.min(z, -1, keepdims=True)


def _slope(s: Any, pre: Any, row: Any) -> Any:
    g = jnp.where(pre.astype(F32) > 0, s, 0.5 * s) * row
    return g.astype(BF16), jnp.max(g, -1) + 1


def _of_both(gate: Any, up: Any, bias: Any, row: Any) -> Any:
    z = jnp.maximum(gate + bias, 0) * up * row
    return z.astype(BF16), up, jnp.sum(z, -1)


def _reduced(s: Any, scale: Any) -> Any:
    return jnp.sum(s * scale, -1)


def _largest(s: Any, bias: Any) -> Any:
    z = s + bias
    return z.astype(BF16), jnp.max(jnp.abs(z), -1)


FUNCTIONS: dict[str, tuple[Any, tuple[tuple[str, Any], ...]]] = {
    "kept": (_kept, (("gn", F32),)),
    "rows": (_rows, (("mn", BF16), ("g1", F32))),
    "slope": (_slope, (("mn", BF16), ("m1", F32))),
    "both": (_of_both, (("n", F32), ("m1", BF16))),
    "reduced": (_reduced, (("gn", F32),)),
    "largest": (_largest, (("gn", F32),)),
}
SIZES = {
    "some empty": (37, 0, 140, 1),
    "rows past the end": (0, 60, 3, 0),
    "too many rows": (70, -3, 200, 9),
    "none": (0, 0, 0, 0),
}
OPTIONS: dict[str, Sequence[Any]] = {
    "function": tuple(FUNCTIONS),
    "sizes": tuple(SIZES),
    # Rows, columns, and the warpgroups that share a tile or take turns.
    "tile": ((128, 64, 2), (64, 128, 2), (64, 32, 1), (64, 64, "in turns")),
    "cluster": ((1, 1), (2, 1), (1, 2)),
    "store_slots": (1, 2),
    "late_store": (False, True),
    "transposed": (False, True),
}


def _config(case: covering.Case) -> HopperConfig | None:
    rows, columns, shared_by = case["tile"]
    if case["function"] == "both":
        # Half of the columns are those of up.
        columns = max(2 * columns, 128)
    try:
        return HopperConfig(
            tile=(rows, columns),
            consumers=2 if shared_by == "in turns" else shared_by,
            pingpong=shared_by == "in turns",
            late_store=case["late_store"],
            stages=2,
            ctas=2 * case["cluster"][0] * case["cluster"][1],
            store_columns=32,
            cluster=case["cluster"],
            store_slots=case["store_slots"],
        )
    except ValueError:
        return None


def _is_legal(case: covering.Case) -> bool:
    config, function = _config(case), case["function"]
    # One result of 16 bits waits in registers. Both sums of a gated product are of the same rows.
    return (
        config is not None
        and (case["transposed"] or config.tile[1] % 64 == 0)
        and not (case["late_store"] and (function != "largest" or config.pingpong))
        and not (function == "both" and case["tile"] == (64, 128, 2))
    )


def _spread(x: Any, kind: str, groups: Any) -> Any:
    return x[groups] if kind.startswith("g") else x


def test_no_column_beyond_the_last_is_picked() -> None:
    config = HopperConfig((64, 64), consumers=1, late_store=False, stages=2, ctas=2)
    # What lies beyond the result is no number in this row.
    x, w = jnp.ones((64, 64), BF16).at[3].set(jnp.inf), jnp.ones((2, 104, 64), BF16)
    labels, sizes = jnp.full((64, 1), 106, jnp.int32), jnp.asarray([30, 34])

    def picked(s: Any, label: Any) -> Any:
        return jnp.sum(jnp.where(jnp.arange(104) == label, s, 0.0), -1), jnp.max(s, -1)

    how: Any = {"transpose_b": True, "implementation": "interpret", "config": config}
    found, largest = grouped_gemm(x, w, sizes, epilogue=picked, operands=(labels,), **how)
    np.testing.assert_array_equal(found, jnp.zeros(64))
    assert largest[3] == jnp.inf


@pytest.mark.every_other
@pytest.mark.parametrize("case", covering.pairs(OPTIONS, _is_legal, 2000), ids=str)
def test_exact(case: covering.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    racing = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(implementation, "_simulator", lambda _: racing)
    function, kinds = FUNCTIONS[case["function"]]
    m, sums = 200, 2 if case["function"] == "both" else 1
    sizes = SIZES[case["sizes"]]
    rng = np.random.default_rng(0)

    def ints(*shape: int, dtype: Any = BF16) -> Any:
        return jnp.asarray(rng.integers(-3, 4, shape).astype(dtype))

    of = {"mn": (m, N), "m1": (m, 1), "n": (N,), "gn": (GROUPS, N), "g1": (GROUPS, 1)}
    a = ints(m, K)
    rights = [ints(GROUPS, *((N, K) if case["transposed"] else (K, N))) for _ in range(sums)]
    operands = [ints(*of[kind], dtype=dtype) for kind, dtype in kinds]
    ends = np.minimum(np.cumsum(np.clip(sizes, 0, m)), m)
    group = np.searchsorted(ends, np.arange(m), side="right")
    # What is in no group shows nowhere.
    own = np.minimum(group, GROUPS - 1)
    poisoned = [
        jnp.where((group < GROUPS)[:, None], x, jnp.nan) if kind[0] == "m" else x
        for x, (kind, _) in zip(operands, kinds, strict=True)
    ]

    def run(a: Any, rights: Any, sizes: Any, *x: Any) -> Any:
        return grouped_gemm(
            *(a, rights[0], sizes),
            up=rights[1] if sums == 2 else None,
            epilogue=function,
            operands=x,
            transpose_b=case["transposed"],
            implementation="interpret",
            config=_config(case),
        )

    given = (a.at[ends[-1] :].set(jnp.nan), rights, jnp.asarray(sizes), *poisoned)
    with races.recorded() as raced:
        found = jax.tree.leaves(jax.block_until_ready(jax.jit(run)(*given)))
        assert not raced()
    # A kernel that was traced to be explained would be traced again to be run.
    explained = explain(run, *given)
    assert explained.implementation == "interpret"
    assert not explained.copies
    wide = [np.asarray(x, np.float32) for x in rights]
    wide = [x.swapaxes(1, 2) if case["transposed"] else x for x in wide]
    products = [jnp.einsum("mk,mkn->mn", np.asarray(a, np.float32), x[own]) for x in wide]
    spread = [_spread(x, kind, own) for x, (kind, _) in zip(operands, kinds, strict=True)]
    for x, y in zip(found, jax.tree.leaves(function(*products, *spread)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        is_any = np.reshape(group < GROUPS, (m, *(1,) * (y.ndim - 1)))
        expected = np.where(is_any, np.asarray(y, F32), 0)
        np.testing.assert_array_equal(np.asarray(x, F32), expected)


def _swiglu_slope(s: Any, gate: Any, up: Any) -> Any:
    gate, up = gate.astype(F32), up.astype(F32)
    hidden, slope = jax.jvp(jax.nn.silu, (gate,), (jnp.ones_like(gate),))
    return (s * up * slope).astype(BF16), (s * hidden).astype(BF16)


def _gelu_and_squares(s: Any, bias: Any) -> Any:
    z = jax.nn.gelu(s + bias)
    return z.astype(BF16), jnp.sum(z * z, -1)


@pytest.mark.parametrize(
    ("function", "kinds"),
    [(_swiglu_slope, ("mn", "mn")), (_gelu_and_squares, ("gn",))],
    ids=["swiglu's derivative", "gelu and squares"],
)
@pytest.mark.parametrize("shape", [(4096, 14336, 4096), (512, 1024, 512)])
def test_nothing_is_spilled(function: Any, kinds: Any, shape: Any) -> None:
    (m, n, k), groups = shape, 8
    of = {"mn": ((m, n), BF16), "gn": ((groups, n), F32)}
    given = [jax.ShapeDtypeStruct(*of[kind]) for kind in kinds]
    factors = [jax.ShapeDtypeStruct(x, BF16) for x in ((m, k), (groups, k, n))]
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)

    def f(a: Any, b: Any, sizes: Any, *x: Any) -> Any:
        return grouped_gemm(a, b, sizes, epilogue=function, operands=x)

    with target("h200"):
        (found,) = summaries.KEPT.of(f, *factors, sizes, *given, target="h200")
    assert (found.spill_bytes, found.serialized) == (0, "")
