"""`Machine`: the hardware numbers that decide what an order of tiles costs, with their sources."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from schedules import _check


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the model has to know about a GPU.

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
        resident_clusters: Cluster size to how many clusters of that size run at the same time,
            where that was measured; elsewhere as many as the SMs allow.
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

MACHINES: Mapping[str, Machine] = MappingProxyType(
    {machine.name.lower(): machine for machine in (H100, H200, B200)}
)
"""Every preset by its name in lower case."""


def machine_named(name: str) -> Machine:
    """Returns the preset called `name`, in capitals or not.

    Raises:
        ValueError: There is none of that name.
    """
    if isinstance(name, str) and name.lower() in MACHINES:
        return MACHINES[name.lower()]
    raise ValueError(f"machine must be one of {', '.join(MACHINES)}, got {name!r}")
