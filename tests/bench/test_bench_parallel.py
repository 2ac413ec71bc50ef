"""The benchmark of a layer on several GPUs, on virtual devices: it computes, checks and reports."""

import json
import pathlib
from typing import Any

import jax
import pytest
from absl import flags

from bench import command, parallel_bench

TINY = ["--tokens=16", "--width=16", "--hidden=32", "--rounds=2", "--calls=2"]


def _values(*text: str) -> flags.FlagValues:
    values = flags.FlagValues()
    parallel_bench.define_flags(values)
    values(["parallel_bench", *TINY, *text])
    return values


@pytest.mark.parametrize(("layout", "devices"), [("sequence", [4]), ("replicated", [1, 2])])
def test_everybody_is_checked_and_nobody_timed_without_a_gpu(
    tmp_path: pathlib.Path, layout: str, devices: list[int]
) -> None:
    path = tmp_path / "out.json"
    count = ",".join(map(str, devices))
    values = _values(f"--layout={layout}", f"--devices={count}", f"--json={path}")
    with pytest.raises(command.RequestError, match=r"this needs an NVIDIA GPU.*; --check checks"):
        parallel_bench._run(values)
    assert not path.exists()
    values.check = True
    assert parallel_bench._run(values) == 0
    rows = json.loads(path.read_text())["rows"]
    names = ["stock", "ours", "ours-f32"]
    names += ["fused", "fused-f32"] if layout == "sequence" else []
    assert [row["name"] for row in rows] == names * 2 * len(devices)
    assert all(row["error"] <= 2 and row["seconds"] is None for row in rows)


def test_ratios_and_efficiency() -> None:
    seconds = {"stock": [4.0, 6.0, 5.0], "ours": [2.0, 2.0, 2.5]}
    alone = parallel_bench.Row(1, "forward", "ours", 1.0, seconds=6.0)
    row = parallel_bench._with_times(
        parallel_bench.Row(4, "forward", "ours", 1.0), seconds, [alone]
    )
    assert (row.seconds, row.times_stock, row.efficiency) == (2.0, 2.0, 0.75)
    assert str(row).split() == ["4", "forward", "ours", "1.00", "2000000.0", "2.000", "75.0%"]


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(split: Any, *operands: jax.Array) -> jax.Array:
        return 2 * parallel_bench._stock(split, *operands)

    monkeypatch.setattr(parallel_bench, "_ours", doubled)
    with pytest.raises(command.RequestError, match="wrong results"):
        parallel_bench._run(_values("--check", "--devices=2", "--layout=replicated"))


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--devices=3", "tokens: 3 devices do not divide 16"),
        ("--devices=16", "of the 8 that there are"),
        ("--devices=some", "are not numbers"),
        ("--option=fast", "is not name=value"),
        ("--json=/nowhere/out.json", "cannot write"),
    ],
)
def test_bad_requests(flag: str, message: str) -> None:
    with pytest.raises(command.RequestError, match=message):
        parallel_bench.options_from(_values(flag))
