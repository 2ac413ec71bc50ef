"""In how many parts of k the sums of a product are made, where the caller is promised their bits.

The tensor cores add up the steps of k in their order. So the bits of an element follow from its row
of a, its column of b, and from where a sum is cut into parts: these are added up in float32, in the
order of k. Neither the tile, nor the order of the tiles, nor who computes them makes a difference.

    who                          parts                                    for
    one CTA                      one after the other, in its registers    many rows
    one CTA for each part        joined in the order of k                 few rows

Both make the same bits (`GemmConfig.split_k`, `HopperConfig.partial_sums`). So the number of parts
may be chosen for few rows, and many rows only lose the tiles that two sums have no registers for.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from pallas_gemm.call import Call, GroupedCall, Numerics, Options
from pallas_gemm.config import STEP_BYTES
from pallas_gemm.problem import Problem

NARROW = 2048
"""Columns of a right operand, below which few rows are too few tiles to keep an H200 busy. 2048 are
32 tiles of 64: 1 to 255 rows of 2048 x 8192 run at 0.72 to 0.88 times the speed that they have
without a promise, and 4096 rows at 1.00 times instead of 0.96 in parts."""
LONG_STEPS = 64
"""Steps of k from which on it takes long that so few SMs are busy."""
PARTS = 4
"""Into how many parts such sums are cut. 1 to 255 rows of 1024 x 4096, 1152 x 6912 and 1536 x 8960
run at 0.88 to 1.04 times the speed that they have on an H200 without a promise. With whole sums it
is 0.55 to 0.83, and with two parts 0.76 to 1.01."""

ELSEWHERE = (
    "this program is compiled for another platform than an NVIDIA GPU; implementation='interpret'"
    " simulates a kernel, which keeps it"
)
"""Why no kernel computes a product."""

# A context of JAX's own, so that a function that was traced outside a block is traced anew in it.
STATED = jax.make_user_context(default_value=None)


def stated(options: Options) -> Options:
    """Returns options with what a block around them states, unless they state it themselves."""
    asked = options.numerics or STATED.value
    if asked is not None and asked.promises_nothing:
        asked = None
    return dataclasses.replace(options, numerics=asked)


def refuse(why: str, own: Numerics | None = None) -> None:
    """Raises an error if an argument, or a block, promises something that is not kept here."""
    if (promised := stated(Options(numerics=own)).numerics) is not None:
        raise ValueError(why_not_kept(promised, why))


def resolved(options: Options, n: int, k: int, dtype: Any, rights: int = 1) -> Options:
    """Returns options with the number of parts that keeps what they promise.

    Args:
        options: As the caller stated them.
        n: Columns of the right operand.
        k: The contracted size.
        dtype: Type of the operands.
        rights: Right operands: two if the product is gated.

    Raises:
        ValueError: The parts that are stated are none of k.
    """
    asked = options.numerics
    if asked is None:
        return options
    return dataclasses.replace(options, parts=_parts(asked, n * rights, k, np.dtype(dtype)))


def resolved_call[C: Call](call: C, n: int, k: int, dtype: Any) -> C:
    """Returns a call with the number of parts that keeps what its options promise."""
    rights = 2 if call.epilogue.gated else 1
    return dataclasses.replace(call, options=resolved(call.options, n, k, dtype, rights))


def over_rows(call: Call, rows: int, dtype: Any) -> Call:
    """Returns the call for a sum over rows, whose parts are chunks of rows if that is stated."""
    asked = call.options.numerics
    if asked is None:
        return call
    options = dataclasses.replace(call.options, numerics=asked.over_rows)
    return dataclasses.replace(call, options=resolved(options, 0, rows, dtype))


def resolved_groups(call: GroupedCall, a: Any, b: Any) -> GroupedCall:
    """Returns the call of a product of groups, with the parts that keep what its options promise.

    Raises:
        ValueError: The parts that are stated are none of k, or groups are summed over in parts.
    """
    if not call.contracted:
        n = b.shape[1 if call.transpose_b else 2]
        return resolved_call(call, n, a.shape[1], a.dtype)
    if (asked := call.options.numerics) is None:
        return call
    options = dataclasses.replace(call.options, numerics=asked.over_rows)
    if asked.over_rows.part is not None:
        raise ValueError(
            f"numerics: sums over groups have no chunks, for groups begin anywhere; got {asked}"
        )
    return dataclasses.replace(call, options=options)


def _parts(asked: Numerics, n: Any, k: Any, dtype: np.dtype) -> int:
    if is_symbolic_dim(k) or is_symbolic_dim(n):
        # No kernel takes such sizes, which is said where one is looked for.
        return 1
    step = STEP_BYTES // dtype.itemsize
    if asked.part is not None:
        return _stated_parts(asked.part, k, step)
    if asked.invariant != "rows":
        return 0
    return PARTS if 0 < n < NARROW and k >= LONG_STEPS * step else 1


def _stated_parts(part: int, k: int, step: int) -> int:
    if k <= part:
        return 1
    if part % step:
        raise ValueError(
            f"numerics: parts of a sum must be a multiple of {step} elements of k, which is a step"
            f" for these types, got {part}; the next is {-(-part // step) * step}"
        )
    if k % part:
        raise ValueError(
            f"numerics: a sum over {k} elements of k must be a whole number of parts of {part}; the"
            f" next is a sum over {-(-k // part) * part}"
        )
    return k // part


def stating(problem: Problem) -> Numerics | None:
    """Returns what asks for the sums of a problem; None if they are not made in certain parts."""
    if not problem.parts:
        return None
    rows, n = Numerics("rows"), problem.n * problem.sums
    if _parts(rows, n, problem.k, problem.a_dtype) == problem.parts:
        return rows
    return Numerics("run", part=problem.k // problem.parts)


def why_not_kept(asked: Numerics | None, why: str, others: Sequence[str] = ()) -> str:
    """Returns the words of an error where no kernel computes what is promised."""
    more = f" ({'; '.join(others)})" if others else ""
    return f"{asked} is a promise of the kernels, and none computes this product: {why}{more}"
