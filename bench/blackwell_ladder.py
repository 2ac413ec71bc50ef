"""The ladder of the B200 article: its eight steps as configs of one kernel.

    python bench/blackwell_ladder.py --csv=ladder.csv
        on a B200: times every step
    python bench/blackwell_ladder.py --list
        anywhere: the steps, and what to expect

The article is "Outperforming cuBLAS on B200: Leveraging Blackwell Features for
SOTA General Matrix Multiplication Performance". Its figures are printed beside
ours, and ratios are what can be compared: it measured another GPU of this
kind, against another release of cuBLAS.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from absl import flags

from bench import command, ladder, report, shapes
from pallas_gemm.device import Device
from pallas_gemm.kernels.blackwell.config import PAIR, BlackwellConfig

PROGRAM = "blackwell_ladder"
SIZES = (2048, 4096, 8192, 16384)

SINGLE = BlackwellConfig(
    cluster=(1, 1),
    stages=1,
    persistence="none",
    schedule="raster",
    accumulators=1,
    specialised=False,
    direct_store=True,
)
PAIRED = dataclasses.replace(SINGLE, cluster=PAIR)
PIPELINED = dataclasses.replace(PAIRED, stages=4)
SPECIALISED = dataclasses.replace(PIPELINED, specialised=True, stages=7)
PERSISTENT = dataclasses.replace(SPECIALISED, persistence="static")
OVERLAPPED = dataclasses.replace(PERSISTENT, accumulators=2)
ORDERED = dataclasses.replace(OVERLAPPED, direct_store=False, stages=6, schedule="clipped_hilbert")
DYNAMIC = dataclasses.replace(ORDERED, persistence="dynamic")

STEPS: Mapping[str, BlackwellConfig] = {
    "1 initial": SINGLE,
    "2 2-CTA MMA": PAIRED,
    "3 pipelining": PIPELINED,
    "4 warp specialisation": SPECIALISED,
    "5 persistent": PERSISTENT,
    "6 two accumulators": OVERLAPPED,
    "7 TMA stores, Hilbert": ORDERED,
    "8 launch control": DYNAMIC,
}
"""Each step keeps what the one before it brought; the ring is as deep as shared memory allows."""

ARTICLE: Mapping[str, tuple[float, float, float, float]] = {
    "cuBLAS": (838.9, 1520.5, 1551.0, 1424.8),
    "1 initial": (441.9, 603.9, 651.6, 596.6),
    "2 2-CTA MMA": (441.5, 620.3, 659.9, 639.8),
    "3 pipelining": (646.1, 971.9, 1070.6, 911.5),
    "4 warp specialisation": (762.6, 1290.9, 1242.7, 1073.3),
    "5 persistent": (762.6, 1473.3, 1353.9, 1106.1),
    "6 two accumulators": (762.6, 1490.8, 1362.7, 1121.6),
    "7 TMA stores, Hilbert": (762.6, 1494.3, 1408.9, 1245.1),
    "8 launch control": (761.5, 1527.4, 1646.7, 1402.3),
}
"""TFLOP/s that the article gives for `SIZES`, bfloat16, on its B200 (1000 W, CUDA 13.0.2)."""


def article_ratio(step: str, size: int) -> float:
    """Returns cuBLAS's time over a step's in the article, at a size cubed."""
    place = SIZES.index(size)
    return ARTICLE[step][place] / ARTICLE["cuBLAS"][place]


def beside(rows: Sequence[report.Row]) -> Iterator[str]:
    """Yields a table: of every step what was measured, and what the article measured."""
    yield f"{'case':20} {'step':22} | {'TF/s':>6} {'x XLA':>6} | {'article':>7} {'x cuBLAS':>8}"
    cases = {size_case(size): size for size in SIZES}
    for row in rows:
        if row.peer not in STEPS or row.case not in cases:
            continue
        size, timing = cases[row.case], row.timing("burst")
        speed = row.flops_per_second("burst")
        ours = (
            f"{speed / 1e12:6.0f} {timing.ratio.median:6.3f}"
            if timing and speed
            else f"{row.status:>13}"
        )
        theirs = ARTICLE[row.peer][SIZES.index(size)]
        yield (
            f"{row.case:20} {row.peer:22} | {ours} | {theirs:7.0f}"
            f" {article_ratio(row.peer, size):8.3f}"
        )


def size_case(size: int) -> str:
    """Returns the name of the article's product of a size: its right operand is stored [n, k]."""
    return shapes.parse(f"{size}x{size}x{size}:NT").name


def listing() -> Iterator[str]:
    """Yields what the program would time, and the article's figures; nothing of it was run here."""
    sizes = " ".join(f"{size:6}" for size in SIZES)
    yield f"{'x cuBLAS in the article at':26} {sizes}"
    for name, config in STEPS.items():
        ratios = " ".join(f"{article_ratio(name, size):6.3f}" for size in SIZES)
        changed = {
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(config)
            if getattr(config, field.name) != field.default
        }
        yield f"{name:26} {ratios}"
        text = " ".join(f"{k}={v}".replace(" ", "") for k, v in changed.items())
        yield from command.wrapped(f"    {text}", indent=4)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command line."""
    text = {"flag_values": values}
    names = [size_case(size) for size in SIZES]
    flags.DEFINE_multi_string("shape", names, "Products to time.", **text)
    flags.DEFINE_bool("list", False, "Show the steps instead of timing them.", **text)
    flags.DEFINE_string("csv", None, "Write the rows to this file.", **text)


def _run(values: flags.FlagValues) -> int:
    """Runs the ladder.

    Returns:
        0; 1 if a result was wrong; 2 for a request that cannot be met.
    """
    console = command.console()
    if values.list:
        console.print("\n".join(listing()))
        return 0
    csv = command.output_path(values.csv)
    found = ladder.climb(values.shape, STEPS, csv, console, why_not)
    console.print("\n".join(beside(found.rows)))
    return ladder.status(found, STEPS)


def why_not(device: Device) -> str | None:
    """Returns why a GPU cannot climb the ladder, or None."""
    major, minor = device.compute_capability
    if major == 10:
        return None
    return f"this needs a B200 or another GPU of 10.x, but {device.kind} has {major}.{minor}"


if __name__ == "__main__":
    command.start(PROGRAM, _run, define_flags)
