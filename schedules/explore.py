"""A page that walks through orders wave by wave, two side by side.

`explorer.html` is the page without its numbers. Its controls are buttons, menus and a slider. Its
script draws two pictures for each side: the waves, and the L2's hits. Everything that can be chosen
is computed here and written into the page.
"""

import base64
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from schedules.model import TileByTile, predict_tiles
from schedules.report import Setting
from schedules.spec import build
from schedules.table import Schedule

_PLACE = "DATA"
"""In the page, where the numbers go."""


@dataclasses.dataclass(frozen=True)
class _Launch:
    """One entry of the menu of launches, with the prediction of each order."""

    setting: Setting
    orders: dict[str, TileByTile]

    @property
    def as_json(self) -> dict[str, Any]:
        rows, cols = self.setting.grid
        waves = next(iter(self.orders.values())).prediction.waves
        orders = {name: _numbers(tiles) for name, tiles in self.orders.items()}
        sizes = {"rows": rows, "cols": cols, "waves": waves}
        return {"label": _label(self.setting), **sizes, "orders": orders}


def write(
    target: str | os.PathLike[str],
    settings: Sequence[Setting],
    orders: Sequence[str],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Writes the page: one file of HTML that needs no other file and no network.

    Args:
        target: The file to write.
        settings: The launches that the page offers; it opens with the first.
        orders: The orders that it offers; it opens with the first beside the last.
        progress: Told what is being computed.

    Raises:
        ValueError: There is no setting or no order, or one is not legal.
        OSError: The file cannot be written.
    """
    if not settings or not orders:
        raise ValueError(
            f"settings and orders must not be empty, got {len(settings)} and {len(orders)}"
        )
    # All of them first: a misspelt order should not wait for the others.
    schedules = [{order: build(order, *setting.grid) for order in orders} for setting in settings]
    launches = [
        _predicted(setting, row, progress) for setting, row in zip(settings, schedules, strict=True)
    ]
    data = {"lowest": _lowest(launches), "launches": [launch.as_json for launch in launches]}
    # Nothing in the numbers may end the script that they are in.
    written = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = resources.files("schedules").joinpath("explorer.html").read_text(encoding="utf-8")
    Path(target).write_text(page.replace(_PLACE, written, 1), encoding="utf-8")


def _label(setting: Setting) -> str:
    m, n, k = setting.problem
    tile, cluster = (f"{size[0]}x{size[1]}" for size in (setting.tile, setting.cluster))
    return f"{setting.machine.name} {m}x{n}x{k}, tile {tile}, cluster {cluster}"


def _predicted(
    setting: Setting, schedules: dict[str, Schedule], progress: Callable[[str], None]
) -> _Launch:
    predictions = {}
    for order, schedule in schedules.items():
        progress(f"{_label(setting)}: {order}")
        predictions[order] = predict_tiles(
            schedule,
            machine=setting.machine,
            tile=setting.tile,
            k=setting.problem[2],
            cluster=setting.cluster,
            persistence=setting.persistence,
        )
    return _Launch(setting, predictions)


def _numbers(tiles: TileByTile) -> dict[str, Any]:
    """Returns what the page shows of an order: its totals, and two numbers for each tile."""
    prediction = tiles.prediction
    read, least = prediction.dram_read_bytes, prediction.compulsory_read_bytes
    return {
        "totals": [
            [f"{read / 1e9:.2f} GB", "read from DRAM"],
            [f"{read / least:.1f} x", "the operands"],
            [f"{prediction.l2_hit_rate:.1%}", "of L2 look-ups hit"],
        ],
        # Waves count from 1: the page's 0 stands for all of them.
        "wave": _packed(tiles.wave.astype("<i2") + np.int16(1)),
        "hits": _packed(np.round(100 * tiles.l2_share).astype(np.uint8)),
    }


def _packed(numbers: Any) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


def _lowest(launches: Sequence[_Launch]) -> int:
    """Returns the share of hits in percent that few tiles are below: where the colours begin."""
    shares = [tiles.l2_share.ravel() for launch in launches for tiles in launch.orders.values()]
    return min(90, 10 * int(10 * np.quantile(np.concatenate(shares), 0.01)))
