"""The PTX of functions that the simulator computes in other ways: how far their results err."""

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pallas_gemm.kernels.ptx import quick

Floats = np.ndarray
SMALLEST = 2.0**-126
EDGES = (0.0, 1.0, 43.0, 44.0, 87.0, 89.0, 1e4, 3e38, np.inf, np.nan)
GIVEN = np.concatenate([np.linspace(-100, 100, 20001), EDGES, np.negative(EDGES)])


def _flushed(x: Floats) -> Floats:
    """Float32 as an instruction with ftz makes it."""
    short = x.astype(np.float32)
    return np.where(np.abs(short) < SMALLEST, np.float32(0), short)


def _run(text: str, units: float, *given: Floats) -> Floats:
    """Runs a block of PTX on arrays of float32, in float64 that is rounded after each instruction.

    Special functions err by some units in the last place besides.
    """
    off = 1 + units * 2.0**-23
    operations: dict[str, Callable[..., Floats]] = {
        "mov.f32": lambda x: x,
        "neg.f32": lambda x: -x,
        "mul.f32": lambda x, y: x * y,
        "add.f32": lambda x, y: x + y,
        "sub.f32": lambda x, y: x - y,
        "fma.rn.f32": lambda x, y, z: x * y + z,
        "ex2.approx.ftz.f32": lambda x: _flushed(np.exp2(_flushed(x)) * off),
        "rcp.approx.ftz.f32": lambda x: _flushed(1 / x * off),
        "max.NaN.f32": np.maximum,
        "min.NaN.f32": np.minimum,
        "shl.b32": lambda x, bits: _of_bits(_bits(x) << np.uint32(bits)),
        "mov.b32": lambda x: x,
        "add.s32": lambda x, y: _of_bits(_bits(x) + np.uint32(y)),
        "cvt.rni.f32.f32": np.rint,
        "cvt.rmi.f32.f32": np.floor,
        "cvt.rpi.f32.f32": np.ceil,
        "xor.b32": lambda x, y: _of_bits(_bits(x) ^ _bits(y)),
    }
    values = {f"${i}": x.astype(np.float64) for i, x in enumerate(given, 1)}
    lines = re.sub(r"[{}]", "", text).strip().rstrip("; \n").split(";")
    for line in lines:
        name, target, *inputs = re.split(r",?\s+", line.strip())
        if name == ".reg":
            continue
        own = [values[x] if x in values else _number(x) for x in inputs]
        values[target] = operations[name](*own).astype(np.float32).astype(np.float64)
    return values["$0"]


def _bits(x: Floats) -> Any:
    return x.astype(np.float32).view(np.uint32)


def _of_bits(x: Any) -> Floats:
    return x.view(np.float32).astype(np.float64)


def _number(text: str) -> Any:
    if not text.startswith("0f"):
        return int(text)
    return np.uint32(int(text.removeprefix("0f"), 16)).view(np.float32).astype(np.float64)


def _check(found: Floats, exact: Floats, x: Floats) -> None:
    """A unit of ex2, one of rcp and half of a sum; ex2 is given two rounded numbers."""
    allowed = (2.5 + np.minimum(np.abs(x), 100)) * 2.0**-23 * np.abs(exact) + 1.5 * SMALLEST
    usual = np.isfinite(x) & (exact < 2.0**126)
    assert (np.abs(found - exact) <= allowed)[usual].all()
    np.testing.assert_allclose(found[~np.isfinite(x)], exact[~np.isfinite(x)], rtol=2.0**-22)


@pytest.mark.parametrize(
    "name", ["exp", "sigmoid", "expm1", "sin", "cos", "floor", "ceil", "nearest"]
)
def test_each_block_is_what_it_means(
    name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick, "_of_each", lambda text, layout, x: _run(text, 0, x))  # noqa: ARG005
    halves = np.arange(-8, 8.5, 0.5)
    x = np.concatenate([rng.uniform(-20, 20, 1000), halves]).astype(np.float32)
    on_gpu, meant = (
        getattr(quick, name)(SimpleNamespace(simulated=is_simulated), x, None)
        for is_simulated in (False, True)
    )
    np.testing.assert_allclose(on_gpu, meant, rtol=3e-6, atol=3e-7)


@pytest.mark.parametrize("units", [-1, 0, 1])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_results_err_by_few_units(units: int) -> None:
    x = GIVEN.astype(np.float32).astype(np.float64)
    _check(_run(quick._EXP, units, x), np.exp(x), x)
    _check(_run(quick._SIGMOID, units, x), 1 / (1 + np.exp(-x)), x)


@pytest.mark.parametrize(
    ("scale", "times"), [(1.0, 1.0), (0.75, 0.5), (-0.5 / math.log2(math.e), 2)]
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_one_plus_tanh_is_precise_where_it_is_small(scale: float, times: float) -> None:
    x = GIVEN.astype(np.float32).astype(np.float64)
    found = _run(quick._one_plus_tanh(scale, times), 1, x)
    _check(found, 2 * times / (1 + np.exp(-2 * scale * x)), 2 * scale * x)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_exp_beside_the_largest_of_several() -> None:
    x = GIVEN[np.isfinite(GIVEN) & (np.abs(GIVEN) < 1e4)].astype(np.float32).astype(np.float64)
    largest = x.max()
    found = _run(quick.EXP_BESIDE, 0, x, np.full_like(x, largest))
    np.testing.assert_allclose(found, np.exp(x - largest), rtol=3e-5, atol=SMALLEST)


@pytest.mark.parametrize("mask", [1.0, 1e4, 1e9, 1e30, np.finfo(np.float32).max])
def test_exp_beside_a_number_is_one_for_that_number(mask: float) -> None:
    """So it is with each value of a row that is masked as a whole."""
    x = np.array([mask, -mask], np.float32).astype(np.float64)
    np.testing.assert_array_equal(_run(quick.EXP_BESIDE, 0, x, x), 1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_expm1_is_precise_where_it_is_small(rng: np.random.Generator) -> None:
    small = 10.0 ** rng.uniform(-30, 0, 20000) * rng.choice([-1, 1], 20000)
    drawn = np.concatenate([rng.uniform(-40, 88.7, 20000), small, [-0.0, 88.72, -1e30]])
    x = drawn.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(_run(quick._EXPM1, 0, x), np.expm1(x), rtol=1.5e-7)
    edges = np.array([89.0, 1e4, np.inf, -np.inf, np.nan])
    found = _run(quick._EXPM1, 0, edges)
    np.testing.assert_array_equal(found, [np.inf, np.inf, np.inf, -1, np.nan])


ANGLES = {
    "small": (4.0, 1.5e-7, 3e-7),
    "hundreds": (1e3, 1.5e-7, 3e-7),
    "a million": (1e6, 2e-7, 1e-6),
}
"""The size of arguments, and the largest error, of a result and relative to it."""


@pytest.mark.parametrize("name", ANGLES)
@pytest.mark.parametrize("function", ["sin", "cos"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sines_are_precise(function: str, name: str, rng: np.random.Generator) -> None:
    size, least, relative = ANGLES[name]
    # Some are as near a zero as float32 has them.
    zeros = np.pi / 2 * rng.integers(-int(size / 2), int(size / 2) + 1, 20000)
    drawn = np.concatenate([rng.uniform(-size, size, 20000), zeros[np.abs(zeros) < size], [0.0]])
    x = drawn.astype(np.float32).astype(np.float64)
    found = _run({"sin": quick._SIN, "cos": quick._COS}[function], 0, x)
    exact = {"sin": np.sin, "cos": np.cos}[function](x)
    error = np.abs(found - exact)
    assert error.max() < least
    assert (error <= relative * np.abs(exact)).all()


@pytest.mark.parametrize("text", [quick._SIN, quick._COS])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sines_of_anything_are_no_larger_than_one(text: str) -> None:
    x = np.array([1e7, 1e8, -3e20, 3e38], np.float32).astype(np.float64)
    assert (np.abs(_run(text, 0, x)) <= 1).all()
    assert np.isnan(_run(text, 0, np.array([np.inf, -np.inf, np.nan]))).all()
