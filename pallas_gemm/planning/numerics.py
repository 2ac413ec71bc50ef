"""In how many parts of k the sums of a product are made, where the caller is promised their bits.

The tensor cores add up the steps of k in their order. So the bits of an element follow from its row
of a, its column of b, and from where a sum is cut into parts: these are added up in float32, in the
order of k. Neither the tile, nor the order of the tiles, nor who computes them makes a difference.

    who                          parts                                    for
    one CTA                      one after the other, in its registers    many rows
    one CTA for several parts    the first CTA adds up its own, and       more rows
                                 others leave each for itself
    one CTA for each part        joined in the order of k                 few rows

All make the same bits (`GemmConfig.split_k`, `HopperConfig.partial_sums`). So the number of parts
may be chosen for few rows, and many rows only lose the tiles that two sums have no registers for.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from pallas_gemm.call import Call, GroupedCall, Numerics, Options
from pallas_gemm.config import STEP_BYTES
from pallas_gemm.problem import Problem

LONG_STEPS = 64
"""Steps of k from which on it takes long that few SMs are busy."""
PARTS = ((512, 4), (640, 3), (1024, 4), (1408, 3), (1536, 4), (2047, 2))
"""(columns, at most, parts of so long a k). 256 rows are where the wrong number costs most: tiles
of 64 x 128, or 64 x 192, then fill the 132 SMs of an H200 once, or nearly. 3 parts of 256 x 1152 x
6912 run at 0.99 times the speed without a promise, and 4 at 0.89. 3 parts of 256 x 1536 x 7168 run
at 0.81 times, and 4 at 1.00. From 2048 columns on sums are whole: 1 to 255 rows run at 0.72 to 0.88
times the speed, and many as fast as without."""
LONGEST_SUM = 4096
"""Elements of k that the tensor cores add up in one sum, where the result is float32 and operands
are shorter. Such a result shows the error of what they cut off."""

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
    refuse_promised(stated(Options(numerics=own)), why)


def refuse_promised(options: Options, why: str, others: Sequence[str] = ()) -> None:
    """Raises an error if something is promised of what no kernel computes."""
    if options.numerics is not None:
        raise ValueError(why_not_kept(options.numerics, why, others))


def resolved(options: Options, n: int, k: int, dtype: Any, longest: int = 0) -> Options:
    """Returns options with the number of parts that keeps what they promise.

    Args:
        options: As the caller stated them.
        n: Columns of the right operands.
        k: The contracted size.
        dtype: Type of the operands.
        longest: Elements of k in one part at most, where the parts follow from k; 0 for any number.

    Raises:
        ValueError: The parts that are stated are none of k.
    """
    asked = options.numerics
    if asked is None:
        return options
    return dataclasses.replace(options, parts=_parts(asked, n, k, np.dtype(dtype), longest))


def resolved_call[C: Call](call: C, n: int, k: int, dtype: Any, *, finished: bool = False) -> C:
    """Returns a call with the number of parts that keeps what its options promise.

    Args:
        call: The product.
        n: Columns of each right operand.
        k: The contracted size.
        dtype: Type of the operands.
        finished: The caller's function is applied to the sums, which takes registers.
    """
    if call.epilogue.blocks:
        # Each block's sum is added up in float32 anyway, and no kernel cuts such sums.
        n = 0
    rights = 2 if call.epilogue.gated else 1
    is_short = np.dtype(dtype).itemsize <= 2 and not np.issubdtype(dtype, np.integer)
    is_wide = is_short and call.out_dtype == np.float32 and not (finished or call.epilogue.blocks)
    longest = LONGEST_SUM if is_wide else 0
    return dataclasses.replace(call, options=resolved(call.options, n * rights, k, dtype, longest))


def over_rows(call: Call, rows: int, dtype: Any) -> Call:
    """Returns the call for a sum over rows, whose parts are chunks of rows if that is stated."""
    asked = call.options.numerics
    if asked is None:
        return call
    options = dataclasses.replace(call.options, numerics=asked.over_rows)
    return dataclasses.replace(call, options=resolved(options, 0, rows, dtype))


def resolved_groups(call: GroupedCall, a: Any, b: Any, *, finished: bool = False) -> GroupedCall:
    """Returns the call of a product of groups, with the parts that keep what its options promise.

    Args:
        call: The product.
        a: Its left operand.
        b: Its right operand.
        finished: As for `resolved_call`.

    Raises:
        ValueError: The parts that are stated are none of k, or groups are summed over in parts.
    """
    if not call.contracted:
        n = b.shape[1 if call.transpose_b else 2]
        return resolved_call(call, n, a.shape[1], a.dtype, finished=finished)
    if (asked := call.options.numerics) is None:
        return call
    options = dataclasses.replace(call.options, numerics=asked.over_rows)
    if asked.over_rows.part is not None:
        raise ValueError(
            f"numerics: sums over groups have no chunks, for groups begin anywhere; got {asked}"
        )
    return dataclasses.replace(call, options=options)


def _parts(asked: Numerics, n: Any, k: Any, dtype: np.dtype, longest: int = 0) -> int:
    if is_symbolic_dim(k) or is_symbolic_dim(n):
        # No kernel takes such sizes, which is said where one is looked for.
        return 1
    step = STEP_BYTES // dtype.itemsize
    if asked.part is not None:
        return _stated_parts(asked.part, k, step)
    if asked.invariant != "rows":
        return 0
    is_cut = n > 0 and k >= LONG_STEPS * step
    of_columns = next((parts for most, parts in PARTS if is_cut and n <= most), 1)
    return max(of_columns, -(-k // longest) if longest else 1)


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
    own = functools.partial(_parts, rows, n, problem.k, problem.a_dtype)
    if problem.parts == own(LONGEST_SUM if problem.out_dtype == np.float32 else 0):
        return rows
    return Numerics("run", part=problem.k // problem.parts)


def why_not_kept(asked: Numerics | None, why: str, others: Sequence[str] = ()) -> str:
    """Returns the words of an error where no kernel computes what is promised."""
    more = f" ({'; '.join(others)})" if others else ""
    return f"{asked} is a promise of the kernels, and none computes this product: {why}{more}"
