"""`Call`: what is fixed about a product while it is traced, everything but the operands."""

import dataclasses
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from jax.export import is_symbolic_dim

from pallas_gemm.config import GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.problem import KINDS, OF_FACTORS, OF_UP, Blocks, Epilogue, Problem
from pallas_gemm.program import Program
from schedules import OnlineSchedule, Pieces, Schedule

Order = str | Schedule | OnlineSchedule | Pieces | None
"""What a caller says of the order of the work: of tiles, or of pieces of k; None for the config's.
"""
Signature = tuple[tuple[tuple[int, ...], Any], ...]
"""The (shape, dtype) of each operand."""


NO_EPILOGUE = Epilogue()

OUT_NAME = "pallas_gemm_out"
"""The name of every result, and of pre-activations, for the policies of `jax.checkpoint`."""


class Operands(NamedTuple):
    """The operands of one product; those that the epilogue does not ask for are None."""

    a: Any
    b: Any
    up: Any = None
    row_blocks: Any = None
    col_blocks: Any = None
    up_blocks: Any = None
    col_zeros: Any = None
    up_zeros: Any = None
    bias: Any = None
    residual: Any = None
    alpha: Any = None
    beta: Any = None
    row_scale: Any = None
    col_scale: Any = None
    up_scale: Any = None
    up_bias: Any = None

    def present(self) -> tuple[Any, ...]:
        """Returns those that there are, in order: how a product takes them."""
        return tuple(operand for operand in self if operand is not None)

    def of_sum(self, names: Sequence[str], *, up: bool) -> "Operands":
        """Returns what one of a gated product's sums takes, as that of a product with one.

        Args:
            names: The operands that it takes beside the factors, by the names of the first sum's.
            up: It is the second.
        """
        taken = {name: getattr(self, OF_UP.get(name, name) if up else name) for name in names}
        return Operands(self.a, self.up if up else self.b, **taken)


FACTORS = ("a", "b", "up")
"""Names of the operands that are multiplied; a product that is not gated has two of them."""
DIMENSIONS = MappingProxyType({"a": "mk", "b": "kn", "up": "kn", **KINDS})
"""The dimensions of each operand if all products of a batch share it; if each product has its own,
there is one more."""

SCALE_OF = MappingProxyType({"a": "row_scale", "b": "col_scale", "up": "up_scale"})
"""The operand with which the sums of a factor's rows, or columns, are scaled."""


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How the sums of products are to be made, and what is promised of their bits.

    Attributes:
        invariant: "rows": the bits of a row do not depend on how many rows there are, or where it
            stands. "run": they are the same in every run. None promises nothing.
        part: Elements of k in each part of a sum. Parts are added up in float32, in their order.
            None for what `invariant` asks for.
        chunk: The part of the sums over rows that gradients of right operands are; None for any.
    """

    invariant: str | None = "run"
    part: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        fields = dataclasses.asdict(self).items()
        said = (f"{name}={x!r}" for name, x in fields if x is not None or name == "invariant")
        return f"numerics({', '.join(said)})"

    @property
    def promises_nothing(self) -> bool:
        """Whether any sum will do."""
        return self == type(self)(None)

    @property
    def over_rows(self) -> "Numerics":
        """The promise for a sum over rows, the gradient of a right operand."""
        return Numerics("run", part=self.chunk)


@dataclasses.dataclass(frozen=True)
class Options:
    """How a product is to be computed, as far as the caller says so.

    Attributes:
        implementation: The name of an implementation, or None for the best one.
        config: The kernel's config, or None for the heuristics' choice.
        schedule: The order of the tiles, or of their pieces of k; None for the config's.
        target: The GPU to plan for; None until the program is lowered for one.
        reduced: The type in which devices exchange partial sums; None for that of the sums.
        once: A result is rounded once, whether it is derived or not.
        numerics: A promise about the sums, which only kernels keep; None for none.
        parts: In how many parts of k each sum is made for that; 0 if any way will do.
    """

    implementation: str | None = None
    config: GemmConfig | None = None
    schedule: Order = None
    target: Device | None = None
    reduced: np.dtype | None = None
    once: bool = False
    numerics: Numerics | None = None
    parts: int = 0

    @property
    def names_something(self) -> bool:
        """Whether the caller names an implementation, a config or a schedule."""
        return (self.implementation, self.config, self.schedule) != (None, None, None)

    def for_another_product(self) -> "Options":
        """Returns the options for a product of other sizes, as a gradient needs it."""
        return dataclasses.replace(self, config=None, schedule=None)


@dataclasses.dataclass(frozen=True)
class Call:
    """A product of matrices, or of a batch of them, without its operands.

    Operands have the dimensions that `DIMENSIONS` says, a transposed factor those two the other way
    round; one more in front, if each product of a batch has its own. An operand without one is
    shared by the whole batch.

    Attributes:
        out_dtype: Element type of the result.
        transpose_a: The left operand is stored `[k, m]`.
        transpose_b: The right operand (both, if gated) is stored `[n, k]`.
        epilogue: The epilogue: the formula that is applied to the sum before it is rounded.
        precision: As for `lax.dot_general`.
        options: How to compute it.
    """

    out_dtype: Any
    transpose_a: bool = False
    transpose_b: bool = False
    epilogue: Epilogue = NO_EPILOGUE
    precision: Any = None
    options: Options = Options()

    def __post_init__(self) -> None:
        object.__setattr__(self, "out_dtype", np.dtype(self.out_dtype))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its operands, but for those of a program."""
        return (*self.factors, *self.epilogue.operands)

    def unpack(self, operands: Sequence[Any]) -> Operands:
        """Gives each operand its name; of a sum of products, those of the first."""
        return Operands(**dict(zip(self.names, operands, strict=False)))

    def repacked(self, given: Operands, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Returns what takes the place of operands, in their order."""
        del operands
        return given.present()

    @property
    def factors(self) -> tuple[str, ...]:
        """The names of the operands that are multiplied."""
        return FACTORS if self.epilogue.gated else FACTORS[:2]

    @property
    def contracted_axes(self) -> tuple[int, ...]:
        """Which dimension of each factor is contracted."""
        right = -1 if self.transpose_b else -2
        return (-2 if self.transpose_a else -1, right, right)[: len(self.factors)]

    def each_sum(self, given: Operands) -> list[Operands]:
        """Returns what each of its sums takes of the factors and of the values of their blocks."""
        names = self.epilogue.of_blocks.operands
        return [given.of_sum(names, up=up) for up in (False, True)[: 1 + self.epilogue.gated]]

    def matrix_shape(self, a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the rows and columns of the result for operands of these shapes."""
        return (
            a_shape[-1 if self.transpose_a else -2],
            b_shape[-2 if self.transpose_b else -1],
        )

    def problem(self, signature: Signature) -> Problem:
        """Returns the problem that operands of these shapes and types pose."""
        (a_shape, a_dtype), (b_shape, b_dtype), *_ = signature
        m, n = self.matrix_shape(a_shape, b_shape)
        deep, given = -2 if self.transpose_a else -1, self.unpack(signature)
        residual = given.residual
        batches = [shape[0] for shape in (a_shape, b_shape) if len(shape) == 3]
        batch = batches[0] if batches else 1
        # A symbolic size is no kernel's, and may not be compared.
        many = is_symbolic_dim(batch) or batch > 1
        return Problem(
            m=m,
            n=n,
            k=a_shape[deep],
            a_dtype=a_dtype,
            b_dtype=b_dtype,
            out_dtype=self.out_dtype,
            transpose_a=self.transpose_a,
            transpose_b=self.transpose_b,
            batch=batch,
            epilogue=self.epilogue.of_whole_sums,
            shared_a=many and len(a_shape) == 2,
            shared_b=many and len(b_shape) == 2,
            residual_dtype=residual and residual[1],
            parts=self.options.parts,
            blocks=self.blocks(given, m, n, a_shape[deep]),
        )

    def blocks(self, given: Operands, m: int, n: int, k: int) -> Blocks | None:
        """Returns the blocks that the shapes of scales say, of a product of these sizes."""
        if not self.epilogue.blocks:
            return None
        left, right = given.row_blocks, given.col_blocks
        deep = left[0][-1] if left else right[0][-2]
        rows, columns = left and left[0][-2], right and right[0][-1]
        # An empty k has no blocks.
        sizes = (k // deep if deep else 1, m // rows if rows else 0, n // columns if columns else 0)
        return Blocks(*sizes, zeros=self.epilogue.col_zeros)

    def with_target(self, device: Device | None) -> Self:
        """Returns the call with the GPU to plan for."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, target=device))

    def plain(self, out_dtype: Any, alpha: float | None = None) -> Self:
        """Returns the call for one product of these layouts with nothing but a number to scale it.

        Args:
            out_dtype: Type of its result.
            alpha: The number; one that only the running program has is left out.
        """
        return dataclasses.replace(
            self,
            out_dtype=np.dtype(out_dtype),
            epilogue=Epilogue(alpha=1.0 if alpha is None else alpha),
            options=self.options.for_another_product(),
        )

    def with_swapped_precision(self) -> "Call":
        """Returns the call for the operands in the other order."""
        if not isinstance(self.precision, tuple) or len(set(self.precision)) == 1:
            return self
        return dataclasses.replace(self, precision=self.precision[::-1])

    def with_program(self, program: Program) -> Self:
        """Returns the call for what a program computes of the sums.

        The operands are then the factors, and those of the program. A value for each element comes
        as `[m, n]`, a vector as `[m]` or `[n]`, a number as `[]`. There is one dimension more if
        each product of a batch, or each group, has its own.
        """
        dtype = next((result.dtype for result in program.arrays), self.out_dtype)
        epilogue = dataclasses.replace(self.epilogue, program=program)
        return dataclasses.replace(self, out_dtype=dtype, epilogue=epilogue)

    def sums(self, out_dtype: Any) -> Self:
        """Returns the call for the sums alone, of the same operands and computed as told.

        Blocks of the factors are scaled in them.
        """
        return dataclasses.replace(
            self, out_dtype=np.dtype(out_dtype), epilogue=self.epilogue.of_blocks
        )


@dataclasses.dataclass(frozen=True)
class SumCall(Call):
    """A sum of products, `a1 @ b1 + a2 @ b2 + ...`, rounded once.

    Every statement about the call holds for each product. There is no epilogue but a scale, all
    operands have two dimensions, and they come in the order `a, b, a, b, ...`.
    """

    @classmethod
    def of(cls, call: Call) -> "SumCall":
        """Returns the sum of such products."""
        return cls(**_fields(call))

    @property
    def each(self) -> Call:
        """The call for one of the products."""
        return Call(**_fields(self))

    def pairs(self, operands: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Returns the left and the right operand of each product."""
        return list(zip(operands[::2], operands[1::2], strict=True))

    def problem(self, signature: Signature) -> Problem:
        """Returns the problem that operands of these shapes and types pose."""
        each = [self.each.problem(pair) for pair in self.pairs(signature)]
        sizes = tuple(problem.k for problem in each)
        return dataclasses.replace(each[0], k=sum(sizes), terms=sizes)


@dataclasses.dataclass(frozen=True)
class GroupedCall(Call):
    """A product of groups of rows, which are one after the other; their sizes are an operand.

        rows in groups    a[m, k] @ b[group of the row, k, n]         [m, n]
        k in groups       a[rows of the group].T @ b[the same]        [groups, m, n]

    Blocks of k that have scales are those of all rows, from the first on, wherever groups begin.

    The operands are a, b (stored `[groups, n, k]` if it is transposed), up if it is gated, the
    sizes, and what the epilogue takes: what has values of columns, or none, may have a group's own,
    one dimension more. Rows that are in no group are zeros in the result, or no part of it.

    Attributes:
        contracted: The groups are of what is contracted: both operands are stored with it first,
            or last where the right one is transposed.
    """

    contracted: bool = False

    def unpack(self, operands: Sequence[Any]) -> Operands:
        """Gives each operand but the sizes its name."""
        return super().unpack((*operands[: len(self.factors)], *operands[len(self.factors) + 1 :]))

    def sizes(self, operands: Sequence[Any]) -> Any:
        """Returns the sizes of the groups among the operands."""
        return operands[len(self.factors)]

    def repacked(self, given: Operands, operands: Sequence[Any]) -> tuple[Any, ...]:
        """See `Call`."""
        return self.packed(given, self.sizes(operands))

    @property
    def contracted_axes(self) -> tuple[int, ...]:
        """See `Call`."""
        left, *right = super().contracted_axes
        return (right[0] if self.contracted else left, *right)

    def packed(self, given: Operands, sizes: Any) -> tuple[Any, ...]:
        """Returns operands in their order."""
        every = given.present()
        return (*every[: len(self.factors)], sizes, *every[len(self.factors) :])

    def problem(self, signature: Signature) -> Problem:
        """Returns the problem that operands of these shapes and types pose."""
        (a_shape, a_dtype), (b_shape, b_dtype), *_ = signature
        ((groups,), _) = self.sizes(signature)
        own: dict[str, Any]
        if self.contracted:
            last = self.transpose_b
            (m, n), k = (x[-1 - last] for x in (a_shape, b_shape)), a_shape[-last]
            own = {"batch": groups, "shared_a": True, "shared_b": True, "ragged_k": True}
            own["transpose_a"] = not last
        else:
            (m, n), k = self.matrix_shape(a_shape, b_shape), a_shape[1]
            own = {"groups": groups, "parts": self.options.parts}
        blocks = self.blocks(self.unpack(signature), m, n, k)
        types = a_dtype, b_dtype, self.out_dtype
        own |= {"epilogue": self.epilogue.of_whole_sums, "blocks": blocks}
        return Problem(m, n, k, *types, transpose_b=self.transpose_b, **own)


@dataclasses.dataclass(frozen=True)
class SymmetricCall(Call):
    """A product whose result and residual are symmetric.

    Attributes:
        symmetric: Why: see `Problem`. In a "gram", both operands are one array.
    """

    symmetric: Literal["gram", "product"] = "gram"

    @classmethod
    def of(cls, call: Call, symmetric: Literal["gram", "product"]) -> "SymmetricCall":
        """Returns a call whose result is symmetric."""
        return cls(**_fields(call), symmetric=symmetric)

    @property
    def whole(self) -> Call:
        """The call for all of the result, above the diagonal too."""
        return Call(**_fields(self))

    def problem(self, signature: Signature) -> Problem:
        """Returns the problem that operands of these shapes and types pose."""
        return dataclasses.replace(super().problem(signature), symmetric=self.symmetric)


def _fields(call: Call) -> dict[str, Any]:
    return {field.name: getattr(call, field.name) for field in dataclasses.fields(Call)}


def signature_of(operands: Iterable[Any]) -> Signature:
    """Returns the shapes and types of operands, concrete or traced."""
    return tuple((tuple(x.shape), np.dtype(x.dtype)) for x in operands)


EXTRAS = tuple(name for name in DIMENSIONS if name not in FACTORS)
"""Names of the operands that the epilogue takes."""
OF_RESULT = tuple(name for name in EXTRAS if name not in OF_FACTORS)
"""Names of those whose dimensions are the result's."""
