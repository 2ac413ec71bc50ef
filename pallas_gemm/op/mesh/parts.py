"""The part of a product that one device of a mesh computes, and the callers that ask for it."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding

from pallas_gemm._version import __version__
from pallas_gemm.call import Call, Signature
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.mesh import mesh_axes, mesh_context
from pallas_gemm.planning import plans, targeting

part_p = core.Primitive("pallas_gemm_part")
"""The product that one device computes; `lowering` says what becomes of it."""

# A context of JAX's own, so that a function that was traced outside a block is traced anew in it.
_NOTED = jax.make_user_context(default_value=None)


class Shared(NamedTuple):
    """A product of all devices, as XLA asks about it.

    Attributes:
        call: Everything about it but the operands.
        contraction: Its dimensions.
        signature: The operands.
        shardings: How the operands come, and last how the result is wanted.
        received: The bytes that arrive at each device for it as it is shared out.
    """

    call: Call
    contraction: Contraction
    signature: Signature
    shardings: tuple[NamedSharding, ...]
    received: float


class Part(NamedTuple):
    """A product of one device.

    Attributes:
        call: Everything about it but the operands.
        signature: The operands.
        split: Which axes of the mesh split what.
        plan: How the kernel computes it, if not as it does without the other devices.
        whole: The product that it is a part of; None if the program says itself what each device
            computes.
    """

    call: Call
    signature: Signature
    split: str
    plan: plans.Plan | None = None
    whole: Shared | None = None


class Parts:
    """Products of one device, with which axes of the mesh split what."""

    def __init__(self) -> None:
        self.found: list[Part] = []
        self.whole: Shared | None = None


@contextlib.contextmanager
def noted() -> Iterator[Parts]:
    """Collects what one device computes in the programs that are compiled within."""
    parts = Parts()
    with _NOTED(parts):
        yield parts


@contextlib.contextmanager
def _parts_of(whole: Shared | None) -> Iterator[None]:
    """Lets what is noted within be a part of this product."""
    if (noted := _NOTED.value) is None:
        yield
        return
    noted.whole = whole
    try:
        yield
    finally:
        noted.whole = None


def note(call: Call, signature: Signature, split: str, plan: plans.Plan | None = None) -> None:
    """Lets `explain_on_mesh` know what one device computes, if it asks: see `Part`."""
    if (noted := _NOTED.value) is not None:
        noted.found.append(Part(call, signature, split, plan, noted.whole))


def handed_out(
    run: Callable[..., Any], partition: Callable[..., Any], rule: str, **more: Any
) -> Callable[..., Any]:
    """Returns a function of which XLA hands out parts to the devices of a mesh.

    Args:
        run: The function.
        partition: Says what one device computes: the answer to XLA's question. It is given the
            devices, with axes of prime sizes, and the GPU that they are if it is not here. Shapes,
            types and shardings of operands and results follow, as XLA would have them. It returns
            the function of one device, how its results are split, and how its operands have to be.
        rule: Says which dimensions of operands and results are split alike.
        **more: More that XLA is to know of dimensions.
    """

    def asked(mesh: Mesh, args: Sequence[Any], results: Any) -> tuple[Any, ...]:
        # Where only `jit` was told about a mesh, its devices are seen here for the first time.
        fine = mesh_axes.refined(mesh, args[0].sharding, len(args[0].shape))
        return fine, *partition(fine, targeting.absent_gpu(mesh), args, results)

    shared = custom_partitioning(run)
    # Dimensions may be split along a part of an axis, which no `NamedSharding` can say.
    shared.def_partition(asked, sharding_rule=rule, decode_shardings=False, **more)
    return shared


def named(text: str) -> contextlib.AbstractContextManager[Any]:
    """Lets a cache of compiled programs tell what is handed out apart, by a text.

    All that the compiler sees of it is its name.
    """
    return set_xla_metadata(pallas_gemm=_digest(text))


def _digest(text: str) -> str:
    return hashlib.sha256(f"{text} {__version__}".encode()).hexdigest()


def told_apart(
    by_xla: Callable[..., Any], call: Call, signature: Signature
) -> contextlib.AbstractContextManager[Any]:
    """Lets such a cache tell products apart whose results differ.

    Args:
        by_xla: Computes a call by XLA.
        call: The product.
        signature: Its operands.
    """
    return named(_formula(by_xla, call, signature))


@functools.lru_cache(maxsize=1024)
def _formula(by_xla: Callable[..., Any], call: Call, signature: Signature) -> str:
    """Returns all that the result depends on."""
    with jax.sharding.use_abstract_mesh(mesh_context.no_mesh()):
        shapes = [jax.ShapeDtypeStruct(*operand) for operand in signature]
        formula = jax.make_jaxpr(functools.partial(by_xla, call))(*shapes)
    epilogue = dataclasses.replace(call.epilogue, activation=None)
    return f"{formula} {(call.precision, call.options, epilogue)}"


def share(
    run: Callable[..., Any], types: Signature, whole: Shared | None = None
) -> Callable[..., list[jax.Array]]:
    """Returns what one device computes; its arrays are on no mesh, whatever types around it say.

    Args:
        run: Computes it from the device's parts of the operands.
        types: Shapes and types of its parts of the results.
        whole: The product that it is a part of, if what that receives was weighed.
    """
    return functools.partial(_share_p.bind, run=run, types=types, whole=whole)


_share_p = core.Primitive("pallas_gemm_share")
_share_p.multiple_results = True


@_share_p.def_abstract_eval
def _abstract_share(*_: Any, types: Signature, **__: Any) -> Any:
    return mesh_context.types_off_mesh(*types)


def _lowered_share(
    ctx: mlir.LoweringRuleContext, *operands: Any, run: Any, whole: Shared | None, **_: Any
) -> Any:
    with _parts_of(whole):
        return mesh_context.lower_share(ctx, run, operands)


mlir.register_lowering(_share_p, _lowered_share)
