"""Products of types or precision that no kernel has, made of products that one has.

An operand is cast, or split into arrays that add up to it: `x = x1 + x2 + ...`, where x1 is x
rounded to a shorter type, x2 is what is left, rounded, and so on. The terms `xi @ yj` are one sum
in a kernel's accumulator, the smallest first:

    BF16_BF16_F32_X3    2 arrays, 3 terms    x @ y to 2**-16 of |x| @ |y|
    BF16_BF16_F32_X6    3 arrays, 6 terms    to 2**-24
    BF16_BF16_F32_X9    3 arrays, 9 terms    nothing is left out
    HIGHEST             as X6                with the error of float32
    TF32_TF32_F32_X3    as HIGHEST

Where that is faster, arrays of float16 are multiplied in place of these (see `halves.py`):

    TF32, the default   1 array, 1 term      to 2**-10
    TF32_TF32_F32_X3    2 arrays, 3 terms    to 2**-21
    X6, HIGHEST         2 arrays, 4 terms    to 2**-22

The tensor cores cut off what a sum of float32 does not hold. So the largest term of all but X3
of bfloat16 is summed up in float32, part by part. They cut off more of a sum of 8-bit floats. These
are multiplied as they are, and HIGHEST and ANY_F8_ANY_F8_F32 ask for short sums.

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
from pallas_gemm.kernels.element_types import FLOATS_8, FLOATS_16, INT8, SINGLE
from pallas_gemm.planning import halves
from pallas_gemm.problem import Blocks, Problem

Terms = tuple[tuple[int, int], ...]

BFLOAT16 = np.dtype(jnp.bfloat16)
HALF = np.dtype(jnp.float16)
MANTISSA = 7
"""Bits that a number of bfloat16 has after its first one."""
THREE: Terms = ((1, 0), (0, 1), (0, 0))
FOUR: Terms = ((1, 1), *THREE)
SIX: Terms = ((2, 0), (0, 2), (1, 1), *THREE)
NINE: Terms = ((2, 2), (2, 1), (1, 2), *SIX)
SHORTEST_SUM = 64
"""Contracted elements that the tensor cores add up where the error is to be float32's own."""
SHORT_SUM = 256
"""The same where an algorithm is named. 4096 cubed in six products of bfloat16 takes 1,207 us on an
H200, and errs 2.4e-7 (root mean square). With sums of 64 it is 1,377 us and 1.6e-7, with one sum
1,083 us and 4.4e-6. XLA takes 1,496 us for X6 and errs 4.4e-6 there, and 1.6e-7 in 512 x 2048 x
8192."""
SUM_OF_8_BITS = 128
"""The same of 8-bit floats, as in cuBLAS."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How operands become arrays of a type that a kernel multiplies.

    Attributes:
        name: The name that JAX has for it, or the type of the left operand if only that changes.
        dtype: The type of the arrays; None for the type of each operand.
        terms: The arrays of the left and of the right operand that are multiplied, the smallest
            term first; () if each operand is one.
        longest_sum: See `Problem`. With the types of the operands, the elements of each block.
        of_left: Only the left operand becomes an array of that type.
        apart: Each term is a product of its own, and XLA adds them up: those of groups.
        otherwise: The scheme of operands that do not fit in arrays of float16; None if all do.
    """

    name: str
    dtype: np.dtype | None
    terms: Terms = ()
    longest_sum: int = 0
    of_left: bool = False
    apart: bool = False
    otherwise: "Scheme | None" = None

    @property
    def count(self) -> int:
        """How many arrays an operand becomes."""
        return 1 + max(map(max, self.terms), default=0)

    def __str__(self) -> str:
        if self.dtype is None:
            return f"{self.name}: one product, in sums of {self.longest_sum} elements"
        if self.of_left:
            how = f"the left operand in {self.dtype}, the right one widened in registers"
            return f"{self.name}: {how}"
        each = "tf32" if self.dtype == SINGLE else str(self.dtype)
        how = f"one product of {each}"
        if self.terms:
            how = f"{len(self.terms)} products of {each}"
            how += ", added up" if self.apart else " in one sum, smallest first"
        if self.otherwise is not None:
            other = str(self.otherwise).removeprefix(f"{self.name}: ").split(" in one sum")[0]
            how += f"; {other} where elements differ too much in size"
        return f"{self.name}: {how}"

    def signature(self, call: Call, signature: Signature) -> Signature:
        """Returns the signature of a call whose operands are of the arrays' type."""
        if self.dtype is None:
            return signature
        count = 1 if self.of_left else 1 + call.problem(signature).sums
        cast = tuple((shape, self.dtype) for shape, _ in signature[:count])
        return cast + signature[count:]

    def whole(self, problem: Problem) -> Problem:
        """Returns the problem of all terms, of that of one."""
        if self.dtype is None:
            # Blocks that have scales are added up in float32 as well.
            blocks, parts = problem.blocks or Blocks(self.longest_sum), min(1, problem.parts)
            return dataclasses.replace(problem, blocks=blocks, parts=parts)
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
            shift=halves.SHIFT if self.dtype == HALF else 0,
            longest_sum=self.longest_sum,
            parts=self._parts(problem.k) if problem.parts else 0,
        )

    def _parts(self, k: int) -> int:
        """In how many parts the largest term is summed up where its bits are promised."""
        return -(-k // self.longest_sum) if self.longest_sum else 1

    def arrays(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the arrays that an operand becomes, the largest first."""
        if not self.terms:
            return (x if self.dtype is None else x.astype(self.dtype),)
        if self.dtype == HALF:
            return halves.split(x)
        # What XLA takes for two casts that undo each other it leaves out, but not this.
        rounded = functools.partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=MANTISSA)
        left = x.astype(SINGLE)
        finite = jnp.isfinite(left)
        most = np.float32((2 - 2.0**-MANTISSA) * 2.0**127)
        first = jnp.where(finite, jnp.clip(rounded(left), -most, most), left)
        found, left = [first], jnp.where(finite, left - first, jnp.zeros_like(left))
        for _ in range(1, self.count):
            found.append(rounded(left))
            left = left - found[-1]
        return tuple(part.astype(self.dtype) for part in found)

    def ready(self, operands: Sequence[jax.Array], factors: int) -> tuple[jax.Array, ...]:
        """Returns the operands of a kernel; the first ones, `factors` of them, are multiplied."""
        factors = 1 if self.of_left else factors
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
    _PRESET.TF32_TF32_F32_X3: (BFLOAT16, SIX, SHORTEST_SUM),
}
_CASTS = {
    _PRESET.BF16_BF16_F32: BFLOAT16,
    _PRESET.F16_F16_F32: np.dtype(np.float16),
    _PRESET.TF32_TF32_F32: SINGLE,
}
HIGHEST = Scheme("HIGHEST", BFLOAT16, SIX, SHORTEST_SUM)
SHORT_SUMS = Scheme("HIGHEST", None, longest_sum=SUM_OF_8_BITS)
_TF32 = Scheme("TF32_TF32_F32", SINGLE)
_IN_FLOAT16: dict[str, Terms] = {
    "TF32_TF32_F32": (),
    "TF32_TF32_F32_X3": THREE,
    "BF16_BF16_F32_X6": FOUR,
    "HIGHEST": FOUR,
}


def scheme(precision: Any, dtypes: Sequence[np.dtype]) -> Scheme | None:
    """Returns how operands become those of a kernel; None if they are multiplied as they are.

    Args:
        precision: As `precision.resolve` returns it.
        dtypes: The types of the operands.
    """
    types = set(dtypes)
    if types <= FLOATS_8:
        if isinstance(precision, tuple):
            return SHORT_SUMS if lax.Precision.HIGHEST in precision else None
        is_named = precision == _PRESET.ANY_F8_ANY_F8_F32
        return dataclasses.replace(SHORT_SUMS, name=precision.name) if is_named else None
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
        return _TF32
    return None


def of_call(call: Call, signature: Signature) -> Scheme | None:
    """Returns the scheme of a call's operands; None if they are multiplied as they are.

    Both operands of a symmetric product are one array, and those of a sum of products are several.
    """
    if isinstance(call, SumCall | SymmetricCall):
        return None
    dtypes = tuple(dtype for _, dtype in signature[:2])
    if not isinstance(call, GroupedCall):
        return scheme(call.precision, dtypes)
    own = scheme(call.precision, dtypes)
    if own is None or not own.terms:
        return own
    # The error of tf32 or float32 would take kernels of other layouts, or other sums.
    is_split = own.dtype == BFLOAT16 and not own.longest_sum and call.epilogue.is_identity
    return dataclasses.replace(own, apart=True) if is_split else None


def in_float16(call: Call, own: Scheme | None, dtypes: Sequence[np.dtype]) -> Scheme | None:
    """Returns the scheme by arrays of float16 that stands for another one; None if none does.

    The bits of a row depend on all rows, because all decide whether elements fit. A config that is
    named is for the other scheme, and TF32 by name is TF32.

    Args:
        call: The product.
        own: The other scheme; None if a kernel multiplies operands as they are.
        dtypes: The types of the operands.
    """
    options, epilogue = call.options, call.epilogue
    if call.precision == _PRESET.TF32_TF32_F32:
        return None
    is_named = (options.config, options.schedule) != (None, None)
    is_other = isinstance(call, SumCall | SymmetricCall)
    has_more = epilogue.program is not None or bool(epilogue.blocks)
    if own is None and set(dtypes) == {SINGLE}:
        own = _TF32
    if own is None or own.name not in _IN_FLOAT16 or is_named or is_other or has_more:
        return None
    if options.parts:
        return None
    terms = _IN_FLOAT16[own.name]
    if terms and (epilogue.gated or isinstance(call, GroupedCall)):
        return None
    return Scheme(own.name, HALF, terms, SHORTEST_SUM if terms else 0, otherwise=own)


def beside_16_bits(call: Call, dtypes: Sequence[np.dtype]) -> Scheme | None:
    """Returns the scheme that multiplies 8 bits as weights of few bits; None if none does.

    float16 holds them as they are, and sums of floats err less. float32 does not hold all sums of
    int8, so that results have 16 bits. The bits of a row depend on how many rows there are, because
    they decide whether this is faster.
    """
    is_short = call.out_dtype in FLOATS_16 and call.epilogue.program is None
    is_held = set(dtypes) <= FLOATS_8 or (set(dtypes) == {INT8} and is_short)
    return Scheme("FLOAT16", HALF, of_left=True) if is_held else None


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
    return dtypes if own is None or own.dtype is None else {own.dtype}
