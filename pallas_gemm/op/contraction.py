"""What is multiplied with what: the dimensions of operands and result by letters, as in an einsum.

    btd,ndh->btnh        a letter is    in lhs, rhs and out     a batch
                                        in lhs and out          rows
                                        in rhs and out          columns
                                        in lhs and rhs          contracted

So a product is known by its dimensions until it is known which of them a device has: `vmap` adds a
letter, a gradient reads the letters in another order, and a mesh splits each dimension for itself.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_gemm.call import DIMENSIONS, OF_RESULT, Call, Operands
from pallas_gemm.planning.by_xla import xla
from pallas_gemm.planning.by_xla.precise import dot_general
from pallas_gemm.problem import OF_UP, Epilogue

Shape = tuple[int, ...]
DimensionNumbers = tuple[tuple[Shape, Shape], tuple[Shape, Shape]]

ONE = "1"
"""A dimension of size 1 that broadcasts: the product does without it."""


@dataclasses.dataclass(frozen=True)
class Contraction:
    """The dimensions of a product, a letter each.

    Attributes:
        lhs: The dimensions of the left operand.
        rhs: The dimensions of the right operand, and of the second one of a gated product.
        out: The dimensions of the result.
        bias: Dimensions of the bias, as of each operand of the epilogue. If it lacks a dimension of
            the result, it is the same along that.
        residual: The dimensions of the residual.
        alpha: The dimensions of the sum's factor.
        beta: The dimensions of the residual's factor.
        row_scale: The dimensions of the scales of rows.
        col_scale: The dimensions of the scales of columns.
        up_scale: The dimensions of the scales of columns of the second sum of a gated product.
        up_bias: The dimensions of its bias.
        row_blocks: The dimensions of the scales of the left operand's blocks, all of that operand.
            A block is of the others.
        col_blocks: The dimensions of the scales of the right operand's blocks.
        up_blocks: The same for the second right operand of a gated product.
        col_zeros: The dimensions of the values that stand for 0 in the right operand's blocks.
        up_zeros: The same for the second right operand of a gated product.
        whole: The dimensions of the result before they were cut into blocks, if they were. The last
            part of each has its letter.
        lettered: The letters are those of the caller's einsum.
    """

    lhs: str
    rhs: str
    out: str
    bias: str = ""
    residual: str = ""
    alpha: str = ""
    beta: str = ""
    row_scale: str = ""
    col_scale: str = ""
    up_scale: str = ""
    up_bias: str = ""
    row_blocks: str = ""
    col_blocks: str = ""
    up_blocks: str = ""
    col_zeros: str = ""
    up_zeros: str = ""
    whole: str = ""
    lettered: bool = False

    @functools.cached_property
    def batch(self) -> str:
        """The dimensions that all have, in the order of the result."""
        return "".join(x for x in self.out if x in self.lhs and x in self.rhs)

    @functools.cached_property
    def rows(self) -> str:
        """The dimensions that the result has of the left operand alone, in its order."""
        return "".join(x for x in self.lhs if x in self.out and x not in self.rhs)

    @functools.cached_property
    def columns(self) -> str:
        """The dimensions that the result has of the right operand alone, in its order."""
        return "".join(x for x in self.rhs if x in self.out and x not in self.lhs)

    @functools.cached_property
    def contracted(self) -> str:
        """The dimensions that are summed over, in the order of the left operand."""
        return "".join(x for x in self.lhs if x in self.rhs and x not in self.out)

    @functools.cached_property
    def swapped(self) -> "Contraction":
        """The same product with the operands in the other order."""
        return Contraction(self.rhs, self.lhs, self.out, lettered=self.lettered)

    @property
    def of_left(self) -> "Contraction":
        """The product of the result's cotangent and the right operand: the left one's gradient."""
        return Contraction(self.out, self.rhs, self.lhs, lettered=self.lettered)

    @property
    def of_right(self) -> "Contraction":
        """The product of the left operand and the result's cotangent: the right one's gradient."""
        return Contraction(self.lhs, self.out, self.rhs, lettered=self.lettered)

    def sizes(self, lhs: Sequence[int], rhs: Sequence[int]) -> dict[str, int]:
        """Returns the size of each dimension for operands of these shapes."""
        return dict(zip(self.lhs + self.rhs, (*lhs, *rhs), strict=True))

    def shape(self, lhs: Shape, rhs: Shape) -> Shape:
        """Returns the shape of the result for operands of these shapes."""
        sizes = self.sizes(lhs, rhs)
        return tuple(sizes[x] for x in self.out)

    def names(self) -> dict[str, str]:
        """Returns what readers know each dimension by.

        It is their own letter, or b, m, n or k, numbered if there are more.
        """
        if self.lettered:
            return {letter: letter for letter in dict.fromkeys(self.lhs + self.rhs)}
        groups = {"b": self.batch, "m": self.rows, "n": self.columns, "k": self.contracted}
        return {
            letter: role if len(group) == 1 else f"{role}{i}"
            for role, group in groups.items()
            for i, letter in enumerate(group, 1)
        }

    def unused(self) -> str:
        """Returns a letter for one more dimension."""
        taken = {*self.lhs, *self.rhs}
        return next(x for x in _letters() if x not in taken)

    def with_rows(self, place: int) -> "Contraction":
        """Returns the product with one more dimension of the left operand, there, as more rows.

        It comes first in the result.
        """
        letter = self.unused()
        lhs = self.lhs[:place] + letter + self.lhs[place:]
        return dataclasses.replace(self, lhs=lhs, out=letter + self.out)

    def of_operands(self, call: Call) -> tuple[str, ...]:
        """Returns the letters of each operand that there is, and last those of the result."""
        factors = [self.lhs, self.rhs] + [self.rhs] * call.epilogue.gated
        return (*factors, *(getattr(self, name) for name in call.epilogue.operands), self.out)

    def without_ones(
        self, call: Call, shapes: Sequence[Shape]
    ) -> tuple["Contraction", tuple[Shape, ...]]:
        """Returns the product without the dimensions that broadcast, and its operands' shapes."""
        squeezed = (
            tuple(size for size, x in zip(shape, letters, strict=True) if x != ONE)
            for shape, letters in zip(shapes, self.of_operands(call), strict=False)
        )
        every = dataclasses.asdict(self).items()
        given = {name: x.replace(ONE, "") for name, x in every if name != "lettered"}
        without = Contraction(**given, lettered=self.lettered)
        return without, tuple(squeezed)

    def aligned(self, given: Operands) -> Operands:
        """Gives what the epilogue takes the result's dimensions, of size 1 where it has none."""
        named = {name: getattr(given, name) for name in OF_RESULT}
        return given._replace(
            **{
                name: _aligned(x, getattr(self, name), self.out)
                for name, x in named.items()
                if x is not None
            }
        )

    def with_letters(self, **letters: str) -> "Contraction":
        """Returns the product with these dimensions of an operand, such as its bias."""
        return dataclasses.replace(self, **letters)

    @property
    def of_up(self) -> "Contraction":
        """The second product of a gated one."""
        return dataclasses.replace(self, **{x: getattr(self, own) for x, own in OF_UP.items()})

    def finish(self, epilogue: Epilogue, sums: list[jax.Array], given: Operands) -> jax.Array:
        """Applies an epilogue as `xla.finish` does."""
        return xla.finish(epilogue, sums, self.aligned(given))

    def by_xla(self, call: Call, *operands: jax.Array) -> jax.Array:
        """Computes a call by XLA, of operands as they are."""
        given = call.unpack(operands)
        if call.epilogue.blocks:
            call, given = self._without_blocks(call, given)
        else:
            given = xla.widened(given)
            if call.epilogue.is_identity:
                return self._dot(call, given.a, given.b, call.out_dtype)
        wide = xla.wide_dtype(given.a.dtype, given.b.dtype, call.out_dtype)
        rights = [b for b in (given.b, given.up) if b is not None]
        sums = [self._dot(call, given.a, b, wide) for b in rights]
        return self.finish(call.epilogue, sums, given).astype(call.out_dtype)

    def _without_blocks(self, call: Call, given: Operands) -> tuple[Call, Operands]:
        """Returns the call for factors whose blocks are scaled, and its operands."""

        def spread(name: str, value: jax.Array, x: jax.Array) -> jax.Array:
            letters = self.lhs if name == "row_blocks" else self.rhs
            return _aligned(value.astype(x.dtype), getattr(self, name), letters)

        return xla.scaled_factors(call, given, spread)

    def _dot(self, call: Call, a: jax.Array, b: jax.Array, out_dtype: Any) -> jax.Array:
        free = [x for x in self.out if x not in self.batch]
        if free and free[0] in self.columns:
            # What stands first in the result is that of the left operand.
            call = call.with_swapped_precision()
            return _dot_general(self.swapped, call.precision, out_dtype, b, a)
        return _dot_general(self, call.precision, out_dtype, a, b)


def joined(result: jax.Array, shape: Shape) -> jax.Array:
    """Returns a result whose dimensions are cut in a shape where they are not; one at a time."""
    for place, size in enumerate(shape):
        while result.shape[place] != size:
            first, second = result.shape[place : place + 2]
            own = (*result.shape[:place], first * second, *result.shape[place + 2 :])
            result = result.reshape(own)
    return result


def _aligned(x: jax.Array, letters: str, out: str) -> jax.Array:
    x = lax.squeeze(x, [i for i, letter in enumerate(letters) if letter == ONE])
    letters = letters.replace(ONE, "")
    order = sorted(range(len(letters)), key=lambda i: out.index(letters[i]))
    missing = [i for i, letter in enumerate(out) if letter not in letters]
    return lax.expand_dims(jnp.transpose(x, order), missing)


def _dot_general(
    dims: Contraction, precision: Any, out_dtype: Any, a: jax.Array, b: jax.Array
) -> jax.Array:
    def places(letters: str) -> tuple[list[int], list[int]]:
        return [dims.lhs.index(x) for x in letters], [dims.rhs.index(x) for x in letters]

    numbers = (places(dims.contracted), places(dims.batch))
    found = dims.batch + dims.rows + dims.columns
    result = dot_general(a, b, numbers, precision=precision, preferred_element_type=out_dtype)
    if found == dims.out:
        return result
    return jnp.transpose(result, [found.index(x) for x in dims.out])


def _letters() -> Iterator[str]:
    """Yields letters, without an end."""
    return filter(str.isalpha, map(chr, itertools.count(ord("a"))))


def _named(rank: int) -> list[str]:
    return list(itertools.islice(_letters(), rank))


@functools.lru_cache(maxsize=4096)
def of_dot_general(
    lhs_rank: int,
    rhs_rank: int,
    dimension_numbers: DimensionNumbers,
    letters: tuple[str, str] | None = None,
) -> Contraction:
    """Returns the dimensions of a legal `lax.dot_general`.

    Args:
        lhs_rank: How many dimensions the left operand has.
        rhs_rank: How many the right operand has.
        dimension_numbers: As `lax.dot_general` takes them, as tuples.
        letters: The caller's letters for each operand, if there are any.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    names = "".join(letters) if letters else "".join(_named(lhs_rank + rhs_rank))
    lhs, rhs = list(names[:lhs_rank]), list(names[lhs_rank:])
    for i, j in zip((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch), strict=True):
        rhs[j] = lhs[i]
    out = [lhs[i] for i in lhs_batch]
    out += [x for i, x in enumerate(lhs) if i not in (*lhs_contract, *lhs_batch)]
    out += [x for j, x in enumerate(rhs) if j not in (*rhs_contract, *rhs_batch)]
    return Contraction(*map("".join, (lhs, rhs, out)), lettered=letters is not None)


@functools.lru_cache(maxsize=4096)
def of_matmul(a_shape: Shape, b_shape: Shape, transpose_a: bool, transpose_b: bool) -> Contraction:
    """Returns the dimensions of `a @ b`, whose leading ones broadcast as in `jnp.matmul`.

    Args:
        a_shape: Shape of the left operand, of one or more dimensions.
        b_shape: Shape of the right operand.
        transpose_a: The last two dimensions of the left operand are swapped.
        transpose_b: The last two dimensions of the right operand are swapped.
    """
    a_lead, b_lead = a_shape[:-2], b_shape[:-2]
    shape = jnp.broadcast_shapes(a_lead, b_lead)
    lead = [x for x in _named(len(shape) + 3) if x not in "kmn"][: len(shape)]

    def leading(own: Shape) -> str:
        letters = lead[len(lead) - len(own) :]
        wanted = shape[len(shape) - len(own) :]
        pairs = zip(own, wanted, letters, strict=True)
        return "".join(x if size == goal else ONE for size, goal, x in pairs)

    a = "k" if len(a_shape) == 1 else leading(a_lead) + ("km" if transpose_a else "mk")
    b = "k" if len(b_shape) == 1 else leading(b_lead) + ("nk" if transpose_b else "kn")
    out = "".join([*lead, *(x for x, own in (("m", a), ("n", b)) if x in own)])
    return Contraction(a, b, out, "n" if "n" in b else "", out)


def of_matrices(call: Call, *ranks: int) -> Contraction:
    """Returns the dimensions of a product of matrices, or a batch of them, stored as `call` says.

    Args:
        call: The product.
        *ranks: How many dimensions each operand has.
    """
    named = call.unpack(ranks)
    a = ("b" if named.a == 3 else "") + ("km" if call.transpose_a else "mk")
    b = ("b" if named.b == 3 else "") + ("nk" if call.transpose_b else "kn")
    extras = {
        name: "b" * (getattr(named, name) > len(letters)) + letters
        for name in call.epilogue.operands
        for letters in (DIMENSIONS[name],)
    }
    return Contraction(a, b, "bmn" if "b" in a + b else "mn", **extras)


def normal_dimension_numbers(dimension_numbers: Any) -> DimensionNumbers:
    """Returns dimension numbers as tuples of Python ints; one number may stand alone."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    return (
        (_ints(lhs_contract), _ints(rhs_contract)),
        (_ints(lhs_batch), _ints(rhs_batch)),
    )


def _ints(dims: Any) -> Shape:
    try:
        return (operator.index(dims),)
    except TypeError:
        return tuple(map(operator.index, dims))
