"""The program of `make demo`: the idea in pictures, then each claim put to work.

It is here and not in the package because it is a program for a source tree: it
needs the extra `test`, and a user's installation has no use for it.

A step is a function that takes a console and prints; `STEPS` lists them with
their titles.
"""

import importlib
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)
    # Says which extra is missing, before an import fails.
    importlib.import_module("bench")

# Before JAX is imported: the simulator waits inside the thread pool of the CPU backend, which must
# not want a second thread for a product.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import numpy as np
import rich.box
from absl import flags
from rich.console import Console
from rich.progress import track
from rich.table import Table

import pallas_gemm
from bench import command, gemm_bench, gpu, report, session
from pallas_gemm import offline
from pallas_gemm.device import H200 as H200_DEVICE
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.problem import Problem
from schedules import build, draw
from schedules.model import B200, H100, H200, Machine, predict

PICTURED = (
    ("raster", "swizzle:3", "nested_swizzle:4x2"),
    ("log_swizzle:2", "hilbert", "clipped_hilbert"),
)
"""The orders that are drawn, one row of pictures after the other."""

PICTURED_GRID = (7, 9)
"""Odd, so that groups and curves have remainders to deal with."""

COMPARED = ("raster", "swizzle:8", "swizzle:12", "swizzle:24", "hilbert", "clipped_hilbert")
"""The orders whose cost is predicted."""

SIZE = 8192
"""Rows, columns and depth of the product that is predicted."""

GAP = "    "
"""Between two pictures."""


@dataclass(frozen=True)
class Launch:
    """A GPU and how a product is cut up for it.

    Attributes:
        machine: The GPU.
        tile: Rows and columns of an output tile, and its step along K.
        cluster: Blocks that share a tile of the schedule, along the rows and the columns.
    """

    machine: Machine
    tile: tuple[int, int, int]
    cluster: tuple[int, int] = (1, 1)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the schedule's tiles."""
        rows, cols = (self.tile[i] * self.cluster[i] for i in range(2))
        return SIZE // rows, SIZE // cols


LAUNCHES = (
    Launch(H100, (128, 128, 64)),
    Launch(H200, (256, 128, 64)),
    # Two blocks of a B200 compute one tile of 256 x 256 together.
    Launch(B200, (128, 256, 64), (2, 1)),
)


@dataclass(frozen=True)
class Step:
    """One part of the demo.

    Attributes:
        title: Its subject, in one line.
        show: Prints it.
    """

    title: str
    show: Callable[[Console], None]


def side_by_side(orders: Sequence[str], grid: tuple[int, int], *, colour: bool = False) -> str:
    """Returns the pictures of several orders beside each other, their names above them.

    Args:
        orders: The orders as text, such as "swizzle:4".
        grid: Rows and columns of tiles.
        colour: Whether to colour the tiles, from first to last, with ANSI escapes.
    """
    # A tile is two characters wide; only in a plain picture the end of a line may be missing.
    drawn = 2 * grid[1]
    width = max(drawn, *map(len, orders))
    lines = [GAP.join(order.ljust(width) for order in orders).rstrip()]
    pictures = [draw.path(build(order, *grid), colour=colour).splitlines() for order in orders]
    for parts in zip(*pictures, strict=True):
        margin = " " * (width - drawn)
        padded = [part + margin if colour else part.ljust(width) for part in parts]
        lines.append(GAP.join(padded).rstrip())
    return "\n".join(lines)


def show_orders(console: Console) -> None:
    """Draws each kind of order."""
    colour = console.is_terminal and not console.no_color
    for orders in PICTURED:
        # Past the console's wrapping and markup, for the pictures have their own colours.
        console.file.write(side_by_side(orders, PICTURED_GRID, colour=colour) + "\n\n")
    console.print(
        "Each line is the way through the tiles of a product, from ○ to ●. The tiles computed at"
        " the same time are neighbours on that line: the more compact the patch they cover, the"
        " fewer rows of A and columns of B they have to fetch."
    )


def show_predictions(console: Console) -> None:
    """Predicts what some orders cost on three GPUs, without a GPU."""
    table = Table(box=rich.box.SIMPLE, title=f"{SIZE} x {SIZE} x {SIZE}, bf16: L2 hits, DRAM read")
    table.add_column("order")
    for launch in LAUNCHES:
        tile = f"{launch.tile[0] * launch.cluster[0]} x {launch.tile[1] * launch.cluster[1]}"
        table.add_column(f"{launch.machine.name}, {tile}", justify="right")
    for order in track(COMPARED, "predicting", console=console, transient=True):
        table.add_row(order, *(_predicted(order, launch) for launch in LAUNCHES))
    console.print(table)
    console.print("The same, order by order, and for other machines and shapes:")
    for launch in LAUNCHES:
        sizes = [f"{m}x{n}" for m, n in (launch.tile[:2], launch.cluster)]
        console.print(
            f"  python -m schedules compare --machine {launch.machine.name.lower()}"
            f" --tile {sizes[0]} --cluster {sizes[1]}",
            soft_wrap=True,
            highlight=False,
        )


def _predicted(order: str, launch: Launch) -> str:
    prediction = predict(
        build(order, *launch.grid),
        machine=launch.machine,
        tile=launch.tile,
        cluster=launch.cluster,
        k=SIZE,
    )
    return f"{prediction.l2_hit_rate:.0%}  {prediction.dram_read_bytes / 1e9:.2f} GB"


SIMULATED = Problem(200, 192, 264)
"""Small, and no multiple of any tile."""

COMPILED = {
    "tile 128x256": HopperConfig(),
    "tile 128x256, cluster 2x1": HopperConfig(cluster=(2, 1)),
    "tile 256x192": HopperConfig(tile=(256, 192), stages=3, store_columns=32, late_store=False),
    "tile 128x192, ping-pong": HopperConfig(tile=(128, 192), pingpong=True, late_store=False),
}
"""Configurations of the Hopper kernel that are compiled for an H200."""


TIMED = ("2048x2048x2048", "4096x4096x4096", "8192x8192x8192", "8192x8192x1024")
"""Products that are timed where there is a GPU; `make bench` looks longer, and at more of them."""


def show_product(console: Console) -> None:
    """Runs the kernel: on this computer's GPU, or in the simulator where it has none."""
    if gpu.missing_gpu() is None:
        show_timing(console)
    else:
        show_simulation(console)


def show_timing(console: Console) -> None:
    """Times a few products against XLA."""
    # Only here, where there is a GPU: the limits are kernels.
    from bench import machine

    arguments = [
        "--peers=xla,ours",
        *(f"--shape={shape}" for shape in TIMED),
        "--sustained_rounds=6",
        "--energy_seconds=0.3",
    ]
    values = flags.FlagValues()
    gemm_bench.define_flags(values)
    values([gemm_bench.PROGRAM, *arguments])
    options = gemm_bench.options_from(values)
    # A narrower terminal may not wrap the table.
    tables = command.console(console.file)
    found = session.run(options, machine.open_bench(options), tables)
    for line in report.summary_lines(found.rows):
        tables.print(line)


def show_simulation(console: Console) -> None:
    """Runs the kernel in JAX's GPU simulator and compares it with float64."""
    rng = np.random.default_rng(0)
    a, b = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in (SIMULATED.a_shape, SIMULATED.b_shape)
    )
    with console.status("simulating"):
        ours = pallas_gemm.gemm(a, b, implementation="interpret")
    exact = np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64)
    theirs = jnp.matmul(a, b)
    table = Table(box=rich.box.SIMPLE)
    table.add_column(f"{SIMULATED.m} x {SIMULATED.n} x {SIMULATED.k}, bf16, largest error")
    table.add_column("against float64", justify="right")
    errors = [np.abs(np.asarray(x).astype(np.float64) - exact).max() for x in (ours, theirs)]
    for name, error in zip(("the kernel, simulated", "XLA on the CPU"), errors, strict=True):
        table.add_row(name, f"{error:.4f}")
    console.print(table)
    verdict = "right" if errors[0] <= 2 * errors[1] else "wrong"
    console.print(
        f"The result is {verdict}: its error may be twice that of XLA, whose own is what rounding"
        " to bfloat16 costs."
    )
    console.print(
        "Every barrier, copy and tensor-core instruction ran one by one; the tests do this with"
        " race detection on for every mode, layout and ragged edge."
    )


def show_compilation(console: Console) -> None:
    """Compiles the same kernel to the machine code of a GPU that need not be there."""
    if absent := offline.missing_packages():
        console.print(f"This needs {', '.join(absent)}: the extra aot, which make demo installs.")
        return
    problem = Problem(SIZE, SIZE, SIZE)
    table = Table(box=rich.box.SIMPLE, title=f"{SIZE} x {SIZE} x {SIZE}, bf16, for an H200")
    for column in ("configuration", "registers", "spilled bytes", "shared memory", "serialized"):
        first = column == "configuration"
        table.add_column(column, justify="left" if first else "right", no_wrap=first)
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (problem.a_shape, problem.b_shape)
    ]
    for name, config in track(COMPILED.items(), "compiling", console=console, transient=True):
        kernel = hopper.build(HopperPlan(problem, config, H200_DEVICE))
        report = offline.compile_report(kernel, *operands, target="h200")
        table.add_row(
            name,
            str(report.registers),
            str(report.spill_bytes),
            f"{report.shared_memory_bytes:,}",
            "yes" if report.serialized else "no",
        )
    console.print(table)


STEPS = (
    Step("The order in which the tiles of a product are visited", show_orders),
    Step("What the order costs, predicted before any GPU has run it", show_predictions),
    Step("A product through the kernel: simulated, or timed where there is a GPU", show_product),
    Step("The kernel as machine code", show_compilation),
)


def main(_: object = None) -> int:
    """Runs every step."""
    console = Console()
    start = time.perf_counter()
    for number, step in enumerate(STEPS, 1):
        console.rule(f"{number} of {len(STEPS)}: {step.title}", align="left")
        step.show(console)
        console.print()
    console.print(f"Done in {time.perf_counter() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    command.start("demo", main)
