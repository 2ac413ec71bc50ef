"""A product and what is around it as one kernel, where that is predicted to save time.

Two products of one left operand, which something around them joins, are one kernel as well: that of
a gated product.

The function that the kernel computes is the program's own. Where sums are rounded to 16 bits in the
program, and so is each step after them, a kernel goes on in float32: it rounds what it stores. With
`exact`, it rounds after each step as the program says.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from pallas_gemm.call import Call, Signature, signature_of
from pallas_gemm.device import Device
from pallas_gemm.kernels.element_types import FLOATS, FLOATS_16
from pallas_gemm.kernels.functions import flat
from pallas_gemm.kernels.functions.axes import ELEMENTWISE
from pallas_gemm.op import fused
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.function_of_sums import Function
from pallas_gemm.op.fused import Fused, fused_p
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.product import product_p
from pallas_gemm.planning import prediction
from pallas_gemm.planning.by_xla.fused import pass_share
from pallas_gemm.problem import Epilogue
from pallas_gemm.rewriting.elementwise import EXACT, VARIES, bytes_of
from pallas_gemm.rewriting.inside import Inside
from pallas_gemm.rewriting.level import Level, called
from pallas_gemm.rewriting.products import Dense, How, avals_of, copy_seconds, is_one_devices
from pallas_gemm.rewriting.regions import Region, region_of

LEAST_SAVED = 0.05
"""A fold has to save this part of its product's time: predictions err by as much. A residual, and
sums of squares for a norm, are predicted to save 1 to 4%, and nothing was measured for residuals.
"""


NOTHING = VARIES | flat.NOTHING
"""Operations that change no value."""


class Fold(NamedTuple):
    """A product, or two, and what is around it as one kernel.

    Attributes:
        saved: Seconds that it is predicted to save.
        products: The products, which have the left operand in common.
        region: The operations around them.
        function: The same as a function of the sums and of operands.
        call: The product, with float32 sums.
    """

    saved: float
    products: tuple[Dense, ...]
    region: Region
    function: Function
    call: Call

    @property
    def told(self) -> dict[Any, tuple[str, ...]]:
        """The names of the operations that each product is computed with, by its result."""
        names = dict.fromkeys(e.primitive.name for e in self.region.inside)
        more = ("the other of its gate",) * (len(self.products) > 1)
        return {own.out: (*more, *names) for own in self.products}

    def apply(self, level: Level) -> None:
        """Puts it in the place of the products and of the operations."""
        region = self.region
        first, *others = self.products
        equation = level.maker(first.out)
        factors = _factors(self.products)
        given = (*factors, *region.operands)
        stored = set(region.results)
        for old in region.inside:
            shared = [x for x in old.outvars if x in stored]
            is_gone = any(old is gone for gone in region.gone)
            if shared and not is_gone:
                # What else it makes is computed again.
                outs = [core.DropVar(x.aval) if x in stored else x for x in old.outvars]
                level.rename(old, old.replace(outvars=outs))
        for old in region.gone:
            level.remove(old)
        for other in others:
            level.depends_more([other.out], given)
            level.remove(level.maker(other.out))
        params = {
            "call": self.call,
            "contraction": first.dims,
            "function": self.function,
            "devices": mesh_context.device_request(self.call, given),
        }
        new = equation.replace(
            primitive=fused_p,
            invars=list(given),
            outvars=list(region.results),
            params=params,
            effects=fused.effects(self.call, first.dims, self.function, avals_of(given)),
        )
        level.replace(equation, new)
        level.depends_more(region.results, given)
        level.remove_unread(region.inside)


class Folder:
    """Folds operations into products."""

    def __init__(self, how: How) -> None:
        self._how = how

    def fold(self, level: Level, own: Dense, ours: Mapping[Any, Dense]) -> Fold | None:
        """Returns a product with what is around it, if that saves time.

        Args:
            level: The function that it is in.
            own: The product.
            ours: All products of the function, by their results.
        """
        if not _may_be_folded(own):
            return None
        own = own.in_order
        best, read = self._best(level, (own,))
        for other in (ours[x].in_order for x in read if x in ours):
            if _are_a_pair(level, own, other):
                both = self.pair(level, (own, other))
                if both is not None and (best is None or both.saved > best.saved):
                    best = both
        return best

    def pair(self, level: Level, products: tuple[Dense, Dense]) -> Fold | None:
        """Returns two products of one left operand as one kernel, if that saves time."""
        return self._best(level, products)[0] if all(map(_may_be_folded, products)) else None

    def _best(
        self, level: Level, products: tuple[Dense, ...]
    ) -> tuple[Fold | None, Mapping[Any, None]]:
        """Returns the fold that saves most, if one does, and what folds would read."""
        best: Fold | None = None
        read: dict[Any, None] = {}
        inside = Inside(level, tuple(each.out for each in products), exact=self._how.exact)
        if len(products) == 1 and inside.sums_along(products[0].axes_of_rows):
            # A kernel adds up the exponentials of its rows, here those of the program's columns.
            products = (products[0].exchanged,)
            inside = inside.made_in_order(products[0].order)
        for reduces in (True, False):
            region = region_of(inside if reduces else inside.without_reductions())
            if region is None:
                break
            read |= dict.fromkeys(region.operands)
            least = best.saved if best else LEAST_SAVED * _seconds(products)
            best = self._planned(level, products, region, least) or best
            if all(map(inside.operands.is_full, region.results)):
                # It reduces nothing.
                break
        return best, read

    def _planned(
        self, level: Level, products: tuple[Dense, ...], region: Region, least: float
    ) -> Fold | None:
        """Returns the fold that a region is, if it saves more than the least that counts."""
        if self._at_most(products, region) <= least:
            return None
        gate = Epilogue(gated=len(products) > 1)
        single = np.dtype(np.float32)
        call = dataclasses.replace(products[0].call, out_dtype=single, epilogue=gate)
        function = self._function(level, region, products[0].order)
        saved = self._saved(products, region, function, call)
        if saved is None or saved <= least:
            return None
        return Fold(saved, products, region, function, call)

    @property
    def elementwise(self) -> frozenset[str]:
        """The operations that it computes for each element."""
        return EXACT if self._how.exact else ELEMENTWISE

    def again(self, level: Level, fold: Fold, region: Region) -> Fold | None:
        """Returns a kernel that is there with more in it, for the sake of memory.

        None if it is then predicted to lose time, by more than predictions err.
        """
        function = self._function(level, region, fold.products[0].order)
        saved = self._saved(fold.products, region, function, fold.call)
        if saved is None or saved < -LEAST_SAVED * _seconds(fold.products):
            return None
        return fold._replace(saved=saved, region=region, function=function)

    def _saved(
        self, products: tuple[Dense, ...], region: Region, function: Function, call: Call
    ) -> float | None:
        """Returns how many seconds it is predicted to save; None if no kernel takes it."""
        signature = signature_of(avals_of((*_factors(products), *region.operands)))
        question = call, products[0].dims, function, signature
        answer = functools.partial(_seconds_of, self._how.device, *question)
        found = self._how.once(question, answer)
        if found is None:
            return None
        seconds, is_pass = found
        if not is_pass and all(own.refused for own in products):
            # XLA is faster at the product, and computes what follows with it.
            return None
        return _seconds(products) + self._passes(region) - seconds

    def _passes(self, region: Region) -> float:
        """Returns how many seconds the passes take that XLA then does not make."""
        device = self._how.device
        moved = region.stock - region.left - sum(2 * bytes_of(x) for x in region.made)
        launch = prediction.pass_seconds(0, device)
        return prediction.pass_seconds(moved, device) - launch * (not region.is_pass)

    def _at_most(self, products: tuple[Dense, ...], region: Region) -> float:
        """Returns how many seconds it could save if its kernel had no more to do than the products.

        It is quicker to ask than to plan the kernel.
        """
        device, launch = self._how.device, prediction.pass_seconds(0, self._how.device)
        shared = sum(bytes_of(own.factors[0]) for own in products[1:])
        stored = sum(bytes_of(own.out) for own in products) - sum(map(bytes_of, region.results))
        less = prediction.pass_seconds(shared + max(0, stored), device) - launch
        return self._passes(region) + less + launch * len(products[1:])

    def _function(self, level: Level, region: Region, order: tuple[int, ...] = ()) -> Function:
        """Returns the function of the sums and of the operands.

        Args:
            level: The function that the operations are in.
            region: The operations.
            order: The axes of the sums in the order in which the kernel makes them.
        """
        key, exact = _key(region), self._how.exact or region.rounds
        function = None if key is None else _FUNCTIONS.get((key, order, exact))
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
                wide = functools.partial(
                    _wide, program, len(sums), exact=exact, rounded=region.compared
                )
                closed = jax.make_jaxpr(_of_turned(wide, order))(*sums, *types)
            run = _of_turned(functools.partial(_as_written, program, dtype, len(sums)), order)
            function = Function(run, closed, len(sums), rounds_to=np.dtype(dtype))
            if key is not None:
                _FUNCTIONS.put((key, order, exact), function)
        return function


def _of_turned(run: Callable[..., Any], order: tuple[int, ...]) -> Callable[..., Any]:
    """Returns a function of a product as one of its sums in the order of a kernel."""
    if not order:
        return run
    back = tuple(np.argsort(order))
    return lambda sums, *args: run(lax.transpose(sums, back), *args)


def _seconds_of(
    device: Device, call: Call, dims: Contraction, function: Function, signature: Signature
) -> tuple[float, bool] | None:
    """Returns how long a kernel is predicted to take, and whether XLA makes a pass instead.

    None if no kernel computes all of a function.
    """
    found = fused.plan(call.with_target(device), dims, function, signature)
    if not isinstance(found, Fused) or found.decision.plan is None or found.split.left:
        return None
    factors, _ = fused.factors_of(call, signature)
    copies = copy_seconds(found.form, tuple(factors), call.out_dtype.itemsize, device)
    spread = prediction.pass_seconds(moved, device) if (moved := found.split.spread_bytes) else 0.0
    is_pass = pass_share(found.decision.problem) == 1
    return found.decision.plan.seconds + copies + spread, is_pass


def _may_be_folded(own: Dense) -> bool:
    """Whether a product has float32 sums, and is one device's as far as its types say."""
    left, right = own.factors
    if {np.dtype(x.aval.dtype) for x in (left, right, own.out)} - FLOATS:
        return False
    return is_one_devices(own)


def _are_a_pair(level: Level, own: Dense, other: Dense) -> bool:
    """Whether a gated product could compute two products."""
    of_one = avals_of((own.factors[1], own.out)) == avals_of((other.factors[1], other.out))
    same = (own.call, own.dims) == (other.call, other.dims) and of_one
    if not same or own.factors[0] is not other.factors[0]:
        return False
    apart = not level.above(own.out) & level.bit(other.out)
    apart = apart and not level.above(other.out) & level.bit(own.out)
    return apart and level.maker(other.out).primitive in (product_p, lax.dot_general_p)


def _factors(products: tuple[Dense, ...]) -> tuple[Any, ...]:
    """Returns the left operand, and each right one."""
    return (products[0].factors[0], *(own.factors[1] for own in products))


def _seconds(products: tuple[Dense, ...]) -> float:
    return sum(own.seconds for own in products)


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


def _key(region: Region) -> Any:
    """Returns what equal functions have in common; None if that cannot be told."""
    try:
        key = _parts(region)
        hash(key)
    except TypeError:
        return None
    return key


def _parts(region: Region) -> Any:
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
    results = map(number, region.results)
    return len(region.products), avals_of(given), tuple(steps), tuple(results)


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
        rounded: The values that are anyway: what is the largest of them is one that is stored.
    """
    taken, made = (avals_of(x) for x in (program.invars, program.outvars))
    totals = [
        _rounded(x, taken[0].dtype) if exact or own in rounded else x
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
    """Rounds a float32 value to 16 bits, and keeps it in float32."""
    return value.astype(dtype).astype(np.float32) if _is_short(dtype) else value


def _is_short(dtype: Any) -> bool:
    """Whether a kernel keeps values of a type in float32."""
    return isinstance(dtype, np.dtype | type) and np.dtype(dtype) in FLOATS_16
