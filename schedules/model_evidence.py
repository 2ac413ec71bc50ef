"""The counts of profilers on real GPUs, beside the model's for the same launches."""

import dataclasses
from collections.abc import Sequence

from schedules import spec
from schedules.machines import B200, H100, H200, Machine
from schedules.model import Persistence, Prediction, predict

SIZE = 8192
"""M, N and K of every launch below, in bfloat16."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel on a machine: the arguments of `predict` that do not depend on the order.

    Attributes:
        name: The machine and what tells this kernel from the others.
        machine: As for `predict`, like the rest.
    """

    name: str
    machine: Machine
    tile: tuple[int, int, int]
    cluster: tuple[int, int] = (1, 1)
    persistence: Persistence = "static"
    multicast: bool = True
    workers: int | None = None


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Counters of one launch, with None for what was not published.

    Attributes:
        kernel: The launch that ran.
        label: The order as its source calls it.
        order: The same as a text that `schedules.build` reads.
        hit_percent: L2 hit rate.
        sectors_millions: L2 sectors, in units of 10^6.
        dram_gigabytes: Bytes read from device memory, in units of 10^9.
    """

    kernel: Kernel
    label: str
    order: str
    hit_percent: float | None = None
    sectors_millions: float | None = None
    dram_gigabytes: float | None = None

    def predicted(self) -> Prediction:
        """Returns what the model says about the launch."""
        kernel = self.kernel
        rows, cols = (SIZE // (kernel.tile[side] * kernel.cluster[side]) for side in range(2))
        return predict(
            spec.build(self.order, rows, cols),
            machine=kernel.machine,
            tile=kernel.tile,
            k=SIZE,
            cluster=kernel.cluster,
            persistence=kernel.persistence,
            workers=kernel.workers,
            multicast=kernel.multicast,
        )


# The tile-scheduling article (H100).
_ONCE = Kernel("H100, 128x128, not persistent", H100, (128, 128, 64), persistence="none")
_DYNAMIC = dataclasses.replace(
    _ONCE, name="H100, 128x128, persistent, as dynamic", persistence="dynamic"
)
_STATIC = dataclasses.replace(
    _ONCE, name="H100, 128x128, persistent, as static", persistence="static"
)
_PLAIN_PAIR = dataclasses.replace(
    _DYNAMIC, name="H100, cluster (2,1), no multicast", cluster=(2, 1), multicast=False
)
_CAST_PAIR = dataclasses.replace(_DYNAMIC, name="H100, cluster (2,1), multicast", cluster=(2, 1))
# Nsight Compute on one H200: a Pallas Mosaic GPU kernel with a table of tiles.
_H200 = Kernel("H200, 256x128, static", H200, (256, 128, 64))
_H200_PAIR = dataclasses.replace(_H200, name="H200, 256x128, cluster (1,2), static", cluster=(1, 2))
# The B200 matmul article. The 2-CTA matrix instruction makes a pair one worker with one tile.
_B200 = Kernel("B200, 256x256 by pairs, static", B200, (256, 256, 64), workers=74)
_B200_IN_ORDER = dataclasses.replace(
    _B200, name="B200, 256x256 by pairs, dynamic", persistence="dynamic"
)

MEASUREMENTS: tuple[Measurement, ...] = (
    Measurement(_ONCE, "raster", "raster", 51.1, 605.3),
    Measurement(_ONCE, "Hilbert", "clipped_hilbert", 76.3, 516.2),
    Measurement(_ONCE, "swizzle 12", "swizzle:12", 78.1, 545.1),
    Measurement(_DYNAMIC, "raster", "raster", 50.3, 601.7),
    Measurement(_DYNAMIC, "Hilbert", "clipped_hilbert", 78.2, 530.1),
    Measurement(_DYNAMIC, "swizzle 24", "swizzle:24", 68.6, 542.5),
    Measurement(_STATIC, "raster", "raster", 50.3, 601.7),
    Measurement(_STATIC, "Hilbert", "clipped_hilbert", 78.2, 530.1),
    Measurement(_STATIC, "swizzle 24", "swizzle:24", 68.6, 542.5),
    Measurement(_PLAIN_PAIR, "Hilbert", "clipped_hilbert", None, 532.9),
    Measurement(_PLAIN_PAIR, "swizzle 24", "swizzle:24:cols", None, 539.0),
    Measurement(_CAST_PAIR, "Hilbert", "clipped_hilbert", None, 441.9),
    Measurement(_CAST_PAIR, "swizzle 24", "swizzle:24:cols", None, 364.7),
    Measurement(_H200, "raster", "raster", 62.0, 395.0, 2.43),
    Measurement(_H200, "Hilbert", "hilbert", 78.0, 357.0, 1.39),
    Measurement(_H200, "serpentine 8", "swizzle:8:cols", 80.0, 326.0, 1.38),
    Measurement(_H200_PAIR, "raster", "raster", 60.0, 333.0, 2.42),
    Measurement(_H200_PAIR, "Hilbert", "hilbert", 74.0, 307.0, 1.32),
    Measurement(_H200_PAIR, "serpentine 8", "swizzle:8:cols", 75.0, 289.0, 1.20),
    Measurement(_B200, "raster", "raster", 49.2),
    Measurement(_B200, "Hilbert, dealt", "clipped_hilbert", 64.9),
    Measurement(_B200_IN_ORDER, "Hilbert, in order", "clipped_hilbert", 74.5),
)
"""Every launch whose counters the model is held to."""


def table(predictions: Sequence[Prediction] | None = None) -> str:
    """Returns the measurements beside the predictions, as a table in Markdown.

    Args:
        predictions: One for each of `MEASUREMENTS`, if they have been made already.
    """
    if predictions is None:
        predictions = [case.predicted() for case in MEASUREMENTS]
    lines = [
        "| kernel | order | hit rate | model | off by | sectors | model | off by "
        "| DRAM read | model | off by |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    kernel = None
    for case, prediction in zip(MEASUREMENTS, predictions, strict=True):
        cells = [
            "" if case.kernel == kernel else case.kernel.name,
            case.label,
            *_cells(case.hit_percent, 100 * prediction.l2_hit_rate, 1, " %", relative=False),
            *_cells(case.sectors_millions, prediction.l2_sectors / 1e6, 0, " M", relative=True),
            *_cells(case.dram_gigabytes, prediction.dram_read_bytes / 1e9, 2, " GB", relative=True),
        ]
        kernel = case.kernel
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cells(
    measured: float | None, predicted: float, digits: int, unit: str, *, relative: bool
) -> tuple[str, str, str]:
    """Returns measured, predicted and what the prediction is off by, in points or per cent."""
    shown = f"{predicted:.{digits}f}{unit}"
    if measured is None:
        return "", shown, ""
    miss = (
        f"{100 * (predicted / measured - 1):+.0f} %" if relative else f"{predicted - measured:+.1f}"
    )
    return f"{measured:.{digits}f}{unit}", shown, miss
