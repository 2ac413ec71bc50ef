"""The page that explores orders: what it holds, and that it plays and chooses in a browser."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedules import build
from schedules.__main__ import main
from schedules.model import H100, H200, predict, predict_tiles
from schedules.report import Setting
from tests import browser

pytest.importorskip("plotly", reason="the viz extra is not installed")

from schedules import explore

ORDERS = ("raster", "swizzle:4", "hilbert")
SETTINGS = [
    Setting(machine, (1024, size, 512), (64, 64, 64), (1, 1), "static", True)
    for machine, size in ((H200, 2048), (H100, 4096))
]
PLOT = "document.querySelector('.js-plotly-plot')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("explore") / "order.html"
    explore.write(target, SETTINGS, ORDERS)
    return target


def test_each_tile_has_its_wave_and_its_share_of_hits() -> None:
    schedule = build("hilbert", 16, 32)
    launch: dict[str, Any] = {"machine": H200, "tile": (64, 64, 64), "k": 512}
    tiles = predict_tiles(schedule, **launch)
    assert tiles.prediction == predict(schedule, **launch)
    assert tiles.wave.tolist() == (schedule.positions() // 132).tolist()
    # All that tiles ask for and memory answers, tile by tile, is what memory answers in all.
    asked = tiles.prediction.requested_bytes / len(schedule)
    from_memory = np.sum(1 - tiles.l2_share) * asked
    assert from_memory == pytest.approx(tiles.prediction.dram_read_bytes, rel=1e-6)
    # The first wave finds nothing there but what its own tiles have just read.
    assert tiles.l2_share[tiles.wave == 0].mean() < tiles.l2_share[tiles.wave > 0].mean()


def test_the_page_is_one_file_with_plotly_and_no_script_of_ours(page: Path) -> None:
    html = page.read_text()
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", html)
    assert html.count('class="plotly-graph-div"') == 1
    assert html.count("</script>") <= 4
    assert page.stat().st_size < 7e6
    for label in (*ORDERS, "H200 1024x2048x512", "H100 1024x4096x512", "play", "pause"):
        assert label in html


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "{}", "hilbrt"], "there is no order 'hilbrt'; did you mean 'hilbert'"),
        (["--out", "{}", "--machine", "h200,h999"], "machine must be one of .*, got 'h999'"),
        (["--out", "{}", "--tile", "128x128,7"], "--tile: must be 2 or 3 positive integers"),
        (["--out", "{}", "--tile", "1x1"], "at most 4194304 tiles, got 8192 x 8192"),
        ([], "the following arguments are required: --out"),
    ],
)
def test_anything_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    target = tmp_path / "order.html"
    with pytest.raises(SystemExit) as stop:
        main(["explore", *(argument.format(target) for argument in arguments)])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("\n") == 1
    assert not target.exists()


def test_without_plotly_it_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "schedules.explore", None)
    monkeypatch.delattr("schedules.explore")
    with pytest.raises(SystemExit):
        main(["explore", "--out", "order.html"])
    assert capsys.readouterr().err.endswith("the explorer needs plotly: pip install '.[viz]'\n")


def test_the_command_writes_what_it_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "order.html"
    sizes = ["--problem", "1024x1024x512", "--tile", "128x128,64x64", "--cluster", "1x1,2x1"]
    assert main(["explore", "hilbert", "--machine", "b200", *sizes, "--out", str(target)]) == 0
    assert capsys.readouterr().out == f"4 launches, 1 orders: {target}\n"
    assert "B200 1024x1024x512, tile 64x64, cluster 2x1" in target.read_text()


def test_an_order_whose_name_depends_on_the_grid_is_one_entry_of_the_menu(tmp_path: Path) -> None:
    target = tmp_path / "order.html"
    # The shift follows from the number of columns.
    settings = [
        Setting(H200, (256, columns * 64, 64), (64, 64, 64), (1, 1), "static", True)
        for columns in (8, 64)
    ]
    explore.write(target, settings, ["log_swizzle", "log_swizzle", "raster"])
    assert build("log_swizzle", *settings[0].grid).name != build("log_swizzle", 4, 64).name
    labels = re.findall('"label":"(log_swizzle[^"]*|raster)"', target.read_text())
    assert labels == ["log_swizzle", "raster"] * 2


@pytest.mark.skipif(browser.found() is None, reason="this computer has no Chromium")
@pytest.mark.parametrize("width", [400, 1400])
def test_in_a_browser_it_plays_and_chooses(page: Path, tmp_path: Path, width: int) -> None:
    with browser.page(str(browser.found()), tmp_path) as tab:
        tab.open(page, width=width)
        tab.wait_for("document.querySelectorAll('.updatemenu-button').length == 2")

        def shown() -> Any:
            """Returns the range of the covers, the wave, and the captions that can be seen."""
            captions = f"{PLOT}.data.filter(t => t.text && t.visible).map(t => t.text[0])"
            wave = "document.querySelector('.slider-label').textContent"
            cover = f"{PLOT}.layout.coloraxis2.cmax"
            return json.loads(tab.value(f"JSON.stringify([{cover}, {wave}, {captions}])"))

        cover, wave, captions = shown()
        assert (cover, wave) == (1e6, "wave 1 to 4")
        first = predict(build("raster", 16, 32), machine=H200, tile=(64, 64, 64), k=512)
        assert captions[0].startswith(f"<b>{first.dram_read_bytes / 1e9:.2f} GB</b>")
        assert len(captions) == 2

        tab.click(".updatemenu-button")
        tab.wait_for(f"{PLOT}.layout.sliders[0].active == 2")
        assert shown()[1] == "wave 3 of 4"
        assert shown()[0] < 100
        tab.wait_for(f"{PLOT}.layout.sliders[0].active == 4")

        tab.click(".updatemenu-header")
        tab.click(".updatemenu-dropdown-button:last-of-type")
        tab.wait_for(f"{PLOT}.layout.sliders[0].steps.length == 9")
        assert shown()[1] == "wave 1 to 8"
        assert shown()[2] != captions
        assert tab.value(f"{PLOT}.scrollWidth <= {width}")
        assert tab.complaints == []
