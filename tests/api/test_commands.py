"""`python -m pallas_gemm`: shapes and functions on the command line."""

import dataclasses
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_gemm import __main__, gemm
from pallas_gemm.api import commands
from pallas_gemm.device import H200
from pallas_gemm.planning import tables
from pallas_gemm.tuning.measure import Turn, Variant


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return gemm(x, w, activation="relu")


def twice(x: jax.Array, w: jax.Array) -> jax.Array:
    return gemm(gemm(x, w), w)


def made() -> tuple[Any, ...]:
    return twice, jnp.ones((64, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)


class MadeUpMeter:
    """A meter for which XLA and the first function take 2 us, and all else 1 us."""

    def turn(self, variant: Variant, calls: int) -> Turn:
        variant.wait(variant.launch(0))
        each = 2e-6 if variant.name in ("XLA", f"{__name__}:layer") else 1e-6
        return Turn((each,) * calls, each * calls)

    def joules(self, *_: object) -> float | None:
        raise AssertionError("bench asks for no energy")

    def pause(self, seconds: float) -> None:
        pass


def test_shapes_and_functions_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("4096x14336x4096", f"{__name__}:layer", "bf16[4096,4096]", "bf16[4096,1024]")
    options = ("--target=h200", "--activation=gelu")
    assert __main__.main(["explain", *words, *options]) == 0
    text = capsys.readouterr().out
    assert "4096x14336x4096\nhopper: m=4096 n=14336 k=4096 NN bfloat16" in text
    assert f"{__name__}:layer\nhopper: m=4096 n=1024 k=4096 NN" in text
    assert "gelu_tanh" in text
    assert "relu" in text


def test_options_of_shapes_are_those_of_gemm(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--dtype=e4m3", "--gated", "--activation=silu", "--bias", "--transpose_b")
    shape = "2x1024x2048x4096"
    assert __main__.main(["explain", shape, *flags, "--target=h200", "--json"]) == 0
    ((product,),) = (json.loads(capsys.readouterr().out)[shape]["products"],)
    sizes = [product[name] for name in ("batch", "m", "n", "k", "layout")]
    assert sizes == [2, 1024, 2048, 4096, "NT"]
    assert product["dtypes"][:2] == ["float8_e4m3fn"] * 2
    assert product["epilogue"] == ["bias", "gated", "silu"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["explain", "4096x4096", "--target=h200"], "'4096x4096' must be a shape such as"),
        (["explain", "bf16[4,4]", "--target=h200"], "'bf16[4,4]' must be a shape such as"),
        (["explain", "no_such_module:f", "--target=h200"], "No module named 'no_such_module'"),
        (["explain", f"{__name__}:nobody", "--target=h200"], "has no attribute 'nobody'"),
        (["explain", f"{__name__}:test_options", "--target=h200"], "has no attribute"),
        (["explain", "64x64x64"], "there is no GPU here; --target says which: h100, h200"),
        (["explain", "64x64x64", "--target=h900"], "invalid choice: 'h900'"),
        (["explain", "64x64x64", "--target=h200", "--dtype=bf61"], "--dtype='bf61' is no type"),
        (["explain", "64x64x64", "--target=h200", "--activation=geluu"], "did you mean 'gelu"),
        (["precompile", "64x64x64"], "--target must say which GPU"),
        (
            ["precompile", "1x64x64", "--target=h200"],
            "no kernel computes these products on h200",
        ),
        (["tune", "64x64x64"], "autotune needs a GPU"),
        (["bench", "64x64x64"], "bench needs a GPU"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        __main__.main(words)
    assert raised.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert error in text


def test_kernels_are_compiled_for_the_gpu_that_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # What was measured of it tells it from the one that is known by name.
    own = dataclasses.replace(H200, measured_clusters=((1, 132), (2, 66)))
    monkeypatch.setattr(commands.targeting, "first_gpu", lambda: own)
    assert __main__.main(["precompile", "512x1024x512"]) == 0
    assert capsys.readouterr().out == "1 kernels for h200, 0 of which spill registers\n"


def test_kernels_are_compiled_with_the_time_that_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("512x1024x512", "1024x512x512", "512x1024x512")
    assert __main__.main(["precompile", *words, "--target=h200"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "2 kernels for h200, 0 of which spill registers\n"
    first, second = captured.err.splitlines()
    assert first.startswith("1/2 1 x 512 x 1024 x 512 NN: hopper")
    assert first.endswith(" s left)")
    assert second.startswith("2/2 1 x 1024 x 512 x 512 NN: hopper")
    assert "left" not in second


def test_shapes_are_timed_beside_xla_and_functions_beside_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "_meter", MadeUpMeter)
    operands = ("bf16[64,64]", "bf16[64,64]")
    words = ("64x64x64", f"{__name__}:layer", *operands, f"{__name__}:made")
    assert __main__.main(["bench", *words]) == 0
    text = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert rows[0] == "64x64x64"
    assert rows[1].startswith("XLA burst 2.0 us, 1.000 times the first's speed")
    assert rows[2].startswith("pallas_gemm burst 1.0 us, 2.000 times the first's speed")
    assert rows[3] == "functions"
    assert rows[4].startswith(f"{__name__}:layer burst 2.0 us, 1.000 times")
    assert rows[5].startswith(f"{__name__}:made burst 1.0 us, 2.000 times")


def test_what_is_tuned_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    seen = []

    def autotune(run: Any, *args: Any) -> tables.Table:
        seen.append(jax.eval_shape(run, *args).shape)
        return tables.Table.of(H200.kind, {})

    monkeypatch.setattr(commands.tuning, "autotune", autotune)
    place = tmp_path / "mine.json"
    words = ("64x96x64", f"{__name__}:made", f"--save={place}")
    assert __main__.main(["tune", *words]) == 0
    assert seen == [(64, 96), (64, 64)]
    assert tables.Table.load(place).device == H200.kind
    assert capsys.readouterr().out == f"0 configs are in {place}\n"


def test_the_program_is_called_as_it_was_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for started, name in (("/bin/pallas-gemm", "pallas-gemm"), ("x/__main__.py", "python -m")):
        monkeypatch.setattr(sys, "argv", [started])
        assert __main__.main([]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: {name}")
        assert all(command in text for command in ("doctor", "explain", "precompile", "tune"))
