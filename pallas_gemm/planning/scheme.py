"""Products of types or precision that no kernel has, made of products that one has.

An operand is cast, or split into arrays that add up to it: `x = x1 + x2 + ...`, where x1 is x
rounded to a shorter type, x2 is what is left, rounded, and so on. The terms `xi @ yj` are one sum
in a kernel's accumulator, the smallest first:

    BF16_BF16_F32_X3    2 arrays, 3 terms    x @ y to 2**-16 of |x| @ |y|
    BF16_BF16_F32_X6    3 arrays, 6 terms    to 2**-24
    BF16_BF16_F32_X9    3 arrays, 9 terms    nothing is left out
    TF32_TF32_F32_X3    2 arrays, 3 terms    to 2**-21; as HIGHEST where k is short
    HIGHEST             as X6                with the error of float32

The tensor cores cut off what a sum of float32 does not hold. So the largest term of all but X3
of bfloat16 is summed up in float32, part by part.

XLA splits by cutting off, we by rounding: X3 leaves out a sixteenth of what XLA's does. The small
terms of infinite values are no numbers and do not count, as with XLA. The last of three arrays
lacks some of the last bits of values below 1e-33.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.call import Call, GroupedCall, Signature, SumCall, SymmetricCall
from pallas_gemm.kernels.element_types import FLOATS_16, SINGLE
from pallas_gemm.problem import Problem

Terms = tuple[tuple[int, int], ...]

BFLOAT16 = np.dtype(jnp.bfloat16)
MANTISSA = {BFLOAT16: 7, SINGLE: 10}
"""Bits that a number of an array has after its first one; of float32, those of tf32."""
THREE: Terms = ((1, 0), (0, 1), (0, 0))
SIX: Terms = ((2, 0), (0, 2), (1, 1), *THREE)
NINE: Terms = ((2, 2), (2, 1), (1, 2), *SIX)
SHORTEST_SUM = 64
"""Contracted elements that the tensor cores add up where the error is to be float32's own."""
SHORT_SUM = 256
"""The same where an algorithm is named. 4096 cubed in X6 takes 1,207 us on an H200, and
errs 2.4e-7 (root mean square). With sums of 64 it is 1,377 us and 1.6e-7, with one sum 1,083 us
and 4.4e-6. XLA takes 1,496 us and errs 4.4e-6 there, and 1.6e-7 in 512 x 2048 x 8192. TF32 X3
takes 1,217 us and errs 6.4e-7, 1,156 us and 9.6e-6 with one sum, and 1,240 us and 9.7e-6 by XLA."""
SHORT_K = 2048
"""Contracted elements below which XLA may compute TF32 X3 by a kernel that cuts off little. Six
products of bfloat16 are as much work as three of tf32, and err no more than it there."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How operands become arrays of a type that a kernel multiplies.

    Attributes:
        name: The name that JAX has for it.
        dtype: The type of the arrays.
        terms: The arrays of the left and of the right operand that are multiplied, the smallest
            term first; () if each operand is one.
        longest_sum: See `Problem`.
        apart: Each term is a product of its own, and XLA adds them up: those of groups.
    """

    name: str
    dtype: np.dtype
    terms: Terms = ()
    longest_sum: int = 0
    apart: bool = False

    @property
    def parts(self) -> int:
        """How many arrays an operand becomes."""
        return 1 + max(map(max, self.terms), default=0)

    def __str__(self) -> str:
        each = "tf32" if self.dtype == SINGLE else str(self.dtype)
        if not self.terms:
            return f"{self.name}: one product of {each}"
        how = ", added up" if self.apart else " in one sum, smallest first"
        return f"{self.name}: {len(self.terms)} products of {each}{how}"

    def signature(self, call: Call, signature: Signature) -> Signature:
        """Returns the signature of a call whose operands are of the arrays' type."""
        count = 1 + call.problem(signature).sums
        cast = tuple((shape, self.dtype) for shape, _ in signature[:count])
        return cast + signature[count:]

    def whole(self, problem: Problem) -> Problem:
        """Returns the problem of all terms, of that of one."""
        if not self.terms:
            return problem
        if self.apart:
            return dataclasses.replace(problem, out_dtype=SINGLE)
        count = len(self.terms)
        return dataclasses.replace(
            problem,
            k=count * problem.k,
            terms=count * (problem.k,),
            arrays=self.terms,
            longest_sum=self.longest_sum,
            parts=self._parts(problem.k) if problem.parts else 0,
        )

    def _parts(self, k: int) -> int:
        """In how many parts the largest term is summed up where its bits are promised."""
        return -(-k // self.longest_sum) if self.longest_sum else 1

    def arrays(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the arrays that an operand becomes, the largest first."""
        if not self.terms:
            return (x.astype(self.dtype),)
        # What XLA takes for two casts that undo each other it leaves out, but not this.
        bits = MANTISSA[self.dtype]
        rounded = functools.partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=bits)
        left = x.astype(SINGLE)
        finite = jnp.isfinite(left)
        most = np.float32((2 - 2.0**-bits) * 2.0**127)
        first = jnp.where(finite, jnp.clip(rounded(left), -most, most), left)
        found, left = [first], jnp.where(finite, left - first, jnp.zeros_like(left))
        for _ in range(1, self.parts):
            found.append(rounded(left))
            left = left - found[-1]
        return tuple(part.astype(self.dtype) for part in found)

    def ready(self, operands: Sequence[jax.Array], factors: int) -> tuple[jax.Array, ...]:
        """Returns the operands of a kernel; the first ones, `factors` of them, are multiplied."""
        each = map(self.arrays, operands[:factors])
        return (*itertools.chain.from_iterable(zip(*each, strict=True)), *operands[factors:])

    def added_up(
        self, kernel: Callable[..., jax.Array], operands: Sequence[jax.Array], dtype: Any
    ) -> jax.Array:
        """Returns the sum of products of two operands, of which each is a kernel."""
        left, right = map(self.arrays, operands[:2])
        each = [kernel(left[i], right[j], *operands[2:]) for i, j in self.terms]
        small = functools.reduce(operator.add, each[:-1])
        small = jnp.where(jnp.isfinite(small), small, jnp.zeros_like(small))
        return (small + each[-1]).astype(dtype)


_PRESET = lax.DotAlgorithmPreset
_SPLITS: dict[Any, tuple[Any, ...]] = {
    _PRESET.BF16_BF16_F32_X3: (BFLOAT16, THREE),
    _PRESET.BF16_BF16_F32_X6: (BFLOAT16, SIX, SHORT_SUM),
    _PRESET.BF16_BF16_F32_X9: (BFLOAT16, NINE, SHORT_SUM),
    _PRESET.TF32_TF32_F32_X3: (SINGLE, THREE, SHORT_SUM),
}
_CASTS = {
    _PRESET.BF16_BF16_F32: BFLOAT16,
    _PRESET.F16_F16_F32: np.dtype(np.float16),
    _PRESET.TF32_TF32_F32: SINGLE,
}
HIGHEST = Scheme("HIGHEST", BFLOAT16, SIX, SHORTEST_SUM)


def scheme(precision: Any, dtypes: Sequence[np.dtype]) -> Scheme | None:
    """Returns how operands become those of a kernel; None if they are multiplied as they are.

    Args:
        precision: As `precision.resolve` returns it.
        dtypes: The types of the operands.
    """
    types = set(dtypes)
    if not types <= FLOATS_16 | {SINGLE} or (len(types) == 1 and types != {SINGLE}):
        return None
    if isinstance(precision, tuple) and lax.Precision.HIGHEST in precision:
        return HIGHEST if SINGLE in types else None
    if precision in _SPLITS:
        return Scheme(precision.name, *_SPLITS[precision])
    if precision in _CASTS:
        own = _CASTS[precision]
        return Scheme(precision.name, own) if types != {own} else None
    is_default = isinstance(precision, tuple) or precision in (None, _PRESET.DEFAULT)
    if is_default and len(types) > 1:
        # JAX widens the narrower one, which tf32 holds as it is.
        return Scheme("TF32_TF32_F32", SINGLE)
    return None


def of_call(call: Call, signature: Signature) -> Scheme | None:
    """Returns the scheme of a call's operands; None if they are multiplied as they are.

    Both operands of a symmetric product are one array, and those of a sum of products are several.
    """
    if isinstance(call, SumCall | SymmetricCall):
        return None
    dtypes = tuple(dtype for _, dtype in signature[:2])
    if not isinstance(call, GroupedCall):
        own = scheme(call.precision, dtypes)
        if own is None or own.dtype != SINGLE or not own.terms:
            return own
        is_short = call.problem(signature).k < SHORT_K
        return dataclasses.replace(HIGHEST, name=own.name) if is_short else own
    narrow = set(dtypes) <= FLOATS_16 | {SINGLE} and not call.epilogue.blocks
    if call.contracted and SINGLE in dtypes and narrow:
        # Kernels read [k, m] and [k, n] of 16 bits alone; three products err less than one of tf32.
        simple = isinstance(call.precision, tuple) and lax.Precision.HIGHEST not in call.precision
        if simple or call.precision in (None, _PRESET.DEFAULT, _PRESET.TF32_TF32_F32):
            return Scheme("BF16_BF16_F32_X3", BFLOAT16, THREE, apart=True)
    own = scheme(call.precision, dtypes)
    if own is None or not own.terms:
        return own
    # The error of tf32 or float32 would take kernels of other layouts, or other sums.
    is_split = own.dtype == BFLOAT16 and not own.longest_sum and call.epilogue.is_identity
    return dataclasses.replace(own, apart=True) if is_split else None


def multiplied(
    precision: Any, dtypes: AbstractSet[np.dtype], *, groups: bool = False
) -> AbstractSet[np.dtype]:
    """Returns the types that a kernel would multiply where operands of several types are cast.

    Without a word about precision the narrower one is widened, and XLA is as fast with that: only
    products of groups take a kernel then.

    Args:
        precision: As `precision.resolve` returns it.
        dtypes: The types of the operands.
        groups: It is a product of groups.
    """
    is_named = precision is not None and precision != _PRESET.DEFAULT
    if isinstance(precision, tuple):
        is_named = lax.Precision.HIGHEST in precision
    own = scheme(precision, tuple(dtypes)) if len(dtypes) > 1 and (groups or is_named) else None
    return dtypes if own is None else {own.dtype}
