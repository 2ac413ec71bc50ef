"""Calls around products, replaced by what they do: it then lies beside the products.

XLA does the same. A call stays if it says where its arguments lie, or gives them away. It stays if
it has products, which are replaced where they are, and if it has one result that a kernel could
compute as it is.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core

from pallas_gemm.kernels.functions.axes import ELEMENTWISE
from pallas_gemm.rewriting import kinds
from pallas_gemm.rewriting.elementwise import is_elementwise, variables

CALL = "jit"


def inlined(jaxpr: core.Jaxpr, equations: Sequence[Any]) -> list[Any]:
    """Returns the equations of a function without such calls, and without what nobody needs.

    Args:
        jaxpr: The function.
        equations: Its equations.
    """
    found: list[Any] = []
    for equation in equations:
        _put(equation, found)
    return needed(jaxpr, found)


def _put(equation: Any, found: list[Any]) -> None:
    """Adds an equation, or those of the function that it calls."""
    if not _may_be_replaced(equation):
        found.append(equation)
        return
    inner, source = equation.params["jaxpr"], equation.source_info
    stack = source.name_stack.extend(f"{CALL}({equation.params['name']})")
    known = dict(zip(inner.invars, equation.invars, strict=True))
    known |= dict(zip(inner.outvars, equation.outvars, strict=True))

    def made(x: Any) -> Any:
        if isinstance(x, core.DropVar):
            return x
        return known.setdefault(x, core.Var(x.aval))

    for own in inner.eqns:
        info = own.source_info.replace(name_stack=stack + own.source_info.name_stack)
        new = own.replace(
            invars=[x if isinstance(x, core.Literal) else known[x] for x in own.invars],
            outvars=[made(x) for x in own.outvars],
            source_info=info,
        )
        _put(new, found)


def _may_be_replaced(equation: Any) -> bool:
    if equation.primitive.name != CALL or equation.effects:
        return False
    params = equation.params
    inner = params["jaxpr"]
    places = (*params["in_shardings"], *params["out_shardings"])
    is_placed = any(type(x).__name__ != "UnspecifiedValue" for x in places)
    is_laid = any(x is not None for x in (*params["in_layouts"], *params["out_layouts"]))
    if is_placed or is_laid or any(params["donated_invars"]) or params["compiler_options_kvs"]:
        return False
    if equation.ctx.xla_metadata or equation.ctx.compute_type:
        return False
    if inner.constvars or not inner.outvars:
        return False
    made = {x for e in inner.eqns for x in e.outvars}
    each = set(map(id, inner.outvars))
    is_made = all(_is_variable(x) and x in made for x in inner.outvars)
    if len(each) < len(inner.outvars) or not is_made:
        # A result is an argument, a number, or another result.
        return False
    return not _has_products(inner) and not _is_elementwise(equation)


def _has_products(jaxpr: core.Jaxpr) -> bool:
    if jaxpr not in _HAS_PRODUCTS:
        _HAS_PRODUCTS[jaxpr] = any(
            e.primitive.name in kinds.DOTS
            or e.primitive.name.startswith("pallas_gemm")
            or any(map(_has_products, core.jaxprs_in_params(e.params)))
            for e in jaxpr.eqns
        )
    return _HAS_PRODUCTS[jaxpr]


_HAS_PRODUCTS: weakref.WeakKeyDictionary[core.Jaxpr, bool] = weakref.WeakKeyDictionary()


def _is_elementwise(equation: Any) -> bool:
    """Whether a kernel could compute a call as it is; several results may have other readers."""
    first, *more = equation.outvars
    return not more and is_elementwise(equation, first.aval.shape, ELEMENTWISE)


def needed(jaxpr: core.Jaxpr, equations: Iterable[Any]) -> list[Any]:
    """Returns the equations that something depends on."""
    wanted, found = set(filter(_is_variable, jaxpr.outvars)), []
    for equation in reversed(list(equations)):
        if equation.effects or not wanted.isdisjoint(equation.outvars):
            found.append(equation)
            wanted.update(variables(equation))
    return found[::-1]


def _is_variable(x: Any) -> bool:
    return isinstance(x, core.Var)
