"""What callers promise of their operands, looked at where they ask for it: `check=True`.

For concrete arrays, it raises the error at once. Within a traced program it is looked at when the
program runs, and the error is the one that JAX makes of a Python error in a callback.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.numpy import matmul

from pallas_gemm.api import arguments

COMMUTE = 2.0**-7
"""How far the product of matrices of 16 bits may be from symmetric, as a share of the sums of
absolute products that its elements are: their elements are rounded by up to a part in 256."""


class _Fault(NamedTuple):
    """What is found: whether anything is wrong, the first place, and the numbers there."""

    found: Any
    at: Any
    here: Any
    there: Any


def check_symmetric(name: str, x: Any) -> None:
    """Refuses a matrix, or several, that equals its transpose not everywhere bit for bit.

    Args:
        name: The caller's name for it.
        x: The array; None is symmetric.

    Raises:
        ValueError: It does not; the message has the first place.
    """
    if x is not None and _are_square(x := arguments.array(name, x)):
        _refuse(f"{name} must be symmetric", x.shape, _asymmetry(x))


def check_commute(a: Any, b: Any) -> None:
    """Refuses two matrices whose product is not symmetric, even if their elements were rounded.

    Raises:
        ValueError: It is not; the message has the first place.
    """
    a, b = arguments.array("a", a), arguments.array("b", b)
    if a.shape == b.shape and a.dtype == b.dtype and _are_square(a, b):
        _refuse("a and b must commute, so that a @ b is symmetric", a.shape, _commutator(a, b))


def _are_square(*arrays: Any) -> bool:
    """Whether there is anything to look at: what is wrong with shapes is said where shapes are."""
    return not any(
        isinstance(x, jax.ShapeDtypeStruct)
        or x.ndim < 2
        or x.shape[-1] != x.shape[-2]
        or not x.size
        for x in arrays
    )


@jax.jit
def _asymmetry(x: jax.Array) -> _Fault:
    other = jnp.swapaxes(x, -1, -2)
    # Where both are no number, they are equal.
    return _first((x != other) & ~(jnp.isnan(x) & jnp.isnan(other)), x, other)


@jax.jit
def _commutator(a: jax.Array, b: jax.Array) -> _Fault:
    wide = np.promote_types(np.float32, a.dtype)
    a, b = a.astype(wide), b.astype(wide)
    product = matmul(a, b, precision="highest")
    size = matmul(jnp.abs(a), jnp.abs(b), precision="highest")
    other = jnp.swapaxes(product, -1, -2)
    bound = COMMUTE * (size + jnp.swapaxes(size, -1, -2))
    return _first(abs(product - other) > bound, product, other)


def _first(wrong: jax.Array, x: jax.Array, other: jax.Array) -> _Fault:
    at = jnp.argmax(wrong)
    return _Fault(wrong.any(), at, x.reshape(-1)[at], other.reshape(-1)[at])


def _refuse(what: str, shape: tuple[int, ...], fault: _Fault) -> None:
    """Raises if anything is wrong, now or when the program runs."""

    def say(found: Any, at: Any, here: Any, there: Any) -> None:
        if found:
            place = [int(i) for i in np.unravel_index(int(at), shape)]
            mirror = [*place[:-2], place[-1], place[-2]]
            raise ValueError(f"{what}, got {here} at {place} and {there} at {mirror}")

    if isinstance(fault.found, jax.core.Tracer):
        jax.debug.callback(say, *fault)
    else:
        say(*fault)
