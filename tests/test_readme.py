"""The README: the files that it names exist, and so do the commands that it gives."""

import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from bench import claims, demo
from pallas_gemm import explain, target
from pallas_gemm._version import NEWEST_TESTED_JAX

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


def test_the_first_screen_leads_with_experts_and_names_every_peer() -> None:
    found = claims.claims()
    assert [claim.product.split(",")[0] for claim in found[:3]] == ["experts"] * 3
    # Plain products, where the gain is least, are not what it leads with.
    assert found[-2].product == "plain products"
    for claim in found:
        low = claims.spread(claim.burst or claim.sustained).split(" ")[0]
        assert f"| {claim.product} | {claim.peer} |" in README
        assert low in README
    assert README.index("<!-- table: claims") < README.index("## When not to use it")


def test_every_peer_of_a_claim_is_explained() -> None:
    page = (ROOT / "docs" / "measured.md").read_text()
    for peer in ("torch", "tokamax", "JAX's Hopper kernels", "XLA's fused program", "optax"):
        assert any(claim.peer.startswith(peer) for claim in claims.claims())
        assert f"\n| {peer} |" in page


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
    of_float32 = [layer.clone(dtype=None) for layer in names["layers"][:2]]
    assert [_computes(layer) for layer in of_float32] == ["hopper"] * 2


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


def test_the_workflow_tests_the_oldest_and_the_newest_jax_that_is_accepted() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    default = re.search(r"^DEFAULT_JAX := (\S+)$", MAKEFILE, re.MULTILINE)
    assert default
    assert default[1] in workflow["jobs"]["test"]["strategy"]["matrix"]["jax"]
    assert workflow["jobs"]["package"]["strategy"] == {
        "matrix": workflow["jobs"]["test"]["strategy"]["matrix"]
    }
    oldest, *_, newest = workflow["jobs"]["test"]["strategy"]["matrix"]["jax"]
    assert oldest == default[1]
    assert newest == ".".join(map(str, NEWEST_TESTED_JAX))
    assert f'"jax>={oldest},<={newest}"' in (ROOT / "pyproject.toml").read_text()
    assert f"JAX {oldest} and {newest}" in README
