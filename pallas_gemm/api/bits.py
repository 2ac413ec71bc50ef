"""Whether the rows of a function's results keep their bits among other rows, and what changes them.

A function is run on all rows, and on some of them, in other orders, and among more. Rows that are
the same have to give the same bits. Where they do not, every operation of the function is compared,
in the order of the program: the first that differs is the one to look at. Where none does alone,
it is one that XLA computes together with others (`fused_bits`).
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_gemm.api import fused_bits
from pallas_gemm.kernels.functions import lines
from pallas_gemm.kernels.functions.flat import Equation, Flat, flat


@dataclasses.dataclass(frozen=True)
class Culprit:
    """The first operation of a program whose rows differ.

    Attributes:
        name: The primitive's; "dot_general" is a product of JAX's own.
        place: The line of the program that asks for it; None if nobody knows.
        is_ours: Whether this package computes it.
        variant: The choice of rows that shows it.
        differing: How many elements differ.
        elements: How many were compared.
    """

    name: str
    place: str | None
    is_ours: bool
    variant: str
    differing: int
    elements: int

    def __str__(self) -> str:
        whose = "of pallas_gemm" if self.is_ours else "of JAX"
        where = f" at {self.place}" if self.place else ""
        return (
            f"{self.name}{where} ({whose}): {self.differing} of {self.elements} elements differ"
            f" with {self.variant}"
        )


@dataclasses.dataclass(frozen=True)
class Checked:
    """The findings of `numerics.check`: true if no bit differs.

    Attributes:
        variants: With how many choices of rows the function was run.
        elements: How many elements of results were compared.
        differing: How many of them differ in a bit.
        first: The first operation whose bits differ; None if none does.
        why: A remark on it.
    """

    variants: int
    elements: int
    differing: int
    first: Culprit | None = None
    why: str = ""

    def __bool__(self) -> bool:
        return self.differing == 0 and self.first is None

    def __str__(self) -> str:
        found = (
            f"{self.differing} of {self.elements} elements differ, with {self.variants} choices of"
            " rows"
        )
        lines = [found, *([f"first: {self.first}"] if self.first else []), self.why]
        return "\n".join(line for line in lines if line)

    __repr__ = __str__


class _Variant(NamedTuple):
    """A choice of rows: which ones, and in words."""

    rows: np.ndarray
    text: str


def check(
    f: Callable[..., Any],
    *args: Any,
    rows: int | Sequence[int] = 0,
    variants: int = 8,
    seed: int = 0,
) -> Checked:
    """Looks if rows keep their bits among other rows, and names the operation that changes them.

    >>> print(numerics.check(jnp.tanh, x))
    0 of 2080 elements differ, with 8 choices of rows

    The function is compiled and run on all rows, on single rows and other parts of them, in another
    order, and among more rows. It has to do the same whatever their number is.

    Args:
        f: A function.
        *args: Its arguments, arrays or trees of them.
        rows: Which arguments have the rows, along the first dimension of each of their arrays. The
            results have them, too.
        variants: How many choices of rows are tried.
        seed: Draws them.

    Returns:
        The findings. They are true if no bit differs; `print` them to see what does.

    Raises:
        ValueError: No argument has rows, or their numbers differ.
        TypeError: `f` is no function.
    """
    if not callable(f):
        raise TypeError(f"f must be a function, got {type(f).__name__}: {f!r:.80}")
    leaves, tree = jax.tree.flatten(args)
    having = _having_rows(args, (rows,) if isinstance(rows, int) else tuple(rows))

    def of_leaves(*own: Any) -> list[Any]:
        return jax.tree.leaves(f(*jax.tree.unflatten(tree, own)))

    call = _Call(of_leaves, leaves, having, _count(leaves, having))
    every = list(_variants(call.count, variants, seed))
    sizes, differing = zip(*_differences(call, every), strict=True)
    if not any(differing):
        return Checked(len(every), sum(sizes), 0)
    worst = next(own for own, count in zip(every, differing, strict=True) if count)
    first, why = _first(call, [worst, *every])
    return Checked(len(every), sum(sizes), sum(differing), first, why)


class _Call(NamedTuple):
    """A function that is run on rows.

    Attributes:
        function: It takes arrays and returns arrays.
        leaves: Its arguments.
        having: Which of them have rows.
        count: How many rows there are.
    """

    function: Callable[..., list[Any]]
    leaves: Sequence[Any]
    having: Sequence[bool]
    count: int

    def chosen(self, rows: np.ndarray) -> list[Any]:
        """Returns the arguments with some rows."""
        pairs = zip(self.leaves, self.having, strict=True)
        return [x[rows] if has_rows else x for x, has_rows in pairs]

    def longer(self, more: int) -> list[Any]:
        """Returns the types of arguments that have some rows more."""
        types = [(list(np.shape(x)), jax.dtypes.result_type(x)) for x in self.leaves]
        for (shape, _), has_rows in zip(types, self.having, strict=True):
            if has_rows:
                shape[0] += more
        return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]

    def traced(self, given: Sequence[Any]) -> Flat:
        """Returns the function of some arguments, as a list of operations."""
        return flat(jax.make_jaxpr(self.function)(*given))


def _differences(call: _Call, variants: Sequence[_Variant]) -> Iterator[tuple[int, int]]:
    """Yields how many elements of results each choice of rows has, and how many of them differ."""
    types, longer = (jax.eval_shape(call.function, *call.longer(more)) for more in (0, 1))
    axes = _axes(types, longer, call.count)
    run = _compiled(call.function)
    whole = run(*call.leaves)
    for variant in variants:
        found = run(*call.chosen(variant.rows))
        pairs = zip(whole, found, axes, strict=True)
        each = [_compared(x, y, axis, call.count, variant.rows) for x, y, axis in pairs]
        yield sum(int(np.size(y)) for y in found), sum(each)


def _having_rows(args: tuple[Any, ...], rows: tuple[int, ...]) -> list[bool]:
    """Returns of each leaf of the arguments whether it has rows."""
    if wrong := [i for i in rows if not 0 <= i < len(args)]:
        raise ValueError(f"rows must name arguments, of which there are {len(args)}, got {wrong}")
    return [i in rows for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]


def _count(leaves: Sequence[Any], having: Sequence[bool]) -> int:
    shapes = [np.shape(x) for x, is_one in zip(leaves, having, strict=True) if is_one]
    counts = {shape[0] for shape in shapes if shape}
    if len(counts) != 1 or not all(shapes):
        raise ValueError(
            "the arguments that have rows must have the same number of them first, got shapes"
            f" {', '.join(str(list(shape)) for shape in shapes) or 'of no array'}"
        )
    if (count := counts.pop()) < 2:
        raise ValueError(f"there must be at least 2 rows to compare, got {count}")
    return count


def _variants(count: int, variants: int, seed: int) -> Iterator[_Variant]:
    """Yields choices of rows: single ones, parts, another order, and more."""
    rng = np.random.default_rng(seed)
    one = int(rng.integers(count))
    yield _Variant(np.array([one]), f"row {one} alone")
    yield _Variant(rng.permutation(count), "the rows in another order")
    extra = rng.integers(count, size=1 + int(rng.integers(count)))
    yield _Variant(np.concatenate([np.arange(count), extra]), f"{len(extra)} more rows after all")
    for _ in range(variants - 3):
        first, end = sorted(rng.choice(count + 1, 2, replace=False).tolist())
        text = f"the rows from {first} to {end - 1} alone"
        own = np.arange(first, end)
        if rng.integers(2) and len(own) > 1:
            own, text = rng.permutation(own), f"{text}, in another order"
        yield _Variant(own, text)


def _bits(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}") if x.dtype.kind not in "iub" else x


def _compared(
    whole: Any, part: Any, axis: tuple[int, int] | None, count: int, rows: np.ndarray
) -> int:
    """Returns how many elements of a part differ from the same rows of the whole.

    Args:
        whole: The value for all rows.
        part: The value for some.
        axis: Along which dimension rows lie, and how many elements there are to a row; None if the
            value has no rows.
        count: How many rows there are.
        rows: Which are in the part.
    """
    first, second = _bits(whole), _bits(part)
    if axis is None:
        return int((first != second).sum()) if first.shape == second.shape else first.size
    dim, each = axis
    first, second = (np.moveaxis(x, dim, 0) for x in (first, second))
    rest = first.shape[1:]
    outer = first.reshape(count, each, *rest)[rows].reshape(second.shape)
    inner = first.reshape(each, count, *rest)[:, rows].reshape(second.shape)
    # Rows that were merged with another dimension come first or last in it.
    return min(int((x != second).sum()) for x in (outer, inner))


def _axes(types: Sequence[Any], longer: Sequence[Any], count: int) -> list[tuple[int, int] | None]:
    """Returns along which dimension the rows of each value lie, from its type with one row more.

    Also, how many elements of it there are to a row.
    """
    found: list[tuple[int, int] | None] = []
    for x, other in zip(types, longer, strict=True):
        shape, pairs = x.shape, zip(x.shape, other.shape, strict=True)
        differ = [i for i, (own, more) in enumerate(pairs) if own != more]
        fits = len(differ) == 1 and shape[differ[0]] % count == 0
        found.append((differ[0], shape[differ[0]] // count) if fits else None)
    return found


def _first(call: _Call, variants: Sequence[_Variant]) -> tuple[Culprit | None, str]:
    """Returns the first operation whose bits differ, or why there is none to name."""
    whole, longer = (call.traced(own) for own in (call.leaves, call.longer(1)))
    if whole.names != longer.names:
        return None, "the function does something else with another number of rows"
    makers = [equation for equation, _ in _arrays(whole)]
    types, others = ([own.types[x] for _, x in _arrays(own)] for own in (whole, longer))
    axes = _axes(types, others, call.count)

    def every(own: Flat, given: Sequence[Any]) -> list[Any]:
        kept = [x for _, x in _arrays(own)]
        return _compiled(fused_bits.beginning(own, kept))(*given)

    results = every(whole, call.leaves)
    for variant in variants:
        own = call.chosen(variant.rows)
        part = call.traced(own)
        if whole.names != part.names:
            return None, f"the function does something else with {variant.text}"
        for equation, x, y, axis in zip(makers, results, every(part, own), axes, strict=True):
            if differing := _compared(x, y, axis, call.count, variant.rows):
                return _culprit(equation, variant, differing, y, axis)
    return _first_together(call, variants[0])


def _first_together(call: _Call, variant: _Variant) -> tuple[Culprit | None, str]:
    """Returns the first operation that XLA computes together with others, and which ones."""

    def compare(whole: Any, some: Any, types: Any, longer: Any) -> tuple[int, int]:
        axes = _axes(types, longer, call.count)
        each = [
            (_compared(x, y, axis, call.count, variant.rows), int(np.size(y)))
            for x, y, axis in zip(whole, some, axes, strict=True)
        ]
        return next((own for own in each if own[0]), (0, sum(size for _, size in each)))

    given = call.leaves, call.chosen(variant.rows), call.longer(1)
    found = fused_bits.first(call.function, given, compare, _compiled)
    kept = "no operation differs where all of their results are kept: XLA computes some of them"
    if found is None:
        return None, f"{kept} differently as parts of larger ones"
    at, last = found.reduction or found.last, found.last.primitive.name
    culprit = _named(at.primitive.name, at.source, variant, found.differing, found.elements)
    if found.reduction is None:
        return culprit, f"{kept} in one kernel, and how depends on the rows"
    place = lines.place(found.last.source)
    end = f"{last} at {place}" if place else last
    return culprit, (
        f"XLA computes it in one kernel with what follows, up to {end}, and how depends on the"
        " number of rows. Behind jax.lax.optimization_barrier it does not differ here"
    )


def _compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(f)


def _culprit(
    equation: Equation, variant: _Variant, differing: int, part: Any, axis: Any
) -> tuple[Culprit, str]:
    size, source = int(np.size(part)), equation.source
    own = _named(equation.primitive.name, source, variant, differing, size)
    over_all = "its result has no rows: it is made of all of them" if axis is None else ""
    return own, over_all


def _named(name: str, source: Any, variant: _Variant, differing: int, elements: int) -> Culprit:
    is_ours = name.startswith("pallas_gemm")
    return Culprit(name, lines.place(source), is_ours, variant.text, differing, elements)


def _arrays(own: Flat) -> list[tuple[Equation, int]]:
    """Returns the values that operations make, with their makers, if they are arrays of numbers."""
    made = [(equation, x) for equation in own.equations for x in equation.outputs]
    return [each for each in made if isinstance(own.types[each[1]].dtype, np.dtype)]
