"""Functions as epilogues in the simulated Hopper kernel: exact numbers, no races, every layout."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm import HopperConfig, gemm
from pallas_gemm.planning import implementation
from tests import covering, races

BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.fixture(autouse=True)
def _as_users_write() -> Iterator[None]:
    """Functions broadcast and promote as they do by default."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def _kept(s: Any, bias: Any) -> Any:
    z = s + bias
    return jnp.maximum(z, 0).astype(BF16), z


def _rows(s: Any, residual: Any) -> Any:
    z = s + residual.astype(F32)
    return z.astype(BF16), jnp.sum(jnp.abs(z), -1), jnp.min(z, -1)


def _columns(s: Any, residual: Any) -> Any:
    z = s - residual.astype(F32)
    return jnp.max(z, -2), z.astype(BF16), jnp.sum(z, -2)


def _loaded(s: Any, x: Any, y: Any, scale: Any) -> Any:
    g = s * x.astype(F32) + y * scale
    return g.astype(BF16), jnp.max(jnp.abs(g))


def _reduced(s: Any, bias: Any) -> Any:
    z = s + bias
    return z.astype(BF16), jnp.max(jnp.abs(z), -1), jnp.sum(z, -2)


def _picked(s: Any, label: Any) -> Any:
    hit = jnp.arange(s.shape[-1]) == label.astype(jnp.int32)
    return jnp.sum(jnp.where(hit, s, 0.0), -1), jnp.max(s, -1)


FUNCTIONS: dict[str, tuple[Any, tuple[tuple[str, Any], ...]]] = {
    "kept": (_kept, (("n", F32),)),
    "rows": (_rows, (("mn", BF16),)),
    "columns": (_columns, (("mn", F32),)),
    "loaded": (_loaded, (("mn", BF16), ("mn", F32), ("m", BF16))),
    "picked": (_picked, (("m", F32),)),
    "reduced": (_reduced, (("n", F32),)),
}
OPTIONS: dict[str, Sequence[Any]] = {
    "function": tuple(FUNCTIONS),
    # Rows, columns, and the warpgroups that share a tile or take turns.
    "tile": ((128, 64, 2), (64, 128, 2), (64, 32, 1), (64, 64, "in turns")),
    "cluster": ((1, 1), (2, 1), (1, 2)),
    "persistence": ("static", "dynamic", "none"),
    "store_slots": (1, 2),
    "late_store": (False, True),
    "layout": ("NN", "NT", "TN"),
    "batch": ((), (2,)),
    # How far the result reaches into its last tiles.
    "edge": ((0, 0), (8, 16), (24, 8)),
}


def _config(case: covering.Case) -> HopperConfig | None:
    rows, columns, shared_by = case["tile"]
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
            persistence=case["persistence"],
            store_slots=case["store_slots"],
        )
    except ValueError:
        return None


def _is_legal(case: covering.Case) -> bool:
    # Consumers in turns claim nothing. A right operand stored [k, n] needs whole panels of columns.
    claims_in_turns = case["persistence"] == "dynamic" and case["tile"][2] == "in turns"
    # One result of 16 bits waits in registers, and nothing that is loaded.
    in_turns, late = case["tile"][2] == "in turns", case["late_store"]
    return (
        not claims_in_turns
        and not (late and (in_turns or case["function"] != "reduced"))
        and _config(case) is not None
        and (case["layout"][1] == "T" or case["edge"][1] % 64 == 0)
    )


def _of(kind: str, lead: tuple[int, ...], m: int, n: int) -> tuple[int, ...]:
    return {"mn": (*lead, m, n), "m": (*lead, m, 1), "n": (n,)}[kind]


@pytest.mark.parametrize("case", covering.pairs(OPTIONS, _is_legal, 300), ids=str)
def test_exact(case: covering.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    racing = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(implementation, "_simulator", lambda: racing)
    config = _config(case)
    assert config is not None
    function, kinds = FUNCTIONS[case["function"]]
    (rows, columns, _), cluster = case["tile"], case["cluster"]
    m, n, k = rows * cluster[0] + case["edge"][0], 128 * cluster[1] + case["edge"][1], 144
    n = max(n, columns * cluster[1] + case["edge"][1])
    rng = np.random.default_rng(0)

    def ints(*shape: int, dtype: Any = BF16) -> Any:
        return jnp.asarray(rng.integers(-3, 4, shape), dtype)

    transposed = [letter == "T" for letter in case["layout"]]
    lead = case["batch"]
    a = ints(*lead, *((k, m) if transposed[0] else (m, k)))
    b = ints(*lead, *((n, k) if transposed[1] else (k, n)))
    operands = [ints(*_of(kind, lead, m, n), dtype=dtype) for kind, dtype in kinds]
    if case["function"] == "picked":
        operands = [jnp.asarray(rng.integers(0, n, (*lead, m, 1)), F32)]
    how = {"transpose_a": transposed[0], "transpose_b": transposed[1], "config": config}
    with races.recorded() as raced:
        found = jax.jit(
            lambda a, b, *x: gemm(
                a, b, epilogue=function, operands=x, implementation="interpret", **how
            )
        )(a, b, *operands)
        jax.block_until_ready(found)
        assert not raced()
    left, right = (
        np.swapaxes(np.asarray(x, np.float32), -1, -2) if t else np.asarray(x, np.float32)
        for x, t in zip((a, b), transposed, strict=True)
    )
    expected = function(jnp.asarray(left @ right), *operands)
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(np.asarray(x, F32), np.asarray(y, F32))
