"""The bench of this computer's GPU: its meter, its peers, its limits, and what it is."""

import importlib.metadata
import platform
from collections.abc import Sequence
from typing import Any

import jax

import pallas_gemm
from bench import limit, peers
from bench.command import RequestError
from bench.gpu import GpuMeter
from bench.report import MODES, Limits
from bench.session import Bench, Options
from bench.shapes import DTYPES
from pallas_gemm.device import Device
from pallas_gemm.planning import targeting
from pallas_gemm.tuning.measure import Settings, measure

LIMIT_SETTINGS = Settings(
    burst_rounds=4, burst_calls=5, sustained_rounds=5, warm_seconds=0.5, energy_seconds=0.0
)
"""How long to look at what the chip can do at most."""

HOPPER = "9.0"


def open_bench(options: Options) -> Bench:
    """Returns the bench for what was asked.

    Raises:
        RequestError: There are configs to time, and the device is none that the kernels know.
        TimingError: The GPU cannot be measured.
    """
    meter = GpuMeter()
    chosen: list[peers.Peer] = [_peer(name, options) for name in options.peers]
    if options.configs:
        chosen.append(peers.Kernel(options.configs, this_device()))
    absent = {peer.name: reason for peer in chosen if (reason := peer.absent())}
    return Bench(
        meter=meter,
        peers=[peer for peer in chosen if peer.name not in absent],
        absent=absent,
        environment=environment(meter, options.settings, cold=options.cold),
        limits=lambda dtypes: measured_limits(dtypes, meter),
    )


def this_device() -> Device:
    """Returns the GPU that JAX uses, as the kernels know it.

    Raises:
        RequestError: It is none that they know.
    """
    found = targeting.first_gpu()
    if found is None:
        raise RequestError("this GPU is none that the kernels know")
    return found


def environment(meter: GpuMeter, settings: Settings, *, cold: bool) -> dict[str, Any]:
    """Returns what a reader needs to know to judge the figures."""
    gauge = meter.gauge
    versions = {
        name: found
        for name in ("jax", "jaxlib", "torch", "triton", "quack-kernels", "nvidia-cublas")
        if (found := _version(name))
    }
    return {
        "device": jax.devices()[0].device_kind,
        "driver": gauge.driver() if gauge else None,
        "power_limit_watts": gauge.power_limit() if gauge else None,
        "pallas_gemm": pallas_gemm.__version__,
        "versions": versions,
        "python": platform.python_version(),
        "operands": "N(0, 1)" + (", rotated: not in the L2 cache" if cold else ", the same ones"),
        "settings": settings,
    }


def measured_limits(dtypes: Sequence[str], meter: GpuMeter) -> Limits:
    """Measures what this chip can do at most.

    Args:
        dtypes: Names of the operands' types.
        meter: The GPU's.
    """
    device = jax.devices()[0]
    copy = measure([limit.copy_variant()], meter, LIMIT_SETTINGS, baseline="copy")["copy"]
    bandwidth = 2 * limit.COPIED_BYTES / copy.burst.seconds.median if copy.burst else None
    if str(device.compute_capability) != HOPPER:
        return Limits({}, bandwidth)
    speeds: dict[str, dict[str, float]] = {}
    for name in dtypes:
        dtype, ctas = DTYPES[name][0], device.core_count
        variant = limit.wgmma_variant(dtype, ctas)
        result = measure([variant], meter, LIMIT_SETTINGS, baseline=variant.name)[variant.name]
        flops = limit.wgmma_flops(dtype, ctas)
        speeds[name] = {mode: flops / getattr(result, mode).seconds.median for mode in MODES}
    return Limits(speeds, bandwidth)


def _peer(name: str, options: Options) -> peers.Peer:
    if name == "jax":
        return peers.JaxHopper(full_grid=options.full_grid)
    return peers.PEERS[name]()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
