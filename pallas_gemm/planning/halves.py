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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.call import SCALE_OF, Call, Operands, Signature
from pallas_gemm.kernels.element_types import SINGLE

Reduced = tuple[jax.Array, Callable[[Any, Any], Any]]
"""An array, and what makes one value of two."""
DECIDING_SECONDS = 55e-6
"""Measuring both operands and deciding take this. Beside products of bfloat16, fifteen products of
2^33 to 2^34 multiplications took 34 to 82 us more than predicted on an H200, 52 in the mean."""
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


def fit(left: Measured, right: Measured, *, alone: bool) -> jax.Array:
    """Returns whether it is sure that two operands lose no more than another scheme does."""
    if alone:
        fits = jnp.maximum(left.roots, right.roots) < 2.0 ** (ALONE_DISTANCE / 2)
    else:
        fits = _meet(left.roots * right.roots, 2)
    return left.in_range & right.in_range & fits


def closely(
    x: jax.Array, y: jax.Array, axes: tuple[int, int], known: tuple[Measured, Measured]
) -> jax.Array:
    """Returns whether they lose no more where some elements are 0.

    Args:
        x: The left operand.
        y: The right one.
        axes: Their contracted dimensions.
        known: Their sizes.
    """
    spreads, shares = [], []
    for operand, axis, own in zip((x, y), axes, known, strict=True):
        size, steps = jnp.abs(operand.astype(SINGLE)), operand.shape[axis]
        # No t is beyond this, and so no element counts for more. One number for all rows is no
        # operand that XLA would store the result for.
        least = jnp.min(jnp.where(own.largest > 0, own.largest, jnp.inf))
        most = 2.0 ** (LONGEST_DISTANCE / 2) * lax.rsqrt(least)
        roots = jnp.minimum(_roots(size), most)
        count, total = _reduced((lax.sign(size), lax.add), (roots, lax.add), axis)
        shares.append(jnp.min(jnp.where(own.largest > 0, count, steps)) / steps)
        spreads.append(jnp.max(jnp.sqrt(own.largest) * total) / steps)
    meet = _meet(spreads[0] * spreads[1], shares[0] + shares[1])
    return known[0].in_range & known[1].in_range & meet


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
    both: dict[str, Any] = dict.fromkeys(SCALE_OF.values(), True)
    epilogue = dataclasses.replace(call.epilogue, **both)
    return dataclasses.replace(call, epilogue=epilogue)


def scaled_signature(call: Call, signature: Signature) -> Signature:
    """Returns the signature of `scaled`."""
    given = call.unpack(signature)
    for (factor, name), axis in zip(SCALE_OF.items(), _axes(call), strict=True):
        own, theirs = _less(getattr(given, factor)[0], axis), getattr(given, name)
        shape = own if theirs is None else max(own, theirs[0], key=len)
        given = given._replace(**{name: (shape, SINGLE)})
    return given.present()


def measured(call: Call, operands: Any, *, alone: bool) -> tuple[Measured, Measured]:
    """Returns the sizes of the elements of a call's factors."""
    given, (left, right) = call.unpack(operands), _axes(call)
    return measure(given.a, left, alone=alone), measure(given.b, right, alone=alone)


def looked_at_closely(call: Call, operands: Any, known: tuple[Measured, Measured]) -> jax.Array:
    """Returns whether the factors of a call fit that may not have passed at once."""
    given = call.unpack(operands)
    return closely(given.a, given.b, _axes(call), known)


def scaled_operands(call: Call, operands: Any, known: tuple[Measured, Measured]) -> Operands:
    """Returns the operands of `scaled`."""
    given, found = call.unpack(operands), {}
    for (factor, name), axis, own in zip(SCALE_OF.items(), _axes(call), known, strict=True):
        theirs, x = getattr(given, name), getattr(given, factor).astype(SINGLE)
        found[name] = own.undone if theirs is None else _times(theirs.astype(SINGLE), own.undone)
        found[factor] = x * jnp.expand_dims(own.scale, axis)
    return given._replace(**found)


def _times(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies scales, of which one may have a dimension more for a batch."""
    rank = max(x.ndim, y.ndim)
    x, y = (jnp.expand_dims(z, 0) if z.ndim < rank else z for z in (x, y))
    return x * y


def _axes(call: Call) -> tuple[int, int]:
    """Returns which dimension of each factor is contracted."""
    return -2 if call.transpose_a else -1, -1 if call.transpose_b else -2


def _less(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[len(shape) + axis + 1 :])


def _power(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits << 23, jnp.float32)
