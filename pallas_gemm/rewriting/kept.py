"""Values that a program keeps for its derivative, computed again by a kernel that has their parts.

    h = silu(gate) * up        the forward pass multiplies h; so does the derivative, much later

The kernel of the derivative reads gate and up. It stores h beside its own results, so that nothing
keeps h in between. The kernel takes longer by the time to write h.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from pallas_gemm.rewriting.elementwise import is_elementwise, variables
from pallas_gemm.rewriting.folds import Fold, Folder
from pallas_gemm.rewriting.level import Level, is_stored_by
from pallas_gemm.rewriting.regions import MOST_ARRAYS

LONG = 4
"""Products and the like between the first and the last reader: a value that is read sooner stays.
"""
MOST_STEPS = 16
"""Operations that are looked at for one kernel."""


class _Again(NamedTuple):
    """A value that could be computed again.

    Attributes:
        value: The value.
        steps: The equations that make it of what the kernel reads, in their order.
        late: The equations that could read it as the kernel stores it.
    """

    value: Any
    steps: tuple[Any, ...]
    late: tuple[Any, ...]


def computed_again(level: Level, folder: Folder, folds: Sequence[Fold]) -> None:
    """Lets kernels compute what a function would keep for them.

    Args:
        level: The function.
        folder: Plans kernels.
        folds: The kernels with more than a product in them.
    """
    for fold in folds:
        equation = level.maker(fold.region.results[0])
        if equation is None or not level.is_there(equation):
            continue
        for found in _candidates(level, folder, fold, equation):
            with equation.ctx.manager:
                more = _with(level, folder, fold, found)
            if more is not None:
                _apply(level, more, found)
                break


def _candidates(level: Level, folder: Folder, fold: Fold, equation: Any) -> Iterator[_Again]:
    """Yields the values of the kernel's operands that are read before it and after."""
    shape = fold.products[0].out.aval.shape
    known = dict.fromkeys(fold.region.operands)
    made: dict[Any, Any] = {}
    queue = [x for x in known if x.aval.shape == shape]
    full = len(queue) + sum(x.aval.shape == shape for x in fold.region.results)
    if full >= MOST_ARRAYS:
        return
    while queue and len(made) < MOST_STEPS:
        for reader in level.readers(queue.pop(0)):
            is_own = all(x in known or x in made for x in variables(reader))
            # What the kernel reads from memory anyway is not computed again.
            if any(x in known or x in made for x in reader.outvars) or not is_own:
                continue
            if is_elementwise(reader, shape, folder.elementwise):
                made |= dict.fromkeys(reader.outvars, reader)
                queue += reader.outvars
    for value in made:
        if value in level.results or isinstance(value, core.DropVar):
            continue
        readers = level.readers(value)
        stored = [e for e in readers if is_stored_by(e)]
        if any(e is equation for e in readers):
            # It is a factor of the product.
            continue
        if len(stored) < 2 or level.depth_before(equation) - level.depth(value) < LONG:
            continue
        before = _before(level, equation, readers)
        late = tuple(e for e in stored if id(e) not in before)
        if late and len(late) + len(before) == len(readers):
            yield _Again(value, tuple(_steps(made, value)), late)


def _before(level: Level, equation: Any, some: Sequence[Any]) -> set[int]:
    """Returns the `id` of those of some equations that another depends on."""
    above = functools.reduce(operator.or_, map(level.above, variables(equation)), 0)
    bits = {id(own): level.bit(own.outvars[0]) for own in some if own.outvars}
    found = {own for own, bit in bits.items() if above & bit}
    wanted = set(map(id, some)) - {own for own, bit in bits.items() if bit}
    seen, queue = {id(equation)}, [equation] if wanted else []
    while queue and not wanted <= found:
        for x in variables(queue.pop()):
            maker = level.maker(x)
            if maker is not None and id(maker) not in seen:
                seen.add(id(maker))
                queue.append(maker)
                if id(maker) in wanted:
                    found.add(id(maker))
    return found


def _steps(made: dict[Any, Any], value: Any) -> list[Any]:
    """Returns the equations that make a value, in their order."""
    wanted, found = {value}, []
    for x, equation in reversed(made.items()):
        if x in wanted and all(equation is not other for other in found):
            found.append(equation)
            wanted.update(variables(equation))
    return found[::-1]


def _with(level: Level, folder: Folder, fold: Fold, again: _Again) -> Fold | None:
    """Returns the kernel with one more result, if it is not predicted to lose time."""
    old = fold.region
    inside = [*old.inside, *(e for e in again.steps if all(e is not x for x in old.inside))]
    region = dataclasses.replace(
        old,
        inside=tuple(sorted(inside, key=level.place)),
        results=(*old.results, again.value),
    )
    return folder.again(level, fold, region)


def _apply(level: Level, fold: Fold, again: _Again) -> None:
    """Puts the kernel in the place of the one without the value."""
    old = level.maker(fold.region.results[0])
    value = core.Var(again.value.aval)
    params = old.params | {"call": fold.call, "function": fold.function}
    pairs = [(old, old.replace(outvars=[*old.outvars, value], params=params))]
    for reader in again.late:
        inputs = [value if x is again.value else x for x in reader.invars]
        pairs.append((reader, reader.replace(invars=inputs)))
    for equation, new in pairs:
        level.rename(equation, new)
        level.depends_anew(new)
