"""`docs/layers.md`: its code runs, and the layers in it are those that they replace."""

import importlib
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import explain, target
from pallas_gemm.api import precompile as precompilation
from tests import layers

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "layers.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def _uncompiled(target: str, product: Any, decision: Any) -> None:
    """Stands for the report on a kernel, which `tests/test_precompile.py` compiles."""


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What is defined after all blocks of the page have run."""
    names: dict[str, Any] = {"__name__": "page"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precompilation, "_report", _uncompiled)
        for block in BLOCKS:
            exec(block, names)
    return names


def test_the_page_has_its_recipes() -> None:
    titles = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    for library in ("Flax: hooks", "Flax: layers", "Equinox", "Haiku"):
        assert library in titles


def test_the_checkpoint_of_a_stock_block_is_loaded(page: dict[str, Any]) -> None:
    stock, saved = page["Stock"](), page["saved"]
    own = page["Fused"]().init(jax.random.key(0), page["x"])
    layers.assert_same_structure(page["loaded"], own)
    layers.assert_trained_as_well(
        lambda saved, x: page["Fused"]().apply({"params": {"mlp": saved["params"]}}, x),
        stock.apply,
        saved,
        layers.normal(16, 256),
    )
    np.testing.assert_array_equal(page["from_checkpoint"].shape, (2, 16, 512))


def test_an_equinox_model_has_our_layers(page: dict[str, Any]) -> None:
    assert {type(layer) for layer in page["replaced"](page["mlp"]).layers} == {page["Linear"]}
    assert page["same"].shape == (32, 128)
    assert page["hidden"].shape == page["swiglu"].shape == (32, 512)


def test_a_haiku_model_has_the_parameters_and_the_results_of_the_stock_layer(
    page: dict[str, Any],
) -> None:
    haiku = importlib.import_module("haiku")

    def network(x: Any) -> Any:
        return jax.nn.relu(haiku.Linear(512)(x))

    stock = haiku.without_apply_rng(haiku.transform(network))
    # The same initial values too, since they come from the same names.
    layers.assert_same_tree(page["weights"], stock.init(jax.random.PRNGKey(0), page["rows"]))
    layers.assert_trained_as_well(
        page["model"].apply, stock.apply, page["weights"], layers.normal(32, 256)
    )
    [decision] = explain(page["model"].apply, page["weights"], page["rows"]).products
    epilogue = decision.problem.epilogue
    assert epilogue.bias
    assert epilogue.activation is not None


def test_the_export_of_the_page_computes_the_same(page: dict[str, Any]) -> None:
    np.testing.assert_array_equal(page["value"], jax.jit(page["loss"])(page["params"], page["x"]))
    # Its few rows of float32 are XLA's.
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (page["params"], page["x"]))
    with target("h200"), jax.numpy_dtype_promotion("standard"):
        exported = jax.export.export(jax.jit(page["loss"]), platforms=["cuda", "cpu"])(*narrow)
    assert "mosaic_gpu_v2" in exported.mlir_module()


def test_the_names_of_the_page_are_public() -> None:
    for name in set(re.findall(r"pallas_gemm\.(\w+)\b", PAGE)) - {"flax"}:
        assert hasattr(pallas_gemm, name), name
