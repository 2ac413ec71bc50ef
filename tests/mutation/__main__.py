"""Plants small mistakes one at a time and tells which ones no test notices: `make mutants`.

    python -m tests.mutation map                which lines each test reaches: runs the tests once
    python -m tests.mutation run --area=op      a sample of mutants; goes on where it was left off
    python -m tests.mutation table              what survived

docs/mutants.md says how to read it.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tests.mutation import mutations, trials

ROOT = trials.ROOT
FOLDER = ROOT / ".pytest_cache" / "mutation"
PAGE = ROOT / "docs" / "mutants.md"
AREAS: Mapping[str, Sequence[str]] = {
    "op": ("pallas_gemm/op/**/*.py",),
    "api": ("pallas_gemm/api/**/*.py",),
    "planning": ("pallas_gemm/planning/**/*.py",),
    "flax": ("pallas_gemm/flax/*.py", "pallas_gemm/layers/*.py"),
    "schedules": ("schedules/*.py",),
    # What is decided before a kernel is traced, and what makes of it what the kernel computes.
    "kernels": (
        *("pallas_gemm/problem.py", "pallas_gemm/config.py", "pallas_gemm/program.py"),
        *("pallas_gemm/call.py", "pallas_gemm/device.py", "pallas_gemm/kernels/*.py"),
        *("pallas_gemm/kernels/functions/*.py", "pallas_gemm/kernels/*/plan.py"),
        "pallas_gemm/kernels/*/config.py",
        *("pallas_gemm/kernels/hopper/problems.py", "pallas_gemm/kernels/hopper/registers.py"),
    ),
}
"""What mistakes are planted in."""
MAPPED: Mapping[str, Sequence[str]] = {
    "op": ("tests/op",),
    "api": ("tests/api",),
    "planning": ("tests/planning", "tests/tuning"),
    "flax": ("tests/flax",),
    "schedules": ("tests/schedules",),
    "kernels": ("tests/kernels", "tests/test_config.py", "tests/test_device.py"),
    "others": ("tests/test_keys.py", "tests/test_offline.py"),
}
"""The tests that may notice one."""
FIRST_FILES, FIRST_SECONDS = 4, 8.0
"""Of the first round, which notices most: files to collect, and seconds of tests."""


class Reach(NamedTuple):
    """Which tests reach what.

    Attributes:
        seconds: What each test takes.
        lines: The tests that reach each line of each module.
        modules: The tests that reach any line of each module.
    """

    seconds: dict[str, float]
    lines: dict[tuple[str, int], set[str]]
    modules: dict[str, set[str]]

    def of(self, mutant: mutations.Mutant) -> set[str]:
        """The tests that reach a mutant; what is reached by import alone, all of the module."""
        if mutant.imported:
            return self.modules[mutant.path] - {""}
        first, last = mutant.lines
        found = set[str]().union(
            *(self.lines.get((mutant.path, line), set()) for line in range(first, last + 1))
        )
        return found - {""} if found != {""} else self.modules[mutant.path] - {""}


def reach_in(folder: pathlib.Path) -> Reach:
    """Reads which tests reach what."""
    reach = Reach({}, collections.defaultdict(set), collections.defaultdict(set))
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            test = record["test"]
            reach.seconds[test] = record["seconds"]
            for path, lines in record["lines"].items():
                reach.modules[path].add(test)
                for number in lines:
                    reach.lines[path, number].add(test)
    return reach


def rounds(tests: Iterable[str], seconds: Mapping[str, float], most: float) -> list[trials.Round]:
    """Returns the tests of a mutant, the fastest first, so many seconds at most."""
    by_time = sorted(tests, key=lambda test: (seconds[test], test))
    files = collections.Counter(test.partition("::")[0] for test in by_time)
    few = {file for file, _ in files.most_common(FIRST_FILES)}
    first, rest = list[str](), list[str]()
    total = [0.0, 0.0]
    for test in by_time:
        if sum(total) + seconds[test] > most and sum(total):
            break
        is_first = test.partition("::")[0] in few and total[0] + seconds[test] <= FIRST_SECONDS
        (first if is_first else rest).append(test)
        total[not is_first] += seconds[test]
    return [trials.Round(*each) for each in zip((first, rest), total, strict=True) if each[0]]


def drawn(area: str, count: int, seed: int, reach: Reach) -> list[mutations.Mutant]:
    """Draws mutants of an area, of lines that tests reach."""
    found = list[mutations.Mutant]()
    paths = {path for glob in AREAS[area] for path in ROOT.glob(glob)}
    for path in sorted(paths):
        name = str(path.relative_to(ROOT))
        found += (each for each in mutations.of(name, path.read_text()) if reach.of(each))
    random.Random(f"{area} {seed}").shuffle(found)
    programs = (each for each in found if each.is_program((ROOT / each.path).read_text()))
    return [each for each, _ in zip(programs, range(count), strict=False)]


def equivalent() -> set[str]:
    """The mutants of which the page says that they change nothing: module and diff."""
    text = PAGE.read_text() if PAGE.exists() else ""
    blocks = re.findall(r"^```diff\n# (\S+)\n(.*?)\n```", text, re.MULTILINE | re.DOTALL)
    return {f"{path}\n{diff}" for path, diffs in blocks for diff in diffs.split("\n\n")}


def records(log: pathlib.Path) -> list[dict[str, Any]]:
    """Reads what became of mutants."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def run(own: argparse.Namespace) -> None:
    """Runs a sample, but for what the log has."""
    reach, log = reach_in(own.folder / "reach"), own.folder / "log.jsonl"
    done = {(each["name"], each["diff"]) for each in records(log)}
    sample = [
        (area, mutant, (ROOT / mutant.path).read_text())
        for area in own.area or AREAS
        for mutant in drawn(area, own.count, own.seed, reach)
    ]

    def jobs() -> Iterator[trials.Job]:
        for area, mutant, source in sample:
            diff = mutant.diff(source)
            if (mutant.name, diff) in done:
                continue
            tests = reach.of(mutant)

            def tell(verdict: trials.Verdict, **facts: Any) -> None:
                with log.open("a") as file:
                    file.write(json.dumps(facts | verdict._asdict()) + "\n")
                said = f"noticed by {verdict.by}" if verdict.noticed else "SURVIVED"
                print(f"{facts['name']}  {said}  {verdict.seconds} s", flush=True)

            facts = {"area": area, "seed": own.seed, "name": mutant.name, "path": mutant.path}
            facts |= {"kind": mutant.kind, "diff": diff, "reaching": len(tests)}
            [module] = trials.names([mutant.path])
            yield trials.Job(
                module,
                mutant.changed(source),
                rounds(tests, reach.seconds, own.seconds),
                lambda verdict, facts=facts: tell(verdict, **facts),
            )

    trials.run(jobs(), own.workers)


def table(own: argparse.Namespace) -> None:
    """Prints how many of each area were noticed, and what survived."""
    same, found = equivalent(), records(own.folder / "log.jsonl")
    print("| area | seed | mutants | change nothing | noticed | of those that change something |")
    print("|---|---|---|---|---|---|")
    for area, seed in sorted({(each["area"], each["seed"]) for each in found}):
        part = [each for each in found if (each["area"], each["seed"]) == (area, seed)]
        noticed = sum(each["noticed"] for each in part)
        nothing = sum(f"{each['path']}\n{each['diff']}" in same for each in part)
        share = noticed / max(len(part) - nothing, 1)
        print(f"| {area} | {seed} | {len(part)} | {nothing} | {noticed} | {share:.0%} |")
    for each in found:
        if not each["noticed"] and f"{each['path']}\n{each['diff']}" not in same:
            print(f"\n{each['name']}: survived {each['ran']} of {each['reaching']} tests")
            print(each["diff"])


def write_map(own: argparse.Namespace) -> None:
    """Runs the tests once, and writes which lines each reaches."""
    failed = 0
    for name in own.area or MAPPED:
        reached = f"--reached={own.folder / 'reach' / name}.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "tests.mutation.reached"]
        done = subprocess.run([*command, reached, *MAPPED[name]], cwd=ROOT, check=False)
        failed |= done.returncode
    sys.exit(failed)


def main() -> None:
    """Does what the command line says."""
    parser = argparse.ArgumentParser(prog="tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("map", "run", "table"))
    parser.add_argument("--area", action="append", choices=(*AREAS, "others"), help="default: all")
    parser.add_argument("--count", type=int, default=40, help="mutants of each area")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--seconds", type=float, default=60, help="of tests for each mutant")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER)
    own = parser.parse_args()
    os.chdir(ROOT)
    own.folder.mkdir(parents=True, exist_ok=True)
    {"map": write_map, "run": run, "table": table}[own.what](own)


if __name__ == "__main__":
    main()
