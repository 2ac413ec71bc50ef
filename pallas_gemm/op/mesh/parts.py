"""The part of a product that one device of a mesh computes, and the callers that ask for it."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from pallas_gemm._version import __version__
from pallas_gemm.call import Call, Signature
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.planning import plans

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


def told_apart(
    by_xla: Callable[..., Any], call: Call, signature: Signature
) -> contextlib.AbstractContextManager[Any]:
    """Lets a cache of compiled programs tell products apart whose results differ.

    All that the compiler sees of a product is its name.

    Args:
        by_xla: Computes a call by XLA.
        call: The product.
        signature: Its operands.
    """
    return set_xla_metadata(pallas_gemm=_fingerprint(by_xla, call, signature))


@functools.lru_cache(maxsize=1024)
def _fingerprint(by_xla: Callable[..., Any], call: Call, signature: Signature) -> str:
    with jax.sharding.use_abstract_mesh(mesh_context.no_mesh()):
        shapes = [jax.ShapeDtypeStruct(*operand) for operand in signature]
        formula = jax.make_jaxpr(functools.partial(by_xla, call))(*shapes)
    epilogue = dataclasses.replace(call.epilogue, activation=None)
    how = (call.precision, call.options, epilogue, __version__)
    return hashlib.sha256(f"{formula} {how}".encode()).hexdigest()


class Share(Protocol):
    """The part of a product that one device computes, from its parts of the operands.

    Attributes:
        whole: The product, if what it receives was weighed.
        shape: The shape of the device's part of the result.
        out_dtype: The type of the result.
    """

    whole: Shared | None
    shape: tuple[int, ...]
    out_dtype: Any

    def __call__(self, *operands: jax.Array) -> jax.Array:
        """Computes it."""
        ...


share_p = core.Primitive("pallas_gemm_share")
"""A `Share`; its arrays are on no mesh, whatever the types around it say."""


@share_p.def_abstract_eval
def _abstract_share(*_: Any, share: Share) -> Any:
    return mesh_context.types_off_mesh((share.shape, share.out_dtype))[0]


def _lowered_share(ctx: mlir.LoweringRuleContext, *operands: Any, share: Share) -> Any:
    with _parts_of(share.whole):
        return mesh_context.lower_share(ctx, share, operands)


mlir.register_lowering(share_p, _lowered_share)
