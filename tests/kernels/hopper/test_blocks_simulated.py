"""Scales of blocks in the simulated Hopper kernel: exact numbers, no races."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm import gated_gemm, gemm
from pallas_gemm.kernels.hopper.block_scales import BlockScales
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.planning import implementation
from pallas_gemm.problem import Blocks, Epilogue, Problem
from tests import covering, races

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
OPTIONS: dict[str, Sequence[Any]] = {
    # Rows, columns, and the warpgroups that share a tile, or take turns.
    "tile": ((128, 128, 2), (64, 128, 2), (128, 64, 1), (64, 32, 1), (64, 64, "in turns")),
    "late_store": (False, True),
    "cluster": ((1, 1), (2, 1), (1, 2)),
    "schedule": ("hilbert", "online_swizzle:3:cols"),
    "stages": (2, 3),
    "split_k": (1, 2),
    # Rows, columns and contracted elements of a block; 0 of a factor without scales.
    "blocks": (
        *((1, 128, 128), (1, 1, 128), (128, 128, 128), (1, 1, 32), (1, 32, 64), (64, 0, 256)),
        *((0, 32, 64), (8, 16, 32)),
    ),
    "edge": ((0, 0), (-3, 16)),
    "k": (256, 512),
    "types": ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)),
    "out": (jnp.bfloat16, jnp.float32, E5M2),
    "epilogue": ("none", "bias", "gated", "function"),
    # As many products as blocks of k would make scales of columns those of each product.
    "batch": ((), (3,)),
}


def _config(case: covering.Case) -> HopperConfig | None:
    rows, columns, consumers = case["tile"]
    in_turns = consumers == "in turns"
    width = 16 if case["out"] == jnp.float32 or columns < 64 else 32
    try:
        return HopperConfig(
            tile=(rows, columns),
            consumers=2 if in_turns else consumers,
            pingpong=in_turns,
            late_store=case["late_store"],
            cluster=case["cluster"],
            schedule=case["schedule"],
            stages=case["stages"],
            split_k=case["split_k"],
            store_columns=max(width, 32 if case["out"] == E5M2 else 16),
            ctas=4,
        )
    except ValueError:
        return None


def _problem(case: covering.Case) -> Problem:
    (r, c, g), gated = case["blocks"], case["epilogue"] == "gated"
    return Problem(
        *(*_sizes(case), case["k"]),
        *(*case["types"], case["out"]),
        transpose_b=True,
        # A function takes the registers of a bias: it adds one.
        epilogue=Epilogue(bias=case["epilogue"] in ("bias", "function"), gated=gated),
        blocks=Blocks(g, r, c),
    )


def _sizes(case: covering.Case) -> tuple[int, int]:
    pairs = zip(case["cluster"], case["edge"], strict=True)
    m, n = (128 * count + more for count, more in pairs)
    return m, n


def _is_legal(case: covering.Case) -> bool:
    config, is_gated = _config(case), case["epilogue"] == "gated"
    if config is None or (is_gated and (case["tile"][1] < 128 or case["tile"][0] == 64)):
        return False
    if case["blocks"][2] > case["k"] or not config.registers_suffice(_problem(case)):
        return False
    if case["split_k"] > 1 and (config.pingpong or case["epilogue"] == "function"):
        return False
    early = case["out"] == jnp.float32 or config.pingpong or config.is_online
    if case["epilogue"] == "function" and case["split_k"] > 1:
        return False
    early = early or case["split_k"] > 1
    early = early or (case["epilogue"] == "bias" and config.consumer_tile == (64, 128))
    early = early or config.consumer_tile == (128, 64)
    return not (case["late_store"] and (early or is_gated or case["epilogue"] == "function"))


def _scales(rng: np.random.Generator, *shape: int) -> Any:
    return jnp.asarray(np.float32(2.0 ** rng.integers(-2, 2, shape) * rng.choice([-1, 1], shape)))


def _whole(scale: Any, size: tuple[int, int], each: tuple[int, int]) -> np.ndarray:
    scale = np.asarray(scale)
    for axis in (0, 1):
        scale = np.repeat(scale, each[axis], scale.ndim - 2 + axis)
    return scale[..., : size[0], : size[1]]


def _biased(out: Any) -> Any:
    """Returns a function of a product: it rounds, and finds the extremes of rows and columns."""

    def function(s: jax.Array, bias: jax.Array) -> Any:
        z = s + jnp.expand_dims(bias, range(s.ndim - 1))
        return z.astype(out), jnp.max(z, -1), jnp.min(z, -2)

    return function


@pytest.mark.every_other
@pytest.mark.parametrize("case", covering.pairs(OPTIONS, _is_legal, 3500), ids=str)
def test_exact(case: covering.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    racing = plgpu.InterpretGPUParams(detect_races=True)
    monkeypatch.setattr(implementation, "_simulator", lambda _: racing)
    rng, config = np.random.default_rng(0), _config(case)
    (r, c, g), (m, n), k = case["blocks"], _sizes(case), case["k"]

    def ints(*shape: int, dtype: Any) -> Any:
        return jnp.asarray(rng.integers(-3, 4, shape).astype(dtype))

    a = ints(*case["batch"], m, k, dtype=case["types"][0])
    weights = [ints(n, k, dtype=case["types"][1]) for _ in range(2)]
    lead = case["batch"]
    row = _scales(rng, *lead, -(-m // r), k // g) if r else None
    cols = [_scales(rng, k // g, -(-n // c)) if c else None for _ in range(2)]
    has_bias = case["epilogue"] in ("bias", "function")
    bias = ints(n, dtype=jnp.float32) if has_bias else None
    how = {
        "transpose_b": True,
        "preferred_element_type": case["out"],
        "config": config,
        "implementation": "interpret",
        "row_scale": row,
    }
    extremes: list[Any] = []
    with races.recorded() as raced:
        if case["epilogue"] == "gated":
            how |= {"gate_scale": cols[0], "up_scale": cols[1], "activation": "relu"}
            found = gated_gemm(a, *weights, **how)
        elif case["epilogue"] == "function":
            del how["preferred_element_type"]
            function = {"epilogue": _biased(case["out"]), "operands": (bias,)}
            found, *extremes = gemm(a, weights[0], col_scale=cols[0], **function, **how)
        else:
            found = gemm(a, weights[0], col_scale=cols[0], bias=bias, **how)
        jax.block_until_ready(found)
        assert not raced()
    left = np.asarray(a, np.float64)
    left = left if row is None else left * _whole(row, (m, k), (r, g))
    sums = [
        left @ (np.asarray(w, np.float64).T * (1 if s is None else _whole(s, (k, n), (g, c))))
        for w, s in zip(weights, cols, strict=True)
    ]
    expected = sums[0] + (0 if bias is None else np.asarray(bias))
    if case["epilogue"] == "gated":
        expected = np.maximum(sums[0], 0) * sums[1]
    if case["epilogue"] == "function":
        for own, expected_one in zip(extremes, (expected.max(-1), expected.min(-2)), strict=True):
            np.testing.assert_array_equal(own, expected_one)
    rounded = np.float32(expected).astype(case["out"])
    np.testing.assert_array_equal(np.float32(found), np.float32(rounded))


PLAIN: covering.Case = {name: values[0] for name, values in OPTIONS.items()}
SEVERAL: dict[str, tuple[int, covering.Case]] = {
    "1 step, then 3 of 4": (4, {"tile": (64, 128, 2), "k": 14 * 128, "edge": (-3, 16)}),
    "of late stores": (4, {"tile": (64, 128, 2), "k": 9 * 128, "late_store": True}),
    "in turns": (4, {"tile": (64, 64, "in turns"), "k": 5 * 128}),
    "2 at a time": (2, {"tile": (64, 256, 1), "k": 8 * 128}),
}


@pytest.mark.parametrize(("ahead", "own"), SEVERAL.values(), ids=SEVERAL)
def test_scales_of_several_steps_are_loaded_at_a_time(
    ahead: int, own: covering.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = PLAIN | own
    assert _is_legal(case)
    assert BlockScales.of(_config(case), _problem(case)).ahead == ahead
    test_exact(case, monkeypatch)
