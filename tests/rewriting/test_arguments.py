"""Where a product's largest or smallest value of a row is: its kernel finds it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from tests import reference
from tests.reference import integers
from tests.rewriting.test_folds import BF16, SHAPE, count, rewritten
from tests.rewriting.test_walk import assert_same

F32 = jnp.float32
LARGE = SHAPE((8192, 256), BF16), SHAPE((4096, 256), BF16)
SMALL = (192, 64), (320, 64)


def _nearest(x: Any, codes: Any) -> Any:
    """The code that each vector is nearest to, and that code."""
    squares = jnp.sum(jnp.square(codes.astype(F32)), 1)
    found = jnp.argmin(squares[None] - 2 * jnp.dot(x, codes.T, preferred_element_type=F32), 1)
    return found, codes[found]


def _likeliest(x: Any, w: Any) -> Any:
    logits = jnp.dot(x, w.T, preferred_element_type=F32)
    return jnp.argmax(logits, -1), jax.nn.logsumexp(logits, -1)


PROGRAMS = (_nearest, _likeliest)


@pytest.mark.parametrize("f", PROGRAMS)
def test_no_array_of_all_values_is_stored(f: Callable[..., Any]) -> None:
    program, (found,) = rewritten(f, *LARGE)
    assert count(program, "pallas_gemm_fused") == 1
    assert not {e.primitive.name for e in program.eqns} & {"argmin", "argmax"}
    assert found.answer.startswith("by a kernel")
    assert all(x.aval.size < 8192 * 4096 for e in program.eqns for x in e.outvars)


@pytest.mark.parametrize("f", PROGRAMS)
def test_values_are_the_programs(f: Callable[..., Any]) -> None:
    rng = np.random.default_rng(0)
    args = [integers(rng, shape, BF16) for shape in SMALL]
    program, _ = rewritten(f, *args, implementation="interpret")
    assert count(program, "pallas_gemm_fused") == 1
    found = jax.jit(core.jaxpr_as_fun(program))(*args)
    expected = jax.tree.leaves(jax.jit(f)(*args))
    assert_same(found[:1], expected[:1])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)


@pytest.mark.parametrize("exact", [False, True])
def test_it_is_the_largest_of_rounded_values_only_if_bits_are_promised(exact: bool) -> None:
    rng = np.random.default_rng(0)
    args = [reference.normal(rng, shape, BF16) for shape in SMALL]
    program, _ = rewritten(
        lambda x, w: jnp.argmax(x @ w.T, -1), *args, implementation="interpret", exact=exact
    )
    assert count(program, "pallas_gemm_fused") == 1
    (found,) = jax.jit(core.jaxpr_as_fun(program))(*args)
    sums = np.asarray(args[0], np.float32) @ np.asarray(args[1], np.float32).T
    of_sums, of_rounded = np.argmax(sums, -1), np.argmax(np.asarray(jnp.asarray(sums, BF16)), -1)
    # Several sums are as large in bfloat16.
    assert np.any(of_sums != of_rounded)
    np.testing.assert_array_equal(found, of_rounded if exact else of_sums)


def test_places_along_columns_stay_jaxs() -> None:
    program, _ = rewritten(lambda x, w: jnp.argmax(x @ w.T, 0), *LARGE)
    assert count(program, "argmax") == 1
