"""The facts about a GPU that kernels need; with `schedules.machines`, the only hardware numbers."""

import dataclasses
import difflib
from collections.abc import Mapping
from types import MappingProxyType

from schedules import machines

LINE_BYTES = 128
"""A line of the caches: what memory is read by."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU, as far as planning needs it.

    Attributes:
        kind: The name that JAX has for it (`device_kind`).
        compute_capability: (major, minor).
        machine: Its SMs, caches and memory.
        shared_memory: Bytes of shared memory that one block can use.
        measured_clusters: Cluster size to how many clusters of that size run at once, as the CUDA
            driver of this very GPU answers for blocks that fill an SM (`occupancy.py` asks). The
            answer differs between two GPUs of one kind, because clusters live within a GPC and GPCs
            differ in which SMs are enabled.
    """

    kind: str
    compute_capability: tuple[int, int]
    # Equal devices have equal kinds, and a machine's table of clusters has no hash.
    machine: machines.Machine = dataclasses.field(hash=False)
    shared_memory: int = 232_448
    measured_clusters: tuple[tuple[int, int], ...] = ()

    @property
    def sms(self) -> int:
        """Streaming multiprocessors."""
        return self.machine.sms

    def lacks(self, needed: str) -> str:
        """Says that a kernel needs another compute capability."""
        major, minor = self.compute_capability
        return f"needs compute capability {needed}, {self.kind} has {major}.{minor}"

    def coresident_clusters(self, size: int) -> int:
        """Returns how many clusters of `size` CTAs run at once when each CTA fills an SM.

        A persistent kernel that launches more runs in two waves, at half speed. Where nobody has
        asked the driver, each GPC is taken to have one SM less than on average, and clusters of one
        or two to fit everywhere.
        """
        known = dict(self.measured_clusters) or self.machine.resident_clusters
        if size in known:
            return known[size]
        if size <= 2:
            return self.sms // size
        # Counted like the next even size: of 3, 5 and 7, fewer fit than their number of SMs says.
        whole = size + size % 2
        return self.machine.gpcs * ((self.sms // self.machine.gpcs - 1) // whole)


HOPPER, BLACKWELL, BLACKWELL_ULTRA = (9, 0), (10, 0), (10, 3)

H100 = Device("NVIDIA H100 80GB HBM3", HOPPER, machines.H100)
H200 = Device("NVIDIA H200", HOPPER, machines.H200)
B200 = Device("NVIDIA B200", BLACKWELL, machines.B200)

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "h100": H100,
        "h200": H200,
        "b200": B200,
        "h100_pcie": Device("NVIDIA H100 PCIe", HOPPER, machines.H100_PCIE),
        "h100_nvl": Device("NVIDIA H100 NVL", HOPPER, machines.H100_NVL),
        "h800": Device("NVIDIA H800", HOPPER, machines.H800),
        "h200_nvl": Device("NVIDIA H200 NVL", HOPPER, machines.H200_NVL),
        "h20": Device("NVIDIA H20", HOPPER, machines.H20),
        "gh200": Device("NVIDIA GH200 480GB", HOPPER, machines.GH200),
        "gh200_144g": Device("NVIDIA GH200 144G HBM3e", HOPPER, machines.GH200_144G),
        "gb200": Device("NVIDIA GB200", BLACKWELL, machines.GB200),
        "b300": Device("NVIDIA B300 SXM6 AC", BLACKWELL_ULTRA, machines.B300),
        "gb300": Device("NVIDIA GB300", BLACKWELL_ULTRA, machines.GB300),
    }
)
"""The presets, by the names that `offline.py` also uses; the kinds are what the driver says."""


def device_named(name: str) -> Device:
    """Returns the preset for a name such as "h200" or for a `device_kind` of JAX.

    Raises:
        ValueError: There is none of that name.
    """
    for short, device in DEVICES.items():
        if str(name).lower() in (short, short.replace("_", "-"), device.kind.lower()):
            return device
    raise ValueError(f"{unknown_device('device', name)}; a `device_kind` of JAX is legal too")


def unknown_device(argument: str, name: object) -> str:
    """Returns what an error says of a name that no preset has."""
    close = difflib.get_close_matches(str(name).lower(), DEVICES, n=1, cutoff=0.8)
    hint = f"did you mean {close[0]!r}?" if close else "XLA computes every product on other GPUs;"
    return f"{argument}={name!r} is unknown; {hint} legal: {', '.join(sorted(DEVICES))}"
