"""How the Hopper kernel grew: each step a config of today's kernel.

    python bench/hopper_ladder.py --csv=ladder.csv

The first table climbs: each step keeps what the one before it brought. The
second holds what was tried on top and did not pay. `ladder.md` keeps the
figures of one run, with what they teach.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from absl import flags

from bench import command, ladder
from pallas_gemm.kernels.hopper.config import HopperConfig

PROGRAM = "hopper_ladder"
SHAPES = ("4096x4096x4096", "8192x8192x8192", "8192x8192x1024")

FIRST = HopperConfig(
    tile=(128, 128), stages=6, persistence="none", schedule="raster", late_store=False
)
WIDE = dataclasses.replace(FIRST, tile=(128, 256), stages=4)
PERSISTENT = dataclasses.replace(WIDE, persistence="static")
ORDERED = dataclasses.replace(PERSISTENT, schedule="swizzle:8")
FEWER = dataclasses.replace(ORDERED, ctas=128)
LATE = dataclasses.replace(FEWER, late_store=True)
TALL = dataclasses.replace(FEWER, tile=(256, 192), stages=3, store_columns=32, late_store=False)

STEPS: Mapping[str, HopperConfig] = {
    "one tile per CTA, 128x128": FIRST,
    "tile 128x256": WIDE,
    "persistent": PERSISTENT,
    "order: swizzle:8": ORDERED,
    "128 of 132 CTAs": FEWER,
    "stores late": LATE,
}
"""Each step of the climb."""

TRIED: Mapping[str, HopperConfig] = {
    "Hilbert": dataclasses.replace(LATE, schedule="hilbert"),
    "swizzle:16": dataclasses.replace(LATE, schedule="swizzle:16"),
    "on-line swizzle:8": dataclasses.replace(FEWER, schedule="online_swizzle:8"),
    "cluster 2x1": dataclasses.replace(LATE, cluster=(2, 1)),
    "cluster 1x2": dataclasses.replace(LATE, cluster=(1, 2)),
    "cluster 2x2": dataclasses.replace(LATE, cluster=(2, 2)),
    "cluster 4x1": dataclasses.replace(LATE, cluster=(4, 1)),
    "claimed tiles": dataclasses.replace(LATE, persistence="dynamic"),
    "claimed, 132 CTAs": dataclasses.replace(LATE, persistence="dynamic", ctas=None),
    "3 stages, 4 slots": dataclasses.replace(LATE, stages=3, store_slots=4),
    "tile 256x128": dataclasses.replace(LATE, tile=(256, 128), store_slots=1),
    "tile 256x192": TALL,
    "ping-pong 128x192": dataclasses.replace(FEWER, tile=(128, 192), pingpong=True, ctas=None),
}
"""The configs that were tried on top of the last step."""


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command line."""
    text = {"flag_values": values}
    flags.DEFINE_multi_string("shape", list(SHAPES), "Products to time.", **text)
    flags.DEFINE_bool("tried", True, "Time what did not pay as well.", **text)
    flags.DEFINE_string("csv", None, "Write the rows to this file.", **text)


def _run(values: flags.FlagValues) -> int:
    """Runs the ladder.

    Returns:
        0; 1 if a result was wrong; 2 for a request that cannot be met.
    """
    steps = {**STEPS, **TRIED} if values.tried else STEPS
    csv = command.output_path(values.csv)
    return ladder.status(ladder.climb(values.shape, steps, csv, command.console()), steps)


if __name__ == "__main__":
    command.start(PROGRAM, _run, define_flags)
