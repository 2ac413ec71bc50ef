"""The page that explores orders: what it holds, and that it plays and chooses in a browser."""

import base64
import contextlib
import functools
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedules import build, explore
from schedules.__main__ import main
from schedules.model import H100, H200, predict, predict_tiles
from schedules.report import Setting
from tests import browser

ORDERS = ("raster", "swizzle:4", "hilbert")
SETTINGS = [
    Setting(machine, (1024, size, 512), (64, 64, 64), (1, 1), "static", True)
    for machine, size in ((H200, 2048), (H100, 4096))
]
IN_A_BROWSER = pytest.mark.skipif(browser.found() is None, reason="this computer has no Chromium")
TAB, SPACE, RIGHT = ("Tab", 9), (" ", 32), ("ArrowRight", 39)


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


def _data(page: Path) -> Any:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text())
    assert found
    return json.loads(found[1])


def test_the_page_is_one_file_that_needs_no_other(page: Path) -> None:
    html = page.read_text()
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", html)
    assert not re.search(r"https?://", html)
    assert page.stat().st_size < 100_000


def test_the_numbers_of_the_page_are_those_that_are_predicted(page: Path) -> None:
    data = _data(page)
    assert [launch["label"].split(",")[0] for launch in data["launches"]] == [
        "H200 1024x2048x512",
        "H100 1024x4096x512",
    ]
    assert all(list(launch["orders"]) == list(ORDERS) for launch in data["launches"])
    tiles = predict_tiles(build("hilbert", 16, 32), machine=H200, tile=(64, 64, 64), k=512)
    launch = data["launches"][0]
    shown = launch["orders"]["hilbert"]
    assert (launch["rows"], launch["cols"], launch["waves"]) == (16, 32, tiles.wave.max() + 1)
    waves = np.frombuffer(base64.b64decode(shown["wave"]), "<i2").reshape(16, 32)
    np.testing.assert_array_equal(waves, tiles.wave + 1)
    hits = np.frombuffer(base64.b64decode(shown["hits"]), np.uint8).reshape(16, 32)
    np.testing.assert_allclose(hits, 100 * tiles.l2_share, atol=0.51)
    assert shown["totals"][0][0] == f"{tiles.prediction.dram_read_bytes / 1e9:.2f} GB"


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
    for launch in _data(target)["launches"]:
        assert list(launch["orders"]) == ["log_swizzle", "raster"]


def _shown(tab: browser.Page) -> tuple[str, list[str]]:
    """Returns the wave that is shown, and the totals of both sides."""
    values = "[...document.querySelectorAll('.totals dd')].map(x => x.textContent)"
    wave = "document.getElementById('wave').textContent"
    found = json.loads(tab.value(f"JSON.stringify([{wave}, {values}])"))
    return found[0], found[1]


def _colour(tab: browser.Page, picture: str, tile: tuple[int, int]) -> list[int]:
    row, col = tile
    context = f"document.getElementById('{picture}').getContext('2d')"
    return json.loads(
        tab.value(
            f"JSON.stringify([...{context}.getImageData({col}, {row}, 1, 1).data].slice(0, 3))"
        )
    )


@IN_A_BROWSER
@pytest.mark.parametrize("width", [400, 1280])
def test_in_a_browser_it_plays_and_chooses(page: Path, tmp_path: Path, width: int) -> None:
    with browser.page(str(browser.found()), tmp_path) as tab:
        tab.open(page, width=width, height=800)
        wave, totals = _shown(tab)
        raster = predict(build("raster", 16, 32), machine=H200, tile=(64, 64, 64), k=512)
        assert wave == "all 4"
        assert totals[0] == f"{raster.dram_read_bytes / 1e9:.2f} GB"
        assert len(totals) == 6
        last = _colour(tab, "left-waves", (15, 31))
        assert last != _colour(tab, "left-waves", (0, 0))

        tab.click("#play")
        assert _shown(tab)[0] == "1 of 4"
        # What is to come is grey until its turn.
        assert _colour(tab, "left-waves", (15, 31)) == [226, 226, 226]
        tab.wait_for("document.getElementById('wave').textContent === '3 of 4'")
        tab.click("#play")
        assert tab.value("document.getElementById('play').textContent") == "play"
        tab.value("new Promise(done => setTimeout(done, 1200))", wait=True)
        assert _shown(tab)[0] == "3 of 4"
        tab.click("#play")
        tab.wait_for("document.getElementById('wave').textContent === 'all 4'")
        assert _colour(tab, "left-waves", (15, 31)) == last

        tab.value("document.getElementById('launch').selectedIndex = 1")
        tab.value("document.getElementById('launch').dispatchEvent(new Event('change'))")
        assert _shown(tab)[0] == "all 8"
        assert _shown(tab)[1] != totals
        assert tab.value(f"document.documentElement.scrollWidth <= {width}")
        assert tab.complaints == []


@IN_A_BROWSER
def test_the_keyboard_reaches_every_control(page: Path, tmp_path: Path) -> None:
    with browser.page(str(browser.found()), tmp_path) as tab:
        tab.open(page, width=1280, height=800)
        reached = []
        for _ in range(5):
            tab.press(*TAB)
            reached.append(tab.value("document.activeElement.id"))
        assert reached == ["launch", "play", "slider", "left-order", "right-order"]
        unnamed = (
            "[...document.querySelectorAll('select, button, input')].filter(x => !x.labels.length)"
        )
        assert tab.value(f"{unnamed}.every(x => x.textContent)")

        tab.value("document.getElementById('slider').focus()")
        tab.press(*RIGHT)
        assert _shown(tab)[0] == "1 of 4"
        tab.value("document.getElementById('play').focus()")
        tab.press(*SPACE)
        assert tab.value("document.getElementById('play').textContent") == "pause"
        tab.press(*SPACE)
        assert tab.value("document.getElementById('play').textContent") == "play"
        assert tab.complaints == []


@IN_A_BROWSER
def test_the_totals_are_above_the_fold(page: Path, tmp_path: Path) -> None:
    with browser.page(str(browser.found()), tmp_path) as tab:
        tab.open(page, width=1280, height=800)
        lowest = (
            "[...document.querySelectorAll('.totals')].map(x => x.getBoundingClientRect().bottom)"
        )
        assert tab.value(f"Math.max(...{lowest})") < 400


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    """Serves a folder on this computer: a page from a file may not look into another one."""

    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
            """Says nothing."""

    handler = functools.partial(Silent, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@IN_A_BROWSER
def test_it_is_dark_where_the_browser_or_the_site_is(page: Path, tmp_path: Path) -> None:
    theme = "document.documentElement.dataset.theme"
    site = page.parent / "site.html"
    site.write_text(f'<body data-theme="auto"><iframe src="{page.name}"></iframe></body>')
    with _served(page.parent) as address, browser.page(str(browser.found()), tmp_path) as tab:
        for scheme in ("light", "dark"):
            tab.prefer(scheme)
            tab.open(page)
            tab.wait_for(f"{theme} === '{scheme}'")
        background = "getComputedStyle(document.body).backgroundColor"
        assert tab.value(background) == "rgb(19, 20, 22)"

        tab.open(f"{address}/site.html")
        of_frame = f"frames[0].{theme}"
        for chosen, shown in (("auto", "dark"), ("light", "light"), ("dark", "dark")):
            tab.value(f"document.body.dataset.theme = '{chosen}'")
            tab.wait_for(f"{of_frame} === '{shown}'")
        assert [
            text for text in tab.complaints if "favicon" not in text and "404" not in text
        ] == []
