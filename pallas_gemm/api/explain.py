"""`explain`: what would compute the products of a function, and why, without computing anything."""

import contextlib
import dataclasses
import textwrap
import uuid
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AxisType

from pallas_gemm.api.request import Request
from pallas_gemm.op import mesh_context
from pallas_gemm.op.parts import Part, noted
from pallas_gemm.op.product import product_p
from pallas_gemm.op.projections import operands_of_each, projections_p
from pallas_gemm.op.sum_of_products import sum_p
from pallas_gemm.planning import dispatch, targeting
from pallas_gemm.planning.call import Call, SumCall, signature_of
from pallas_gemm.planning.dispatch import Decision, Plan
from pallas_gemm.problem import Problem


class _Notes:
    """The requests that were made while a function was traced."""

    def __init__(self) -> None:
        self.requests: list[Request] = []


# A context of JAX's own, so that a function that was traced before is traced anew.
_NOTES = jax.make_user_context(default_value=None)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What would compute the products of a function. `print` it.

    Attributes:
        products: The decision for each product, in the order of the program. What is derived or
            mapped is there as it is computed: the products of a gradient, one for a whole `vmap`.
        outside: (what, why) of each call that XLA computes without a look at the kernels.
        copies: Copies that are made of operands to bring their dimensions side by side.
    """

    products: tuple[Decision, ...]
    outside: tuple[tuple[str, str], ...] = ()
    copies: tuple[str, ...] = ()

    @property
    def implementation(self) -> str:
        """What computes the first product; "none" if there is none."""
        if self.products:
            return self.products[0].implementation
        return "xla" if self.outside else "none"

    @property
    def reason(self) -> str:
        """Why that computes it."""
        if self.products:
            return self.products[0].reason
        return self.outside[0][1] if self.outside else "no product"

    @property
    def plan(self) -> Plan | None:
        """How a kernel computes the first product: config, steps, predicted time."""
        return self.products[0].plan if self.products else None

    def __str__(self) -> str:
        parts = [_decision_text(decision) for decision in self.products]
        parts += [f"xla: {what}\n  why       {why}" for what, why in self.outside]
        parts += [f"before it: {copy}" for copy in self.copies]
        return "\n".join(parts) or "no product"


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
        products = tuple(
            decision
            for call, avals in _products(jaxpr.jaxpr)
            for decision in _decided(_for_gpu(call, gpu), avals)
        )
    outside = tuple((_asked_text(r), r.outside) for r in notes.requests if r.outside)
    copies = tuple(copy for r in notes.requests if not r.outside for copy in _copies(r))
    return Explanation(products, outside, copies)


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
    return Explanation(tuple(_decided_part(part, gpu) for part in parts.found))


def note(asked: Request) -> None:
    """Notes a request if somebody asked for an explanation."""
    notes = _NOTES.value
    if notes is not None:
        notes.requests.append(asked)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)


def _target_of(leaves: list[Any]) -> Any:
    """Plans for the GPU that the arguments are on, which tracing them would forget."""
    known = targeting.known_target(*(leaf for leaf in leaves if _is_array(leaf)))
    return contextlib.nullcontext() if known is None else targeting.target(known)


def _products(jaxpr: core.Jaxpr) -> Iterator[tuple[Call, list[Any]]]:
    """Yields each product and the types of its operands."""
    for equation in jaxpr.eqns:
        avals: list[Any] = [v.aval for v in equation.invars]
        if equation.primitive in (product_p, sum_p):
            yield equation.params["call"], avals
        if equation.primitive is projections_p:
            call = equation.params["call"]
            yield from ((call, [avals[0], *own]) for own in operands_of_each(call, avals[1:]))
        for inner in core.jaxprs_in_params(equation.params):
            yield from _products(inner)


def _decided(call: Call, avals: list[Any]) -> Iterator[Decision]:
    """Yields the decision about a product; about each of a sum that no kernel computes at once."""
    whole = _decided_alone(call, avals)
    if not isinstance(call, SumCall) or whole.plan is not None:
        yield whole
        return
    yield from (_decided_alone(call.each, list(pair)) for pair in call.pairs(avals))


def _decided_alone(call: Call, avals: list[Any]) -> Decision:
    decision = dispatch.decide(call, signature_of(tuple(avals)))
    meshes = [aval.sharding.mesh for aval in avals if aval.sharding.mesh.size > 1]
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
    return dataclasses.replace(decision, plan=part.plan or decision.plan, mesh=text)


def _for_gpu(call: Call, gpu: Any) -> Call:
    return call.with_target(gpu) if call.options.target is None else call


def _mesh_text(mesh: Any) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())


def _decision_text(decision: Decision) -> str:
    lines = [f"{decision.implementation}: {_problem_text(decision.problem)}"]
    rows = [("why", decision.reason)]
    if decision.mesh is not None:
        rows.append(("mesh", decision.mesh))
    if (plan := decision.plan) is not None:
        rows.append(("for", plan.device.kind))
        rows.append(("config", repr(plan.config)))
        rows.append(("predicted", f"{plan.seconds * 1e6:.0f} us ({plan.source})"))
        if plan.realigned.unfused is not None:
            rows.append(("epilogue", f"by XLA, because {plan.realigned.unfused}"))
        rows += [("step", str(step)) for step in plan.realigned.steps]
    rows += [(f"not {name}", "; ".join(reasons)) for name, reasons in decision.refused]
    for name, text in rows:
        lines += textwrap.wrap(
            text,
            100,
            initial_indent=f"  {name:<14}",
            subsequent_indent=" " * 16,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def _problem_text(problem: Problem) -> str:
    batch = f"{problem.batch} x " if problem.batch != 1 else ""
    sizes = f"m={problem.m} n={problem.n} k={problem.k}"
    dtypes = f"{problem.a_dtype} x {problem.b_dtype} -> {problem.out_dtype}"
    epilogue = problem.epilogue
    if problem.pieces:
        sizes += f" ({' + '.join(map(str, problem.pieces))})"
    extras = [name for name in ("bias", "residual", "gated") if getattr(epilogue, name)]
    if epilogue.activation is not None:
        extras.append(getattr(epilogue.activation, "__name__", "activation"))
    return " ".join([f"{batch}{sizes} {problem.layout} {dtypes}", *extras])


def _asked_text(asked: Request) -> str:
    shapes = " x ".join(f"{x.dtype}{list(x.shape)}" for x in asked.operands[:2])
    return f"{shapes} -> {asked.call.out_dtype}"


def _copies(asked: Request) -> Iterator[str]:
    form = asked.form
    left, right = asked.operands.a, asked.operands.b
    if form.swapped:
        left, right = right, left
    for x, side in ((left, form.a), (right, form.b)):
        if side.is_free:
            continue
        if side.broadcast is not None:
            what, shape = "broadcast", side.broadcast
        else:
            what, shape = f"transpose{side.permutation}", side.shape
        moved = (np.prod(x.shape) + np.prod(shape)) * x.dtype.itemsize
        yield f"{what} of {x.dtype}{list(x.shape)}: moves {moved / 1e6:.1f} MB"
