"""The pages of `docs`: their code runs, and raises the errors that they say it raises."""

import dataclasses
import doctest
import importlib
import pathlib
import re
import textwrap
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import pallas_gemm
import schedules
from bench import claims, tables
from pallas_gemm import equinox, flax, optax
from pallas_gemm.api import precompile as precompilation
from pallas_gemm.flax import linen, nnx
from schedules import draw

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
OWN = ("pallas_gemm", "schedules")
API = (DOCS / "api.md").read_text()

ELSEWHERE = {"layers.md": "flax/test_recipes.py", "parallel.md": "op/mesh/test_partition.py"}
"""Pages whose code another test runs, which looks at what it computes too."""

BLOCK = re.compile(
    r"(?P<unrun>^<!-- not run: .* -->\n)?"
    r"^(?P<indent> *)```python\n(?P<code>.*?)^ *```\n"
    r"(?:\n```text\n(?P<error>(?:\w*Error: |\w+: |must |captures ).*?)```)?",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of code, and the error that the page says it raises."""

    code: str
    error: str | None


def blocks(page: pathlib.Path) -> list[Block]:
    """Returns the blocks of a page that are to be run, in their order."""
    return [
        Block(textwrap.dedent(found["code"]), found["error"])
        for found in BLOCK.finditer(page.read_text())
        if not found["unrun"]
    ]


def one_line(text: str) -> str:
    return " ".join(text.split())


ALL = sorted([*DOCS.glob("*.md"), *DOCS.glob("ideas/*.md")])
PAGES = [page for page in ALL if page.name not in ELSEWHERE and blocks(page)]


# On a CPU no kernel has an order.
@pytest.mark.filterwarnings("ignore:schedule=.* has no effect")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(
    page: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A report on a kernel takes seconds, and is tested elsewhere.
    monkeypatch.setattr(precompilation, "_report", lambda *_: None)
    names: dict[str, Any] = {"__name__": "page"}
    for code, error in blocks(page):
        if error is None:
            exec(code, names)
            continue
        with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
            exec(code, names)
        assert one_line(error) in one_line(f"{type(raised.value).__name__}: {raised.value}")


def test_the_pages_have_code_and_errors() -> None:
    found = {page.stem: blocks(page) for page in PAGES}
    assert {"start", "orders", "fuse", "tutorial", "migrate", "troubleshooting"} <= set(found)
    assert sum(block.error is not None for block in found["troubleshooting"]) >= 9


@pytest.mark.parametrize("page", ELSEWHERE)
def test_a_page_that_is_run_elsewhere_is(page: str) -> None:
    assert f'"{page}"' in (ROOT / "tests" / ELSEWHERE[page]).read_text()


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.stem)
def test_a_page_is_in_the_contents(page: pathlib.Path) -> None:
    contents = re.findall(r"```{toctree}\n.*?\n\n(.*?)```", (DOCS / "index.md").read_text(), re.S)
    listed = "\n".join(contents).split()
    assert page.relative_to(DOCS).with_suffix("").as_posix() in {*listed, "index"}


IDEAS = {page.stem: page.read_text() for page in DOCS.glob("ideas/*.md")}


def test_times_of_the_ideas_are_those_of_the_ladder() -> None:
    measured = {
        f"{float(row['burst_us']):.1f}, {float(row['burst_ratio']):.3f}"
        for row in claims.rows("h200_ladder")
    }
    shown = {time for page in IDEAS.values() for time in re.findall(r"\d+\.\d, \d\.\d{3}", page)}
    assert len(shown) > 20
    assert shown <= measured


def test_what_orders_cost_is_what_the_study_measured() -> None:
    measured = {
        f"| `{row['order']}` | {float(row['burst_ms']):.3f} | {float(row['burst_ratio']):.3f} |"
        f" {float(row['counted_dram_read_bytes']) / 1e9:.2f} GB |"
        for row in claims.rows("h200_study_128x256")
        if (row["how"], row["persistence"], row["cluster"]) == ("offline", "static", "1x1")
    }
    shown = re.findall(r"^\| `.* GB \|$", IDEAS["tile-orders"], re.MULTILINE)
    assert len(shown) == 4
    assert set(shown) <= measured


@pytest.mark.parametrize("page", tables.PAGES)
def test_the_tables_of_a_page_are_those_of_the_rows(page: str) -> None:
    text = (ROOT / page).read_text()
    assert sorted(tables.places(text)) == sorted(tables.PAGES[page])
    assert tables.filled(page, text) == text, "python bench/figures.py writes them"


def test_noted_times_and_their_ratios_agree() -> None:
    for row in claims.rows("h200_noted"):
        assert (ROOT / row["page"]).exists()
        ratio = row["burst_ratio"] or row["sustained_ratio"]
        if row["peer_us"] and row["ours_us"]:
            # Both times were rounded before they were noted.
            assert float(row["peer_us"]) / float(row["ours_us"]) == pytest.approx(
                float(ratio), rel=0.01
            )


def test_every_setting_of_ours_is_on_the_page_of_environment_variables() -> None:
    sources = [*ROOT.glob("pallas_gemm/**/*.py"), *ROOT.glob("schedules/*.py")]
    ours = {
        name for path in sources for name in re.findall(r"PALLAS_GEMM_[A-Z_]+", path.read_text())
    }
    assert "PALLAS_GEMM_CACHE_DIR" in ours
    page = (DOCS / "environment.md").read_text()
    assert {name for name in ours if f"`{name}" not in page} == set()


def test_the_kernels_of_the_page_on_profiling_are_ours() -> None:
    sources = "\n".join(path.read_text() for path in ROOT.glob("pallas_gemm/kernels/**/*.py"))
    named = set(re.findall(r'name="(pallas_gemm_\w+)"', sources))
    shown = set(
        re.findall(r"`(pallas_gemm_\w+)_mosaic_gpu_kernel`", (DOCS / "profiling.md").read_text())
    )
    assert len(named) >= 5
    assert shown == named


def test_the_waves_of_the_ideas_are_those_that_the_schedules_draw() -> None:
    orders = [schedules.build(name, 8, 16) for name in ("swizzle:4", "raster", "hilbert")]
    drawn = zip(*(draw.waves(order, 32).splitlines() for order in orders), strict=True)
    lines = ["      ".join(line) for line in drawn if line[0].isdigit()]
    assert len(lines) == 8
    assert "\n".join(lines) in IDEAS["tile-orders"]


def test_the_pieces_of_the_ideas_are_those_that_the_schedules_draw() -> None:
    work = schedules.split_k(schedules.raster(1, 3), steps=6, parts=2, last=2)
    assert f"```text\n{draw.pieces(work)}\none letter: a piece\n```" in IDEAS["along-k"]


def test_dir_shows_what_is_public() -> None:
    shown = dir(pallas_gemm)
    assert {"gemm", "explain", "Table", "checkpoint_policies", "__version__"} <= set(shown)
    assert not {"api", "op", "planning", "problem", "config"} & set(shown)


MODULES = re.findall(r"automodule:: (\S+)(?:\n   :members:(.*))?", API)


@pytest.mark.parametrize(("name", "members"), [("pallas_gemm", ""), *MODULES])
def test_dir_shows_what_a_module_offers_and_nothing_that_it_uses(name: str, members: str) -> None:
    module = importlib.import_module(name)
    shown = {each: getattr(module, each) for each in dir(module) if not each.startswith("_")}
    assert {each for each in members.strip().split(", ") if each} <= set(shown)
    homes = {each: getattr(value, "__module__", None) for each, value in shown.items()}
    assert not {x for x, home in homes.items() if home and not home.startswith(OWN)}
    modules = {each for each, value in shown.items() if isinstance(value, types.ModuleType)}
    assert modules <= {"checkpoint_policies", "flax", "offline"}


def test_dir_shows_the_modules_of_layers() -> None:
    assert dir(flax) == ["linen", "nnx"]
    for name in ("equinox", "optax"):
        assert f"automodule:: pallas_gemm.{name}\n" in API


@pytest.mark.parametrize("package", [pallas_gemm, schedules], ids=lambda package: package.__name__)
def test_the_reference_has_every_public_name(package: Any) -> None:
    words = set(re.findall(r"\w+", API))
    public = {
        name
        for name in dir(package)
        if not name.startswith("_") and callable(getattr(package, name))
    }
    # That of `schedules`.
    public.discard("Schedule" if package is pallas_gemm else "")
    assert public <= words


def _public() -> Iterator[Any]:
    """Yields each public name with its value; `schedules` has doctests of its own."""
    for package in (pallas_gemm, schedules, linen, nnx, equinox, optax):
        names = re.findall(r"^.. autofunction:: (\w+)|^.. autoclass:: (\w+)", API, re.M)
        listed = re.findall(rf"automodule:: {package.__name__}\n   :members: (.*)", API)
        shown = listed[0].split(", ") if listed else [a or b for a, b in names]
        yield from (pytest.param(getattr(package, name), id=name) for name in shown)


@pytest.mark.parametrize("value", list(_public()))
def test_a_public_name_has_an_example_that_runs(value: Any) -> None:
    x = jnp.ones((64, 16), jnp.bfloat16)
    known = {
        **{name: getattr(pallas_gemm, name) for name in dir(pallas_gemm)},
        **{name: getattr(schedules, name) for name in dir(schedules)},
        **{name: getattr(optax, name) for name in dir(optax)},
        "jax": jax,
        "jnp": jnp,
        "dataclasses": dataclasses,
        "x": x,
        "w": jnp.ones((16, 32), jnp.bfloat16),
        "bias": jnp.ones(32),
        "experts": jnp.ones((3, 16, 32), jnp.bfloat16),
        "labels": jnp.zeros(64, jnp.int32),
        "sizes": jnp.array([20, 0, 40]),
        "squares": x @ x.T,
        "large": jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),
    }
    finder, runner = (
        doctest.DocTestFinder(recurse=False, exclude_empty=False),
        doctest.DocTestRunner(),
    )
    (found,) = finder.find(value, value.__name__, module=False, globs=known)
    assert found.examples
    assert not runner.run(found).failed


def test_the_front_page_shows_the_explorer_where_the_site_has_it() -> None:
    (shown,) = re.findall(r'<iframe src="([^"]+)"', (DOCS / "index.md").read_text())
    assert f"explore --out docs/_build/extra/{shown}\n" in (ROOT / "Makefile").read_text()
    assert 'html_extra_path = ["_build/extra"]' in (DOCS / "conf.py").read_text()
