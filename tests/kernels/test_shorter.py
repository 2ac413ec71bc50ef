"""Programs in fewer instructions: the same results, and which steps go."""

import collections
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_gemm.kernels.functions import saturating
from pallas_gemm.kernels.functions.axes import Names
from pallas_gemm.kernels.functions.parts import Split
from pallas_gemm.kernels.functions.shorter import FMA, ONE_PLUS_TANH, shorter
from pallas_gemm.kernels.functions.split import split
from pallas_gemm.kernels.ptx import quick
from pallas_gemm.program import Constant, Program

pytestmark = pytest.mark.usefixtures("as_users_write")

F32, BF16, E4M3 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn


def _program(f: Callable[..., Any], *operands: Any) -> Program:
    # The sign of float32 results that must be exact; it is a step of every program here.
    def whole(s: Any, *x: Any) -> list[Any]:
        return [*jax.tree.leaves(f(s, *x)), jnp.sum(jnp.exp(s), 0)]

    closed = jax.make_jaxpr(whole)(WIDE, *operands)
    parts = split(closed, Names("mn", "m", "n"))
    assert isinstance(parts, Split)
    return parts.program


def _in(dtype: Any, x: Constant) -> Any:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return np.asarray(x.value, dtype if dtype and is_float else x.dtype)[()]


class _Simulated:
    """A plan as far as an operation asks for it."""

    simulated = True


def _run(program: Program, dtype: Any, s: Any, *operands: Any) -> list[Any]:
    """Runs a program in a type, in which nothing is rounded to a shorter one; None for as it is."""
    values = [s, *operands]
    for step in program.steps:
        given = [_in(dtype, x) if isinstance(x, Constant) else values[x] for x in step.inputs]
        params: Any = dict(step.params)
        plan: Any = _Simulated()
        converts = step.primitive is lax.convert_element_type_p
        if dtype and converts and jnp.issubdtype(params["new_dtype"], jnp.floating):
            values.append(given[0].astype(dtype))
        elif step.primitive is saturating.SATURATED:
            values.append(quick.saturated(plan, *given, params["new_dtype"]))
        elif step.primitive is FMA:
            values.append(quick.fma(plan, given, params["signs"], None))
        elif step.primitive is ONE_PLUS_TANH:
            values.append(quick.one_plus_tanh(plan, *given, params["scale"], params["times"], None))
        else:
            arrays = [jnp.broadcast_to(x, (8, 16)) for x in given]
            values.append(step.primitive.bind(*arrays, **params))
    return [values[own.value] for own in program.results]


def _slope(s: Any, pre: Any) -> Any:
    _, slope = jax.jvp(jax.nn.gelu, (pre,), (jnp.ones_like(pre),))
    return (s * slope).astype(BF16), jnp.sum(s * slope, 0)


WIDE, SMALL = (jax.ShapeDtypeStruct((8, 16), dtype) for dtype in (F32, jnp.int8))
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "gelu": (lambda s: jnp.sum(jax.nn.gelu(s), 0), ()),
    "gelu in float32": (jax.nn.gelu, ()),
    "gelu's slope": (_slope, (WIDE,)),
    "bias": (lambda s, x: 2 * (3 * s) + x, (WIDE,)),
    "differences": (lambda s, x: (x - s * s, s * x - 1), (WIDE,)),
    "distributed": (lambda s: (0.5 * (0.25 * (4 + s) * s - 2)).astype(BF16), ()),
    "distributed in float32": (lambda s: 0.5 * (0.25 * (4 + s) * s - 2), ()),
    "capped": (lambda s: 30 * jnp.tanh(s / 30), ()),
    "both": (lambda s: (jnp.tanh(s), 1 + jnp.tanh(s)), ()),
    "a product for two": (lambda s: (s * s + 1, s * s), ()),
    "large": (lambda s: 1e20 * (1e20 * s) + 1e-20 * (1e-20 * s), ()),
    "of integers": (
        lambda s, x: s + (x * x + 1).astype(F32),
        (jax.ShapeDtypeStruct((8, 16), jnp.int8),),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_the_program(name: str) -> None:
    f, operands = FUNCTIONS[name]
    program = _program(f, *operands)
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.normal(0, 3, x.shape).astype(x.dtype)) for x in (WIDE, *operands)]
    short = shorter(program)
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) if x.dtype == F32 else x for x in given]
        exact = [np.asarray(x) for x in _run(program, np.float64, *wide)]
    assert [own._replace(value=0) for own in short.results] == [
        own._replace(value=0) for own in program.results
    ]
    for x, z in zip(_run(short, F32, *given), exact, strict=True):
        with np.errstate(over="ignore"):
            rounded = z.astype(np.float32)
        np.testing.assert_allclose(x, rounded, rtol=2e-5, atol=2e-6)


def _count(name: str) -> dict[str, int]:
    program = shorter(_program(FUNCTIONS[name][0], *FUNCTIONS[name][1]))
    found = collections.Counter(step.primitive.name for step in program.steps)
    assert found.pop("exp") == 1
    return found


def test_which_steps_are_left() -> None:
    assert _count("gelu") == {"integer_pow": 1, "fma": 1, "one_plus_tanh": 1, "mul": 1}
    found = _count("gelu's slope")
    assert (found["fma"], found["one_plus_tanh"], found["tanh"]) == (4, 1, 0)
    assert found["integer_pow"] == 1
    assert sum(found.values()) <= 11
    assert _count("bias") == {"fma": 1}
    assert _count("differences") == {"fma": 2}
    assert _count("distributed") == {"fma": 2, "mul": 1, "convert_element_type": 1}
    # A small rest of large sums would have the digits of a number that was multiplied beforehand.
    assert _count("distributed in float32") == {"fma": 1, "mul": 2, "add": 1}
    # What is used twice is computed once, and what is far from 1 in the order of the function.
    assert _count("a product for two")["fma"] == 0
    assert _count("large")["mul"] >= 3


@pytest.mark.parametrize(("name", "most"), [("gelu", 3), ("gelu's slope", 2)])
def test_a_cube_is_taken_apart_where_the_square_is_there(name: str, most: int) -> None:
    program = shorter(_program(FUNCTIONS[name][0], *FUNCTIONS[name][1]))
    (power,) = [step for step in program.steps if step.primitive is lax.integer_pow_p]
    assert dict(power.params)["y"] == most
    (tangent,) = [step for step in program.steps if step.primitive is ONE_PLUS_TANH]
    scale = dict(tangent.params)["scale"]
    assert (np.float32(-2 * math.log2(math.e) * scale) == 1) == (most == 2)


CLIPPED: dict[str, tuple[Callable[..., Any], bool]] = {
    "as it saturates": (lambda s, x: jnp.clip(s * x, -448, 448).astype(E4M3), True),
    "its other type": (lambda s, x: jnp.clip(s * x, -57344, 57344).astype(jnp.float8_e5m2), True),
    "first from above": (
        lambda s, x: jnp.maximum(jnp.minimum(s * x, 448), -448).astype(E4M3),
        True,
    ),
    "less": (lambda s, x: jnp.clip(s * x, -447, 447).astype(E4M3), False),
    "from below": (lambda s, x: jnp.maximum(s * x, -448).astype(E4M3), False),
    "at other numbers": (lambda s, x: jnp.clip(s * x, 448, -448).astype(E4M3), False),
    "of another type": (lambda s, x: jnp.clip(s * x, -448, 448).astype(jnp.float8_e5m2), False),
    "in no type of 8 bits": (lambda s, x: jnp.clip(s * x, -448, 448).astype(BF16), False),
    "twice": (lambda s, x: jnp.clip(jnp.clip(s * x, -448, 448), -448, 448).astype(E4M3), True),
}


@pytest.mark.parametrize("exp", [False, True])
@pytest.mark.parametrize("name", CLIPPED)
def test_a_conversion_clips_by_itself(name: str, exp: bool) -> None:
    f, goes = CLIPPED[name]

    def both(s: Any, x: Any) -> list[Any]:
        return [f(s, x), jnp.sum(jnp.exp(s), 0)] if exp else [f(s, x), jnp.max(s, 0)]

    parts = split(jax.make_jaxpr(both)(WIDE, WIDE), Names("mn", "m", "n"))
    assert isinstance(parts, Split)
    short = shorter(parts.program)
    found = [step.primitive for step in short.steps]
    assert (saturating.SATURATED in found) == goes
    if goes:
        (dtype,) = [
            dict(s.params)["new_dtype"] for s in short.steps if "new_dtype" in dict(s.params)
        ]
        assert dtype == short.results[0].dtype == parts.program.results[0].dtype
        assert (lax.min_p in found) == (lax.max_p in found) == (name == "twice")
    s = np.linspace(-1000, 1000, 128, dtype=np.float32).reshape(8, 16)
    s[0, :3] = np.inf, -np.inf, np.nan
    x = np.full_like(s, 90.0)
    plain, own = (_run(program, None, s, x) for program in (parts.program, short))
    for expected, result in zip(plain, own, strict=True):
        np.testing.assert_array_equal(np.asarray(result, F32), np.asarray(expected, F32))


def test_tanh_stays_precise_where_small_numbers_count() -> None:
    for name in ("capped", "both", "gelu in float32"):
        assert _count(name)["tanh"] == 1
        assert _count(name)["one_plus_tanh"] == 0


def test_a_program_that_may_be_approximated_keeps_tanh_which_is_one_instruction() -> None:
    closed = jax.make_jaxpr(lambda s: [jax.nn.gelu(s).astype(BF16)])(WIDE)
    parts = split(closed, Names("mn", "m", "n"))
    assert isinstance(parts, Split)
    short = shorter(parts.program)
    assert parts.program.is_coarse
    assert short.is_coarse
    found = collections.Counter(step.primitive.name for step in short.steps)
    assert found.pop("convert_element_type") == 1
    assert found == {"integer_pow": 1, "fma": 2, "mul": 2, "tanh": 1}
    s = np.random.default_rng(0).normal(0, 3, (8, 16)).astype(np.float32)
    (own,), (plain,) = (_run(program, F32, s) for program in (short, parts.program))
    np.testing.assert_allclose(own, plain, rtol=2e-5, atol=2e-6)
