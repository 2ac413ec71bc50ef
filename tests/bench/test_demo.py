"""The demo: every step runs, and shows what it says."""

import contextlib
import io
import itertools
import json
import re
from collections.abc import Iterator

import pytest
from rich.console import Console
from rich.text import Text

from bench import demo, gemm_bench, machine, report
from pallas_gemm.problem import Problem
from schedules import build, model
from schedules.__main__ import main


@pytest.fixture
def console() -> Console:
    """A console of which the output can be read."""
    return Console(file=io.StringIO(), width=80)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


ORDERS = ("swizzle:8",)
"""Of those whose cost is predicted: each takes seconds, and the next one shows nothing new."""
KERNELS = dict(itertools.islice(demo.COMPILED.items(), 2))
"""Of those that are compiled, likewise."""


@pytest.fixture(scope="module", autouse=True)
def one_run() -> Iterator[None]:
    """Figures that are compared with each other are of one simulated run, and no mean of four."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_DRAWS", 1)
        yield


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What each step of the program prints, by its title; the program runs once."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        patch.setattr(demo, "COMPARED", ORDERS)
        patch.setattr(demo, "COMPILED", KERNELS)
        demo.main()
    text = out.getvalue()
    titles = [step.title for step in demo.STEPS]
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    assert "Done in" in text[places[-1] :]
    parts = itertools.pairwise([*places, len(text)])
    return {title: text[begin:end] for title, (begin, end) in zip(titles, parts, strict=True)}


def test_every_order_is_drawn_within_a_terminal(printed: dict[str, str]) -> None:
    picture = printed[demo.STEPS[0].title]
    for orders in demo.PICTURED:
        assert all(order in picture for order in orders)
    assert max(len(line) for line in picture.splitlines()) <= 80


def test_a_coloured_picture_is_the_plain_one_with_colours() -> None:
    plain = demo.side_by_side(("raster", "hilbert"), (3, 5))
    coloured = demo.side_by_side(("raster", "hilbert"), (3, 5), colour=True)
    without = Console(file=io.StringIO(), width=200)
    assert "\x1b[" in coloured
    with without.capture() as capture:
        without.print(Text.from_ansi(coloured), end="")
    assert [line.rstrip() for line in capture.get().splitlines()] == plain.splitlines()


def test_every_order_is_predicted_for_every_machine(printed: dict[str, str]) -> None:
    table = printed[demo.STEPS[1].title]
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line.split()}
    for order in ORDERS:
        # The name, and for each machine a share of hits, a size and its unit.
        assert len(rows[order]) == 1 + 3 * len(demo.LAUNCHES)
    for launch in demo.LAUNCHES:
        assert launch.machine.name in table


def test_the_commands_that_it_names_print_its_figures(
    printed: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed[demo.STEPS[1].title]
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}
    commands = re.findall("python -m schedules (.*)", text)
    assert len(commands) == len(demo.LAUNCHES)
    for place, command in enumerate(commands):
        main([*command.split(), "swizzle:8", "--json"])
        (prediction,) = json.loads(capsys.readouterr().out).values()
        hits, read, unit = rows["swizzle:8"][3 * place : 3 * place + 3]
        assert hits == f"{prediction['l2_hit_rate']:.0%}"
        assert (read, unit) == (f"{prediction['dram_read_bytes'] / 1e9:.2f}", "GB")


def test_where_there_is_a_gpu_products_are_timed(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = report.Row("2048x2048x2048", "", "ours", "refused", "made up", 1, 1)
    seen = []

    def run(options: gemm_bench.Options, *_: object) -> report.Report:
        seen.append([case.name for case in options.cases])
        assert options.peers == ("xla", "ours")
        return report.Report({}, report.Limits({}), [row])

    monkeypatch.setattr(demo.gpu, "missing_gpu", lambda: None)
    monkeypatch.setattr(demo.session, "run", run)
    monkeypatch.setattr(machine, "open_bench", lambda _: None)
    demo.show_product(console)
    assert seen == [list(demo.TIMED)]


def test_without_a_compiler_the_demo_says_what_is_missing(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.offline, "missing_packages", lambda: ("nvidia-cuda-nvcc",))
    demo.show_compilation(console)
    assert shown(console).startswith("This needs nvidia-cuda-nvcc: the extra aot")


def test_the_program_simulates_a_product_and_compiles_the_kernel(printed: dict[str, str]) -> None:
    simulated, compiled = (printed[step.title] for step in demo.STEPS[2:])
    assert "the kernel, simulated" in simulated
    assert "The result is right" in simulated
    for name in KERNELS:
        # Registers, no spilled byte, shared memory, nothing serialized.
        assert re.search(rf"{re.escape(name)} +\d+ +0 +[\d,]+ +no *$", compiled, re.MULTILINE)


def test_what_the_program_compares_and_compiles_exists() -> None:
    problem = Problem(demo.SIZE, demo.SIZE, demo.SIZE)
    for config in demo.COMPILED.values():
        assert config.refusals(problem, demo.H200_DEVICE) == ()
    assert set(ORDERS) <= set(demo.COMPARED)
    for launch in demo.LAUNCHES:
        assert all(build(order, *launch.grid) for order in demo.COMPARED)
