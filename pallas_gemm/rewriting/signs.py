"""Where an input of relu is positive, asked of its result.

    y = max(x, 0)        x > 0 is y > 0, bit for bit

The derivative of relu asks it of `x`. The next product reads `y`, so that `y` is in memory anyway,
and nobody has to store `x` any more.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core

from pallas_gemm.rewriting.level import called


def asked_of_results(equations: Sequence[Any]) -> list[Any]:
    """Returns equations that ask the results of relu for signs, not its inputs."""
    results: dict[Any, Any] = {}
    found = []
    for equation in equations:
        of_one = _relu_of(equation)
        if of_one is not None:
            results.setdefault(of_one, equation.outvars[0])
        elif equation.primitive is lax.gt_p and _is_zero(equation.invars[1]):
            asked, zero = equation.invars
            if isinstance(asked, core.Var) and asked in results:
                equation = equation.replace(invars=[results[asked], zero])  # noqa: PLW2901
        found.append(equation)
    return found


def _relu_of(equation: Any) -> Any:
    """Returns the value whose relu an equation makes; None if it makes none."""
    inner = called(equation)
    if inner is not None:
        is_one = len(inner.eqns) == len(inner.outvars) == 1 and not inner.constvars
        if not is_one or inner.eqns[0].outvars != inner.outvars:
            return None
        given = _relu_of(inner.eqns[0])
        return equation.invars[inner.invars.index(given)] if given in inner.invars else None
    if equation.primitive is not lax.max_p:
        return None
    x, y = equation.invars
    if _is_zero(x):
        x, y = y, x
    return x if isinstance(x, core.Var) and _is_zero(y) else None


def _is_zero(x: Any) -> bool:
    return isinstance(x, core.Literal) and np.ndim(x.val) == 0 and x.val == 0
