"""Products of float32 by arrays of float16: they have the bits of TF32, and take half its time.

float16 lacks the range. So rows of the left operand and columns of the right one are multiplied by
powers of two first, which bring their largest elements to 2**14. The sums are divided by them. One
array holds 11 bits of each element. A second one, 2**11 times as large, holds 11 bits of the rest:

    x * scale = first + second / 2**11    to 2**-23 of x, and to 2**-50 of the largest in its row

One product of float16 has the first array alone: to 2**-11 of x, and to 2**-39 of the largest.

Small elements may lose the last number. This matters where a sum consists of them, as in `x @ eye`.
`fit` bounds it by two numbers for each row. The `share` is that of elements that are not 0. The
`spread` is the mean of sqrt(largest / |x|), to which an x of 0 adds nothing. At least

    share - spread / 2**(t / 2)           of a row are within 2**-t of its largest element,

as Markov's inequality says. Let these shares of a row and of a column, for t and u, come to 17/16
together. Then a 16th of the elements of both meet. So |x| @ |y| is at least k / 16 * 2**-(t + u) of
the product of the largest two. Small elements lose 2 * k * 2**-50 of that product at most. If t + u
is 21, that is 2**-24 of |x| @ |y|, a rounding of float32; with one array it is 2**-13. The best t
and u ask for

    2 * sqrt(spread of x * spread of y / 2**(21 / 2)) <= share of x + share of y - 17/16.

Zeros count as the smallest number at first, and the share as 1: that takes a pass over an operand.
Where each operand is one array, it is enough that no element but 0 is below 2**-28 of the largest:
none loses more than 2**-11 of itself then. All others are measured `closely`.

A product that does not pass, or has elements that float32 itself can barely add up, is computed by
another scheme, in the same program.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.call import SCALE_OF, Call, Signature
from pallas_gemm.kernels.element_types import SINGLE

Reduced = tuple[jax.Array, Callable[[Any, Any], Any]]
"""An array, and what makes one value of two."""
DECIDING_SECONDS = 55e-6
"""Measuring both operands and deciding take this. Beside products of bfloat16, fifteen products of
2^33 to 2^34 multiplications took 34 to 82 us more than predicted on an H200, 52 in the mean."""
ALONE_AT_MOST = 0.9
"""One product of float16 may be predicted to take this share of the time that TF32 takes. Where
elements differ too much, TF32 follows after all, some passes later."""
TOP = 14
"""The exponent of the largest element of a row once it is scaled: float16 ends at 2**16."""
LONGEST_DISTANCE = 21
"""t + u above."""
ALONE_DISTANCE = 28
"""Exponents from the largest number that a row is scaled to, to the smallest that has all bits."""
MEETING = 1 / 16
"""The share of elements that meet."""
BIAS = 127
"""The bits of an exponent of float32 are larger by this."""
RANGE = 60
"""Exponents of the largest elements are within this distance of 0: no sum is then infinite or lost
that would not be so in float32, whatever scales the caller has up to 2**50."""
SMALLEST = 2.0**-126
"""Smaller numbers of float32 count as this one, which is beyond any t."""
SMALLEST_HALF = -14
"""The exponent of the smallest number of float16 that has all bits."""
SHIFT = 11
"""By how many powers of two the second array is larger."""


class Measured(NamedTuple):
    """The sizes of an operand's elements.

    Attributes:
        largest: The size of the largest element of each row, for a left operand, or of each column.
        roots: The largest of these spreads, where 0 counts as the smallest number. Where an operand
            is one array, the largest sqrt(largest / |x|) of what is not 0.
    """

    largest: jax.Array
    roots: jax.Array

    @property
    def scale(self) -> jax.Array:
        """The power of two for each row or column."""
        return _power(jnp.where(self.largest > 0, TOP + 2 * BIAS - self._exponent, BIAS))

    @property
    def undone(self) -> jax.Array:
        """The power of two that the sums are multiplied by in turn."""
        return _power(jnp.where(self.largest > 0, self._exponent - TOP, BIAS))

    @property
    def in_range(self) -> jax.Array:
        """Whether float32 itself holds the sums; not if an element is infinite, or no number."""
        far = jnp.abs(self._exponent - BIAS) > RANGE
        return ~jnp.any(far & (self.largest != 0))

    @property
    def _exponent(self) -> jax.Array:
        return lax.bitcast_convert_type(self.largest, jnp.int32) >> 23


def measure(x: jax.Array, axis: int, *, alone: bool) -> Measured:
    """Returns the sizes of an operand's elements.

    Args:
        x: The operand.
        axis: Its contracted dimension.
        alone: It is to be one array.
    """
    size = jnp.abs(x.astype(SINGLE))
    if alone:
        largest, most = _reduced((size, lax.max), (_roots(size), lax.max), axis)
        return Measured(largest, jnp.max(jnp.sqrt(largest) * most))
    roots = lax.rsqrt(jnp.maximum(size, SMALLEST))
    largest, total = _reduced((size, lax.max), (roots, lax.add), axis)
    return Measured(largest, jnp.max(jnp.sqrt(largest) * total) / x.shape[axis])


def fit(left: Measured, *right: Measured, alone: bool) -> jax.Array:
    """Returns whether it is sure that operands lose no more than another scheme does."""
    roots = functools.reduce(jnp.maximum, (own.roots for own in right))
    if alone:
        fits = jnp.maximum(left.roots, roots) < 2.0 ** (ALONE_DISTANCE / 2)
    else:
        fits = _meet(left.roots * roots, 2)
    return _in_range(left, *right) & fits


def closely(
    factors: Sequence[jax.Array], axes: Sequence[int], known: Sequence[Measured]
) -> jax.Array:
    """Returns whether they lose no more where some elements are 0.

    Args:
        factors: The left operand, and the right ones.
        axes: Their contracted dimensions.
        known: Their sizes.
    """
    spreads, shares = [], []
    for operand, axis, own in zip(factors, axes, known, strict=True):
        size, steps = jnp.abs(operand.astype(SINGLE)), operand.shape[axis]
        # No t is beyond this, and so no element counts for more. One number for all rows is no
        # operand that XLA would store the result for.
        least = jnp.min(jnp.where(own.largest > 0, own.largest, jnp.inf))
        most = 2.0 ** (LONGEST_DISTANCE / 2) * lax.rsqrt(least)
        roots = jnp.minimum(_roots(size), most)
        count, total = _reduced((lax.sign(size), lax.add), (roots, lax.add), axis)
        shares.append(jnp.min(jnp.where(own.largest > 0, count, steps)) / steps)
        spreads.append(jnp.max(jnp.sqrt(own.largest) * total) / steps)
    spread, share = (
        functools.reduce(jnp.maximum, spreads[1:]),
        functools.reduce(jnp.minimum, shares[1:]),
    )
    return _in_range(*known) & _meet(spreads[0] * spread, shares[0] + share)


def _in_range(*known: Measured) -> jax.Array:
    return functools.reduce(operator.and_, (own.in_range for own in known))


def _roots(size: jax.Array) -> jax.Array:
    """Returns 1 / sqrt(x) where x is not 0."""
    return lax.sign(size) * lax.rsqrt(jnp.maximum(size, SMALLEST))


def _reduced(one: Reduced, other: Reduced, axis: int) -> Sequence[jax.Array]:
    """Returns what two arrays become along a dimension.

    XLA reads an operand once for one reduction of two values, along rows and along columns. For
    three, or for two reductions, it reads columns several times, and stores what it computes.
    """
    (x, of_x), (y, of_y) = one, other
    zero = np.float32(0)
    return lax.reduce(
        (x, y), (zero, zero), lambda a, b: (of_x(a[0], b[0]), of_y(a[1], b[1])), (axis % x.ndim,)
    )


def _meet(spreads: jax.Array, shares: Any) -> jax.Array:
    """Returns whether enough large elements meet, for a product of spreads and a sum of shares."""
    return 2 * jnp.sqrt(spreads * 2.0 ** (-LONGEST_DISTANCE / 2)) <= shares - (1 + MEETING)


def split(x: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the two arrays of an operand that is scaled."""
    # A reduced precision has no numbers below its smallest whole one; those of float16 are evenly
    # spaced there.
    spacing = 2.0 ** (SMALLEST_HALF - 10)
    first = jnp.where(
        jnp.abs(x) < 2.0**SMALLEST_HALF,
        lax.round(x / spacing, lax.RoundingMethod.TO_NEAREST_EVEN) * spacing,
        lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10),
    )
    return first.astype(jnp.float16), ((x - first) * 2.0**SHIFT).astype(jnp.float16)


def scaled(call: Call) -> Call:
    """Returns the call whose rows and columns have scales."""
    every: dict[str, Any] = {SCALE_OF[factor]: True for factor in call.factors}
    epilogue = dataclasses.replace(call.epilogue, **every)
    return dataclasses.replace(call, epilogue=epilogue)


def scaled_signature(call: Call, signature: Signature) -> Signature:
    """Returns the signature of `scaled`."""
    given = call.unpack(signature)
    for factor, axis in zip(call.factors, call.contracted_axes, strict=True):
        own, theirs = _less(getattr(given, factor)[0], axis), getattr(given, SCALE_OF[factor])
        shape = own if theirs is None else max(own, theirs[0], key=len)
        given = given._replace(**{SCALE_OF[factor]: (shape, SINGLE)})
    return call.repacked(given, signature)


def measured(call: Call, operands: Any, *, alone: bool) -> tuple[Measured, ...]:
    """Returns the sizes of the elements of a call's factors."""
    factors = zip(_factors(call, operands), call.contracted_axes, strict=True)
    return tuple(measure(x, axis, alone=alone) for x, axis in factors)


def looked_at_closely(call: Call, operands: Any, known: Sequence[Measured]) -> jax.Array:
    """Returns whether the factors of a call fit that may not have passed at once."""
    return closely(_factors(call, operands), call.contracted_axes, known)


def scaled_operands(call: Call, operands: Any, known: Sequence[Measured]) -> tuple[Any, ...]:
    """Returns the operands of `scaled`."""
    given, found = call.unpack(operands), {}
    for factor, axis, own in zip(call.factors, call.contracted_axes, known, strict=True):
        x, theirs = getattr(given, factor).astype(SINGLE), getattr(given, SCALE_OF[factor])
        scale = own.undone if theirs is None else _times(theirs.astype(SINGLE), own.undone)
        found |= {factor: x * jnp.expand_dims(own.scale, axis), SCALE_OF[factor]: scale}
    return call.repacked(given._replace(**found), operands)


def _factors(call: Call, operands: Any) -> list[jax.Array]:
    given = call.unpack(operands)
    return [getattr(given, factor) for factor in call.factors]


def _times(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies scales, of which one may have a dimension more for a batch."""
    rank = max(x.ndim, y.ndim)
    x, y = (jnp.expand_dims(z, 0) if z.ndim < rank else z for z in (x, y))
    return x * y


def _less(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[len(shape) + axis + 1 :])


def _power(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits << 23, jnp.float32)
