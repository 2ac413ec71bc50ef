"""The README: the files that it names exist, and so do the commands that it gives."""

import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from bench import demo, figures
from pallas_gemm import explain, target

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def _section(title: str) -> str:
    """Returns what stands under a heading, up to the next one."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no section {title!r}"
    return found[1]


def _mapped() -> list[str]:
    """Returns the paths of the file map, whose lines are `path  what it is`, indented by folder."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"^## File map\n\n```text\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    assert block, "the file map is a block of text"
    paths, folders = [], [""]
    for line in block[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path = folders[depth] + line.split()[0]
        folders[depth + 1 :] = [path if path.endswith("/") else ""]
        paths.append(path)
    return paths


@pytest.mark.parametrize("path", _mapped())
def test_a_file_of_the_map_exists(path: str) -> None:
    assert (ROOT / path).exists()
    assert (ROOT / path).is_dir() == path.endswith("/")


@pytest.mark.parametrize("package", ["pallas_gemm", "schedules"])
def test_the_map_names_every_public_module(package: str) -> None:
    modules = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / package).rglob("*.py")
        if not path.name.startswith("_") or path.name == "__main__.py"
    }
    assert modules <= set(_mapped())


@pytest.mark.parametrize("orders", demo.PICTURED)
def test_the_pictures_are_those_that_the_schedules_draw(orders: tuple[str, ...]) -> None:
    assert demo.side_by_side(orders, demo.PICTURED_GRID) in README


def test_the_example_of_orders_runs(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(
        r"```python\n(.*?)```", _section("Orders, without a GPU and without JAX"), re.DOTALL
    )
    assert block
    exec(block[1], {})
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:3]] == ["raster", "swizzle:8", "hilbert"]
    assert len(printed) == 3 + 8


def test_the_first_example_runs() -> None:
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block
    names: dict[str, Any] = {}
    exec(block[1], names)
    assert names["y"].shape == (512, 512)


@pytest.mark.parametrize(
    ("text", "file", "case", "digits"),
    [
        ("165 TFLOP/s", "h200_products", ("8191x8191x8191", "xla"), 0),
        ("at 742.", "h200_products", ("8191x8191x8191", "ours"), 0),
    ],
)
def test_a_speed_of_the_readme_is_that_of_a_row(
    text: str, file: str, case: tuple[str, str], digits: int
) -> None:
    (row,) = [row for row in figures.rows(file) if (row["case"], row["peer"]) == case]
    assert text in README
    assert f"{float(row['burst_tflops']):.{digits}f}" in text


@pytest.mark.parametrize(
    ("text", "file", "cases"),
    [
        ("1.00 to 1.03 times as fast as XLA on plain", "h200_short", figures.PLAIN),
        ("1.07 to 1.13 with a fused epilogue", "h200_products", figures.FUSED),
        ("2.8 to 4.5 at odd sizes", "h200_products", figures.ODD),
    ],
)
def test_a_range_of_the_readme_is_that_of_the_figures_rows(
    text: str, file: str, cases: dict[str, str]
) -> None:
    assert text in " ".join(README.split())
    low, high = re.findall(r"\d\.\d+", text)
    digits = len(low) - 2
    ratios = [
        float(row["burst_ratio"])
        for row in figures.rows(file)
        if row["case"] in cases and row["peer"] == "ours"
    ]
    assert (f"{min(ratios):.{digits}f}", f"{max(ratios):.{digits}f}") == (low, high)


def test_the_ranges_of_products_of_groups_are_those_of_their_rows() -> None:
    seconds: dict[str, dict[str, float]] = {}
    for row in figures.rows("h200_grouped"):
        seconds.setdefault(row["case"], {})[row["peer"]] = float(row["burst_us"])
    assert len(seconds) == 44
    for peer, digits, text in (
        ("xla", 0, "7 to 155 times as fast as `lax.ragged_dot`"),
        ("torch", 2, "1.03 to 1.44 times as fast as torch"),
    ):
        ratios = [of[peer] / of["ours"] for of in seconds.values()]
        assert text.startswith(f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f} times")
        assert text in README


# On a CPU no kernel has an order.
@pytest.mark.filterwarnings("ignore:schedule=.* has no effect")
def test_the_example_of_the_multiply_runs(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.search(r"```python\n(.*?)```", _section("Multiply"), re.DOTALL)
    assert block
    exec(block[1], {})
    printed = capsys.readouterr().out
    assert printed.startswith(
        "hopper: m=1024 n=1024 k=1024 NN bfloat16 x bfloat16 -> bfloat16 bias"
    )


def test_the_layers_run_the_kernel_and_float32_does_what_the_table_says() -> None:
    block = re.search(r"```python\n(.*?)```", _section("In a model"), re.DOTALL)
    assert block
    names: dict[str, Any] = {}
    exec(block[1], names)
    assert [_computes(layer) for layer in names["layers"]] == ["hopper"] * 4
    stock, fused, *_ = names["layers"]
    assert _computes(stock.clone(dtype=None)) == "xla"
    assert _computes(fused.clone(dtype=None)) == "hopper"


def _computes(layer: Any) -> str:
    """Returns what computes the largest product of a layer on an H200; a router's is small."""
    x = jax.ShapeDtypeStruct((4096, 4096), np.float32)
    params = jax.eval_shape(layer.init, jax.random.key(0), x)
    with target("h200"):
        products = explain(layer.apply, params, x).products
    return max(products, key=lambda product: product.problem.flops).implementation


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake (\w+)", README))))
def test_a_command_of_the_readme_exists(target: str) -> None:
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)", README))))
def test_a_link_of_the_readme_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_the_workflow_tests_the_release_of_jax_that_is_developed_on() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    default = re.search(r"^DEFAULT_JAX := (\S+)$", MAKEFILE, re.MULTILINE)
    assert default
    assert default[1] in workflow["jobs"]["test"]["strategy"]["matrix"]["jax"]
    assert workflow["jobs"]["package"]["strategy"] == {
        "matrix": workflow["jobs"]["test"]["strategy"]["matrix"]
    }
    assert f'"jax>={default[1]}"' in (ROOT / "pyproject.toml").read_text()
