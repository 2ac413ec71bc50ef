"""The presets agree with what the offline compiler is told, and guesses about clusters are low."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_gemm import explain, matmul, offline, target
from pallas_gemm.config import CLUSTERS
from pallas_gemm.device import DEVICES, H200, Device, device_named

SIZES = sorted({rows * cols for rows, cols in CLUSTERS})


def described(target: str) -> tuple[str, int, int, int, tuple[int, int]]:
    """Name, SMs, shared memory of a block, L2 and compute capability as the compiler is told."""
    text = offline.described(target)

    def only(pattern: str) -> str:
        (found,) = re.findall(pattern, text)
        return found

    # A number that is 0 is not written down.
    major, minor = re.findall(r"cuda_compute_capability \{ major: (\d+)(?: minor: (\d+))?", text)[0]
    return (
        only(r'\bname: "(.*)"'),
        int(only(r"\bcore_count: (\d+)")),
        int(only(r"\bshared_memory_per_block_optin: (\d+)")),
        int(only(r"\bl2_cache_size: (\d+)")),
        (int(major), int(minor or 0)),
    )


def test_devices_can_be_keys():
    known = {device: name for name, device in DEVICES.items()}
    assert known[H200] == "h200"
    same = dataclasses.replace(
        H200, machine=dataclasses.replace(H200.machine, resident_clusters={1: 132})
    )
    assert hash(same) == hash(H200)
    assert same != H200


def unmeasured(device: Device) -> Device:
    machine = dataclasses.replace(device.machine, resident_clusters={})
    return dataclasses.replace(device, machine=machine, measured_clusters=())


def test_every_target_has_a_preset_and_the_other_way_round():
    assert set(DEVICES) == set(offline.targets())


@pytest.mark.parametrize("target", DEVICES)
def test_presets_are_what_the_compiler_is_told(target):
    device = DEVICES[target]
    assert described(target) == (
        device.kind,
        device.sms,
        device.shared_memory,
        device.machine.l2_bytes,
        device.compute_capability,
    )


@pytest.mark.usefixtures("proven")
@pytest.mark.parametrize(
    ("kind", "sms", "capability"),
    [
        ("NVIDIA H100 80GB HBM3", 132, (9, 0)),
        ("NVIDIA H100 PCIe", 114, (9, 0)),
        ("NVIDIA H100 NVL", 132, (9, 0)),
        ("NVIDIA H200", 132, (9, 0)),
        ("NVIDIA H200 NVL", 132, (9, 0)),
        ("NVIDIA H800", 132, (9, 0)),
        ("NVIDIA H20", 78, (9, 0)),
        ("NVIDIA GH200 480GB", 132, (9, 0)),
        ("NVIDIA GH200 144G HBM3e", 132, (9, 0)),
        ("NVIDIA B200", 148, (10, 0)),
        ("NVIDIA GB200", 152, (10, 0)),
        ("NVIDIA B300 SXM6 AC", 148, (10, 3)),
        ("NVIDIA GB300", 152, (10, 3)),
    ],
)
def test_the_chips_of_both_families_are_known_by_what_the_driver_calls_them(kind, sms, capability):
    device = device_named(kind)
    assert (device.sms, device.compute_capability) == (sms, capability)
    with target(kind):
        decided = explain(
            matmul, *(jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),) * 2
        ).implementation
    assert decided == ("hopper" if capability == (9, 0) else "blackwell")


def test_two_chips_were_measured_and_explain_says_so_of_others():
    assert {x for x, own in DEVICES.items() if own.machine.is_measured} == {"h100", "h200"}
    operands = (jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),) * 2
    for name in ("h100", "h200", "h20"):
        with target(name):
            said = str(explain(matmul, *operands))
        assert ("on which nobody has measured yet" in said) == (name == "h20")


def test_tensor_cores_that_do_less_in_a_cycle_are_predicted_to_take_longer():
    operands = (jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16),) * 2
    seconds = {}
    for name in ("h200_nvl", "h20"):
        with target(name):
            plan = explain(matmul, *operands).plan
        assert plan is not None
        seconds[name] = plan.seconds
    # 148 TFLOP/s at most, beside some 750.
    assert seconds["h20"] > 2 * 8192**3 / 148e12 > 3 * seconds["h200_nvl"]


@pytest.mark.parametrize("target", DEVICES)
def test_a_preset_is_found_by_its_name_and_by_what_jax_calls_it(target):
    device = DEVICES[target]
    for name in (target, target.upper(), device.kind, device.kind.lower()):
        assert device_named(name) is device


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h2000", "did you mean 'h200'? "),
        ("a100", "XLA computes every product on other GPUs; "),
    ],
)
def test_an_unknown_name_is_refused_with_the_legal_ones(name, hint):
    names = ", ".join(sorted(DEVICES))
    with pytest.raises(ValueError, match=r"^device=") as refused:
        device_named(name)
    with pytest.raises(ValueError, match=r"^target=") as not_compiled:
        offline.check_target(name)
    said = f"={name!r} is unknown; {hint}legal: {names}"
    assert str(refused.value) == f"device{said}; a `device_kind` of JAX is legal too"
    assert str(not_compiled.value) == f"target{said}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("target", DEVICES)
def test_an_unmeasured_gpu_is_not_asked_for_more_than_its_sms_hold(target, size):
    device = unmeasured(DEVICES[target])
    assert 1 <= device.coresident_clusters(size) <= device.sms // size


@pytest.mark.parametrize("size", H200.machine.resident_clusters)
def test_the_estimate_is_not_above_what_was_measured(size):
    assert unmeasured(H200).coresident_clusters(size) <= H200.coresident_clusters(size)


def test_what_the_driver_answered_counts_before_what_is_known_of_the_kind():
    assert H200.coresident_clusters(4) == H200.machine.resident_clusters[4]
    device = dataclasses.replace(H200, measured_clusters=((2, 60), (4, 28)))
    assert [device.coresident_clusters(size) for size in (2, 4)] == [60, 28]
    # A size that the driver was not asked about is estimated for this GPU too.
    assert device.coresident_clusters(8) == unmeasured(H200).coresident_clusters(8)
