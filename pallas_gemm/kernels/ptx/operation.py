"""An operation that Pallas has no word for, and what it means."""

from collections.abc import Callable
from typing import Any, Self

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.plan import KernelPlan

INT32 = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT)
"""A number that all threads have."""
NUMBER = plgpu.Layout.WG_SPLAT
REF = plgpu.RefType()


class Operation:
    """A function that is called with a plan first, and is another one where that is simulated."""

    def __init__(self, on_gpu: Callable[..., Any]) -> None:
        self._on_gpu = on_gpu
        self._meaning: Callable[..., Any] | None = None
        self.__doc__ = on_gpu.__doc__

    def meaning(self, function: Callable[..., Any]) -> Self:
        """Adds what the operation means, in words that the simulator knows."""
        self._meaning = function
        return self

    def __call__(self, plan: KernelPlan, *args: Any, **options: Any) -> Any:
        """Does it."""
        if not plan.simulated:
            return self._on_gpu(*args, **options)
        assert self._meaning is not None, "nothing simulated comes here"
        return self._meaning(*args, **options)


def word_of(value: Any) -> Any:
    """The register of a number that all threads have."""
    return value.registers.item()


def number_by(ptx: str, *registers: Any) -> Any:
    """Returns the int32 that a program of PTX leaves in `$0`, the same in all threads."""
    int32 = utils.ir.IntegerType.get_signless(32)
    word = utils.inline_ptx(ptx, *registers, result_types=int32, has_side_effects=True)
    return mgpu.FragmentedArray.splat(word, (), is_signed=True)
