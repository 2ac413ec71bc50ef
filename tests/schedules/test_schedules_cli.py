"""`python -m schedules`: what it prints, and one line with exit status 2 for anything wrong."""

import argparse
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schedules import build, draw, hilbert, split_k
from schedules.__main__ import COMPARED, _parser, main
from schedules.model import H100, predict

SMALL = ["--problem", "1024x2048x512", "--tile", "128x128"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err


def options(command: str) -> Iterator[argparse.Action]:
    (commands,) = (x for x in _parser()._actions if isinstance(x, argparse._SubParsersAction))
    yield from commands.choices[command]._actions


@pytest.mark.parametrize("command", ["show", "compare", "predict", "explore"])
def test_help_tells_each_default(command: str) -> None:
    def written(value: Any) -> str:
        if isinstance(value, list):
            return ",".join(map(written, value))
        return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)

    told = 0
    for option in options(command):
        found = re.search(r"\bdefault (\d+x\S+|h200)$", option.help or "")
        if found:
            told += 1
            assert found[1] == written(option.default), option.dest
    assert told >= (command != "show")


def test_progress_is_for_terminals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    explore = ["explore", "raster", "--machine", "h200", *SMALL, "--out", str(tmp_path / "o.html")]
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)  # noqa: B023
        assert main(explore) == 0
        assert ("\r" in capsys.readouterr().err) == is_terminal


def test_show_draws_numbers_where_they_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    header, _, picture = printed(capsys, "show", "hilbert").partition("\n")
    assert header == "hilbert, 8 x 8 tiles: 63 steps, 0 jumps"
    assert picture == draw.numbers(hilbert(8, 8)) + "\n"
    assert draw.path(hilbert(30, 30)) in printed(capsys, "show", "hilbert", "--grid", "30x30")
    assert draw.waves(hilbert(50, 50), 132) in printed(capsys, "show", "hilbert", "--grid", "50x50")


def test_show_draws_the_style_and_the_colour_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    order = ["show", "swizzle:3", "--grid", "6x7"]
    schedule = build("swizzle:3", 6, 7)
    assert draw.path(schedule) in printed(capsys, *order, "--style", "path")
    waves = printed(capsys, *order, "--style", "waves", "--workers", "5")
    assert draw.waves(schedule, 5) in waves
    assert "one letter: 5 tiles at a time" in waves
    assert "\x1b" not in waves
    painted = printed(capsys, *order, "--colour", "always", "--workers", "5")
    assert draw.numbers(schedule, workers=5, colour=True) in painted


def test_colour_is_for_terminals_that_want_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b[" in printed(capsys, "show", "hilbert")
    assert "\x1b[" not in printed(capsys, "show", "hilbert", "--colour", "never")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in printed(capsys, "show", "hilbert")
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b[" not in printed(capsys, "show", "hilbert")


def test_show_draws_pieces_of_k_and_says_what_a_letter_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = ["show", "hilbert", "--grid", "3x4", "--split-k", "5"]
    work = split_k(hilbert(3, 4), 64, 5)
    monkeypatch.setenv("COLUMNS", "80")
    header, _, picture = printed(capsys, *order).partition("\n")
    assert header == "hilbert, 3 x 4 tiles: 60 pieces, along 64 steps of k"
    assert picture == draw.pieces(work) + "\none letter: a piece\n"
    long = split_k(hilbert(3, 4), 130, 5, 2)
    shown = printed(capsys, *order, "--steps", "130", "--split-last", "2", "--workers", "9")
    assert draw.pieces(long, 9) in shown
    assert shown.endswith("one letter: 9 pieces at a time, 3 steps of k\n")
    assert max(map(len, shown.splitlines())) <= 80


def test_show_writes_a_png(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the viz extra is not installed")
    target = tmp_path / "order.png"
    assert str(target) in printed(capsys, "show", "hilbert", "--png", str(target))
    assert target.read_bytes().startswith(b"\x89PNG")
    message = refused(capsys, "show", "hilbert", "--png", str(tmp_path / "none" / "order.png"))
    assert "cannot write" in message
    assert "No such file" in message


def test_compare_ranks_by_what_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"dram-read": "dram_read_bytes", "l2-sectors": "l2_sectors", "hit-rate": "l2_hit_rate"}
    orders = ["raster", "hilbert", "swizzle:4"]
    for by, key in keys.items():
        arguments = ["compare", *orders, "--machine", "H100", *SMALL, "--by", by]
        figures = json.loads(printed(capsys, *arguments, "--json"))
        assert sorted(figures) == sorted(orders)
        values = [figures[order][key] for order in figures]
        assert values == sorted(values, reverse=by == "hit-rate")
        table = printed(capsys, *arguments).splitlines()
        assert table[:2] == [
            "H100: 1024 x 2048 x 512",
            "tiles of 128 x 128 x 64, no clusters, static",
        ]
        assert "8 x 16 = 128 units of work, 132 at a time: 1 wave, 97% full" in table[2]
        assert [line.split()[1] for line in table[5:8]] == list(figures)


def test_tiles_of_a_triangle_are_counted_as_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    problem = ["--problem", "1024x1024x512", "--tile", "128x128"]
    for command in ("compare", "predict"):
        table = printed(capsys, command, "triangle:hilbert", *problem)
        assert "36 of 8 x 8 units of work, 132 at a time: 1 wave, 27% full" in table


def test_compare_takes_a_selection_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    table = printed(capsys, "compare", *SMALL).splitlines()
    assert len(table) == 5 + len(COMPARED) + 2


def test_predict_prints_what_the_model_says(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["predict", "hilbert", "--machine", "h100", *SMALL, "--cluster", "2x1"]
    arguments += ["--persistence", "dynamic", "--workers", "10", "--no-multicast"]
    expected = predict(
        hilbert(4, 16),
        machine=H100,
        tile=(128, 128, 64),
        k=512,
        cluster=(2, 1),
        persistence="dynamic",
        workers=10,
        multicast=False,
    )
    (figures,) = json.loads(printed(capsys, *arguments, "--json")).values()
    assert figures["l2_sectors"] == expected.l2_sectors
    assert figures["dram_read_bytes"] == expected.dram_read_bytes
    text = printed(capsys, *arguments)
    assert text.startswith("hilbert on H100: 1024 x 2048 x 512\ntiles of 128 x 128 x 64, clusters")
    assert "without multicast, dynamic" in text
    assert f"{expected.l2_hit_rate:.1%}" in text
    assert f"{expected.dram_read_bytes / 1e6:.2f} MB" in text
    assert f"{expected.waves} waves" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["draw"], "invalid choice: 'draw'"),
        (["show"], "the following arguments are required: ORDER"),
        (["show", "hilbrt"], "there is no order 'hilbrt'; did you mean 'hilbert'"),
        (["show", "hilbert", "--split-k", "65"], "parts must be at most the 64 steps of k, got 65"),
        (["show", "hilbert", "--steps", "8"], "--steps need --split-k"),
        (["show", "hilbert", "--split-k", "2", "--png", "x"], "so leave out --png and --style"),
        (["show", "triangle:raster", "--split-k", "2"], "not of a triangle"),
        (["show", "swizzle:0"], "group must be an integer of at least 1, got 0"),
        (["show", "hilbert", "--grid", "8"], "--grid: must be 2 positive integers .*, got '8'"),
        (["show", "hilbert", "--grid", "8x0"], "--grid: must be .* positive .*, got '8x0'"),
        (["show", "hilbert", "--grid", "8x-1"], "--grid: must be .*, got '8x-1'"),
        (["show", "hilbert", "--grid", "70000x1"], "rows must be at most 65535, got 70000"),
        (["show", "hilbert", "--grid", "9000x9000"], "at most 4194304 tiles, got 9000 x 9000"),
        (
            ["compare", "--problem", "9999999x9999999x64"],
            "at most 4194304 tiles, got 39063 x 78125",
        ),
        (["show", "hilbert", "--workers", "0"], "--workers: must be a positive integer, got '0'"),
        (
            ["show", "hilbert", "--workers", "9999999", "--style", "waves"],
            "workers must be at most",
        ),
        (["show", "hilbert", "--style", "oil"], "--style: invalid choice: 'oil'"),
        (["compare", "hilbert", "raste"], "there is no order 'raste'; did you mean 'raster'"),
        (["compare", "--machine", "h999"], "machine must be one of h100, .*, got 'h999'"),
        (["compare", "--problem", "8192"], "--problem: must be 3 positive integers"),
        (["compare", "--tile", "128"], "--tile: must be 2 or 3 positive integers"),
        (["compare", "--cluster", "200x1"], "must be at most the 132 SMs of H200, got 200"),
        (["compare", "--by", "luck"], "--by: invalid choice: 'luck'"),
        (["predict"], "the following arguments are required: ORDER"),
        (["predict", "hilbert", "--persistence", "half"], "--persistence: invalid choice: 'half'"),
        (["predict", "hilbert", "--workers", "133"], "workers must be at most the 132 clusters"),
    ],
)
def test_anything_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    error = refused(capsys, *arguments)
    assert re.search(message, error), error


def test_without_a_command_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    assert text.startswith("usage: python -m schedules")
    assert "explore" in text
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert re.fullmatch(r"pallas-gemm [0-9.]+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([command, "--help"] for command in ("show", "compare", "predict", "explore")),
        ["compare", "nested_swizzle:16x8", "raster", *SMALL, "--cluster", "2x2"],
        ["predict", "hilbert", "--cluster", "1x2", "--no-multicast", "--persistence", "dynamic"],
    ],
)
def test_80_columns_are_enough(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        main(arguments)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_slow_prediction_says_so_before_it_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed(capsys, "compare", "raster", *SMALL)
    assert main(["compare", "raster", *SMALL]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("schedules.__main__.SLOW_TILES", 100)
    assert main(["compare", "raster", "hilbert", *SMALL]) == 0
    assert capsys.readouterr().err == "256 tiles to predict: about 0 s\n"


def test_runs_as_a_module_and_survives_a_reader_that_stops() -> None:
    module = [sys.executable, "-m", "schedules"]
    shown = subprocess.run([*module, "show", "raster"], capture_output=True, check=True, text=True)
    assert shown.stdout.splitlines()[-1] == "56 57 58 59 60 61 62 63"
    wrong = subprocess.run([*module, "show", "x"], capture_output=True, check=False, text=True)
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    with subprocess.Popen(
        [*module, "show", "raster", "--grid", "600x600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_a_terminal_without_box_characters_gets_question_marks() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "schedules", "show", "hilbert", "--style", "path"],
        env={"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert "?" in shown.stdout
