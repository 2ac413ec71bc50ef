"""The function that a kernel computes with products: the program's own operations.

Where sums are rounded to 16 bits in the program, and so is each step after them, a kernel goes on
in float32: it rounds what it stores. With `exact`, it rounds after each step as the program says.
A value of 8 bits is rounded in any case.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from pallas_gemm.kernels.element_types import FLOATS_16
from pallas_gemm.kernels.functions import flat
from pallas_gemm.op.function_of_sums import Function
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.rewriting.elementwise import VARIES
from pallas_gemm.rewriting.level import Level, called
from pallas_gemm.rewriting.products import avals_of
from pallas_gemm.rewriting.regions import Region
from pallas_gemm.rewriting.rounded import rounded_of

NOTHING = VARIES | flat.NOTHING
"""Operations that change no value."""


def function_of(
    level: Level, region: Region, order: tuple[int, ...] = (), *, exact: bool = False
) -> Function:
    """Returns the function of the sums and of the operands.

    Args:
        level: The function that the operations are in.
        region: The operations.
        order: The axes of the sums in the order in which the kernel makes them.
        exact: Whether all values are rounded as in the program.
    """
    exact = exact or region.rounds
    rounded = frozenset() if exact else rounded_of(level, region)
    key = _key(region, rounded, order, exact)
    function = None if key is None else _FUNCTIONS.get(key)
    if function is None:
        products = region.products
        program = level.jaxpr.replace(
            constvars=[],
            consts=(),
            invars=[*products, *region.operands],
            outvars=list(region.results),
            eqns=list(region.inside),
            effects=frozenset(),
        )
        dtype, shape = products[0].aval.dtype, products[0].aval.shape
        types = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in region.operands]
        made = tuple(shape[axis] for axis in order) or shape
        sums = [jax.ShapeDtypeStruct(made, np.float32)] * len(products)
        with jax.sharding.use_abstract_mesh(mesh_context.no_mesh()):
            wide = functools.partial(_wide, program, len(sums), exact=exact, rounded=rounded)
            closed = jax.make_jaxpr(_of_turned(wide, order))(*sums, *types)
        run = _of_turned(functools.partial(_as_written, program, dtype, len(sums)), order)
        function = Function(run, closed, len(sums), rounds_to=np.dtype(dtype))
        if key is not None:
            _FUNCTIONS.put(key, function)
    return function


def _of_turned(run: Callable[..., Any], order: tuple[int, ...]) -> Callable[..., Any]:
    """Returns a function of a product as one of its sums in the order of a kernel."""
    if not order:
        return run
    back = tuple(np.argsort(order))
    return lambda sums, *args: run(lax.transpose(sums, back), *args)


class _Functions:
    """Functions that were traced, the latest ones: equal functions are one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: collections.OrderedDict[Any, Function] = collections.OrderedDict()

    def get(self, key: Any) -> Function | None:
        """Returns a function; None if it was not traced, or long ago."""
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def put(self, key: Any, function: Function) -> None:
        """Keeps a function."""
        self._known[key] = function
        if len(self._known) > self._most:
            self._known.popitem(last=False)


_FUNCTIONS = _Functions(512)


def _key(region: Region, rounded: AbstractSet[Any], *more: Any) -> Any:
    """Returns what equal functions have in common; None if that cannot be told."""
    try:
        key = *_parts(region, rounded), *more
        hash(key)
    except TypeError:
        return None
    return key


def _parts(region: Region, rounded: AbstractSet[Any]) -> tuple[Any, ...]:
    given = (*region.products, *region.operands)
    numbers = {x: i for i, x in enumerate(given)}

    def number(x: Any) -> Any:
        if isinstance(x, core.Literal):
            if np.ndim(x.val):
                raise TypeError("an array has no key")
            return x.aval, np.asarray(x.val).tobytes()
        return numbers.setdefault(x, len(numbers))

    # The operations say the types of what they make.
    steps = [
        (e.primitive, *e.params, *e.params.values(), *map(number, (*e.invars, *e.outvars)))
        for e in region.inside
    ]
    results, short = map(number, region.results), frozenset(map(number, rounded))
    return len(region.products), avals_of(given), tuple(steps), tuple(results), short


def _as_written(program: core.Jaxpr, dtype: Any, sums: int, *args: Any) -> list[Any]:
    """Computes the operations as the program has them."""
    given = (*(x.astype(dtype) for x in args[:sums]), *args[sums:])
    results = (x for e in program.eqns for x in e.outvars)
    if any(map(_varies, results)) and not any(map(_varies, map(jax.typeof, given))):
        # This is lowered for one device, but calls have types of a mesh.
        return _run(program, given, exact=None)
    return core.jaxpr_as_fun(program)(*given)


def _varies(x: Any) -> bool:
    """Whether a value, or one of a type, may differ between the devices of a mesh."""
    return bool(getattr(x, "aval", x).manual_axis_type.varying)


def _wide(
    program: core.Jaxpr, sums: int, *args: Any, exact: bool, rounded: AbstractSet[Any]
) -> list[Any]:
    """Computes the operations as a kernel does: in float32 what the program has in 16 bits.

    Args:
        program: The operations.
        sums: How many of the arguments are sums.
        *args: The arguments.
        exact: Whether all values are rounded as in the program.
        rounded: The values that are anyway: what they are reduced to meets what is stored.
    """
    taken, made = (avals_of(x) for x in (program.invars, program.outvars))
    dtype = taken[0].dtype
    totals = [
        _rounded(x, dtype) if exact or own in rounded else _kept(x, dtype)
        for own, x in zip(program.invars, args[:sums], strict=False)
    ]
    values = _run(program, [*totals, *args[sums:]], exact=exact, rounded=rounded)
    return [x.astype(own.dtype) for x, own in zip(values, made, strict=True)]


def _run(
    program: core.Jaxpr,
    args: Sequence[Any],
    *,
    exact: bool | None,
    rounded: AbstractSet[Any] = frozenset(),
) -> list[Any]:
    """Computes a program without its calls: in float32, or in its own types if `exact` is None."""
    known = dict(zip(program.invars, args, strict=True))

    def read(x: Any) -> Any:
        value = x.val if isinstance(x, core.Literal) else known[x]
        is_widened = exact is not None and _is_short(jnp.result_type(value))
        return jnp.asarray(value, np.float32) if is_widened else value

    for equation in program.eqns:
        inputs = [read(x) for x in equation.invars]
        inner = called(equation)
        if inner is not None:
            outputs = _run(inner, inputs, exact=exact)
        elif equation.primitive.name in NOTHING:
            outputs = inputs
        else:
            outputs = _bound(equation, inputs, wide=exact is not None)
        types = avals_of(equation.outvars)
        for x, own, value in zip(equation.outvars, types, outputs, strict=True):
            known[x] = _rounded(value, own.dtype) if exact or x in rounded else value
    return [read(x) for x in program.outvars]


def _bound(equation: Any, inputs: list[Any], *, wide: bool) -> list[Any]:
    """Computes one operation, in float32 or as it is."""
    params = {
        name: np.dtype(np.float32) if wide and _is_short(value) else value
        for name, value in equation.params.items()
    }
    result = equation.primitive.bind(*inputs, **params)
    return result if equation.primitive.multiple_results else [result]


def _rounded(value: Any, dtype: Any) -> Any:
    """Rounds a float32 value to its type in the program; one of 16 bits stays in float32."""
    return value.astype(dtype).astype(np.float32) if _is_short(dtype) else _kept(value, dtype)


def _kept(value: Any, dtype: Any) -> Any:
    """Returns a value in its type in the program; one of 16 bits stays in float32 as it is."""
    return value if _is_short(dtype) or value.dtype == dtype else value.astype(dtype)


def _is_short(dtype: Any) -> bool:
    """Whether a kernel keeps values of a type in float32."""
    return isinstance(dtype, np.dtype | type) and np.dtype(dtype) in FLOATS_16
