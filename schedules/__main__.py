"""`python -m schedules`: draws orders, ranks them for a launch, and predicts what they cost."""

import argparse
import dataclasses
import importlib.metadata
import io
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from schedules import draw, explore, report, spec
from schedules.model import MACHINES, Persistence, Prediction, machine_named, predict
from schedules.pieces import split_k
from schedules.table import Schedule

COMPARED = (
    "raster",
    "raster:cols",
    "swizzle:8",
    "swizzle:12",
    "swizzle:16",
    "swizzle:24",
    "swizzle:8:straight",
    "nested_swizzle:16x8",
    "log_swizzle",
    "hilbert",
    "clipped_hilbert",
)

EXPLORED = ("raster", "swizzle:8", "swizzle:24", "nested_swizzle:16x8", "hilbert")

TILE_LIMIT = 2**22
"""More tiles than a picture shows or a prediction takes minutes for."""

STEPS = 64
"""Steps of k that are drawn if nothing is said: a K of 4096 in 16 bits."""

LABEL_COLUMNS = 16
"""The columns of a line that the name of a tile takes."""

SLOW_TILES = 2**16
"""More tiles than a prediction takes a second or two for."""

SECONDS_PER_TILE = 3e-5
"""The time of a prediction, for each tile, on one idle core."""


class _OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line that says what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status.

    Args:
        arguments: The arguments after the program's name; `sys.argv` if None.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without box-drawing characters gets question marks rather than a traceback.
        sys.stdout.reconfigure(errors="replace")
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.run is None:
        parser.print_help()
        return 0
    try:
        options.run(options)
        sys.stdout.flush()
    except (ValueError, ImportError, MemoryError) as error:
        parser.error(str(error) or "the grid does not fit into memory")
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; nothing is left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        where = repr(str(error.filename)) if error.filename else "the output"
        parser.error(f"cannot write {where}: {error.strerror or error}")
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="python -m schedules",
        description="The order in which the output tiles of a matrix multiply are visited.",
        epilog=spec.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_show(commands.add_parser("show", help="draw an order"))
    compare = commands.add_parser("compare", help="rank orders for a problem on a machine")
    compare.add_argument(
        "orders", nargs="*", metavar="ORDER", default=COMPARED, help="default: a selection"
    )
    compare.add_argument("--by", choices=report.RANKINGS, default="dram-read", help="what ranks")
    compare.set_defaults(run=_compare)
    prediction = commands.add_parser("predict", help="all that is predicted for one order")
    prediction.add_argument("order", metavar="ORDER")
    prediction.set_defaults(run=_predict)
    for command in (compare, prediction):
        _add_launch(command)
    _add_explore(
        commands.add_parser("explore", help="write a page that walks through orders, wave by wave")
    )
    return parser


def _version() -> str:
    try:
        return f"pallas-gemm {importlib.metadata.version('pallas-gemm')}"
    except importlib.metadata.PackageNotFoundError:
        return "pallas-gemm, not installed"


def _add_show(command: argparse.ArgumentParser) -> None:
    command.add_argument("order", metavar="ORDER")
    command.add_argument(
        "--grid", type=_sizes(2), default=(8, 8), metavar="ROWSxCOLS", help="tiles; default 8x8"
    )
    command.add_argument(
        "--style",
        choices=("auto", "numbers", "path", "waves"),
        default="auto",
        help="when each tile is visited, a line through the tiles, or one letter per wave; "
        "auto takes the first that fits the terminal",
    )
    command.add_argument(
        "--workers",
        type=_size,
        metavar="N",
        help="colour by wave, N tiles at a time; style waves takes 132 if not told",
    )
    command.add_argument("--colour", choices=("auto", "always", "never"), default="auto")
    command.add_argument(
        "--png", type=Path, metavar="FILE", help="write a picture (extra viz) instead of text"
    )
    command.add_argument(
        "--split-k",
        type=_size,
        metavar="PARTS",
        help="draw the pieces of k into which tiles are cut: a line for each tile, along k",
    )
    command.add_argument(
        "--split-last", type=_size, metavar="N", help="of the last N tiles alone; default all"
    )
    command.add_argument(
        "--steps", type=_size, metavar="N", help="of k that each tile takes; default 64"
    )
    command.set_defaults(run=_show)


def _add_launch(command: argparse.ArgumentParser) -> None:
    command.add_argument("--machine", default="h200", help=f"{', '.join(MACHINES)}; default h200")
    command.add_argument(
        "--problem",
        type=_sizes(3),
        default=(8192, 8192, 8192),
        metavar="MxNxK",
        help="default 8192x8192x8192",
    )
    command.add_argument(
        "--tile",
        type=_sizes(2, 3),
        default=(256, 128, 64),
        metavar="MxN[xK]",
        help="of one CTA, with its step along K; default 256x128x64",
    )
    command.add_argument(
        "--cluster", type=_sizes(2), default=(1, 1), metavar="MxN", help="in CTAs; default 1x1"
    )
    command.add_argument(
        "--no-multicast", action="store_true", help="each CTA of a cluster reads for itself"
    )
    command.add_argument(
        "--persistence",
        choices=("none", "static", "dynamic"),
        default="static",
        help="who gets the next tile; default static",
    )
    command.add_argument(
        "--workers", type=_size, metavar="N", help="clusters at a time; default all that fit"
    )
    command.add_argument("--json", action="store_true", help="print every figure as JSON")


def _add_explore(command: argparse.ArgumentParser) -> None:
    command.description = (
        "Writes one HTML file that holds all it needs (extra viz). Each combination of the lists "
        "below becomes an entry of its menu of launches."
    )
    command.add_argument("orders", nargs="*", metavar="ORDER", help="default: a selection")
    command.add_argument("--out", type=Path, required=True, metavar="FILE")
    command.add_argument(
        "--machine", type=_list(str), default=["h200", "h100", "b200"], metavar="NAME,..."
    )
    command.add_argument(
        "--problem",
        type=_list(_sizes(3)),
        default=[(8192, 8192, 8192)],
        metavar="MxNxK,...",
        help="default 8192x8192x8192",
    )
    command.add_argument(
        "--tile",
        type=_list(_sizes(2, 3)),
        default=[(256, 128)],
        metavar="MxN[xK],...",
        help="of one CTA; default 256x128",
    )
    command.add_argument(
        "--cluster",
        type=_list(_sizes(2)),
        default=[(1, 1), (1, 2)],
        metavar="MxN,...",
        help="in CTAs; default 1x1,1x2",
    )
    command.add_argument("--persistence", choices=("none", "static", "dynamic"), default="static")
    command.set_defaults(run=_explore)


def _list(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Returns a reader of several values with commas between them."""
    return lambda text: [read(part) for part in text.split(",")]


def _size(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def _sizes(*counts: int) -> Callable[[str], tuple[int, ...]]:
    """Returns a reader of texts such as 256x128 with one of the given numbers of sizes."""

    def read(text: str) -> tuple[int, ...]:
        parts = text.split("x")
        good = all(re.fullmatch("[0-9]{1,9}", part) and int(part) for part in parts)
        if not good or len(parts) not in counts:
            wanted = " or ".join(map(str, counts))
            raise argparse.ArgumentTypeError(
                f"must be {wanted} positive integers with an x between them, got {text!r}"
            )
        return tuple(map(int, parts))

    return read


def _show(options: argparse.Namespace) -> None:
    schedule = _built(options.order, options.grid)
    if options.split_k is not None:
        _show_pieces(schedule, options)
        return
    if options.split_last is not None or options.steps is not None:
        raise ValueError("--split-last and --steps need --split-k, the number of pieces of a tile")
    if options.png is not None:
        draw.png(schedule, options.png, workers=options.workers)
        print(f"{schedule.name}, {schedule.rows} x {schedule.cols} tiles: {options.png}")
        return
    steps = np.abs(np.diff(schedule.order, axis=0)).sum(axis=1)
    jumps = int(np.sum(steps > 1))
    picture = _picture(schedule, options)
    print(
        f"{schedule.name}, {schedule.rows} x {schedule.cols} tiles: "
        f"{len(steps) - jumps} steps, {jumps} jumps"
    )
    print(picture)


def _show_pieces(schedule: Schedule, options: argparse.Namespace) -> None:
    if options.png is not None or options.style != "auto":
        raise ValueError("--split-k draws a line for each tile, so leave out --png and --style")
    if schedule.triangle is not None:
        raise ValueError("--split-k cuts the tiles of a whole grid, not of a triangle")
    steps = options.steps or STEPS
    work = split_k(schedule, steps, options.split_k, options.split_last)
    workers = options.workers or 1
    width = max(1, shutil.get_terminal_size().columns - LABEL_COLUMNS)
    print(
        f"{schedule.name}, {schedule.rows} x {schedule.cols} tiles: {len(work)} pieces, along"
        f" {steps} steps of k"
    )
    print(draw.pieces(work, workers, width=width))
    letter = f"{workers} pieces at a time" if options.workers else "a piece"
    together = -(-steps // width)
    print(f"one letter: {letter}" + (f", {together} steps of k" if together > 1 else ""))


def _built(order: str, grid: tuple[int, int]) -> Schedule:
    rows, cols = grid
    if rows * cols > TILE_LIMIT:
        raise ValueError(f"the grid must have at most {TILE_LIMIT} tiles, got {rows} x {cols}")
    return spec.build(order, rows, cols)


def _picture(schedule: Schedule, options: argparse.Namespace) -> str:
    colour = options.colour == "always" or (options.colour == "auto" and _colour_terminal())
    style = options.style
    if style == "auto":
        style = _widest_that_fits(schedule, shutil.get_terminal_size().columns)
    if style == "numbers":
        return draw.numbers(schedule, workers=options.workers, colour=colour)
    if style == "path":
        return draw.path(schedule, workers=options.workers, colour=colour)
    workers = options.workers or 132
    return draw.waves(schedule, workers, colour=colour) + f"\none letter: {workers} tiles at a time"


def _widest_that_fits(schedule: Schedule, columns: int) -> str:
    digits = len(str(len(schedule) - 1))
    if (digits + 1) * schedule.cols <= columns:
        return "numbers"
    return "path" if 2 * schedule.cols <= columns else "waves"


def _colour_terminal() -> bool:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def _compare(options: argparse.Namespace) -> None:
    setting = _setting(options)
    predictions: dict[str, Prediction] = {}
    # All of them first: a misspelt order should not wait for the others.
    schedules = [_built(order, setting.grid) for order in options.orders]
    _warn_if_slow(sum(map(len, schedules)))
    for done, schedule in enumerate(schedules):
        _progress(f"{done + 1} of {len(schedules)}: {schedule.name}")
        predictions[schedule.name] = _predicted(schedule, setting, options)
    _progress("")
    if options.json:
        best_first = report.ranked(predictions, options.by)
        print(json.dumps({order: dataclasses.asdict(p) for order, p in best_first}, indent=2))
        return
    print(setting.headline(predictions[schedules[0].name], len(schedules[0])))
    print(report.ranking(predictions, options.by))


def _predict(options: argparse.Namespace) -> None:
    setting = _setting(options)
    schedule = _built(options.order, setting.grid)
    _warn_if_slow(len(schedule))
    prediction = _predicted(schedule, setting, options)
    if options.json:
        print(json.dumps({schedule.name: dataclasses.asdict(prediction)}, indent=2))
        return
    print(f"{schedule.name} on {setting.headline(prediction, len(schedule))}\n")
    print(report.details(setting, prediction))


def _explore(options: argparse.Namespace) -> None:
    settings = [
        _launch(machine, problem, tile, cluster, options.persistence)
        for machine, problem, tile, cluster in itertools.product(
            options.machine, options.problem, options.tile, options.cluster
        )
    ]
    orders = options.orders or EXPLORED
    _warn_if_slow(sum(math.prod(setting.grid) for setting in settings) * len(orders))
    explore.write(options.out, settings, orders, progress=_progress)
    print(f"{len(settings)} launches, {len(orders)} orders: {options.out}")


def _setting(options: argparse.Namespace) -> report.Setting:
    setting = _launch(
        options.machine, options.problem, options.tile, options.cluster, options.persistence
    )
    return dataclasses.replace(setting, multicast=not options.no_multicast)


def _launch(
    machine: str,
    problem: tuple[int, int, int],
    tile: tuple[int, ...],
    cluster: tuple[int, int],
    persistence: Persistence,
) -> report.Setting:
    setting = report.Setting(
        machine=machine_named(machine),
        problem=problem,
        tile=(tile[0], tile[1], tile[2] if len(tile) == 3 else 64),
        cluster=cluster,
        persistence=persistence,
        multicast=True,
    )
    if math.prod(setting.grid) > TILE_LIMIT:
        rows, cols = setting.grid
        raise ValueError(f"the grid must have at most {TILE_LIMIT} tiles, got {rows} x {cols}")
    return setting


def _warn_if_slow(tiles: int) -> None:
    """Says how long what follows takes, where nobody would expect it to."""
    if tiles > SLOW_TILES:
        seconds = tiles * SECONDS_PER_TILE
        time = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
        print(f"{tiles} tiles to predict: about {time}", file=sys.stderr)


def _predicted(
    schedule: Schedule, setting: report.Setting, options: argparse.Namespace
) -> Prediction:
    return predict(
        schedule,
        machine=setting.machine,
        tile=setting.tile,
        k=setting.problem[2],
        cluster=setting.cluster,
        persistence=options.persistence,
        workers=options.workers,
        multicast=setting.multicast,
    )


def _progress(text: str) -> None:
    """Rewrites one line of the terminal that the errors go to, if there is one."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
