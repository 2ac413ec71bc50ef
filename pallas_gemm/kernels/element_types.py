"""The element types that the kernels multiply, and those of the results that they make of them."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_gemm.problem import Problem

FLOATS_16 = frozenset(map(np.dtype, (jnp.bfloat16, jnp.float16)))
FLOATS_8 = frozenset(map(np.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2)))
SINGLE = np.dtype(np.float32)
FROM_16_BITS = FLOATS_16 | {SINGLE}
"""The floats of 16 bits and more."""
INT8 = np.dtype(np.int8)
INT32 = np.dtype(np.int32)
FLOATS = FLOATS_16 | FLOATS_8 | {SINGLE}
INT4, UINT4 = np.dtype(jnp.int4), np.dtype(jnp.uint4)
E2M1 = np.dtype(jnp.float4_e2m1fn)
BITS = MappingProxyType(dict.fromkeys((INT4, UINT4, E2M1), 4) | dict.fromkeys({INT8} | FLOATS_8, 8))
"""The types of weights that are widened in registers, and the bits of each."""


def bits(kind: np.dtype) -> int:
    """The bits of a number in memory."""
    return BITS.get(kind, 8 * kind.itemsize)


def is_widened(left: Any, right: Any) -> bool:
    """Whether a right operand of few bits is multiplied in the type of the left one."""
    return np.dtype(right) in BITS and np.dtype(left) in FROM_16_BITS


def refusals(problem: Problem, *, single: bool, blocks: bool) -> Iterator[str]:
    """Yields every reason why a kernel cannot take the types of a problem.

    Args:
        problem: The product.
        single: The kernel multiplies float32.
        blocks: It scales blocks of the factors.
    """
    if problem.blocks is not None and not blocks:
        how = f"scales of {problem.blocks} are multiplied in"
        if not problem.scales:
            how = f"{problem.blocks} elements are added up"
        yield f"{how} on Hopper alone"
    a, b = problem.a_dtype, problem.b_dtype
    if not (a == b or {a, b} <= FLOATS_8):
        yield f"operands must have one dtype, or two of 8-bit floats, got {a} and {b}"
    if a not in FLOATS | {INT8} or (a == SINGLE and not single):
        names = "bfloat16, float16, float32, float8" if single else "bfloat16, float16, float8"
        yield f"operands must be {names} or int8, got {a}"
    elif a not in FLOATS_16 and (problem.transpose_a or not problem.transpose_b):
        yield (
            f"{a} operands must be stored with k last (layout NT): only 16-bit elements are"
            f" transposed on the way into the tensor cores, got layout {problem.layout}"
        )
    bare = problem.epilogue.is_identity
    results = FLOATS | {INT32} if a == INT8 and bare else FLOATS
    if problem.out_dtype not in results:
        names = ", ".join(sorted(map(str, results)))
        what = str(a) if bare else f"{a} with an epilogue"
        yield f"the result of {what} must be one of {names}, got {problem.out_dtype}"
    if problem.residual_dtype is not None and problem.residual_dtype not in FLOATS:
        names = ", ".join(sorted(map(str, FLOATS)))
        yield f"the residual must be one of {names}, got {problem.residual_dtype}"


def _cast(operands: AbstractSet[np.dtype]) -> str:
    """Says what to cast so that operands of several types may be multiplied by a kernel."""
    narrow, *_, wide = sorted(operands, key=lambda dtype: dtype.itemsize)
    if narrow.itemsize == wide.itemsize:
        return "cast one of them to the type of the other"
    if wide == SINGLE:
        # Products of float32 are XLA's for the most part.
        if narrow in FLOATS_16:
            name = "BF16_BF16_F32" if narrow == np.dtype(jnp.bfloat16) else "F16_F16_F32"
            return f"cast float32 to {narrow}, or let precision={name!r} do it"
        return f"cast both to bfloat16, with what {narrow} was divided by as row_scale or col_scale"
    return f"cast {narrow} to {wide}, with what it was divided by as row_scale or col_scale"


def are_widened(operands: AbstractSet[np.dtype]) -> bool:
    """Whether weights of few bits are multiplied by what has 16."""
    wide = operands & FLOATS_16
    return len(operands) == 2 and len(wide) == 1 and operands - wide <= set(BITS)


def why_promoted(operands: AbstractSet[np.dtype]) -> str | None:
    """Returns why operands of several types are promoted and left to XLA; None if they are not."""
    if len(operands) == 1 or operands <= FLOATS_8 or not operands <= FLOATS | {INT8}:
        return None
    return f"no kernel multiplies {' by '.join(sorted(map(str, operands)))}; {_cast(operands)}"


def why_no_kernel(
    operands: AbstractSet[np.dtype], result: np.dtype, *, widened: bool = True
) -> str | None:
    """Returns why no kernel takes these types, whatever else a product is; None if one may.

    A result of int8 is what JAX promotes int8 to: XLA rounds to it within the product.

    Args:
        operands: The types of the operands.
        result: The type of the result.
        widened: A kernel may take weights of few bits beside what has 16.
    """
    if widened and are_widened(operands):
        return None
    if foreign := operands - (FLOATS | {INT8}):
        return f"no kernel takes operands of {', '.join(sorted(map(str, foreign)))}"
    if why := why_promoted(operands):
        return why
    if result not in FLOATS | ({INT8, INT32} if operands == {INT8} else set()):
        names = ", ".join(sorted(map(str, operands)))
        return f"no kernel makes a result of {result} from {names}"
    return None
