"""What quantizes blocks of a matrix: the kernel, or XLA and why."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from pallas_gemm.call import Signature
from pallas_gemm.device import H200, Device
from pallas_gemm.kernels import quantize
from pallas_gemm.kernels.hopper.quantize.plan import QuantizePlan, is_square, refusals, slots
from pallas_gemm.kernels.quantize import ACROSS, ALONG, Quantization
from pallas_gemm.planning import architectures
from pallas_gemm.planning.implementation import simulator

HOPPER = "hopper"
"""The implementation that the kernel is."""


class Quantizer(NamedTuple):
    """The choice of a kernel, or XLA, for a matrix or several.

    Attributes:
        how: How it is quantized.
        shape: The matrix's, with all leading dimensions.
        plan: The kernel's plan; None if XLA does it.
        reason: Why.
    """

    how: Quantization
    shape: tuple[int, ...]
    plan: QuantizePlan | None
    reason: str

    def __str__(self) -> str:
        by = "XLA" if self.plan is None else f"a kernel for {self.plan.device.kind}"
        return f"{list(self.shape)} {self.how}, by {by}: {self.reason}"

    def run(self) -> Callable[..., list[Any]]:
        """Returns the function that quantizes a matrix."""
        if self.plan is None:
            return functools.partial(quantize.by_xla, how=self.how)
        from pallas_gemm.kernels.hopper.quantize import kernel

        return functools.partial(by_kernel, self, kernel.build(self.plan))

    def made_of(self) -> tuple[Any, ...]:
        """Returns all that a kernel depends on but the shape and type of the matrix."""
        return ("quantize", self.plan)


def decide(
    how: Quantization, signature: Signature, device: Device | None, implementation: str | None
) -> Quantizer:
    """Decides what quantizes a matrix.

    Args:
        how: How it is quantized.
        signature: Its shape and type.
        device: The GPU; None for another platform.
        implementation: The caller's; None for the best.

    Raises:
        ValueError: The kernel is named, and cannot do it.
    """
    (shape, dtype), *tiles = signature
    simulated = implementation == "interpret"
    if simulated:
        device = H200
    why = _why_xla(how, signature, device, implementation)
    if why is not None:
        if implementation not in (None, "xla"):
            raise ValueError(f"implementation={implementation!r} cannot quantize this: {why}")
        return Quantizer(how, shape, None, why)
    assert device is not None
    groups = tiles[0][0][0] if tiles else None
    interpret = simulated and simulator()
    matrices = _matrices(how, shape)
    own = {"stages": slots(how), "groups": groups}
    plan = QuantizePlan(how, matrices, dtype, device, interpret, **own)
    return Quantizer(how, shape, plan, "it reads the array once")


def _why_xla(
    how: Quantization, signature: Signature, device: Device | None, implementation: str | None
) -> str | None:
    """Returns why XLA does it; None if the kernel does."""
    (shape, dtype), *tiles = signature
    if implementation == "xla":
        return "implementation='xla' asks for it"
    if device is None:
        return "the program is for no GPU that is known"
    kind = architectures.architecture_of(device)
    if kind is None or kind.name != HOPPER:
        return f"the kernel is for Hopper: it {device.lacks('9.0')}"
    if any(map(is_symbolic_dim, shape)):
        return "a symbolic size is no kernel's"
    return next(refusals(how, _matrices(how, shape), dtype, groups=bool(tiles)), None)


def _matrices(how: Quantization, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns batch, rows and columns; rows of several matrices are rows of one, if they may be."""
    *lead, rows, cols = shape
    batch = math.prod(lead)
    if all(way.axis == ALONG and way.block.across == 1 for way in how.ways):
        return 1, batch * rows, cols
    return batch, rows, cols


def by_kernel(
    own: Quantizer, kernel: Callable[..., Any], x: jax.Array, *tiles: jax.Array
) -> list[Any]:
    """Returns what a kernel makes of an array, in the shapes that were asked for."""
    assert own.plan is not None
    values, scales = kernel(x.reshape(own.plan.shape), *tiles)
    found: list[Any] = []
    for number, way in enumerate(own.how.ways):
        matrices = own.plan.whole(way)
        *lead, rows, cols = matrices[1:] if tiles else own.shape
        shape = (cols, rows) if way.axis == ACROSS else (rows, cols)
        scale = scales[own.plan.scales_of(number)]
        if way.axis == ALONG and not is_square(way):
            scale = jnp.swapaxes(scale, -1, -2)
        down, along = way.blocks(matrices)
        scale = scale[:, :down, :along]
        found += [values[number].reshape(*lead, *shape)]
        found += [scale.reshape(*lead, *way.blocks((rows, cols)))]
    return found
