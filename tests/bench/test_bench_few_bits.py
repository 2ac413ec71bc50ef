"""The program that times weights of few bits, with a GPU that is made up."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from absl import flags

from bench import command, few_bits_bench
from pallas_gemm.tuning.measure import Turn, Variant


class MadeUpMeter:
    """Runs each call once; ours take a microsecond, others three."""

    def turn(self, variant: Variant, calls: int) -> Turn:
        variant.wait(variant.launch(0))
        seconds = 1e-6 if variant.name == "ours" else 3e-6
        return Turn((seconds,) * calls, seconds * calls)

    def pause(self, seconds: float) -> None:
        pass


class Here:
    """Compiles in this process; results are a list, as of what another process lowered."""

    def build(self, program: Any) -> Any:
        run = program.compiled()
        return lambda *operands: jax.tree.leaves(run(*operands))


@contextlib.contextmanager
def workers() -> Iterator[Here]:
    yield Here()


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_bits_bench.gpu, "missing_gpu", lambda: None)
    monkeypatch.setattr(few_bits_bench.gpu, "prepare_environment", lambda: None)
    monkeypatch.setattr(few_bits_bench.gpu, "GpuMeter", MadeUpMeter)
    monkeypatch.setattr(few_bits_bench, "Workers", workers)
    monkeypatch.setattr(few_bits_bench, "COLD_BYTES", 1)
    monkeypatch.setattr(few_bits_bench, "EXPERT_SIZES", (64, 32))
    monkeypatch.setattr(few_bits_bench, "TOKENS", (1, 5))


def run(*arguments: str) -> int:
    values = flags.FlagValues()
    few_bits_bench.define_flags(values)
    values(["few_bits_bench", "--burst_rounds=1", *arguments])
    return few_bits_bench.run(values)


@pytest.mark.parametrize("group", [32, 0])
def test_each_product_is_checked_and_timed(
    group: int, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    assert run("--size=3x48x64,16x8x32", f"--group={group}", f"--csv={path}") == 0
    shown = capsys.readouterr().out
    of = group or "column"
    header, *rows = path.read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == [
        *(f"{size} int4/{of}" for size in ("3x48x64", "16x8x32")),
        *(f"{size} int8/{of}" for size in ("3x48x64", "16x8x32")),
    ]
    assert header.startswith("product,ours_us,bf16_us,x_bf16,control")
    assert {row.split(",")[3] for row in rows} == {"3.000"}
    assert "geometric mean 3.000, least 3.0" in shown
    assert max(map(len, shown.splitlines())) <= 90


def test_each_token_goes_to_two_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--experts", "--group=16", "--bits=4") == 0
    shown = capsys.readouterr().out
    assert "2x64x32 of 8 experts int4/16" in shown
    assert "10x64x32 of 8 experts int4/16" in shown


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = few_bits_bench.made

    def wrong(by: str, device: str) -> Any:
        own = real(by, device)
        return own if by == "bf16" else lambda x, values, scale: own(x, values, 1.01 * scale)

    monkeypatch.setattr(few_bits_bench, "made", wrong)
    with pytest.raises(command.RequestError, match="ours: 4x64x64 int4/32 errs"):
        run("--size=4x64x64", "--group=32", "--bits=4")


def test_a_seed_draws_thirty_sizes_with_whole_groups() -> None:
    first, again, other = (few_bits_bench.unseen(seed) for seed in (7, 7, 8))
    assert first == again != other
    assert len({*first}) == few_bits_bench.UNSEEN
    assert all(1 <= m <= 128 and n % 8 == k % 128 == 0 for m, n, k in first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits=3"], "--bits takes 4, 8 or 4,8, got '3'"),
        (["--size=4x64"], "--size takes sizes such as 4096x14336x4096, got '4x64'"),
        (["--size=4x64x96"], "--group=128 does not divide k of every product"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(arguments: list[str], message: str) -> None:
    with pytest.raises(command.RequestError, match=message):
        run(*arguments)
