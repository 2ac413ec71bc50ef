"""`explain`: what would compute the products of a function, and why, without computing anything."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import sysconfig
import uuid
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import primitives
from jax.sharding import AbstractMesh, AxisType

from pallas_gemm.api.explanation import Copy, Explanation, Origin
from pallas_gemm.api.request import Request
from pallas_gemm.call import Call, GroupedCall, Signature, SumCall, SymmetricCall, signature_of
from pallas_gemm.op import mesh_context, traffic
from pallas_gemm.op.canonical import Merged, merged
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.grouped import grouped_p
from pallas_gemm.op.parts import Part, Shared, noted
from pallas_gemm.op.product import product_p
from pallas_gemm.op.projections import operands_of_each, projections_p
from pallas_gemm.op.sum_of_products import each_merged, merged_sum, sum_p
from pallas_gemm.op.symmetric import symmetric_p
from pallas_gemm.planning import dispatch, targeting
from pallas_gemm.planning.dispatch import Decision

# Here are no lines of the caller's: this package, Python's own library, what is installed.
_PACKAGE = f"{pathlib.Path(__file__).parents[1]}{os.sep}"
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


class _Notes:
    """The requests that were made while a function was traced."""

    def __init__(self) -> None:
        self.requests: list[Request] = []


# A context of JAX's own, so that a function that was traced before is traced anew.
_NOTES = jax.make_user_context(default_value=None)


def explain(f: Any, *args: Any, **kwargs: Any) -> Explanation:
    """Says what would compute the products of a function, and why, without computing anything.

    >>> print(explain(gemm, a, b, activation="gelu"))  # doctest: +SKIP
    >>> print(explain(jax.grad(loss), params, batch))  # doctest: +SKIP

    Args:
        f: A function that calls `gemm` and its relatives, however deep inside.
        *args: Its arguments: arrays, trees of them, or `jax.ShapeDtypeStruct`s.
        **kwargs: Its keyword arguments; what is not an array is passed as it is.

    Returns:
        The explanation. Under `target(...)` it is for that GPU.

    Raises:
        TypeError: `f` is no function.
        ValueError: What a call names cannot compute its product.
    """
    if not callable(f):
        raise TypeError(
            "f must be a function, and its arguments follow it, as in explain(gemm, a, b); got"
            f" {type(f).__name__}: {f!r:.80}"
        )
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def of_arrays(*arrays: Any) -> Any:
        filled = list(leaves)
        for place, x in zip(places, arrays, strict=True):
            filled[place] = x
        own_args, own_kwargs = jax.tree.unflatten(tree, filled)
        return f(*own_args, **own_kwargs)

    notes = _Notes()
    with _NOTES(notes), _target_of(leaves):
        jaxpr = jax.make_jaxpr(of_arrays)(*(leaves[place] for place in places))
        gpu = targeting.first_gpu() if jax.default_backend() == "gpu" else None
        asked = list(_products(jaxpr.jaxpr))
        decided = [
            (product, list(_decided(_for_gpu(product.call, gpu), product)))
            for product in asked
            if product.call is not None
        ]
    products = [(one, product.origin) for product, each in decided for one in each]
    # Once, however many products read it; XLA's own reads what is stored.
    by_kernels = [product for product, each in decided if any(one.plan for one in each)]
    turned = {id(own): own.copy for product in by_kernels for own in product.turned}
    outside = tuple((_asked_text(r), r.outside) for r in notes.requests if r.outside)
    copies = tuple(copy for product in asked for copy in product.copies)
    by_jax = tuple(str(product.origin.place) for product in asked if product.call is None)
    decisions, origins = zip(*products, strict=True) if products else ((), ())
    needless = tuple(turned.values())
    return Explanation(decisions, outside, copies, origins, by_jax, turned=needless)


def explain_on_mesh(f: Any, *args: Any) -> Explanation:
    """Says what one device of a mesh would compute, and how the mesh splits each product.

    Only the compiler knows how arrays within a program are split, so this compiles the program,
    for the devices that the arguments are on, which need not exist; it computes nothing.

    >>> print(explain_on_mesh(train_step, params, batch))  # doctest: +SKIP

    Args:
        f: A function, under `jax.jit` or not.
        *args: Its arguments: arrays, trees of them, or `jax.ShapeDtypeStruct`s with shardings.

    Returns:
        The explanation. Products that each device computes for itself, as inside
        `jax.shard_map`, are in that of `explain`.

    Raises:
        Exception: What a call names cannot compute a device's part; the message says which axes
            of the mesh split what.
    """
    gpu = targeting.first_gpu() if jax.default_backend() == "gpu" else None

    def anew(*args: Any) -> Any:
        return f(*args)

    # A name that no cache of compiled programs knows: what comes from there asks nothing.
    anew.__name__ = f"explained_{uuid.uuid4().hex}"
    with noted() as parts:
        jax.jit(anew).lower(*args).compile()
    nothing = "no product that a mesh splits; explain has what each device computes for itself"
    return Explanation(tuple(_decided_part(part, gpu) for part in parts.found), nothing=nothing)


def note(asked: Request) -> None:
    """Notes a request if somebody asked for an explanation."""
    notes = _NOTES.value
    if notes is not None:
        notes.requests.append(asked)


def is_noting() -> bool:
    """Whether somebody asked for an explanation: of which line asks for what, too."""
    return _NOTES.value is not None


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)


def _target_of(leaves: list[Any]) -> Any:
    """Plans for the GPU that the arguments are on, which tracing them would forget."""
    known = targeting.known_target(*(leaf for leaf in leaves if _is_array(leaf)))
    return contextlib.nullcontext() if known is None else targeting.target(known)


class _Asked(NamedTuple):
    """A product of matrices in a program; one of JAX's own has no call.

    Attributes:
        call: Everything about it but the operands.
        signature: The operands.
        meshes: Of several devices, that the operands are on.
        origin: Who asks for it.
        copies: What is copied for it.
        turned: What the program itself turns for it, and the product could read as it is stored.
    """

    call: Call | None
    signature: Signature
    meshes: tuple[AbstractMesh, ...]
    origin: Origin
    copies: tuple[Copy, ...] = ()
    turned: tuple["_Turned", ...] = ()


class _Turned(NamedTuple):
    """An array that a program is given, and turns.

    Attributes:
        permutation: Of its dimensions.
        stored: Its shape and type.
    """

    permutation: tuple[int, ...]
    stored: tuple[Any, Any]

    @property
    def copy(self) -> Copy:
        """What it takes."""
        shape, dtype = self.stored
        what = f"transpose{self.permutation} of {dtype}{list(shape)} by the program"
        return Copy(what, int(2 * np.prod(shape) * dtype.itemsize))

    def letters(self, turned: str) -> str:
        """Returns the letters of the dimensions as they are stored, of those that are turned."""
        return "".join(turned[self.permutation.index(i)] for i in range(len(turned)))


def _products(
    jaxpr: core.Jaxpr, gradient: bool = False, turned: Mapping[Any, _Turned] = MappingProxyType({})
) -> Iterator[_Asked]:
    """Yields each product, and the types of its operands."""
    turned, given = dict(turned), {*jaxpr.invars, *jaxpr.constvars}
    for equation in jaxpr.eqns:
        own = [turned.get(v) if isinstance(v, core.Var) else None for v in equation.invars]
        if equation.primitive is lax.transpose_p and equation.invars[0] in given:
            (stored,) = signature_of((equation.invars[0].aval,))
            turned[equation.outvars[0]] = _Turned(equation.params["permutation"], stored)
        avals: list[Any] = [v.aval for v in equation.invars]
        source: Any = equation.source_info
        backward = gradient or "transpose(" in str(source.name_stack)
        is_jaxs = equation.primitive is lax.dot_general_p and not _is_ours(source)
        ours = (product_p, sum_p, projections_p, grouped_p, symmetric_p)
        if is_jaxs or equation.primitive in ours:
            yield from _asked(equation, avals, own, Origin(_place(source), backward))
        for inner in core.jaxprs_in_params(equation.params):
            known = {}
            if equation.primitive is primitives.jit_p:
                # A function that is called is given what its caller turns; a loop, slices of it.
                pairs = zip(inner.invars, own, strict=True)
                known = {v: x for v, x in pairs if x is not None}
            yield from _products(inner, backward, known)


def _asked(
    equation: Any, avals: list[Any], turned: list[_Turned | None], origin: Origin
) -> Iterator[_Asked]:
    """Yields the products of one primitive with operands of these types."""
    call = equation.params.get("call")
    given = signature_of(tuple(avals))
    meshes = tuple(own for x in avals if (own := x.sharding.mesh).size > 1)
    if equation.primitive is product_p:
        matrices = merged(call, equation.params["contraction"], given)
        copies = tuple(_copies(call, matrices, given))
        needless = tuple(_needless(call, equation.params["contraction"], given, turned))
        yield _Asked(matrices.call, matrices.signature, meshes, origin, copies, needless)
    elif equation.primitive is projections_p:
        each = operands_of_each(call, given[1:])
        for dims, own in zip(equation.params["contractions"], each, strict=True):
            yield _Asked(*merged(call, dims, (given[0], *own))[:2], meshes, origin)
    elif equation.primitive is sum_p:
        each = each_merged(call, equation.params["contractions"], given)
        wholes = [whole] if (whole := merged_sum(each)) else [own[:2] for own in each]
        for own_call, signature in wholes:
            yield _Asked(own_call, signature, meshes, origin)
    else:
        needless = ()
        if equation.primitive is grouped_p:
            needless = tuple(x for x in turned if x is not None and x.permutation == (0, 2, 1))
        yield _Asked(call, given, meshes, origin, turned=needless)


def _needless(
    call: Call, contraction: Contraction, given: Signature, turned: list[_Turned | None]
) -> Iterator[_Turned]:
    """Yields what need not be turned: as it is stored, the product reads it without a copy."""
    for name, place in (("lhs", 0), ("rhs", 1)):
        operand = turned[place]
        if operand is None or (place and call.epilogue.gated):
            continue
        stored = operand.letters(getattr(contraction, name))
        dims = contraction.with_letters(**{name: stored})
        operands = (*given[:place], operand.stored, *given[place + 1 :])
        if not list(_copies(call, merged(call, dims, operands), operands)):
            yield operand


def _files(source: Any) -> Iterator[tuple[str, int]]:
    """Yields the lines within the explained function that made an equation, innermost first."""
    for frame in () if source.traceback is None else source.traceback.frames:
        if frame.file_name == __file__:
            return
        yield frame.file_name, frame.line_num


def _is_ours(source: Any) -> bool:
    """Whether this package made an equation, for a product that it leaves to XLA."""
    return any(file.startswith(_PACKAGE) for file, _ in _files(source))


def _place(source: Any) -> str | None:
    """Returns the innermost line of the caller's own program that made an equation."""
    for file, line in _files(source):
        if not file.startswith((_PACKAGE, *_LIBRARIES)):
            return f"{pathlib.Path(file).name}:{line}"
    return None


def _decided(call: Call, asked: _Asked) -> Iterator[Decision]:
    """Yields the decision about a product; about each of a sum that no kernel computes at once."""
    whole = _decided_alone(call, asked.signature, asked.meshes)
    if isinstance(call, SymmetricCall) and whole.plan is None:
        # The other half is computed, too.
        every = _decided_alone(call.whole, asked.signature, asked.meshes)
        yield dataclasses.replace(every, refused=whole.refused or every.refused)
        return
    if not isinstance(call, SumCall) or whole.plan is not None:
        yield whole
        return
    for pair in call.pairs(asked.signature):
        yield _decided_alone(call.each, pair, asked.meshes)


def _decided_alone(call: Call, signature: Signature, meshes: tuple[AbstractMesh, ...]) -> Decision:
    decision = dispatch.decide(call, signature)
    if not meshes or all(kind == AxisType.Manual for kind in meshes[0].axis_types):
        return decision
    mesh = meshes[0]
    if why := mesh_context.why_not_shared(*meshes):
        return Decision("xla", decision.problem, why, mesh=_mesh_text(mesh))
    text = f"{_mesh_text(mesh)}; each device's part is decided on when the program is compiled"
    return dataclasses.replace(decision, mesh=text)


def _decided_part(part: Part, gpu: Any) -> Decision:
    decision = dispatch.decide(_for_gpu(part.call, gpu), part.signature)
    text = f"one device's part; the mesh splits {part.split}"
    if not isinstance(part.call, GroupedCall):
        text = f"{text}; {_traffic_text(part.whole)}"
    return dataclasses.replace(decision, plan=part.plan or decision.plan, mesh=text)


def _traffic_text(whole: Shared | None) -> str:
    """Says what is sent for a product, and what would be if XLA shared its own out."""
    if whole is None:
        return "the program says itself what is sent"
    if not whole.received:
        return "nothing is sent"
    own = _received_by_xla(whole)
    text = (
        f"{_megabytes(whole.received)} arrive at each device, {_megabytes(own)} with XLA's product"
    )
    return f"{text}, which implementation='xla' takes" if own < whole.received else text


def _received_by_xla(whole: Shared) -> float:
    """Compiles XLA's own product of the same operands; returns the bytes that arrive."""
    *operands, result = whole.shardings
    shapes = [jax.ShapeDtypeStruct(*operand) for operand in whole.signature]
    run = jax.jit(
        functools.partial(whole.contraction.by_xla, whole.call),
        in_shardings=tuple(operands),
        out_shardings=result,
    )
    return traffic.received(str(run.lower(*shapes).compile().as_text()))


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.3g} MB"


def _for_gpu(call: Call, gpu: Any) -> Call:
    return call.with_target(gpu) if call.options.target is None else call


def _mesh_text(mesh: Any) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())


def _asked_text(asked: Request) -> str:
    shapes = " x ".join(f"{x.dtype}{list(x.shape)}" for x in asked.operands[:2])
    return f"{shapes} -> {asked.call.out_dtype}"


def _copies(call: Call, matrices: Merged, given: Signature) -> Iterator[Copy]:
    form = matrices.form
    left, right = given[1::-1] if form.swapped else given[:2]
    for (shape, dtype), side in ((left, form.a), (right, form.b)):
        if side.is_free:
            continue
        what = "broadcast" if side.broadcast else f"transpose{side.permutation}"
        moved = (np.prod(shape) + np.prod(side.shape)) * dtype.itemsize
        yield Copy(f"{what} of {dtype}{list(shape)}", int(moved))
    if form.permutation is not None:
        moved = 2 * np.prod(form.parts) * call.out_dtype.itemsize
        what = f"transpose{form.permutation} of {call.out_dtype}{list(form.parts)}, the result"
        yield Copy(what, int(moved))
