"""Which GPU a product is planned for."""

import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import pallas_gemm
from pallas_gemm import offline
from pallas_gemm.device import B200, H100, H200, Device
from pallas_gemm.op.product import product_p
from pallas_gemm.planning import targeting

needs_compiler = pytest.mark.skipif(
    bool(offline.missing_packages()), reason="needs the extra aot, which brings the topology"
)


def test_nothing_is_known_on_a_cpu() -> None:
    ones = jnp.ones((2, 2))
    assert targeting.known_target(ones, ones) is None
    assert targeting.known_target() is None
    assert targeting.first_gpu() is None


@pytest.mark.parametrize(
    ("name", "device"),
    [("h200", H200), ("H100", H100), ("NVIDIA B200", B200), (H200, H200)],
    ids=["lower", "upper", "kind", "device"],
)
def test_a_target_is_a_preset_or_a_device(name: Any, device: Any) -> None:
    with pallas_gemm.target(name) as chosen:
        assert chosen == device
        assert targeting.known_target() == device
        with pallas_gemm.target("b200"):
            assert targeting.known_target() == B200
        assert targeting.known_target() == device
    assert targeting.known_target() is None


def test_an_unknown_target_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"'h300' is unknown.*legal: b200, .*h100, .*h200"):
        pallas_gemm.target("h300").__enter__()


def test_a_block_is_left_by_an_error() -> None:
    with pytest.raises(RuntimeError), pallas_gemm.target("h200"):
        raise RuntimeError
    assert targeting.known_target() is None


def _kind(device: Device | None) -> str | None:
    return None if device is None else device.kind


def _planned(f: Any, *args: Any) -> list[Any]:
    """Returns the targets of the products in a function."""
    inner = jax.make_jaxpr(f)(*args).jaxpr.eqns
    return [e.params["call"].options.target for e in inner if e.primitive is product_p]


def test_a_function_that_was_traced_before_is_traced_anew_for_a_target() -> None:
    a = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    f = jax.jit(pallas_gemm.gemm)

    def kinds() -> list[str | None]:
        inner = jax.make_jaxpr(f)(a, a).jaxpr.eqns[0].params["jaxpr"].jaxpr.eqns
        return [getattr(e.params["call"].options.target, "kind", None) for e in inner]

    assert kinds() == [None]
    with pallas_gemm.target("h200"):
        assert kinds() == ["NVIDIA H200"]
    assert kinds() == [None]


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.usefixtures("proven")
@needs_compiler
@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_ahead_of_time_the_mesh_tells(name: str, kind: AxisType) -> None:
    sharding: Any = offline._device_sharding(name)
    devices = sharding.mesh.devices
    mesh = jax.sharding.Mesh(devices, ("x",), axis_types=(kind,))
    sharding = jax.NamedSharding(mesh, jax.P())
    a = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=sharding)
    assert _kind(targeting.known_target(a)) == devices.flat[0].device_kind
    [device] = _planned(pallas_gemm.gemm, a, a)
    assert device.kind == devices.flat[0].device_kind
    text = jax.jit(pallas_gemm.gemm).lower(a, a).as_text()
    assert "mosaic_gpu" in text
    with jax.set_mesh(mesh):
        assert _kind(targeting.known_target()) == devices.flat[0].device_kind


def _gpu(kind: str, capability: str, sms: int) -> Any:
    """A device as JAX describes it."""
    return types.SimpleNamespace(
        platform="gpu",
        device_kind=kind,
        compute_capability=capability,
        core_count=sms,
        local_hardware_id=0,
    )


def test_devices_of_jax_are_described() -> None:
    assert _kind(targeting.device_of(_gpu("NVIDIA H200", "9.0", 132))) == H200.kind
    other = targeting.device_of(_gpu("NVIDIA GH200 480GB", "9.0", 128))
    assert other is not None
    assert (other.kind, other.compute_capability, other.sms) == ("NVIDIA GH200 480GB", (9, 0), 128)
    for capability, model in (("9.0", H100), ("10.0", B200), ("10.1", B200)):
        chip = targeting.device_of(_gpu("of next year", capability, 120))
        assert chip is not None
        assert (chip.sms, chip.machine.l2_bytes) == (120, model.machine.l2_bytes)
        assert not chip.machine.is_measured
    old = targeting.device_of(_gpu("NVIDIA A100-SXM4-80GB", "8.0", 108))
    assert old is not None
    assert (old.compute_capability, old.sms) == ((8, 0), 108)
    cpu: Any = types.SimpleNamespace(platform="cpu")
    assert targeting.device_of(cpu) is None
    amd: Any = types.SimpleNamespace(platform="gpu", device_kind="MI300X")
    assert targeting.device_of(amd) is None


def test_a_described_device_can_be_a_target() -> None:
    device = dataclasses.replace(H200, kind="another")
    a = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    with pallas_gemm.target(device):
        assert _planned(pallas_gemm.gemm, a, a) == [device]


@pytest.fixture
def forgotten() -> Iterator[None]:
    kept = targeting.first_gpu
    kept.cache_clear()
    yield
    kept.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_the_first_gpu_is_the_first_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [_gpu("NVIDIA H200", "9.0", 132), _gpu("NVIDIA B200", "10.0", 148)]
    given = {None: [types.SimpleNamespace(platform="cpu")], "cuda": found}
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: given[backend])
    assert _kind(targeting.first_gpu()) == H200.kind


@pytest.mark.usefixtures("forgotten")
def test_gpus_of_a_mesh_are_absent_unless_this_process_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mesh(platform: str, kind: str = "NVIDIA H200") -> Any:
        device = types.SimpleNamespace(platform=platform, device_kind=kind)
        return types.SimpleNamespace(empty=False, devices=np.array([device], object))

    for platform in ("gpu", "cuda"):
        assert targeting.absent_gpu(mesh(platform)) == H200
    assert targeting.absent_gpu(mesh("cpu")) is None
    # Nothing says how many SMs it has.
    assert targeting.absent_gpu(mesh("gpu", "of next year")) is None
    nothing: Any = types.SimpleNamespace(empty=True)
    assert targeting.absent_gpu(nothing) is None
    monkeypatch.setattr(targeting, "first_gpu", lambda: B200)
    assert targeting.absent_gpu(mesh("gpu")) is None


def test_a_part_of_a_gpu_has_fewer_sms_than_its_kind() -> None:
    part = targeting.device_of(_gpu("NVIDIA H200", "9.0", 60))
    assert part is not None
    assert (part.kind, part.sms, part.compute_capability) == (H200.kind, 60, (9, 0))
    machine = part.machine
    assert (machine.name, machine.resident_clusters) == (H200.kind, {})
    assert not machine.is_measured
    assert machine.l2_bytes == H200.machine.l2_bytes
    # A capability without a second number is the first of its family.
    other = targeting.device_of(_gpu("of next year", "10", 120))
    assert other is not None
    assert other.compute_capability == (10, 0)


def test_a_concrete_operand_tells_by_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    ones, asked = jnp.ones((2, 2)), list[Any]()
    monkeypatch.setattr(targeting, "device_of", lambda device: device)
    [own] = ones.devices()
    assert targeting.known_target(ones) is own
    assert targeting.known_target(np.ones(2), ones) is own
    assert targeting.known_target(np.ones(2)) is None
    assert targeting.known_target(jax.ShapeDtypeStruct((2, 2), jnp.float32)) is None
    jax.make_jaxpr(lambda x: asked.append(targeting.known_target(x)) or x)(ones)
    assert asked == [None]
