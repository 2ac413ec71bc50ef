"""Devices that work on one product, each of which has some rows of it."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_gemm.kernels.traced import Ref, Scalar


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Who exchanges rows, and which: each device has the same number, in the order of the devices.

    Attributes:
        mesh: All axes of the mesh, and their sizes.
        axes: The axes along which the devices lie; neighbours lie along the last one.
        gathers: The rows are those of the left operand, and every device multiplies all of them;
            else they are those of the result, to which every device has computed a summand.
    """

    mesh: tuple[tuple[str, int], ...]
    axes: tuple[str, ...]
    gathers: bool

    @property
    def size(self) -> int:
        """How many devices there are."""
        return math.prod(size for name, size in self.mesh if name in self.axes)

    def rank(self) -> Any:
        """Returns this device's number among them, inside of a kernel."""
        return lax.axis_index(self.axes)

    def device(self, rank: Scalar) -> Any:
        """Returns what JAX takes for the device with a number among them: see `numbered`."""
        sizes, place = dict(self.mesh), {}
        for name in reversed(self.axes):
            place[name] = lax.rem(rank, jnp.int32(sizes[name]))
            rank = lax.div(rank, jnp.int32(sizes[name]))
        if not numbered():
            return place
        number = jnp.int32(0)
        for name, size in self.mesh:
            index = place[name] if name in place else lax.axis_index(name)
            number = number * size + index
        return number

    def owner(self, rank: Scalar, share: Scalar) -> Any:
        """Returns the number of the device whose rows are a share of this one's work.

        Shares are counted in the order in which they are computed. A device begins with its own
        rows where rows are gathered, since the others are on their way. It ends with them where
        they are scattered, since then nothing is left to send.
        """
        first = rank if self.gathers else rank + 1
        return lax.rem(first + share, jnp.int32(self.size))


ALONE = Exchange((), (), gathers=False)


@functools.cache
def numbered() -> Mapping[str, Any]:
    """Returns how JAX is told that a device is its number in the whole mesh.

    Nothing where it takes places in the mesh alone, as 0.12 does without a warning. Each
    copy to a device named by its number makes the same TMA descriptor.
    """
    if inspect.signature(plgpu.remote_ref).parameters["device_id_type"].default is None:
        return {}
    return {"device_id_type": pl.DeviceIdType.LOGICAL}


def on_device(ref: Ref, device: Any) -> Any:
    """Returns what is on another device where `ref` is on this one."""
    return plgpu.remote_ref(ref, device, **numbered())
