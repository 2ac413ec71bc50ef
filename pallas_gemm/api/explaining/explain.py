"""`explain`: what would compute the products of a function, and why, without computing anything."""

import contextlib
import dataclasses
import functools
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from pallas_gemm.api import arguments
from pallas_gemm.api.explaining.asked import Asked, last_layers, products, quantized
from pallas_gemm.api.explaining.explanation import Explanation
from pallas_gemm.api.explaining.findings import Entry
from pallas_gemm.api.explaining.passes import passes_of
from pallas_gemm.api.explaining.trace import Trace, trace_of
from pallas_gemm.api.notes import NOTES, Notes, Outside
from pallas_gemm.call import (
    Call,
    GroupedCall,
    Signature,
    SumCall,
    SymmetricCall,
)
from pallas_gemm.device import Device
from pallas_gemm.op.mesh import mesh_context, traffic
from pallas_gemm.op.mesh.parts import Part, Shared, noted
from pallas_gemm.planning import dispatch, targeting
from pallas_gemm.planning.by_xla import xla_time
from pallas_gemm.planning.dispatch import Decision


def explain(f: Any, *args: Any, configs: bool = False, **kwargs: Any) -> Explanation:
    """Says what would compute the products of a function, and why, without computing anything.

    >>> print(explain(gemm, a, b, activation="gelu"))  # doctest: +SKIP
    >>> print(explain(jax.grad(loss), params, batch))  # doctest: +SKIP

    A program that calls nothing of this package is explained, too: each of JAX's products has the
    time that XLA is predicted to take, and the kernel that would compute it.

    Args:
        f: A function.
        *args: Its arguments: arrays, trees of them, or `jax.ShapeDtypeStruct`s.
        configs: Print the config of each product, where there are several.
        **kwargs: Its keyword arguments; what is not an array is passed as it is.

    Returns:
        The explanation. Under `target(...)` it is for that GPU.

    Raises:
        TypeError: `f` is no function.
        ValueError: A call names a config or a kernel that cannot compute its product.
    """
    _check_function(f)
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if arguments.is_array(leaf)]

    def of_arrays(*arrays: Any) -> Any:
        filled = list(leaves)
        for place, x in zip(places, arrays, strict=True):
            filled[place] = x
        own_args, own_kwargs = jax.tree.unflatten(tree, filled)
        return f(*own_args, **own_kwargs)

    notes = Notes()
    with NOTES(notes), _target_of(leaves):
        jaxpr = jax.make_jaxpr(of_arrays)(*(leaves[place] for place in places))
        found = _explained(trace_of(jaxpr.jaxpr), notes.outside)
    return dataclasses.replace(found, configs=configs, rewritten=notes.found)


def _explained(program: Trace, outside: list[Outside]) -> Explanation:
    """Explains a program of which some calls are known to be XLA's."""
    device = targeting.known_target()
    asked = list(_with_reasons(products(program), outside))
    entries = [list(_entries(own, device)) for own in asked]
    # What is copied is copied once, however many products read it; XLA's own read what is stored.
    by_kernels = [
        own
        for own, each in zip(asked, entries, strict=True)
        if own.is_ours and any(one.decision.plan for one in each)
    ]
    turned = {id(one.operation): one.copy for own in by_kernels for one in own.turned}
    return Explanation(
        tuple(one for each in entries for one in each),
        tuple((own.text, own.why) for own in outside),
        tuple(copy for own in by_kernels for copy in own.copies),
        tuple(turned.values()),
        passes_of(program),
        device,
        last_layers=last_layers(program),
        quantized=quantized(program, device),
    )


def explain_on_mesh(f: Any, *args: Any) -> Explanation:
    """Says what one device of a mesh would compute, and how the mesh splits each product.

    Only the compiler knows how arrays within a program are split. So this compiles the program, and
    computes nothing. The devices that the arguments are on need not exist.

    >>> print(explain_on_mesh(train_step, params, batch))  # doctest: +SKIP

    Args:
        f: A function, under `jax.jit` or not.
        *args: Its arguments: arrays, trees of them, or `jax.ShapeDtypeStruct`s with shardings.

    Returns:
        The explanation. Products that each device computes for itself, as inside
        `jax.shard_map`, are in that of `explain`.

    Raises:
        TypeError: `f` is no function.
        Exception: A kernel or config that a call names cannot compute a device's part; the message
            says which axes of the mesh split what.
    """
    _check_function(f)

    def anew(*args: Any) -> Any:
        return f(*args)

    # A name that no cache of compiled programs knows: what comes from there asks nothing.
    anew.__name__ = f"explained_{uuid.uuid4().hex}"
    with noted() as parts:
        jax.jit(anew).lower(*args).compile()
    nothing = "no product that a mesh splits; explain has what each device computes for itself"
    entries = tuple(Entry(_decided_part(part)) for part in parts.found)
    return Explanation(entries, nothing=nothing)


def _check_function(f: Any) -> None:
    if not callable(f):
        raise TypeError(
            "f must be a function, and its arguments follow it, as in explain(gemm, a, b); got"
            f" {type(f).__name__}: {f!r:.80}"
        )


def _target_of(leaves: list[Any]) -> Any:
    """Plans for the GPU that the arguments are on, which tracing them would forget, or for ours."""
    known = targeting.known_target(*(leaf for leaf in leaves if arguments.is_array(leaf)))
    known = known or _own_gpu()
    return contextlib.nullcontext() if known is None else targeting.target(known)


def _own_gpu() -> Device | None:
    """Returns the first GPU of a process that computes on GPUs."""
    return targeting.first_gpu() if jax.default_backend() == "gpu" else None


def _with_reasons(found: Iterable[Asked], outside: list[Outside]) -> Iterator[Asked]:
    """Yields products, those that a call leaves to XLA with its reason.

    A derivative has the reason of the line that it is derived from.
    """
    asked, of_line = list(found), {}
    for own in asked:
        alike = (one.why for one in outside if {*one.factors} == {*own.signature[:2]})
        if own.outside is not None and (why := next(alike, None)):
            of_line.setdefault(own.origin.place, why)
    every = {own.why for own in outside}
    default = every.pop() if len(every) == 1 else "its call leaves it to XLA"
    for own in asked:
        if own.is_ours and own.outside is not None:
            problem, why = own.outside
            why = why or of_line.get(own.origin.place, default)
            yield dataclasses.replace(own, outside=(problem, why))
        else:
            yield own


def _entries(asked: Asked, device: Device | None) -> Iterator[Entry]:
    """Yields what is said of a product; of each of a sum that no kernel computes at once."""
    common = {"origin": asked.origin, "times": asked.times, "is_ours": asked.is_ours}
    if asked.outside is not None:
        problem, why = asked.outside
        seconds = None if device is None else xla_time.seconds(problem, device)
        yield Entry(Decision("xla", problem, why), seconds, **common, is_outside=asked.is_ours)
    if asked.call is None:
        return
    for decision in _decided(asked.call, asked):
        yield Entry(decision, _by_xla(asked.call, decision, device), **common)


def _by_xla(call: Call, decision: Decision, device: Device | None) -> float | None:
    """Predicts how long XLA takes; None where nobody knows."""
    if device is None or decision.mesh:
        return None
    return xla_time.seconds_as_written(decision.problem, device, call.precision)


def _decided(call: Call, asked: Asked) -> Iterator[Decision]:
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


def _decided_part(part: Part) -> Decision:
    call = part.call if part.call.options.target else part.call.with_target(_own_gpu())
    decision = dispatch.decide(call, part.signature)
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


def _mesh_text(mesh: Any) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
