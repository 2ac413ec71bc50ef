"""The tool that plants mistakes: which ones, which tests run, and what it says of them."""

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.mutation import __main__ as command
from tests.mutation import mutations, trials

SOURCE = '''
"""A module. 1 < 2"""

LIMIT: int = 100


def clipped(x: int, most: int = LIMIT, *, strict: bool = False) -> int:
    """Returns `x`, or `most`."""
    if not strict and x < 0:
        raise ValueError(f"{x - 1} is less than {0}")
    log(x, most, where=1)
    return min(x, most) if x in range(most) else most
'''


def diffs(source: str, kind: str) -> list[str]:
    """Returns what mistakes of a kind put in the place of a line."""
    found = [each for each in mutations.of("m.py", source) if each.kind == kind]
    assert all(each.is_program(source) for each in found)
    return [each.diff(source).splitlines()[-1] for each in found]


def test_each_kind_of_mistake_is_planted() -> None:
    assert diffs(SOURCE, "comparison") == [
        "+ if not strict and x <= 0:",
        "+ return min(x, most) if x not in range(most) else most",
    ]
    assert diffs(SOURCE, "logic") == [
        "+ if not strict or x < 0:",
        "+ if strict and x < 0:",
    ]
    assert "+ LIMIT: int = 200" in diffs(SOURCE, "constant")
    assert "+ if not strict and x < 1:" in diffs(SOURCE, "constant")
    assert "+ if not (not strict and x < 0):" in diffs(SOURCE, "condition")
    assert diffs(SOURCE, "argument") == ["+ log(most, x, where=1)", "+ log(x, most)"]
    assert diffs(SOURCE, "statement") == ["+ pass"]
    assert "+ return min(x, most) if x in range(most) else strict" in diffs(SOURCE, "variable")
    assert diffs("x = a + b * c\nx -= 1", "operator") == [
        *("+ x = a - b * c", "+ x = a + b // c", "+ x += 1")
    ]


def test_what_runs_at_import_is_told_from_what_runs_in_a_function() -> None:
    imported = [each for each in mutations.of("m.py", SOURCE) if each.imported]
    assert {each.diff(SOURCE).splitlines()[0] for each in imported} == {
        "- LIMIT: int = 100",
        "- def clipped(x: int, most: int = LIMIT, *, strict: bool = False) -> int:",
    }


def test_types_words_and_what_is_asked_twice_are_left_alone() -> None:
    whole = "\n".join(each.diff(SOURCE) for each in mutations.of("m.py", SOURCE))
    assert "is less than" not in whole
    assert '"""' not in whole
    assert diffs("for a, b in zip(x, y, strict=True):\n    min(a, b)", "constant") == []
    assert diffs("for a, b in zip(x, y, strict=True):\n    min(a, b)", "argument") == [
        "+ for a, b in zip(y, x, strict=True):"
    ]


def test_a_mistake_that_is_none_is_not_counted() -> None:
    plain = mutations.Mutant("m.py", "constant", (1, 1), (4, 5), "(1)", imported=True)
    assert not plain.is_program("x = 1")
    broken = mutations.Mutant("m.py", "constant", (1, 1), (4, 5), "1 +", imported=True)
    assert not broken.is_program("x = 1")


def test_the_fastest_tests_of_few_files_come_first_and_no_more_than_there_is_time_for() -> None:
    files = "aaabbccdde"
    seconds = {f"{file}.py::{i}": float(i) for i, file in enumerate(files)}
    first, second = command.rounds(seconds, seconds, most=30)
    assert first.tests == [f"{files[i]}.py::{i}" for i in (0, 1, 2)] + ["b.py::3"]
    assert second.tests == [f"{files[i]}.py::{i}" for i in (4, 5, 6, 7)]
    assert (first.seconds, second.seconds) == (6, 22)
    # A test is run however long it takes.
    assert command.rounds(["e.py::9"], seconds, most=1) == [trials.Round(["e.py::9"], 9)]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A map of two tests of a module, of which one reaches nothing but what is imported."""
    lines = {"schedules/raster.py": list(range(1, 200))}
    records = [
        {"test": "", "seconds": 0, "lines": {"schedules/raster.py": [1, 3]}},
        {"test": "t.py::test_all", "seconds": 2, "lines": lines},
        {"test": "t.py::test_one", "seconds": 1, "lines": {"schedules/raster.py": [1]}},
    ]
    (tmp_path / "reach").mkdir()
    (tmp_path / "reach" / "map.jsonl").write_text("\n".join(map(json.dumps, records)))
    return tmp_path


def test_what_runs_at_import_is_reached_by_all_tests_of_a_module(folder: pathlib.Path) -> None:
    reach = command.reach_in(folder / "reach")
    mutant = mutations.Mutant("schedules/raster.py", "constant", (3, 3), (0, 1), "", imported=True)
    assert reach.of(mutant) == {"t.py::test_all", "t.py::test_one"}
    inner = mutations.Mutant("schedules/raster.py", "constant", (3, 3), (0, 1), "", imported=False)
    assert reach.of(inner) == {"t.py::test_all"}
    none = mutations.Mutant("schedules/raster.py", "constant", (999, 999), (0, 1), "", False)
    assert reach.of(none) == set()


def planned(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, **own: Any) -> Sequence[Any]:
    """Returns the jobs of a run, of which none is done."""
    jobs: list[trials.Job] = []
    monkeypatch.setattr(trials, "run", lambda given, _: jobs.extend(given))
    options = {"area": ["schedules"], "count": 6, "seed": 3, "seconds": 60.0, "workers": 1}
    command.run(argparse.Namespace(folder=folder, **options | own))
    return jobs


def test_a_run_goes_on_where_it_was_left_off(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = planned(folder, monkeypatch)
    assert len(jobs) == 6
    jobs[0].done(trials.Verdict(noticed=True, by="t.py::test_all", ran=1, seconds=2.5))
    jobs[3].done(trials.Verdict(noticed=False, by="", ran=2, seconds=3.5))
    rest = [job.source for job in planned(folder, monkeypatch)]
    assert rest == [job.source for i, job in enumerate(jobs) if i not in (0, 3)]
    assert len(planned(folder, monkeypatch, seed=4)) > 0
    # Another sample of another size begins with the same mutants.
    assert [job.source for job in planned(folder, monkeypatch, count=5)] == rest[:3]
    capsys.readouterr()
    command.table(argparse.Namespace(folder=folder))
    said = capsys.readouterr().out
    assert "| schedules | 3 | 2 | 0 | 1 | 50% |" in said
    assert "survived 2 of " in said
    # What the page says of a mutant that changes nothing is told by module and diff.
    [survivor] = [each for each in command.records(folder / "log.jsonl") if not each["noticed"]]
    page = folder / "page.md"
    page.write_text(f"```diff\n# {survivor['path']}\n{survivor['diff']}\n```\n")
    monkeypatch.setattr(command, "PAGE", page)
    command.table(argparse.Namespace(folder=folder))
    said = capsys.readouterr().out
    assert "| schedules | 3 | 2 | 1 | 1 | 100% |" in said
    assert "survived" not in said


RUN = """
import json, pathlib
from tests.mutation import trials

trials.GRACE = 0
source = pathlib.Path("schedules/raster.py").read_text()
found = {}
jobs = [
    trials.Job(
        "schedules.raster",
        text,
        [trials.Round([TEST], 0.3 if n == "endless" else 20)],
        lambda verdict, n=n: found.update({n: verdict}),
    )
    for n, text in (
        ("as it is", None),
        ("same", source + "\\nSAME = 1"),
        ("wrong", source.replace('along == "rows"', 'along != "rows"')),
        ("broken", "raise ImportError"),
        ("endless", "while True: pass"),
        ("crash", "import os; os._exit(3)"),
    )
]
trials.run(jobs, 2)
print(json.dumps(found), file=open(OUT, "w"))
"""


def test_mistakes_are_told_from_what_changes_nothing(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "found.json"
    # This test draws nothing. One that draws its cases failed in a fork, in two runs of all tests.
    test = (
        "tests/schedules/test_schedules_orders.py::test_drawings_in_the_docstrings_are_true[.table]"
    )
    code = RUN.replace("TEST]", f"{test!r}]").replace("OUT", repr(str(out)))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=trials.ROOT, capture_output=True, text=True, check=False
    )
    assert out.exists(), done.stdout + done.stderr
    found = {name: trials.Verdict(*value) for name, value in json.loads(out.read_text()).items()}
    assert {name: (v.noticed, v.by) for name, v in found.items()} == {
        "as it is": (False, ""),
        "same": (False, ""),
        "wrong": (True, test),
        "broken": (True, "import of tests/schedules/test_schedules_orders.py"),
        "endless": (True, "time"),
        "crash": (True, "crash"),
    }
