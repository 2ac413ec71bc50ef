"""`Problem`: what is to be multiplied, without a word about how."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_gemm.program import ADDING, Program, Result

ROW_BYTES = 16
"""What TMA asks of rows: a multiple of it."""

TYPES = MappingProxyType(
    {
        "bf16": jnp.bfloat16,
        "f16": jnp.float16,
        "f32": jnp.float32,
        "f64": jnp.float64,
        "e4m3": jnp.float8_e4m3fn,
        "e5m2": jnp.float8_e5m2,
        "s8": jnp.int8,
        "s32": jnp.int32,
    }
)
"""Short names of types, beside those that NumPy and JAX know."""


def element_type(value: Any) -> Any:
    """Returns a type that may be given by a short name such as "bf16"; all else as it is."""
    return TYPES.get(value, value) if isinstance(value, str) else value


KINDS = MappingProxyType(
    {
        "row_blocks": "mk",
        "col_blocks": "kn",
        "up_blocks": "kn",
        "col_zeros": "kn",
        "up_zeros": "kn",
        "bias": "n",
        "residual": "mn",
        "alpha": "",
        "beta": "",
        "row_scale": "m",
        "col_scale": "n",
        "up_scale": "n",
        "up_bias": "n",
    }
)
"""The operands of an epilogue in words, in their order, with the dimensions that each has: rows (m)
and columns (n) of the result, both or none; or some of those of a factor, in blocks (`BLOCKS`)."""
BLOCKS = ("row_blocks", "col_blocks", "up_blocks")
"""Those of them that scale a factor block by block: each has a value for each block of it, and so
it is smaller than the factor."""
ZEROS = ("col_zeros", "up_zeros")
"""The values of a right operand that stand for 0, one for each of its blocks."""
OF_FACTORS = (*BLOCKS, *ZEROS)
SCALES = ("row_scale", "col_scale", "up_scale")
"""The scales: vectors by which sums are multiplied."""
OF_VALUE = ("alpha", "row_scale", "col_scale", "bias")
"""Operands that make a value of a sum. The last is added, and all others multiply it."""
OF_UP = MappingProxyType(
    {
        "col_scale": "up_scale",
        "bias": "up_bias",
        "col_blocks": "up_blocks",
        "col_zeros": "up_zeros",
    }
)
"""The operands of the second sum of a gated product, by the names of those of the first."""
VALUES = (OF_VALUE, tuple(OF_UP.get(name, name) for name in OF_VALUE))
"""The same for the first sum, and for the second."""


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The steps from the float32 sum to the result, which is rounded once.

        value = alpha * row_scale * col_scale * sum + bias
        result = activation(value) + beta * residual

    A gated one has two right operands and two sums: the result is `activation(value) * up_value +
    beta * residual`. The value of the other sum is made with `up_scale` and `up_bias` in place of
    `col_scale` and `bias`.

    Attributes:
        alpha: Scales the sum; None if it is an operand, and so a number of the running program.
        beta: Scales the residual; None likewise.
        bias: There is one value per column to add.
        residual: There is an array of the result's shape to add.
        activation: A traceable elementwise function of a float32 array.
        gated: There are two right operands, gate and up.
        row_blocks: There is one value per block of the left operand to scale it with.
        col_blocks: There is one value per block of the right operand to scale it with.
        up_blocks: There is one value per block of the other right operand to scale it with.
        col_zeros: There is one value per block of the right operand that is taken off it first.
        up_zeros: There is one value per block of the other right operand, likewise.
        row_scale: There is one value per row to scale the sum with.
        col_scale: There is one value per column to scale the sum with.
        up_scale: There is one value per column to scale the sum of up with.
        up_bias: There is one value per column to add to the value of up.
        program: The steps of the caller's function, in place of all these.
    """

    alpha: float | None = 1.0
    beta: float | None = 1.0
    bias: bool = False
    residual: bool = False
    activation: Callable[[Any], Any] | None = None
    gated: bool = False
    row_blocks: bool = False
    col_blocks: bool = False
    up_blocks: bool = False
    col_zeros: bool = False
    up_zeros: bool = False
    row_scale: bool = False
    col_scale: bool = False
    up_scale: bool = False
    up_bias: bool = False
    program: Program | None = None

    @functools.cached_property
    def is_identity(self) -> bool:
        """Whether the sum is only rounded."""
        return self == Epilogue(beta=self.beta)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The operands that it takes beside the factors, by their names and in their order."""
        # A number is one if only the running program knows it.
        given = {name: getattr(self, name) for name in KINDS}
        return tuple(name for name, value in given.items() if value is None or value is True)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The operands with values for blocks of the factors, by their names, in their order."""
        return tuple(name for name in OF_FACTORS if getattr(self, name))

    @property
    def of_whole_sums(self) -> "Epilogue":
        """The rest of it, without the scales of blocks."""
        return (
            dataclasses.replace(self, **dict.fromkeys(self.blocks, False)) if self.blocks else self
        )

    @property
    def of_blocks(self) -> "Epilogue":
        """Nothing but the values of blocks, of the factors of one sum."""
        return Epilogue(
            row_blocks=self.row_blocks, col_blocks=self.col_blocks, col_zeros=self.col_zeros
        )

    @property
    def parts(self) -> tuple[str, ...]:
        """What it consists of, in words: for those who read what is computed, or why not."""
        found = [*self.operands, *(["gated"] if self.gated else [])]
        if self.alpha not in (None, 1):
            found.append(f"alpha={self.alpha:g}")
        if self.activation is not None:
            found.append(getattr(self.activation, "__name__", "activation"))
        if self.program is not None:
            found.append("a function of the product")
        return tuple(found)


class Blocks(NamedTuple):
    """Blocks of the factors, whose sums are scaled and then added up in float32.

    One that is as long as the factor is one block. Without scales only k is cut.

        sum over blocks of  left[row block, block of k] * right[block of k, column block]
                            * (a in this block @ b in this block)

    Attributes:
        k: Contracted elements of each.
        rows: Rows of each block of the left operand; 0 if its blocks have no scales.
        columns: Columns of each block of the right operand, or of each of both; 0 likewise.
        zeros: Blocks of the right operand have a value each that stands for 0.
    """

    k: int
    rows: int = 0
    columns: int = 0
    zeros: bool = False

    def __str__(self) -> str:
        left = f"{self.rows} x {self.k} of a" if self.rows else ""
        right = f"{self.k} x {self.columns} of b" if self.columns else ""
        right += " with zero points" if self.zeros else ""
        if not (left or right):
            return f"sums of {self.k}"
        return "blocks of " + " and ".join(filter(None, (left, right)))


@dataclasses.dataclass(frozen=True)
class Problem:
    """`out[batch, m, n] = epilogue(sum over k of a[batch, m, k] * b[batch, k, n])`.

    Attributes:
        m: Rows of the result.
        n: Columns of the result.
        k: The contracted size.
        a_dtype: Element type of the left operand.
        b_dtype: Element type of the right operand.
        out_dtype: Element type of the result; the sum itself is kept in float32 (int32 for int8).
        transpose_a: The left operand is stored `[k, m]` instead of `[m, k]`.
        transpose_b: The right operand is stored `[n, k]` instead of `[k, n]`.
        batch: How many products of this size are computed; the operands and the result then have
            a leading dimension of this size, unless `batch` is 1.
        epilogue: The steps between the sum and the result.
        transpose_out: The result is stored `[n, m]`. Bias and residual belong to the result as it
            is stored.
        kept: (rows, columns) of the product that are the result, where the operands were made
            longer than the result is to be; None for all m and n.
        terms: The contracted sizes of several products, where the result is their sum and k is the
            sum of these; `()` for one product. Each operand is an array for each product, and its
            shape is that of these arrays side by side.
        arrays: Each operand is the sum of several arrays, the largest first, and these are the
            (left, right) arrays that are multiplied, one pair for each of `terms`. The last pair
            is of the largest two; what the others come to counts where it is finite. `()` if each
            array of one operand is multiplied by one of the other.
        shift: Each further one of these arrays is 2**shift times as large as what it stands for.
        longest_sum: Contracted elements of the largest term that the tensor cores may add up at
            most; such sums are added up in float32. 0 for any number.
        shared_a: The products of a batch have one left operand, a matrix.
        shared_b: They have one right operand, or one pair of them.
        groups: The rows are those of this number of groups, one after the other, each with a right
            operand of its own. How many rows each has is an operand. 0 if there are none.
        ragged_k: Each product of the batch is a sum over steps of k of its own. They lie one after
            the other in the operands, which all share. How many each has is an operand.
        symmetric: Why the result and its residual are symmetric, so that only the tiles on and
            below the diagonal are computed: "gram" of an array and the same transposed, whose sums
            are equal bit for bit on both sides of the diagonal, or "product" of two symmetric ones
            that commute. "" if it is not.
        residual_dtype: Element type of the residual, where it is not the result's; else None.
        parts: In how many parts of k, one after the other, each sum has to be made: see
            `planning/numerics.py`. 0 if any way will do.
        blocks: The blocks of the factors whose sums are added up in float32. Their scales come
            before the operands of the epilogue. None if there are none.
    """

    m: int
    n: int
    k: int
    a_dtype: Any = jnp.bfloat16
    b_dtype: Any = jnp.bfloat16
    out_dtype: Any = jnp.bfloat16
    transpose_a: bool = False
    transpose_b: bool = False
    batch: int = 1
    epilogue: Epilogue = Epilogue()
    transpose_out: bool = False
    kept: tuple[int, int] | None = None
    terms: tuple[int, ...] = ()
    arrays: tuple[tuple[int, int], ...] = ()
    shift: int = 0
    longest_sum: int = 0
    shared_a: bool = False
    shared_b: bool = False
    groups: int = 0
    ragged_k: bool = False
    symmetric: Literal["", "gram", "product"] = ""
    residual_dtype: Any = None
    parts: int = 0
    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        for field in ("a_dtype", "b_dtype", "out_dtype"):
            object.__setattr__(self, field, np.dtype(element_type(getattr(self, field))))
        if self.residual_dtype is not None:
            own = np.dtype(element_type(self.residual_dtype))
            is_own = self.epilogue.residual and own != self.out_dtype
            object.__setattr__(self, "residual_dtype", own if is_own else None)
        for field in ("m", "n", "k", "batch"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must not be negative, got {getattr(self, field)}")

    def __hash__(self) -> int:
        """Of the sizes alone: what else tells problems apart takes long to hash."""
        return hash((self.m, self.n, self.k, self.batch, self.transpose_a, self.transpose_b))

    @property
    def layout(self) -> str:
        """The four usual names, `"NN"`, `"NT"`, `"TN"` and `"TT"`: T where stored transposed."""
        return "NT"[self.transpose_a] + "NT"[self.transpose_b]

    @property
    def sums(self) -> int:
        """How many sums go into an element of the result: two if it is gated."""
        return 2 if self.epilogue.gated else 1

    @property
    def scales(self) -> int:
        """How many operands are scales of blocks."""
        if self.blocks is None:
            return 0
        of_both = self.blocks.rows, self.blocks.columns
        left, right = map(bool, of_both[::-1] if self.transpose_out else of_both)
        return left + right * self.sums * (1 + self.blocks.zeros)

    @property
    def pairs(self) -> int:
        """In how many arrays each operand is given."""
        if self.arrays:
            return 1 + max(map(max, self.arrays))
        return len(self.terms) or 1

    @property
    def large_k(self) -> int:
        """The contracted size of the largest term, where operands are sums of arrays; else k."""
        return self.terms[-1] if self.arrays else self.k

    @property
    def in_groups(self) -> bool:
        """Whether the sizes of groups are an operand."""
        return self.groups > 0 or self.ragged_k

    @property
    def flops(self) -> int:
        """Multiplications plus additions."""
        products = 1 if self.ragged_k else self.batch
        values = self.m * (self.m + 1) // 2 if self.symmetric else self.m * self.n
        return 2 * self.sums * products * values * self.k

    @functools.cached_property
    def a_shape(self) -> tuple[int, ...]:
        """The shape of the left operand in memory."""
        matrix = (self.k, self.m) if self.transpose_a else (self.m, self.k)
        return matrix if self.shared_a else self._batched(matrix)

    @functools.cached_property
    def b_shape(self) -> tuple[int, ...]:
        """The shape of the right operand in memory."""
        matrix = (self.n, self.k) if self.transpose_b else (self.k, self.n)
        if self.groups:
            return (self.groups, *matrix)
        return matrix if self.shared_b else self._batched(matrix)

    @functools.cached_property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        rows, cols = self.kept or (self.m, self.n)
        return self._batched((cols, rows) if self.transpose_out else (rows, cols))

    @property
    def added_dtype(self) -> np.dtype:
        """Element type of the residual."""
        return self.residual_dtype or self.out_dtype

    @functools.cached_property
    def result_dtypes(self) -> tuple[np.dtype, ...]:
        """Types of the results that have an element for each sum."""
        if self.epilogue.program is None:
            return (self.out_dtype,)
        return tuple(result.dtype for result in self.epilogue.program.arrays)

    @functools.cached_property
    def loaded_dtypes(self) -> tuple[np.dtype, ...]:
        """Types of the operands of the epilogue that have an element for each sum."""
        if self.epilogue.program is None:
            return (self.added_dtype,) if self.epilogue.residual else ()
        return tuple(operand.loaded for operand in self.epilogue.program.tiles)

    @property
    def own_slots(self) -> tuple[bool, ...]:
        """Whether each of those is loaded into slots of its own: its type is not a result's."""
        pairs = itertools.zip_longest(self.loaded_dtypes, self.result_dtypes)
        return tuple(own != out for own, out in pairs)[: len(self.loaded_dtypes)]

    @functools.cached_property
    def own_dtypes(self) -> tuple[np.dtype, ...]:
        """Types of those that are loaded into slots of their own."""
        return tuple(itertools.compress(self.loaded_dtypes, self.own_slots))

    @property
    def reductions(self) -> tuple[Result, ...]:
        """The results that are reduced along rows or columns."""
        return () if self.epilogue.program is None else self.epilogue.program.reductions

    @property
    def adds_rows_in_order(self) -> bool:
        """Whether it adds up along rows, and the order of that may not depend on the tiles."""
        sums = [own for own in self.reductions if own.kind == "m" and own.reduction in ADDING]
        return bool(self.parts and sums)

    @functools.cached_property
    def stored_dtypes(self) -> tuple[np.dtype, ...]:
        """Types of what passes through store slots: results, and operands in slots of their own."""
        return (*self.result_dtypes, *self.own_dtypes)

    @functools.cached_property
    def bytes_of_each(self) -> int:
        """Bytes of results and of what the epilogue loads, for each element of the result."""
        return sum(dtype.itemsize for dtype in (*self.result_dtypes, *self.loaded_dtypes))

    @functools.cached_property
    def moved_bytes(self) -> int:
        """Bytes that any way of computing it moves: operands, residual and result once."""
        rights = 0 if self.symmetric == "gram" else self.sums
        return (
            math.prod(self.a_shape) * self.a_dtype.itemsize
            + math.prod(self.b_shape) * self.b_dtype.itemsize * rights
            + math.prod(self.out_shape) * self.bytes_of_each
        )

    @property
    def residual_shape(self) -> tuple[int, ...]:
        """The shape of the residual: the result's, with rows of a multiple of 16 bytes."""
        *lead, length = self.out_shape
        whole = ROW_BYTES // self.added_dtype.itemsize
        return (*lead, -(-length // whole) * whole)

    def mirrored(self) -> "Problem":
        """The same arrays as the transposed product: operands change sides, the result stays."""
        return self._mirrored

    @functools.cached_property
    def _mirrored(self) -> "Problem":
        return dataclasses.replace(
            self,
            m=self.n,
            n=self.m,
            a_dtype=self.b_dtype,
            b_dtype=self.a_dtype,
            transpose_a=not self.transpose_b,
            transpose_b=not self.transpose_a,
            transpose_out=not self.transpose_out,
            kept=self.kept and self.kept[::-1],
            shared_a=self.shared_b,
            shared_b=self.shared_a,
            arrays=tuple((left, right) for right, left in self.arrays),
            blocks=self.blocks
            and self.blocks._replace(rows=self.blocks.columns, columns=self.blocks.rows),
        )

    @functools.cached_property
    def accumulator_dtype(self) -> Any:
        """The type of the sum, or of a block's: float32, or int32 for integers."""
        integer = all(np.issubdtype(x, np.integer) for x in (self.a_dtype, self.b_dtype))
        return np.dtype(np.int32 if integer else np.float32)

    def _batched(self, shape: tuple[int, int]) -> tuple[int, ...]:
        return shape if self.batch == 1 and not self.ragged_k else (self.batch, *shape)
