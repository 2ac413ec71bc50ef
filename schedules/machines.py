"""`Machine`: the hardware numbers that decide what an order of tiles costs, with their sources."""

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType

from schedules import _check


@dataclasses.dataclass(frozen=True)
class Machine:
    """The numbers of a GPU that the model needs.

    Attributes:
        name: As the vendor spells it.
        sms: Streaming multiprocessors; one cooperative thread array (CTA) of a large matrix
            multiply fills one.
        l2_bytes: The L2 cache as the driver reports it, all partitions together.
        l2_partitions: Into how many parts the L2 is split. Each keeps copies of what its own SMs
            read, so that shared data is held once per partition.
        gpcs: Graphics processing clusters: groups of SMs that sit beside one partition and whose
            simultaneous reads of the same data are merged on their way to the L2.
        dram_bytes_per_second: Peak bandwidth of device memory.
        clock_hz: Highest SM clock.
        speed_spread: How much the SMs differ in speed, as a standard deviation relative to the
            mean. It is what a static schedule cannot even out.
        resident_clusters: For each cluster size, how many clusters run at the same time, if that
            was measured; otherwise the SMs decide.
        tensor_share: The share of operations that its tensor cores do in a cycle, of those that
            others of their generation do.
        is_measured: Whether orders and kernels of this project were timed on one.
    """

    name: str
    sms: int
    l2_bytes: int
    l2_partitions: int
    gpcs: int
    dram_bytes_per_second: float
    clock_hz: float
    speed_spread: float = 0.0
    # A mapping has no hash, and machines that differ in nothing else are as good as equal.
    resident_clusters: Mapping[int, int] = dataclasses.field(
        default=MappingProxyType({}), hash=False
    )
    tensor_share: float = 1.0
    is_measured: bool = False

    def __post_init__(self) -> None:
        _check.positive_int("sms", self.sms)
        _check.int_at_least("l2_bytes", self.l2_bytes, 0)
        _check.positive_int("l2_partitions", self.l2_partitions)
        _check.positive_int("gpcs", self.gpcs)
        if self.gpcs % self.l2_partitions:
            raise ValueError(
                f"gpcs must be a multiple of l2_partitions={self.l2_partitions}, got {self.gpcs}"
            )
        for argument in ("dram_bytes_per_second", "clock_hz"):
            value = getattr(self, argument)
            if not value > 0:
                raise ValueError(f"{argument} must be above 0, got {value!r}")
        if not 0 <= self.speed_spread < 1:
            raise ValueError(f"speed_spread must be from 0 to below 1, got {self.speed_spread!r}")

    def concurrency(self, cluster_size: int) -> int:
        """Returns how many clusters of `cluster_size` CTAs run at the same time.

        Raises:
            ValueError: `cluster_size` is not a positive integer or exceeds the number of SMs.
        """
        cluster_size = _check.positive_int("cluster_size", cluster_size)
        if cluster_size > self.sms:
            raise ValueError(
                f"cluster_size must be at most the {self.sms} SMs of {self.name}, "
                f"got {cluster_size}"
            )
        return self.resident_clusters.get(cluster_size, self.sms // cluster_size)


# SMs, L2 size, bandwidth and clock of the H100 and the B200: the device descriptions that XLA
# publishes with its compiler (h100_sxm.txtpb, b200.txtpb), which hold what the CUDA driver reports.
# Two partitions beside four GPCs each: NVIDIA's answer in its developer forum ("NCU L2 metric
# understanding"), which adds that on GH100 and GB100 a read of memory attached to the other
# partition first looks into a local slice (the local caching node) and then goes over the L2 fabric
# to the slice that owns the line.
H100 = Machine(
    name="H100",
    sms=132,
    l2_bytes=52_428_800,
    l2_partitions=2,
    gpcs=8,
    dram_bytes_per_second=3.352e12,
    clock_hz=1.98e9,
    is_measured=True,
)

# The driver of an H200 reports 60 MB of L2 (torch prints `L2_cache_size=60MB`): all twelve memory
# controllers of the die are on, where an H100 has ten. XLA's h200.txtpb repeats the H100's 50 MB.
# Bandwidth: NVIDIA's data sheet. Clusters: `cudaOccupancyMaxActiveClusters` on one H200, for CTAs
# of 384 threads and 227 KB of shared memory.
H200 = Machine(
    name="H200",
    sms=132,
    l2_bytes=62_914_560,
    l2_partitions=2,
    gpcs=8,
    dram_bytes_per_second=4.8e12,
    clock_hz=1.98e9,
    resident_clusters=MappingProxyType(
        {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15, 16: 7}
    ),
    is_measured=True,
)

# Two dies: the B200 matmul article names the latency between them as a reason for SMs to run apart.
# The spread comes from its speeds at 8192 cubed: 1408.9 TFLOP/s with tiles dealt out beforehand,
# 1646.7 with tiles handed to whoever is free. The slowest of 74 workers ends the first; the largest
# of 74 normal draws is 2.4 deviations out. So 1646.7 / 1408.9 - 1 = 16.9%, less 1.2% for the last
# wave (13.84 waves take the time of 14), is 2.4 spreads.
B200 = Machine(
    name="B200",
    sms=148,
    l2_bytes=132_644_864,
    l2_partitions=2,
    gpcs=8,
    dram_bytes_per_second=7.672e12,
    clock_hz=1.965e9,
    speed_spread=0.065,
)

# The same dies with other numbers of SMs, clocks and memories; nobody here has had one. SMs, L2,
# bandwidth and clock of the H100 PCIe, GB200 and GB300: XLA's descriptions of them. Of the others,
# what drivers report where people print it (H200 NVL: 132 SMs, 1,785 MHz; GH200: 132 SMs, 60 MB of
# L2; H20: 78 SMs, 60 MB; B300: 148 SMs, 2,032 MHz, where XLA's description has 158), bandwidths
# from data sheets; the H100 NVL is taken to have the clock of the H200 NVL. The H800 is an H100
# with fewer links; the H20 does 148 TFLOP/s with 16 bits, of the 633 that its SMs and its clock
# would allow.
_LIKE_H100 = dataclasses.replace(H100, is_measured=False)
H100_PCIE = dataclasses.replace(
    _LIKE_H100, name="H100 PCIe", sms=114, dram_bytes_per_second=2.039e12, clock_hz=1.755e9
)
H100_NVL = dataclasses.replace(
    _LIKE_H100, name="H100 NVL", dram_bytes_per_second=3.938e12, clock_hz=1.785e9
)
H800 = dataclasses.replace(_LIKE_H100, name="H800")
_LIKE_H200 = dataclasses.replace(H200, resident_clusters={}, is_measured=False)
H200_NVL = dataclasses.replace(_LIKE_H200, name="H200 NVL", clock_hz=1.785e9)
H20 = dataclasses.replace(
    _LIKE_H200, name="H20", sms=78, dram_bytes_per_second=4.0e12, tensor_share=148 / 633
)
GH200 = dataclasses.replace(_LIKE_H200, name="GH200", dram_bytes_per_second=4.0e12)
GH200_144G = dataclasses.replace(_LIKE_H200, name="GH200 144G", dram_bytes_per_second=4.9e12)
GB200 = dataclasses.replace(
    B200,
    name="GB200",
    sms=152,
    l2_bytes=135_528_448,
    dram_bytes_per_second=7.928e12,
    clock_hz=2.062e9,
)
B300 = dataclasses.replace(GB200, name="B300", sms=148, clock_hz=2.032e9)
GB300 = dataclasses.replace(GB200, name="GB300", clock_hz=2.07e9)

_ALL = (
    H100,
    H100_PCIE,
    H100_NVL,
    H800,
    H200,
    H200_NVL,
    H20,
    GH200,
    GH200_144G,
    B200,
    GB200,
    B300,
    GB300,
)
MACHINES: Mapping[str, Machine] = MappingProxyType(
    {machine.name.lower().replace(" ", "_"): machine for machine in _ALL}
)
"""Every preset by its name in lower case, with underscores."""


def machine_named(name: str) -> Machine:
    """Returns the preset called `name`, in capitals or not.

    Raises:
        ValueError: There is none of that name.
    """
    plain = re.sub("[ -]", "_", name.lower()) if isinstance(name, str) else None
    if plain in MACHINES:
        return MACHINES[plain]
    raise ValueError(f"machine must be one of {', '.join(MACHINES)}, got {name!r}")
