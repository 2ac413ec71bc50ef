"""A page that walks through orders wave by wave, two side by side; needs plotly (the extra viz).

The page holds plotly's own script and no other: menus, slider and buttons are plotly's, and what
can be chosen is computed beforehand. Menus of plotly do not know of each other, so each sets
properties that no other sets:

| control | sets |
|---|---|
| launch | the numbers of every trace, the colours of its waves, and how many steps the slider has |
| left, right | which traces of a side can be seen |
| slider, play | the range of the colour axis that all covers share |

A cover lies over each picture: clear on the current wave, pale on those before it, grey on those
to come.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from schedules.model import TileByTile, predict_tiles
from schedules.report import Setting
from schedules.spec import build
from schedules.table import Schedule

_HEIGHT, _ABOVE, _BELOW = 960, 210, 10
"""Of the figure in pixels, with what its menus take above."""

_ROWS = (0.4, 0.4, 0.08)
"""What the rows take of the height: waves, hits, and what an order costs."""

_GAP = 0.06
"""Between rows, of the height; the lower one holds the colour bar."""

_BAR = _ROWS[2] + _GAP
"""Where the colour bar hangs: from the lower edge of the hits."""

_ALL = {"cmin": -1e6, "cmax": 1e6}
"""A range in whose middle, where covers are clear, lie all waves."""

_TRACES = 5
"""Of one order on one side: two pictures, their covers, the caption."""

_ALL_WAVES = "all"
_STEP_MILLISECONDS = 500

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Orders of tiles</title>
<style>
body {{ margin: 0 auto; max-width: 1400px; font-family: sans-serif; color: #222; }}
h1 {{ margin: 12px 12px 0; font-size: 20px; }}
p {{ margin: 6px 12px; line-height: 1.4; }}
</style>
</head>
<body>
<h1>Orders of tiles</h1>
<p>A GPU computes a matrix product in tiles, one wave of them at a time. What the tiles of a wave
share is fetched once. Choose a launch and two orders, then play: tiles that are done turn pale,
those to come are grey. Everything is predicted by <code>schedules.model</code>, not measured.</p>
{figure}
</body>
</html>
"""


@dataclasses.dataclass(frozen=True)
class _Launch:
    """One entry of the menu of launches, with what was predicted for each order."""

    setting: Setting
    orders: dict[str, TileByTile]

    @property
    def label(self) -> str:
        return _label(self.setting)

    @property
    def waves(self) -> int:
        return next(iter(self.orders.values())).prediction.waves

    def numbers(self, order: str) -> list[dict[str, Any]]:
        """Returns what each trace of an order shows: two pictures, their covers, the caption."""
        tiles = self.orders[order]
        wave = tiles.wave.astype(np.int16) + 1
        hits = np.round(100 * tiles.l2_share).astype(np.int16)
        return [{"z": wave}, {"z": wave}, {"z": hits}, {"z": wave}, {"text": [self.caption(order)]}]

    def caption(self, order: str) -> str:
        prediction = self.orders[order].prediction
        read, least = prediction.dram_read_bytes, prediction.compulsory_read_bytes
        return (
            f"<b>{read / 1e9:.2f} GB</b> read from DRAM,<br>"
            f"{read / least:.1f} times the operands;<br>"
            f"<b>{prediction.l2_hit_rate:.1%}</b> of L2 look-ups hit"
        )


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
    html = _figure(launches).to_html(
        include_plotlyjs=True,
        full_html=False,
        auto_play=False,
        config={"responsive": True, "displayModeBar": False},
    )
    Path(target).write_text(_PAGE.format(figure=html), encoding="utf-8")


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


def _figure(launches: list[_Launch]) -> go.Figure:
    orders = list(launches[0].orders)
    most = max(launch.waves for launch in launches)
    figure = make_subplots(
        rows=3,
        cols=2,
        row_heights=list(_ROWS),
        horizontal_spacing=0.03,
        vertical_spacing=_GAP,
    )
    for side, chosen in enumerate((orders[0], orders[-1])):
        for order in orders:
            _add_order(figure, launches[0], order, side + 1, visible=order == chosen)
    figure.frames = [
        go.Frame(name=name, layout={"coloraxis2": window})
        for name, window in [*_windows(most), (_ALL_WAVES, _ALL)]
    ]
    _lay_out(figure, most)
    figure.update_layout(coloraxis3=_hit_colours(launches))
    _add_controls(figure, launches)
    return figure


def _add_order(figure: go.Figure, launch: _Launch, order: str, col: int, *, visible: bool) -> None:
    """Adds the traces of one order on one side, in the sequence of `_Launch.numbers`."""
    place = "row %{y}, column %{x}"
    pictures = [
        (1, {"coloraxis": "coloraxis", "hovertemplate": place + "<br>wave %{z}<extra></extra>"}),
        (1, {"coloraxis": "coloraxis2", "hoverinfo": "skip"}),
        (2, {"coloraxis": "coloraxis3", "hovertemplate": place + "<br>%{z}%<extra></extra>"}),
        (2, {"coloraxis": "coloraxis2", "hoverinfo": "skip"}),
    ]
    *grids, caption = launch.numbers(order)
    for (row, look), numbers in zip(pictures, grids, strict=True):
        figure.add_trace(go.Heatmap(**numbers, **look, visible=visible), row=row, col=col)
    figure.add_trace(
        go.Scatter(x=[0], y=[0], mode="text", hoverinfo="skip", visible=visible, **caption),
        row=3,
        col=col,
    )


def _windows(waves: int) -> list[tuple[str, dict[str, float]]]:
    """Returns, for each wave, the range of the covers' colours that has it in the middle."""
    return [
        (str(wave), {"cmin": wave - waves - 0.5, "cmax": wave + waves + 0.5})
        for wave in range(1, waves + 1)
    ]


def _cover(waves: int) -> list[list[Any]]:
    """Returns the covers' colours: the middle of `2 * waves + 1` bands is clear."""
    start, end = waves / (2 * waves + 1), (waves + 1) / (2 * waves + 1)
    pale, clear, grey = "rgba(255,255,255,0.7)", "rgba(255,255,255,0)", "rgb(226,226,226)"
    return [[0, pale], [start, pale], [start, clear], [end, clear], [end, grey], [1, grey]]


def _wave_colours(waves: int) -> dict[str, Any]:
    """Returns the colour axis of the waves: violet to yellow, every other one a shade lighter."""
    bands: list[list[Any]] = []
    for wave in range(waves):
        scale = "Viridis" if wave % 2 == 0 else [[0, "#6d3f80"], [0.5, "#4fa8a4"], [1, "#fff3a0"]]
        (colour,) = sample_colorscale(scale, [wave / max(1, waves - 1)])
        bands += [[wave / waves, colour], [(wave + 1) / waves, colour]]
    return {"colorscale": bands, "cmin": 0.5, "cmax": waves + 0.5, "showscale": False}


def _hit_colours(launches: list[_Launch]) -> dict[str, Any]:
    """Returns the colour axis of the hits, from what few tiles are below to all."""
    shares = [tiles.l2_share.ravel() for launch in launches for tiles in launch.orders.values()]
    lowest = 10 * int(10 * np.quantile(np.concatenate(shares), 0.01))
    bar = {"orientation": "h", "thickness": 8, "ticksuffix": "%", "nticks": 6, "outlinewidth": 0}
    return {
        "colorscale": "RdYlBu",
        "cmin": min(lowest, 90),
        "cmax": 100,
        "colorbar": {**bar, "len": 0.95, "y": _BAR, "yanchor": "top", "ypad": 4},
    }


def _lay_out(figure: go.Figure, most: int) -> None:
    figure.update_xaxes(visible=False, fixedrange=True)
    figure.update_yaxes(visible=False, fixedrange=True, autorange="reversed")
    headings = {
        "y": "Wave of each tile, violet first, yellow last",
        "y3": "Share of its operands that the L2 had",
    }
    figure.update_layout(
        template="plotly_white",
        height=_HEIGHT,
        margin={"l": 12, "r": 12, "t": _ABOVE, "b": _BELOW},
        showlegend=False,
        annotations=[
            {
                "text": f"<b>{text}</b>",
                "xref": "paper",
                "yref": f"{axis} domain",
                "x": 0,
                "y": 1,
                "yanchor": "bottom",
                "showarrow": False,
            }
            for axis, text in headings.items()
        ],
        coloraxis2={"colorscale": _cover(most), "showscale": False, **_ALL},
    )


def _add_controls(figure: go.Figure, launches: list[_Launch]) -> None:
    orders = list(launches[0].orders)
    plot = _HEIGHT - _ABOVE - _BELOW

    def above(pixels: int) -> float:
        return 1 + pixels / plot

    look = {"yanchor": "top", "xanchor": "left", "pad": {"t": 0}}
    per_side = _TRACES * len(orders)
    menus: list[dict[str, Any]] = [
        {"y": above(_ABOVE - 5), "x": 0, "buttons": _launch_buttons(launches)}
    ]
    for side, chosen in enumerate((0, len(orders) - 1)):
        buttons = _order_buttons(orders, range(side * per_side, (side + 1) * per_side))
        menus.append({"y": above(57), "x": side * 0.515, "buttons": buttons, "active": chosen})
    menus.append(
        {
            "type": "buttons",
            "direction": "left",
            "showactive": False,
            "y": above(_ABOVE - 45),
            "x": 0,
            "buttons": _play_buttons(launches[0]),
        }
    )
    figure.update_layout(
        updatemenus=[{**look, **menu} for menu in menus],
        sliders=[{**_slider(launches[0]), "y": above(_ABOVE - 80)}],
        coloraxis=_wave_colours(launches[0].waves),
    )


def _launch_buttons(launches: list[_Launch]) -> list[dict[str, Any]]:
    buttons = []
    for launch in launches:
        once = [numbers for order in launch.orders for numbers in launch.numbers(order)]
        traces = {key: [numbers.get(key) for numbers in once * 2] for key in ("z", "text")}
        slider = _slider(launch)
        layout = {
            "coloraxis": _wave_colours(launch.waves),
            "coloraxis2.cmin": _ALL["cmin"],
            "coloraxis2.cmax": _ALL["cmax"],
            "sliders[0].steps": slider["steps"],
            "sliders[0].active": slider["active"],
            "updatemenus[3].buttons": _play_buttons(launch),
        }
        buttons.append({"label": launch.label, "method": "update", "args": [traces, layout]})
    return buttons


def _order_buttons(orders: list[str], traces: range) -> list[dict[str, Any]]:
    return [
        {
            "label": order,
            "method": "restyle",
            "args": [
                {"visible": [place // _TRACES == chosen for place in range(len(traces))]},
                list(traces),
            ],
        }
        for chosen, order in enumerate(orders)
    ]


def _timing(milliseconds: int) -> dict[str, Any]:
    return {
        "frame": {"duration": milliseconds, "redraw": True},
        "transition": {"duration": 0},
        "mode": "immediate",
    }


def _play_buttons(launch: _Launch) -> list[dict[str, Any]]:
    names = [*map(str, range(1, launch.waves + 1)), _ALL_WAVES]
    play = {**_timing(_STEP_MILLISECONDS), "fromcurrent": False}
    return [
        {"label": "▶ play", "method": "animate", "args": [names, play]},
        {"label": "❚❚ pause", "method": "animate", "args": [[None], _timing(0)]},
    ]


def _slider(launch: _Launch) -> dict[str, Any]:
    names = [*map(str, range(1, launch.waves + 1)), _ALL_WAVES]
    return {
        "active": launch.waves,
        "yanchor": "top",
        "currentvalue": {
            "prefix": "wave ",
            "font": {"color": "#222", "size": 13},
        },
        "ticklen": 0,
        "minorticklen": 0,
        "font": {"color": "rgba(0,0,0,0)"},
        "steps": [
            {
                "label": f"{name} of {launch.waves}"
                if name != _ALL_WAVES
                else f"1 to {launch.waves}",
                "method": "animate",
                "args": [[name], _timing(0)],
            }
            for name in names
        ],
    }
