"""What the CUDA driver is asked about clusters: by a stand-in for it, and on a real GPU."""

import ctypes
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from pallas_gemm.computer import occupancy
from pallas_gemm.config import CLUSTERS
from pallas_gemm.device import H100, H200

SHARED_BYTES = 232_448


class StandIn:
    """A driver library that writes down what it is asked; one function may fail, or be missing."""

    def __init__(
        self,
        failing: str = "",
        code: int = 0,
        missing: str = "",
        clusters: int = 1,
        apart: tuple[tuple[int, int], ...] = (),
    ):
        self.failing, self.code, self.missing, self.clusters = failing, code, missing, clusters
        self.apart = apart
        self.calls: list[str] = []
        self.questions: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name == self.missing:
            raise AttributeError(name)
        return functools.partial(self.call, name)

    def call(self, name: str, *arguments: Any) -> int:
        self.calls.append(name)
        if name == self.failing:
            return self.code
        match name, arguments:
            case "cuGetErrorName", (_, text):
                text._obj.value = b"CUDA_ERROR_OF_THE_DAY"
            case "cuDeviceGet", (device, ordinal):
                device._obj.value = ordinal.value
            case "cuDeviceCanAccessPeer", (answer, one, other):
                answer._obj.value = (one.value, other.value) not in self.apart
            case "cuDeviceGetName", (buffer, *_):
                buffer.value = b"NVIDIA H200"
            case "cuDeviceGetAttribute", (value, attribute, _):
                value._obj.value = {97: SHARED_BYTES, 120: self.clusters}[attribute.value]
            case "cuOccupancyMaxActiveClusters", (count, _, config):
                self.questions.append(read(config._obj))
                count._obj.value = 132 // self.questions[-1]["cluster"][0]
        return 0


def read(config: occupancy.LaunchConfig) -> dict[str, Any]:
    """What a launch configuration says."""
    attribute = config.attributes[0]
    return {
        "grid": tuple(config.grid),
        "block": tuple(config.block),
        "shared_bytes": config.shared_bytes,
        "attributes": config.attribute_count,
        "id": attribute.id,
        "cluster": tuple(attribute.value.cluster),
    }


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    """An answer of the stand-in must not outlive its test."""
    remembering = (occupancy.resident_clusters, occupancy.reach_each_other)
    for answers in remembering:
        answers.cache_clear()
    yield
    for answers in remembering:
        answers.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, library: StandIn) -> StandIn:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    return library


def test_without_a_driver_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(occupancy, "LIBRARY", "libcuda_of_nobody.so.1")
    with pytest.raises(occupancy.DriverError, match=r"no CUDA driver: libcuda_of_nobody\.so\.1"):
        occupancy.measured(H200)


@pytest.mark.parametrize(
    ("apart", "answer"), [((), True), (((2, 0),), False), (((3, 0), (0, 3)), True)]
)
def test_gpus_reach_each_other_if_each_pair_does(monkeypatch, apart, answer):
    library = install(monkeypatch, StandIn(apart=apart))
    assert occupancy.reach_each_other((0, 1, 2)) is answer
    asked = library.calls.count("cuDeviceCanAccessPeer")
    assert asked == 6 if answer else asked == 5


def test_the_structures_lie_in_memory_as_the_driver_reads_them():
    # sizeof and offsetof, as a C compiler gives them for the 64-bit cuda.h of CUDA 13.0.
    config, attribute = occupancy.LaunchConfig, occupancy.LaunchAttribute
    assert (ctypes.sizeof(config), ctypes.sizeof(attribute)) == (56, 72)
    offsets = [getattr(config, field[0]).offset for field in config._fields_]
    assert offsets == [0, 12, 24, 32, 40, 48]
    assert (attribute.id.offset, attribute.value.offset, attribute.value.size) == (0, 8, 64)


def test_the_question_is_about_blocks_that_fill_an_sm(monkeypatch):
    library = install(monkeypatch, StandIn())
    device = occupancy.measured(H200)
    assert device == dataclasses.replace(
        H200, measured_clusters=tuple((size, 132 // size) for size in occupancy.SIZES)
    )
    assert library.questions == [
        {
            "grid": (size, 1, 1),
            "block": (384, 1, 1),
            "shared_bytes": SHARED_BYTES,
            "attributes": 1,
            "id": 4,  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            "cluster": (size, 1, 1),
        }
        for size in occupancy.SIZES
    ]
    assert {rows * cols for rows, cols in CLUSTERS} <= set(occupancy.SIZES)


def test_each_gpu_is_asked_once(monkeypatch):
    library = install(monkeypatch, StandIn())
    for ordinals in ((0,), (0, 1), (1,)):
        occupancy.measured(H200, ordinals)
    assert library.calls.count("cuModuleLoadData") == 2


def test_of_several_gpus_the_smallest_answer_counts(monkeypatch):
    answers = [
        tuple((size, 30 - gpu if size == 4 else 60 + gpu) for size in occupancy.SIZES)
        for gpu in (0, 1)
    ]
    remembered = [(H200.kind, clusters) for clusters in answers]
    monkeypatch.setattr(occupancy, "resident_clusters", remembered.__getitem__)
    both = occupancy.measured(H200, (0, 1))
    assert [both.coresident_clusters(size) for size in (2, 4)] == [60, 29]


@pytest.mark.parametrize(
    "function",
    [
        "cuInit",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuFuncSetAttribute",
        "cuOccupancyMaxActiveClusters",
        "cuModuleUnload",
        "cuCtxPopCurrent_v2",
        "cuDevicePrimaryCtxRelease_v2",
    ],
)
def test_every_failure_is_reported_and_nothing_is_left_behind(function, monkeypatch):
    library = install(monkeypatch, StandIn(failing=function, code=999))
    with pytest.raises(occupancy.DriverError) as caught:
        occupancy.measured(H200)
    assert f"{function} failed with CUDA error 999 (CUDA_ERROR_OF_THE_DAY)" in str(caught.value)
    assert caught.value.code == 999
    for made, undone in (
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"),
        ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"),
        ("cuModuleLoadData", "cuModuleUnload"),
    ):
        assert library.calls.count(undone) == (library.calls.count(made) and function != made)


def test_of_a_size_that_the_gpu_refuses_none_run(monkeypatch):
    install(monkeypatch, StandIn(failing="cuOccupancyMaxActiveClusters", code=912))
    assert set(dict(occupancy.measured(H200).measured_clusters).values()) == {0}


def test_a_driver_that_is_too_old_is_named(monkeypatch):
    install(monkeypatch, StandIn(missing="cuOccupancyMaxActiveClusters"))
    with pytest.raises(occupancy.DriverError, match="too old: it has no cuOccupancyMaxActive"):
        occupancy.measured(H200)


def test_a_gpu_without_clusters_is_named(monkeypatch):
    install(monkeypatch, StandIn(clusters=0))
    with pytest.raises(occupancy.DriverError, match="GPU 0, NVIDIA H200, has no clusters"):
        occupancy.measured(H200)


def test_another_gpu_than_this_computers_is_refused(monkeypatch):
    install(monkeypatch, StandIn())
    with pytest.raises(ValueError, match=r"device must be 'NVIDIA H200', as GPU 0 is, got .*H100"):
        occupancy.measured(H100)
    with pytest.raises(ValueError, match="at least one GPU, got none"):
        occupancy.measured(H200, ())


@pytest.mark.gpu("hopper")
def test_a_real_driver_answers_between_the_estimate_and_what_its_sms_allow():
    gpu = jax.devices()[0]
    machine = dataclasses.replace(
        H200.machine, name=gpu.device_kind, sms=gpu.core_count, resident_clusters={}
    )
    unknown = dataclasses.replace(H200, kind=gpu.device_kind, machine=machine)
    device = occupancy.measured(unknown, (gpu.local_hardware_id,))
    assert [size for size, _ in device.measured_clusters] == list(occupancy.SIZES)
    for size, count in device.measured_clusters:
        assert 0 <= count <= device.sms // size
    assert device.coresident_clusters(1) == device.sms
    for rows, cols in CLUSTERS:
        assert device.coresident_clusters(rows * cols) >= unknown.coresident_clusters(rows * cols)
