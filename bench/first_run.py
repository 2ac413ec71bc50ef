"""All that there is to measure on a GPU that nobody measured yet, in one file.

    python bench/first_run.py
        on a B200: under 10 minutes; writes first_run.zip, to send back
    python bench/first_run.py --list
        anywhere: the parts, and how long each may take

Each part is a program of this folder in a process of its own. One that takes
longer than its share is ended: its files hold what it had found by then. A
kernel that is not proven on this GPU is proven first, which takes time of its
own; if it fails, nothing is timed.
"""

import dataclasses
import functools
import json
import pathlib
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from absl import flags

from bench import command
from pallas_gemm.planning import proof
from pallas_gemm.proving import prove

PROGRAM = "first_run"
HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Part:
    """A program, and what it is told.

    Attributes:
        name: Its name here.
        seconds: After so long it is ended.
        program: Its file in this folder.
        options: Its command line, for each kernel's name.
    """

    name: str
    seconds: int
    program: str
    options: Callable[[str], tuple[str, ...]]


PARTS = (
    Part("ladder", 150, "{kernel}_ladder.py", lambda _: ("--csv=ladder.csv",)),
    Part(
        "suite",
        150,
        "gemm_bench.py",
        lambda _: ("--suite=short", "--peers=xla,ours,torch", "--json=suite.json"),
    ),
    Part(
        "tuning",
        120,
        "tune.py",
        lambda _: (
            *("--suites=short,layouts", "--seconds=80", "--most=12"),
            *("--output=tuned.json", "--csv=tuned.csv"),
        ),
    ),
    Part(
        "study",
        150,
        "schedule_study.py",
        lambda kernel: (
            *(f"--kernel={kernel}", "--orders=raster,hilbert,clipped_hilbert,swizzle"),
            *("--groups=8,16", "--clusters=2x1", "--persistence=static,dynamic"),
            *("--counters", "--counter_seconds=30", "--csv=study.csv"),
        ),
    ),
)
"""The parts in their order, the largest gain of knowledge first."""

Run = Callable[[Sequence[str], pathlib.Path, float], tuple[int | None, str]]
"""Runs a command in a folder for so long: its exit status, None if it was ended, and its words."""


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command line."""
    text = {"flag_values": values}
    flags.DEFINE_string("out", "first_run.zip", "The file to send back.", **text)
    flags.DEFINE_bool("list", False, "Show the parts instead of running them.", **text)


def _run(values: flags.FlagValues) -> int:
    """Runs all parts.

    Returns:
        0; 1 if one failed, or the kernel; 2 for a request that cannot be met.
    """
    if values.list:
        print("\n".join(listing()))
        return 0
    from bench import counters, report

    out = pathlib.Path(values.out).expanduser().resolve()
    report.check_writable(out)
    console = command.console()
    try:
        proven = ready(functools.partial(console.print, end=""))
    except prove.NothingToProveError as error:
        raise command.RequestError(str(error)) from None
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        run = functools.partial(counters.ended, inside=True)
        status = measure(proven, folder, out, console.print, run)
    console.print(f"please send us {out}")
    return status


def listing() -> Iterator[str]:
    """Yields the parts, and how long each may take."""
    for part in PARTS:
        yield f"{part.name:8} {part.seconds:4} s  {part.program.format(kernel='blackwell')}"
        yield from command.wrapped(f"    {' '.join(part.options('blackwell'))}", indent=4)
    yield f"together {sum(part.seconds for part in PARTS):4} s at most"


def ready(say: Callable[[str], object], start: prove.Start = prove.in_process) -> proof.Proof:
    """Returns what is proven of this GPU's kernel; proves it where that is not known.

    Raises:
        NothingToProveError: There is no GPU that a kernel is for.
    """
    here = prove.survey(start)
    known = proof.found(here["kernel"], here["device"])
    if known is not None and known.failed is None:
        say(f"the {known.kernel} kernel was proven on {known.device} on {known.when}\n")
        return known
    return prove.prove(say, start)


def measure(
    proven: proof.Proof,
    folder: pathlib.Path,
    out: pathlib.Path,
    say: Callable[[str], object],
    run: Run,
) -> int:
    """Runs each part, and writes all files of all parts anew after each; returns the status.

    Args:
        proven: The kernel's proof; if it failed, no part is run.
        folder: Where the parts write.
        out: The file to send back.
        say: Is handed each line for the user.
        run: Runs a part.
    """
    (folder / "proof.json").write_text(json.dumps(dataclasses.asdict(proven), indent=1))
    _pack(folder, out)
    if proven.failed is not None:
        return 1
    status = 0
    for part in PARTS:
        say(f"{part.name}, for {part.seconds} s at most")
        program = [sys.executable, str(HERE / part.program.format(kernel=proven.kernel))]
        code, words = run([*program, *part.options(proven.kernel)], folder, part.seconds)
        (folder / f"{part.name}.txt").write_text(words)
        say(words.rstrip())
        if code is None:
            say(f"{part.name} was ended after {part.seconds} s; its files hold what it had found")
        elif code:
            say(f"{part.name} failed: status {code}")
            status = 1
        _pack(folder, out)
    return status


def _pack(folder: pathlib.Path, out: pathlib.Path) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(folder.iterdir()):
            # What ran beside them is not to be sent.
            if path.suffix in (".txt", ".csv", ".json"):
                file.write(path, path.name)


if __name__ == "__main__":
    command.start(PROGRAM, _run, define_flags)
