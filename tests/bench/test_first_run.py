"""The first run on a GPU that nobody measured: parts within their time, one file, a made-up GPU."""

import contextlib
import json
import pathlib
import re
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from absl import flags

from bench import (
    blackwell_ladder,
    command,
    first_run,
    gemm_bench,
    report,
    schedule_study,
    study,
    tune,
)
from pallas_gemm.computer.user_folder import FOLDER_VARIABLE
from pallas_gemm.device import B200
from pallas_gemm.planning import proof
from pallas_gemm.proving import processes
from pallas_gemm.tuning.measure import Result, Spread, Timing

PROGRAMS = {
    "blackwell_ladder.py": blackwell_ladder,
    "gemm_bench.py": gemm_bench,
    "tune.py": tune,
    "schedule_study.py": schedule_study,
}
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "prove.md"


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    yield
    proof._read.cache_clear()


def proven(failed: str | None = None) -> proof.Proof:
    stages = (proof.Stage("one CTA", "7 products are exact", 9.0),)
    version = proof.version_of("blackwell")
    return proof.Proof("blackwell", B200.kind, version, "2026-11-22", stages, failed)


class MadeUpGpu:
    """Runs parts: each writes the files that it is told to, and a line of what it would print."""

    def __init__(self, **ends: int | None) -> None:
        self.ends = ends
        self.run: list[str] = []

    def __call__(
        self, command: Sequence[str], folder: pathlib.Path, _: float
    ) -> tuple[int | None, str]:
        program = pathlib.Path(command[1]).name
        self.run.append(program)
        (folder / "stdout").write_text("not to be sent")
        for file in re.findall(r"=(\w+\.(?:csv|json))", " ".join(command)):
            (folder / file).write_text("made up")
        name = program.removesuffix(".py")
        words = ladder_table() if name == "blackwell_ladder" else f"({program}'s tables)"
        return self.ends.get(name, 0), f"{words}\n"


def ladder_table() -> str:
    """What the ladder prints where a step takes a tenth less than the one before it."""
    case = blackwell_ladder.size_case(8192)

    def row(place: int, name: str) -> report.Row:
        seconds = 2e-3 * 0.9**place
        taken, ratio = (Spread(x, x, x) for x in (seconds, 7e-4 / seconds))
        result = Result(Timing(taken, ratio, None, 1.0), None, None)
        return report.Row(case, "", name, "ok", "", 2 * 8192**3, 1, result=result)

    steps = enumerate(blackwell_ladder.STEPS)
    return "\n".join(blackwell_ladder.beside([row(*step) for step in steps]))


def measured(
    tmp_path: pathlib.Path, gpu: MadeUpGpu, failed: str | None = None
) -> tuple[int, list[str], dict[str, str]]:
    said: list[str] = []
    parts, out = tmp_path / "parts", tmp_path / "first_run.zip"
    parts.mkdir()
    status = first_run.measure(proven(failed), parts, out, said.append, gpu)
    with zipfile.ZipFile(out) as file:
        return status, said, {name: file.read(name).decode() for name in file.namelist()}


def test_the_parts_take_less_than_ten_minutes_and_are_programs_that_take_their_options() -> None:
    assert sum(part.seconds for part in first_run.PARTS) < 600
    assert {part.program.format(kernel="blackwell") for part in first_run.PARTS} == {*PROGRAMS}
    for part in first_run.PARTS:
        program: Any = PROGRAMS[part.program.format(kernel="blackwell")]
        values = flags.FlagValues()
        program.define_flags(values)
        values([program.PROGRAM, *part.options("blackwell")])
        options: Any = program.options_from(values) if hasattr(program, "options_from") else None
        if program is schedule_study:
            names = {"orders": options.orders, "persistence": options.persistence}
            chosen = study.launches(
                options.case.problem, B200, options.base, clusters=options.clusters, **names
            )
            assert {launch.config.persistence for launch in chosen} == {"static", "dynamic"}


def test_all_is_in_one_file(tmp_path: pathlib.Path) -> None:
    gpu = MadeUpGpu()
    status, said, files = measured(tmp_path, gpu)
    assert (status, gpu.run) == (0, [*PROGRAMS])
    tables = {"ladder.csv", "suite.json", "tuned.json", "tuned.csv", "study.csv"}
    words = {f"{part.name}.txt" for part in first_run.PARTS}
    assert set(files) == {"proof.json"} | tables | words
    assert json.loads(files["proof.json"])["failed"] is None
    assert "\n".join(said) in PAGE.read_text(), "\n".join(said)


@pytest.mark.parametrize(("end", "status"), [(None, 0), (1, 1)], ids=["too long", "failed"])
def test_a_part_that_ends_badly_keeps_its_files_and_the_next_ones_run(
    end: int | None, status: int, tmp_path: pathlib.Path
) -> None:
    gpu = MadeUpGpu(blackwell_ladder=end)
    found, said, files = measured(tmp_path, gpu)
    assert (found, gpu.run) == (status, [*PROGRAMS])
    assert {"ladder.csv", "study.csv"} <= set(files)
    why = "ladder was ended after 150 s" if end is None else "ladder failed: status 1"
    assert any(line.startswith(why) for line in said)


def test_nothing_is_timed_of_a_kernel_that_failed(tmp_path: pathlib.Path) -> None:
    gpu = MadeUpGpu()
    status, _, files = measured(tmp_path, gpu, failed="types: WRONG")
    assert (status, gpu.run, [*files]) == (1, [], ["proof.json"])


def test_what_is_not_proven_is_proven_first() -> None:
    asked: list[str] = []

    def start(name: str, _: str) -> contextlib.AbstractContextManager[processes.Go]:
        def go(told: processes.Told) -> processes.End:
            asked.append(name)
            stages = [("one CTA", "once")]
            here = {"device": B200.kind, "kernel": "blackwell", "driver": "", "stages": stages}
            told(json.dumps(here if name == "survey" else {"done": 7, "replays": 0, "note": ""}))
            return processes.End(0, False, "")

        return contextlib.nullcontext(go)

    assert first_run.ready(print, start).failed is None
    assert asked == ["survey", "survey", "one CTA"]
    asked.clear()
    assert first_run.ready(print, start).failed is None
    assert asked == ["survey"]


def test_the_parts_are_listed_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    values = flags.FlagValues()
    first_run.define_flags(values)
    values([first_run.PROGRAM, "--list"])
    assert command.guarded(first_run.PROGRAM, lambda: first_run._run(values)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "together  570 s at most"
    assert max(map(len, lines)) <= command.WIDTH
