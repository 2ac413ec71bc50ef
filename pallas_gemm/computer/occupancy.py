"""How many clusters run at once on this computer's own GPU, as its CUDA driver answers.

A cluster lives within one GPC, and two GPUs of one kind differ in which SMs of a GPC are enabled,
so that no table can know the answer. It is asked for CTAs that fill an SM, as those of the
kernels here do. The driver is called through ctypes: neither a CUDA toolkit nor a compiler is
needed, and nothing runs on the GPU. It also knows whether one GPU can store in the memory of
another.

Ask where a GPU is detected, never while tracing: a trace may be for a GPU that is not there.
"""

import contextlib
import ctypes
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

from pallas_gemm.device import Device

LIBRARY = "libcuda.so.1"
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16)
"""The sizes that are asked about: all that every GPU with clusters takes, and the largest there is.

Each answer takes the driver microseconds.
"""
THREADS = 384
"""Threads of a block. Its shared memory fills the SM; the threads only have to fit beside it."""

# Which of the driver's enumerators is meant where, as cuda.h numbers them.
_CLUSTER_DIMENSION = 4
_FUNCTION_DYNAMIC_SHARED_BYTES = 8
_FUNCTION_NON_PORTABLE_CLUSTERS = 14
_DEVICE_SHARED_BYTES_PER_BLOCK = 97
_DEVICE_HAS_CLUSTERS = 120
_INVALID_CLUSTER_SIZE = 912

_PTX = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry fill() { ret; }\n"


class DriverError(RuntimeError):
    """The driver cannot answer.

    Attributes:
        code: The driver's error code; None where there is no driver, or no such function in it.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class LaunchAttributeValue(ctypes.Union):
    """`CUlaunchAttributeValue` of cuda.h, a union of 64 bytes."""

    _fields_ = (("cluster", ctypes.c_uint * 3), ("bytes", ctypes.c_uint64 * 8))


class LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute` of cuda.h."""

    _fields_ = (("id", ctypes.c_int), ("value", LaunchAttributeValue))


class LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig` of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


def measured(device: Device, ordinals: Sequence[int] = (0,)) -> Device:
    """Returns a device with `measured_clusters` as the driver answers for GPUs of this computer.

    Args:
        device: The facts of these GPUs.
        ordinals: Their numbers as CUDA counts them, `local_hardware_id` of JAX's devices. One
            program runs on all of them, so that of their answers the smallest counts.

    Raises:
        DriverError: There is no driver, or it cannot answer.
        ValueError: `ordinals` is empty, or one of them is not a GPU of the kind of `device`.
    """
    if not ordinals:
        raise ValueError("ordinals must name at least one GPU, got none")
    answers = []
    for ordinal in ordinals:
        kind, clusters = resident_clusters(ordinal)
        if kind.lower() != device.kind.lower():
            raise ValueError(f"device must be {kind!r}, as GPU {ordinal} is, got {device.kind!r}")
        answers.append(dict(clusters))
    fewest = tuple((size, min(answer[size] for answer in answers)) for size in SIZES)
    return dataclasses.replace(device, measured_clusters=fewest)


@functools.cache
def resident_clusters(ordinal: int) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Returns the kind of a GPU, and for each of `SIZES` how many clusters run on it at once.

    The driver is asked once in each process.

    Args:
        ordinal: Which GPU of this computer, as CUDA counts them.

    Raises:
        DriverError: There is no driver, or it cannot answer.
    """
    driver = Driver()
    device = driver.device(ordinal)
    name = ctypes.create_string_buffer(256)
    driver("cuDeviceGetName", name, ctypes.c_int(len(name)), device)
    kind = name.value.decode()
    if not _device_attribute(driver, device, _DEVICE_HAS_CLUSTERS):
        raise DriverError(
            f"GPU {ordinal}, {kind}, has no clusters: only Hopper and newer GPUs have them"
        )
    shared_bytes = shared_bytes_per_block(driver, device)
    with current(driver, device), filling_kernel(driver, shared_bytes) as kernel:
        return kind, tuple((size, _ask(driver, kernel, shared_bytes, size)) for size in SIZES)


@functools.cache
def reach_each_other(ordinals: tuple[int, ...]) -> bool:
    """Returns whether each of some GPUs can store in the memory of all others.

    Args:
        ordinals: Which GPUs of this computer, as CUDA counts them.

    Raises:
        DriverError: There is no driver, or it cannot answer.
    """
    driver = Driver()
    devices = [driver.device(ordinal) for ordinal in ordinals]
    for one, other in itertools.permutations(devices, 2):
        answer = ctypes.c_int()
        driver("cuDeviceCanAccessPeer", ctypes.byref(answer), one, other)
        if not answer.value:
            return False
    return True


class Driver:
    """The functions of the CUDA driver, by name. One that fails raises."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise DriverError(f"this computer has no CUDA driver: {error}") from error

    def device(self, ordinal: int) -> ctypes.c_int:
        """Returns the GPU that CUDA counts so."""
        self("cuInit", ctypes.c_uint(0))
        device = ctypes.c_int()
        self("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        return device

    def __call__(self, name: str, *arguments: object) -> None:
        """Calls a function; raises `DriverError` if it fails."""
        function = getattr(self._library, name, None)
        if function is None:
            raise DriverError(f"the CUDA driver of this computer is too old: it has no {name}")
        code = function(*arguments)
        if code:
            raise DriverError(f"{name} failed with {self._explain(code)}", code)

    def _explain(self, code: int) -> str:
        """Returns an error code in the driver's words; it has none for codes newer than itself."""
        words = []
        for function in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            text = ctypes.c_char_p()
            if function(ctypes.c_int(code), ctypes.byref(text)) == 0 and text.value is not None:
                words.append(text.value.decode())
        return f"CUDA error {code}" + (f" ({': '.join(words)})" if words else "")


def shared_bytes_per_block(driver: Driver, device: ctypes.c_int) -> int:
    """Returns the shared memory of a block that leaves none of its SM to another one."""
    return _device_attribute(driver, device, _DEVICE_SHARED_BYTES_PER_BLOCK)


def _device_attribute(driver: Driver, device: ctypes.c_int, attribute: int) -> int:
    value = ctypes.c_int()
    driver("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device)
    return value.value


@contextlib.contextmanager
def current(driver: Driver, device: ctypes.c_int) -> Iterator[None]:
    """Makes the device's primary context current: the one that JAX uses, so that none is added."""
    with contextlib.ExitStack() as undo:
        context = ctypes.c_void_p()
        driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        undo.callback(driver, "cuDevicePrimaryCtxRelease_v2", device)
        driver("cuCtxPushCurrent_v2", context)
        undo.callback(driver, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        yield


@contextlib.contextmanager
def filling_kernel(driver: Driver, shared_bytes: int) -> Iterator[ctypes.c_void_p]:
    """Loads a kernel that does nothing and may be launched like those that are asked about."""
    with contextlib.ExitStack() as undo:
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        driver("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(_PTX))
        undo.callback(driver, "cuModuleUnload", module)
        driver("cuModuleGetFunction", ctypes.byref(kernel), module, ctypes.c_char_p(b"fill"))
        for attribute, value in (
            (_FUNCTION_DYNAMIC_SHARED_BYTES, shared_bytes),
            (_FUNCTION_NON_PORTABLE_CLUSTERS, 1),
        ):
            driver("cuFuncSetAttribute", kernel, ctypes.c_int(attribute), ctypes.c_int(value))
        yield kernel


def _ask(driver: Driver, kernel: ctypes.c_void_p, shared_bytes: int, size: int) -> int:
    """Returns how many clusters of `size` blocks run at once; none if the GPU refuses the size."""
    value = LaunchAttributeValue(cluster=(size, 1, 1))
    config = LaunchConfig(
        grid=(size, 1, 1),
        block=(THREADS, 1, 1),
        shared_bytes=shared_bytes,
        attributes=ctypes.pointer(LaunchAttribute(_CLUSTER_DIMENSION, value)),
        attribute_count=1,
    )
    count = ctypes.c_int()
    try:
        driver("cuOccupancyMaxActiveClusters", ctypes.byref(count), kernel, ctypes.byref(config))
    except DriverError as error:
        if error.code != _INVALID_CLUSTER_SIZE:
            raise
        return 0
    return count.value
