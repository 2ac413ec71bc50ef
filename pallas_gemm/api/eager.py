"""Calls outside of any trace: each is one compiled program, which JAX finds by types and options.

Checks and choices are made when it is traced. A call that was made before costs what `jnp.matmul`
costs, which is compiled as a whole, too.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallas_gemm.api.few_bits.weights import QuantizedWeight


def compiled[**P, R](
    *operands: str, check: Callable[[Mapping[str, Any]], None] = lambda _: None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compiles a function as a whole for calls with arrays that are there.

    Args:
        *operands: The arguments that are arrays, lists or tuples of them, or None. All others are
            a part of the program, unless they are given as arrays.
        check: Refuses values, which no program can refuse. It gets the arguments by name, after the
            program was started.
    """

    def decorate(f: Callable[P, R]) -> Callable[P, R]:
        names = tuple(inspect.signature(f).parameters)
        options = frozenset(names) - set(operands)

        @functools.cache
        def program(arrays: frozenset[str]) -> Callable[..., R]:
            return jax.jit(f, static_argnames=tuple(options - arrays), inline=True)

        @functools.wraps(f)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given = (*zip(names, args, strict=False), *kwargs.items())
            arrays = frozenset(name for name, x in given if isinstance(x, jax.Array))
            fixed = options - arrays
            if all(is_hashable(x) if name in fixed else _is_there(x) for name, x in given):
                # What is wrong is said without JAX's frames between the caller and us.
                with contextlib.suppress(TypeError, ValueError):
                    result = program(arrays & options)(*args, **kwargs)
                    check(dict(given))
                    return result
            return f(*args, **kwargs)

        return call

    return decorate


def _is_there(operand: Any) -> bool:
    """Whether an operand is an array with values, or there is none."""
    if isinstance(operand, list | tuple):
        return all(map(_is_there, operand))
    if isinstance(operand, jax.core.Tracer):
        return False
    if isinstance(operand, QuantizedWeight):
        return all(map(_is_there, jax.tree.leaves(operand)))
    return operand is None or isinstance(operand, jax.Array)


def is_hashable(option: Any) -> bool:
    """Whether a compiled program may be found by it."""
    try:
        hash(option)
    except TypeError:
        return False
    return True
