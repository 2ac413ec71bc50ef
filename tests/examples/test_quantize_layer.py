"""The example that quantizes: each kind of layer computes the same, as well as its type can."""

import io

import jax
from rich.console import Console

from examples import quantize_layer


def test_a_trained_layer_loses_what_its_bits_cannot_hold() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    with jax.numpy_dtype_promotion("standard"):
        errors = quantize_layer.run(32, 64, 64, 3, console)
    text = console.export_text()
    assert all(f"{name} " in text and f"{error:.4f}" in text for name, error in errors.items())
    # No speed is shown where there is no GPU.
    assert "No GPU" in text
    assert " us" not in text
    int8 = errors.pop("int8 per channel")
    assert errors["fused"] < errors["stock"] < int8 < 0.03
    assert all(int8 < errors[name] < 0.1 for name in errors if name.startswith("fp8"))
