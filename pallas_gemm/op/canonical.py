"""Any `dot_general` or `matmul` as one batched product of matrices, by reshapes where they do.

The kernels take `[batch, m, k]` or `[batch, k, m]` on the left, `[batch, k, n]` or `[batch, n, k]`
on the right. The dimensions of an operand fall into three groups, batch, free and contracted. Where
the groups lie one after the other, batch first, merging each into one dimension is a reshape and
costs nothing; otherwise the operand is transposed, which is one pass over it. Which contracted
dimension comes first is free to choose, as long as both operands agree.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gemm.planning.call import Operands

Shape = tuple[int, ...]
DimensionNumbers = tuple[tuple[Shape, Shape], tuple[Shape, Shape]]


@dataclasses.dataclass(frozen=True)
class Side:
    """How one operand becomes a matrix, or a batch of them.

    Attributes:
        shape: The shape to give it.
        transposed: The left operand is then `[..., k, m]`, the right one `[..., n, k]`.
        broadcast: The shape that it is first broadcast to; None if it is not.
        permutation: The order that its dimensions are first put into; None if it is not.
    """

    shape: Shape
    transposed: bool = False
    broadcast: Shape | None = None
    permutation: Shape | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing is copied."""
        return self.broadcast is None and self.permutation is None

    def apply(self, x: jax.Array) -> jax.Array:
        """Makes the matrix, or the batch of them."""
        if self.broadcast is not None:
            x = jnp.broadcast_to(x, self.broadcast)
        if self.permutation is not None:
            x = jnp.transpose(x, self.permutation)
        return x.reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Form:
    """A contraction as a product of matrices.

    A matrix times a vector is computed as the vector, a single row, times the transposed matrix:
    then many vectors, as under `vmap`, are many rows.

    Attributes:
        a: How the left factor of the product is made.
        b: How the right factor is made.
        shape: The shape of the contraction's result; a reshape of the product's.
        swapped: The left factor is made of the right operand, and the right one of the left.
    """

    a: Side
    b: Side
    shape: Shape
    swapped: bool = False

    def factors(self, left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Makes the factors of the product of the operands of the contraction."""
        if self.swapped:
            left, right = right, left
        return self.a.apply(left), self.b.apply(right)

    def ready(self, given: Operands) -> Operands:
        """Makes the product's operands of those of the contraction; those that are None stay so."""
        left, right = (given.b, given.a) if self.swapped else (given.a, given.b)
        residual = given.residual
        return given._replace(
            a=None if left is None else self.a.apply(left),
            b=None if right is None else self.b.apply(right),
            up=None if given.up is None else self.b.apply(given.up),
            residual=None if residual is None else residual.reshape(self.product_shape),
        )

    def with_batch(self, left_shape: Shape) -> "Form":
        """Returns the form whose first dimension of the rows is a batch, where that is possible.

        A mesh may split it and the other rows along different axes, but not what they merge into.
        """
        is_matrix = len(self.a.shape) == len(self.b.shape) == 2 < len(left_shape)
        if self.swapped or self.a.transposed or not (is_matrix and self.a.is_free):
            return self
        first, (rows, contracted) = left_shape[0], self.a.shape
        if first == 0 or rows % first:
            return self
        return dataclasses.replace(self, a=Side((first, rows // first, contracted)))

    @property
    def product_shape(self) -> Shape:
        """The shape of the product: `[m, n]` or `[batch, m, n]`."""
        batch = max(self.a.shape[:-2], self.b.shape[:-2], key=len)
        return (*batch, self.rows, self.columns)

    @property
    def rows(self) -> int:
        """Rows of the product."""
        return self.a.shape[-1] if self.a.transposed else self.a.shape[-2]

    @property
    def columns(self) -> int:
        """Columns of the product."""
        return self.b.shape[-2] if self.b.transposed else self.b.shape[-1]


@functools.lru_cache(maxsize=4096)
def of_dot_general(
    lhs_shape: Shape, rhs_shape: Shape, dimension_numbers: DimensionNumbers, rhs_cost: float = 1.0
) -> Form:
    """Returns the form of a legal `lax.dot_general`.

    Args:
        lhs_shape: Shape of the left operand.
        rhs_shape: Shape of the right operand.
        dimension_numbers: As `lax.dot_general` takes them, as tuples.
        rhs_cost: What moving an element of the right operand costs, relative to the left one.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    batch = tuple(lhs_shape[d] for d in lhs_batch)
    orders = {
        tuple(sorted(range(len(dims)), key=dims.__getitem__)) for dims in dimension_numbers[0]
    }
    pairs = []
    for order in sorted(orders):
        lhs = _side(lhs_shape, lhs_batch, tuple(lhs_contract[i] for i in order), free_first=True)
        rhs = _side(rhs_shape, rhs_batch, tuple(rhs_contract[i] for i in order), free_first=False)
        cost = (not lhs.is_free) * math.prod(lhs_shape)
        cost += (not rhs.is_free) * math.prod(rhs_shape) * rhs_cost
        pairs.append((cost, lhs, rhs))
    _, lhs, rhs = min(pairs, key=lambda pair: pair[0])
    free = (
        _others(lhs_shape, (*lhs_batch, *lhs_contract)),
        _others(rhs_shape, (*rhs_batch, *rhs_contract)),
    )
    shape = (*batch, *(lhs_shape[d] for d in free[0]), *(rhs_shape[d] for d in free[1]))
    if free[0] and not free[1]:
        return Form(_swap(rhs), _swap(lhs), shape, swapped=True)
    return Form(lhs, rhs, shape)


@functools.lru_cache(maxsize=4096)
def of_matmul(a_shape: Shape, b_shape: Shape, transpose_a: bool, transpose_b: bool) -> Form:
    """Returns the form of `a @ b`, whose leading dimensions broadcast as in `jnp.matmul`.

    Args:
        a_shape: Shape of the left operand, of one or more dimensions.
        b_shape: Shape of the right operand.
        transpose_a: The last two dimensions of the left operand are swapped.
        transpose_b: The last two dimensions of the right operand are swapped.
    """
    if len(b_shape) == 1 < len(a_shape):
        turned = of_matmul(b_shape, a_shape, False, not transpose_a)
        return dataclasses.replace(turned, swapped=True)
    a_matrix = (1, *a_shape) if len(a_shape) == 1 else a_shape[-2:]
    b_matrix = (1, *b_shape) if len(b_shape) == 1 else b_shape[-2:]
    transpose_a &= len(a_shape) > 1
    transpose_b |= len(b_shape) == 1
    rows = () if len(a_shape) == 1 else (a_matrix[1] if transpose_a else a_matrix[0],)
    columns = () if len(b_shape) == 1 else (b_matrix[0] if transpose_b else b_matrix[1],)
    a_lead, b_lead = a_shape[:-2], b_shape[:-2]
    lead = jnp.broadcast_shapes(a_lead, b_lead)
    sizes = math.prod(a_lead), math.prod(b_lead)
    if sizes[1] == 1 and not transpose_a:
        # One right operand for all rows of all left ones: the batch is more rows.
        a = Side((sizes[0] * a_matrix[0], a_matrix[1]))
        b = Side(b_matrix, transpose_b)
    elif len(a_shape) == 1 and transpose_b:
        # One row for all right operands, which lie one below the other: they are more columns.
        a, b = Side(a_matrix), Side((sizes[1] * b_matrix[0], b_matrix[1]), True)
    else:
        a = _broadcast(a_shape, a_lead, a_matrix, lead, transpose_a)
        b = _broadcast(b_shape, b_lead, b_matrix, lead, transpose_b)
    return Form(a, b, (*lead, *rows, *columns))


def _broadcast(shape: Shape, own: Shape, matrix: Shape, lead: Shape, transposed: bool) -> Side:
    if math.prod(own) == 1:
        # Shared by the whole batch.
        return Side(matrix, transposed)
    stacked = (math.prod(lead), *matrix)
    same = math.prod(own) == math.prod(lead)
    return Side(stacked, transposed, None if same else (*lead, *shape[-2:]))


def _swap(side: Side) -> Side:
    """Returns the same matrix as the other factor of a product."""
    return dataclasses.replace(side, transposed=not side.transposed)


def _others(shape: Shape, dims: Shape) -> Shape:
    return tuple(d for d in range(len(shape)) if d not in dims)


def _side(shape: Shape, batch: Shape, contract: Shape, *, free_first: bool) -> Side:
    """Merges the dimensions of an operand into batch, free and contracted.

    Args:
        shape: The operand's shape.
        batch: Its batch dimensions, in the order of the result.
        contract: Its contracted dimensions, in the order that both operands agree on.
        free_first: The free dimension comes first where it is not transposed: the left operand.
    """
    free = _others(shape, (*batch, *contract))
    size = {
        name: math.prod(shape[d] for d in dims) for name, dims in (("f", free), ("k", contract))
    }
    lead = tuple(size for size in (math.prod(shape[d] for d in batch),) if size != 1)
    # What is contracted last is what every kernel and element type can take, so it is tried first.
    for contracted_last in (True, False):
        order = (*batch, *free, *contract) if contracted_last else (*batch, *contract, *free)
        if _in_order(shape, order) or not contracted_last:
            break
    fits = _in_order(shape, order)
    if not fits:
        order, contracted_last = (*batch, *free, *contract), True
    matrix = (size["f"], size["k"]) if contracted_last else (size["k"], size["f"])
    return Side(
        (*lead, *matrix),
        transposed=contracted_last != free_first,
        permutation=None if fits else order,
    )


def _in_order(shape: Shape, order: Shape) -> bool:
    """Whether the dimensions already lie in that order; those of size 1 may lie anywhere."""
    real = [d for d in order if shape[d] != 1]
    return real == sorted(real)


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
