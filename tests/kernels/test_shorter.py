"""Programs in fewer instructions: the same results, and which steps go."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels.axes import Names
from pallas_gemm.kernels.ptx import quick
from pallas_gemm.kernels.shorter import FMA, ONE_PLUS_TANH, shorter
from pallas_gemm.kernels.split import Split, split
from pallas_gemm.program import Constant, Program

F32, BF16 = jnp.float32, jnp.bfloat16


@pytest.fixture(autouse=True)
def _as_users_write() -> Iterator[None]:
    """Functions broadcast and promote as they do by default."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def _program(f: Callable[..., Any], *operands: Any) -> Program:
    # The sign of float32 results that must be exact; it is a step of every program here.
    def whole(s: Any, *x: Any) -> list[Any]:
        return [*jax.tree.leaves(f(s, *x)), jnp.sum(jnp.exp(s), 0)]

    closed = jax.make_jaxpr(whole)(WIDE, *operands)
    parts = split(closed, Names("mn", "m", "n"))
    assert isinstance(parts, Split)
    return parts.program


class _Simulated:
    """A plan as far as an operation asks for it."""

    simulated = True


def _run(program: Program, s: Any, *operands: Any) -> list[Any]:
    values = [s, *operands]
    for step in program.steps:
        given = [
            np.asarray(x.value, x.dtype)[()] if isinstance(x, Constant) else values[x]
            for x in step.inputs
        ]
        params: Any = dict(step.params)
        plan: Any = _Simulated()
        if step.primitive is FMA:
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
    "distributed": (lambda s: 0.5 * (0.25 * (4 + s) * s - 2), ()),
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
    given = [jnp.asarray(rng.normal(0, 3, x.shape), x.dtype) for x in (WIDE, *operands)]
    short = shorter(program)
    assert [own._replace(value=0) for own in short.results] == [
        own._replace(value=0) for own in program.results
    ]
    for x, y in zip(_run(short, *given), _run(program, *given), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


def _count(name: str) -> dict[str, int]:
    program = shorter(_program(FUNCTIONS[name][0], *FUNCTIONS[name][1]))
    found = collections.Counter(step.primitive.name for step in program.steps)
    assert found.pop("exp") == 1
    return found


def test_which_steps_are_left() -> None:
    assert _count("gelu") == {"integer_pow": 1, "fma": 1, "one_plus_tanh": 1, "mul": 1}
    found = _count("gelu's slope")
    assert (found["fma"], found["one_plus_tanh"], found["tanh"]) == (5, 1, 0)
    assert sum(found.values()) <= 13
    assert _count("bias") == {"fma": 1}
    assert _count("differences") == {"fma": 2}
    assert _count("distributed") == {"fma": 2, "mul": 1}
    # What is used twice is computed once, and what is far from 1 in the order of the function.
    assert _count("a product for two")["fma"] == 0
    assert _count("large")["mul"] >= 3


def test_tanh_stays_precise_where_small_numbers_count() -> None:
    for name in ("capped", "both", "gelu in float32"):
        assert _count(name)["tanh"] == 1
        assert _count(name)["one_plus_tanh"] == 0


def test_a_program_that_may_be_approximated_is_left_as_it_is() -> None:
    closed = jax.make_jaxpr(lambda s: [jax.nn.gelu(s).astype(BF16)])(WIDE)
    parts = split(closed, Names("mn", "m", "n"))
    assert isinstance(parts, Split)
    program = parts.program
    assert program.is_coarse
    assert shorter(program) == program
