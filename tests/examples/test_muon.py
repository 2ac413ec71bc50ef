"""The example of Muon: its update is that of optax."""

import dataclasses
import functools
import io

import jax
import pytest
from rich.console import Console

from examples import muon
from examples.settings import PRESETS


def test_its_update_is_that_of_optax(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of one iteration: a product takes as long to compile as it did the first time.
    for name, make in muon.OPTIMIZERS.items():
        monkeypatch.setitem(muon.OPTIMIZERS, name, functools.partial(make, ns_steps=1))
    console = Console(record=True, width=100, file=io.StringIO())
    settings = dataclasses.replace(PRESETS["tiny"], blocks=0, dtype="bfloat16")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        errors = muon.run(settings, console)
    text = console.export_text()
    assert all(f"{error:.2g}" in text for error in errors.values())
    # No speed is shown where there is no GPU.
    assert "No GPU" in text
    assert "ms" not in text
    assert 0 < errors["pallas_gemm"] <= 2 * errors["optax"]
