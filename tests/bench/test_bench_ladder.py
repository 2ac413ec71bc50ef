"""The ladders: steps that can be built, what is printed beside them, and who may not climb."""

import contextlib
import csv
import io
import pathlib
import pickle
from typing import Any

import pytest
from absl import flags

from bench import blackwell_ladder, command, hopper_ladder, ladder, machine, report, session, shapes
from bench.peers import Kernel, Xla
from pallas_gemm import offline
from pallas_gemm.device import B200, H200, Device
from pallas_gemm.planning import targeting
from tests import forks
from tests.bench.test_bench import ENVIRONMENT, MadeUpGpu, MadeUpPeer

ROOT = pathlib.Path(__file__).parent.parent.parent


def run(program: Any, *arguments: str) -> int:
    values = flags.FlagValues()
    program.define_flags(values)
    values([program.PROGRAM, *arguments])
    return command.guarded(program.PROGRAM, lambda: program._run(values))


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that makes up a GPU on which each step takes a millisecond less."""

    def of(device: Device | None, broken: str = "") -> None:
        def step(_: Any, device: Device, name: str) -> MadeUpPeer:
            del device
            return MadeUpPeer(name, breaks=fails if name == broken else lambda: None)

        seconds = {
            name: 10e-3 - 1e-3 * place
            for place, name in enumerate(["xla", *blackwell_ladder.STEPS])
        }
        bench = session.Bench(
            MadeUpGpu(seconds), [Xla()], {}, ENVIRONMENT, lambda _: report.Limits({})
        )
        monkeypatch.setattr(ladder.gpu, "missing_gpu", lambda: None)
        monkeypatch.setattr(targeting, "first_gpu", lambda: device)
        monkeypatch.setattr(machine, "open_bench", lambda _: bench)
        monkeypatch.setattr("bench.workers.Workers", contextlib.nullcontext)
        monkeypatch.setattr(ladder, "Kernel", step)

    return of


def fails() -> None:
    raise RuntimeError("no such instruction")


def test_every_step_is_timed_and_stands_beside_the_article(
    made_up: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up(B200)
    path = tmp_path / "rows.csv"
    assert run(blackwell_ladder, "--shape=64x32x128", f"--csv={path}") == 0
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert [row["peer"] for row in rows] == ["xla", *blackwell_ladder.STEPS]
    assert {row["status"] for row in rows} == {"ok"}
    assert float(rows[-1]["burst_ratio"]) == pytest.approx(5)
    assert "article" in capsys.readouterr().out


def test_the_articles_figures_stand_beside_ours() -> None:
    case = blackwell_ladder.size_case(8192)
    rows = [
        report.Row(case, "", name, "refused", "why", 1, 1) for name in ("xla", "8 launch control")
    ]
    header, line = blackwell_ladder.beside(rows)
    assert header.split()[-3:] == ["article", "x", "cuBLAS"]
    assert line.split()[:4] == [case, "8", "launch", "control"]
    assert line.split()[-2:] == ["1647", "1.062"]
    assert "refused" in line


def test_the_articles_ladder_climbs() -> None:
    means = {
        name: sum(blackwell_ladder.article_ratio(name, size) for size in blackwell_ladder.SIZES) / 4
        for name in blackwell_ladder.STEPS
    }
    # The article: from about 44% on average to 99.0%, by 91.9%, 88.9%, 82.8%, and 106% at 8192.
    expected = [0.441, 0.452, 0.685, 0.828, 0.882, 0.889, 0.919, 0.990]
    assert list(means.values()) == pytest.approx(expected, abs=1e-3)
    assert blackwell_ladder.article_ratio("8 launch control", 8192) == pytest.approx(
        1.062, abs=1e-3
    )


def test_what_is_said_of_the_memory_of_steps_is_so() -> None:
    page = (ROOT / "bench" / "ladder.md").read_text()
    problem = shapes.parse(blackwell_ladder.size_case(8192)).problem
    sizes = [step.shared_memory_bytes(problem) // 1024 for step in blackwell_ladder.STEPS.values()]
    assert f"{sizes[0]} and {sizes[1]} KB of shared memory and 256 columns" in page
    assert f"step 3 ({sizes[2]} KB) or of the later ones ({max(sizes[3:])} KB)" in page
    # Two CTAs of the first two share an SM.
    assert 2 * max(sizes[:2]) < B200.shared_memory // 1024 < 2 * min(sizes[2:])
    assert {
        step.tile[1] * step.accumulators for step in [*blackwell_ladder.STEPS.values()][:3]
    } == {256}


def test_a_step_that_breaks_is_a_failure(made_up: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made_up(B200, broken="5 persistent")
    assert run(blackwell_ladder, "--shape=64x32x128") == 1
    assert "no such instruction" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (H200, "needs a B200 or another GPU of 10.x, but NVIDIA H200 has 9.0"),
        (None, "none that the kernels know"),
    ],
    ids=["H200", "unknown"],
)
def test_another_gpu_is_refused_in_one_line(
    device: Device | None, reason: str, made_up: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up(device)
    assert run(blackwell_ladder) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert reason in line


@pytest.mark.parametrize("program", [blackwell_ladder, hopper_ladder], ids=lambda p: p.PROGRAM)
@pytest.mark.parametrize(
    ("argument", "reason"),
    [("--shape=8x8", "shape must be MxNxK"), ("--csv=/nowhere/x.csv", "no folder /nowhere")],
)
def test_a_bad_request_is_one_line(
    program: Any, argument: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(program, argument) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


def test_without_a_gpu_the_programs_say_so_and_help_says_how_to_run_them() -> None:
    program = ROOT / "bench" / "blackwell_ladder.py"
    done = forks.of_session().run_program(program)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("blackwell_ladder: this needs an NVIDIA GPU")
    text = forks.of_session().run_program(program, "--help").stdout
    assert "    python bench/blackwell_ladder.py --csv=ladder.csv\n        on a B200" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_steps_are_listed_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(blackwell_ladder, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line[:1] for line in lines} == {"x", " ", *"12345678"}
    assert "persistence=dynamic" in " ".join(lines[-2:])
    assert max(map(len, lines)) <= command.WIDTH


def test_a_step_is_lowered_for_the_gpu_by_another_process_too() -> None:
    step = Kernel([blackwell_ladder.STEPS["8 launch control"]], B200, "last")
    case = shapes.parse(blackwell_ladder.size_case(2048))
    assert step.refusal(case) is None
    (candidate,) = step.candidates(case)
    program = pickle.loads(pickle.dumps(candidate.program))
    found = offline.compile_report(program.make(*program.args), *program.operands, target="b200")
    assert (found.kernel, found.spill_bytes) == ("pallas_gemm_blackwell", 0)
    assert found.grid == (2 * 8 * 8, 1, 1)
