"""Products of arrays whose rows a program makes one dimension of, without that.

    y = (x.reshape(-1, k) @ w).reshape(*x.shape[:-1], n)      x @ w
    x.reshape(-1, k).T @ dy.reshape(-1, n)                    a sum over all dimensions of rows

The operations between two such products then have the dimensions of the products. So a kernel
computes them with one.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core

from pallas_gemm.rewriting.inlining import needed
from pallas_gemm.rewriting.level import variables

PRODUCT, RESHAPE = "dot_general", "reshape"


def with_rows_apart(jaxpr: core.Jaxpr, equations: Sequence[Any]) -> Sequence[Any]:
    """Returns the equations of a function with such products as they are without reshapes.

    Args:
        jaxpr: The function.
        equations: Its equations.
    """
    if not any(e.primitive.name == RESHAPE for e in equations):
        return equations
    rows = _Rows(jaxpr, equations)
    found = [own for e in equations for own in rows.changed(e)]
    return needed(jaxpr, found) if rows.is_changed else equations


class _Rows:
    """The products and reshapes of a function."""

    def __init__(self, jaxpr: core.Jaxpr, equations: Sequence[Any]) -> None:
        self.is_changed = False
        self._makers: dict[Any, Any] = {x: e for e in equations for x in e.outvars}
        self._readers: dict[Any, list[Any]] = {}
        for equation in equations:
            for x in variables(equation):
                self._readers.setdefault(x, []).append(equation)
        self._results = {x for x in jaxpr.outvars if isinstance(x, core.Var)}
        self._gone: set[int] = set()

    def changed(self, equation: Any) -> Iterator[Any]:
        """Yields what takes the place of an equation: itself, if nothing does."""
        if id(equation) in self._gone:
            return
        if equation.primitive.name == PRODUCT and not _is_split(equation):
            equation = self._with_result_apart(self._with_sums_apart(equation))
        yield equation

    def _merged(self, x: Any, axis: int) -> Any:
        """Returns the array of which a reshape makes one dimension of several, and these sizes."""
        maker = self._makers.get(x) if isinstance(x, core.Var) else None
        if maker is None or not _is_reshape(maker):
            return None
        (before,) = maker.invars
        group = _group(x.aval.shape, before.aval.shape, axis)
        return None if group is None or not isinstance(before, core.Var) else (before, group)

    def _with_sums_apart(self, equation: Any) -> Any:
        """Returns a product that adds up along the dimensions that are one in the program."""
        (left, right), (batch, other) = equation.params["dimension_numbers"]
        if len(left) != 1:
            return equation
        first, second = (
            self._merged(x, axis) for x, (axis,) in zip(equation.invars, (left, right), strict=True)
        )
        if first is None or second is None or first[1] != second[1]:
            return equation
        self.is_changed = True
        more = len(first[1]) - 1
        sums = tuple(tuple(range(axis, axis + 1 + more)) for (axis,) in (left, right))
        batches = (_moved(batch, left[0], more), _moved(other, right[0], more))
        params = equation.params | {"dimension_numbers": (sums, batches)}
        return equation.replace(invars=[first[0], second[0]], params=params)

    def _with_result_apart(self, equation: Any) -> Any:
        """Returns a product whose result has the rows apart that its left operand has, too.

        A reshape makes this of the result, which nothing else reads.
        """
        (x,) = equation.outvars
        readers = self._readers.get(x, [])
        if x in self._results or len(readers) != 1 or not _is_reshape(readers[0]):
            return equation
        (reshape,) = readers
        (summed, other), (batch, same) = equation.params["dimension_numbers"]
        left, right = equation.invars
        rows = [axis for axis in range(len(left.aval.shape)) if axis not in (*summed, *batch)]
        for place, axis in enumerate(rows, len(batch)):
            merged = self._merged(left, axis)
            group = _group(x.aval.shape, reshape.outvars[0].aval.shape, place)
            if merged is None or group is None or merged[1] != group:
                continue
            self.is_changed = True
            self._gone.add(id(reshape))
            sums, batches = (_moved(own, axis, len(group) - 1) for own in (summed, batch))
            params = equation.params | {"dimension_numbers": ((sums, other), (batches, same))}
            return equation.replace(
                invars=[merged[0], right], outvars=reshape.outvars, params=params
            )
        return equation


def _group(whole: Sequence[int], apart: Sequence[int], axis: int) -> tuple[int, ...] | None:
    """Returns the sizes that a reshape makes one dimension of; None if other ones differ.

    A reshape keeps the number of elements. The product of these sizes is therefore the dimension's.
    """
    more = len(apart) - len(whole)
    group = tuple(apart[axis : axis + 1 + more])
    is_same = (*whole[:axis], *group, *whole[axis + 1 :]) == tuple(apart)
    return group if more > 0 and is_same and all(apart) else None


def _moved(axes: Sequence[int], split: int, more: int) -> tuple[int, ...]:
    """Returns some dimensions of an array after another one became several."""
    return tuple(axis + more * (axis > split) for axis in axes)


def _is_reshape(equation: Any) -> bool:
    return equation.primitive.name == RESHAPE and not equation.params["dimensions"]


def _is_split(equation: Any) -> bool:
    """Whether the types of a product say how a mesh splits it."""
    every = (*equation.invars, *equation.outvars)
    return any(x.aval.sharding.mesh.size > 1 for x in every) or (
        equation.params["out_sharding"] is not None
    )
