"""Notes that calls leave for `explain` while a program is traced."""

from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_gemm.api.request import Request
from pallas_gemm.call import Signature, signature_of
from pallas_gemm.kernels import element_types
from pallas_gemm.planning import ignored, targeting
from pallas_gemm.rewriting.walk import Found


class Outside(NamedTuple):
    """A call that XLA computes without a look at the kernels.

    Attributes:
        factors: Shape and type of both.
        out_dtype: Type of the result.
        why: Why no kernel is considered.
    """

    factors: Signature
    out_dtype: Any
    why: str

    @property
    def text(self) -> str:
        """The operands and the result."""
        shapes = " x ".join(f"{dtype}{list(shape)}" for shape, dtype in self.factors)
        return f"{shapes} -> {self.out_dtype}"


class Notes:
    """The calls that were made while a function was traced, and that no kernel is considered for.

    Attributes:
        outside: In the order of the program.
        found: The products of functions that `accelerate` rewrote; None if there is no function.
    """

    def __init__(self) -> None:
        self.outside: list[Outside] = []
        self.found: tuple[Found, ...] | None = None


NOTES = jax.make_user_context(default_value=None)
"""The notes of the explanation that is being made; None if nobody asked for one.

It is a context of JAX's own, so that a function that was traced before is traced anew.
"""


def note(asked: Request) -> None:
    """Notes a request if somebody asked for an explanation."""
    if asked.outside is not None:
        note_outside(asked.operands.present()[:2], asked.call.out_dtype, asked.outside)


def note_outside(factors: tuple[Any, ...], out_dtype: Any, why: str) -> None:
    """Notes a call that no kernel is considered for, if somebody asked for an explanation.

    If nobody did, it warns where the types of the operands are the reason, on a GPU.

    Args:
        factors: The operands of the product.
        out_dtype: Type of the result.
        why: Why.
    """
    notes = NOTES.value
    if notes is not None:
        notes.outside.append(Outside(signature_of(factors), out_dtype, why))
        return
    on_gpu = targeting.known_target(*factors) is not None or jax.default_backend() == "gpu"
    if on_gpu and why == element_types.why_promoted({np.dtype(x.dtype) for x in factors}):
        ignored.warn_of_promotion(why)


def note_found(found: tuple[Found, ...]) -> None:
    """Notes what became of the products of a program that was rewritten."""
    notes = NOTES.value
    if notes is not None:
        notes.found = (*(notes.found or ()), *found)


def is_noting() -> bool:
    """Whether somebody asked for an explanation: of which line asks for what, too."""
    return NOTES.value is not None
