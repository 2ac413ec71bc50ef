"""Which GPU a product is planned for, found without asking for devices while tracing.

In this order: what `target(...)` says, the mesh that an operand's type names (under ahead-of-time
compilation that is the GPU that is not there), the current mesh, and where a concrete operand is.
If none of these knows, the product stays open until it is lowered for a platform; only when that
platform is CUDA is JAX asked for its first GPU, once.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax

from pallas_gemm.computer import occupancy
from pallas_gemm.device import DEVICES, Device, device_named

# A context of JAX's own, so that a function that was traced outside a block is traced anew in it.
_CHOSEN = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def target(device: str | Device) -> Iterator[Device]:
    """Plans every product that is traced within for a GPU that need not be there.

    >>> with target("h200"):
    ...     exported = jax.export.export(jax.jit(f), platforms=["cuda"])(*shapes)  # doctest: +SKIP

    Args:
        device: A `Device`, the name of a preset such as "h200", or JAX's `device_kind`.

    Raises:
        ValueError: No preset has that name.
    """
    chosen = device if isinstance(device, Device) else device_named(device)
    with _CHOSEN(chosen):
        yield chosen


def known_target(*operands: Any) -> Device | None:
    """Returns the GPU that the product of these operands is for, None if nothing tells yet."""
    if (chosen := _CHOSEN.value) is not None:
        return chosen
    meshes = [jax.typeof(x).sharding.mesh for x in operands if hasattr(x, "aval")]
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        if mesh.abstract_device is not None:
            return _described(mesh.abstract_device.device_kind, None, None)
    return next((found for x in operands if (found := _of_concrete(x)) is not None), None)


@functools.cache
def first_gpu() -> Device | None:
    """Returns the first GPU of this process, None if it has none."""
    try:
        return device_of(jax.local_devices(backend="cuda")[0])
    except RuntimeError:
        return None


def absent_gpu(mesh: jax.sharding.Mesh) -> Device | None:
    """Returns what the GPUs of a mesh are, None if they are none or this process has GPUs."""
    if mesh.empty or mesh.devices.flat[0].platform not in ("gpu", "cuda") or first_gpu():
        return None
    return _described(mesh.devices.flat[0].device_kind, None, None)


def device_of(device: jax.Device) -> Device | None:
    """Returns what is known about one of JAX's devices; None if it is not an NVIDIA GPU."""
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability is None:
        return None
    major, _, minor = str(capability).partition(".")
    numbers = (int(major), int(minor or 0))
    return _present(device.device_kind, numbers, device.core_count, device.local_hardware_id)


def _of_concrete(operand: Any) -> Device | None:
    if isinstance(operand, jax.core.Tracer):
        return None
    if isinstance(operand, jax.ShapeDtypeStruct | jax.Array):
        sharding = operand.sharding
        if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
            return None
        devices = getattr(sharding, "device_set", None) or ()
        return next((device_of(device) for device in devices), None)
    return None


@functools.cache
def _present(kind: str, capability: tuple[int, int], sms: int, ordinal: int) -> Device | None:
    """Returns what is known about a GPU of this computer, with what its driver says."""
    device = _described(kind, capability, sms)
    if device is not None:
        with contextlib.suppress(occupancy.DriverError, ValueError):
            return occupancy.measured(device, (ordinal,))
    return device


@functools.lru_cache(maxsize=64)
def _described(kind: str, capability: tuple[int, int] | None, sms: int | None) -> Device | None:
    """Returns the preset of a kind of GPU, or one like it for a kind that has none.

    The number of SMs is the driver's where it is known: a part of a GPU has fewer than its kind.
    """
    try:
        model = device_named(kind)
        if sms is None or sms == model.sms:
            return model
        capability = model.compute_capability
    except ValueError:
        if capability is None or sms is None:
            return None
        own = capability
        # Of the same capability, or else at least of the same family.
        model = max(
            DEVICES.values(),
            key=lambda known: (
                known.compute_capability == own,
                known.compute_capability[0] == own[0],
            ),
        )
    machine = dataclasses.replace(
        model.machine, name=kind, sms=sms, resident_clusters={}, is_measured=False
    )
    return dataclasses.replace(model, kind=kind, compute_capability=capability, machine=machine)
