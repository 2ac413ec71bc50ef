"""What the benchmark programs share on the command line: flags, errors in one line, progress."""

import concurrent.futures
import contextlib
import math
import os
import pathlib
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from absl import app, flags, logging
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from pallas_gemm.tuning.timing import TimingError

WIDTH = 80
"""Columns of every table."""

HELP = frozenset(("-h", "-help", "--help"))
"""How a program is asked what it can do."""

BAD_REQUEST = 2
"""Exit status of a program that was asked for what it cannot do."""


class RequestError(ValueError):
    """A request that cannot be met; the message is one line for the user."""


def start(
    program: str,
    run: Callable[[flags.FlagValues], int],
    define: Callable[[flags.FlagValues], None] = lambda _: None,
) -> None:
    """Reads the command line, runs a program and ends with the status that it returns.

    Args:
        program: Its name.
        run: The program, given the values of its flags.
        define: Defines its flags.
    """
    define(flags.FLAGS)
    app.run(lambda _: guarded(program, lambda: run(flags.FLAGS)), flags_parser=_parser(program))


def _parser(program: str) -> Callable[[Sequence[str]], list[str]]:
    """Returns a parser of flags for `absl.app.run` that reports an error in one line."""

    def parse(argv: Sequence[str]) -> list[str]:
        if HELP.intersection(argv):
            # absl's own flag for it exits with 1.
            app.usage(shorthelp=True, writeto_stdout=True)
            sys.exit(0)
        try:
            rest = flags.FLAGS(list(argv))
        except flags.Error as error:
            complain(program, str(error))
            sys.exit(BAD_REQUEST)
        if len(rest) > 1:
            complain(program, f"unexpected argument {rest[1]!r}; every option begins with --")
            sys.exit(BAD_REQUEST)
        if flags.FLAGS["verbosity"].using_default_value:
            # Or absl would also show what JAX has to tell its developers.
            flags.FLAGS.verbosity = logging.WARNING
        return rest

    return parse


def guarded(program: str, run: Callable[[], int]) -> int:
    """Runs a program's work; what the user has to mend is said in one line."""
    try:
        return run()
    except (RequestError, TimingError) as error:
        complain(program, str(error))
        return BAD_REQUEST
    except KeyboardInterrupt:
        complain(program, "stopped; files hold what was found by then")
        return 130


def complain(program: str, message: str) -> None:
    """Prints one line to the standard error."""
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)


def console(file: IO[str] | None = None) -> Console:
    """Returns where tables go, which fit, and sentences, which are wrapped.

    Args:
        file: Where both go; None for the standard output.
    """
    return Console(file=file, width=WIDTH, highlight=False, markup=False)


def wrapped(text: str, indent: int) -> list[str]:
    """Returns a line as several that fit, all but the first indented."""
    return textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=" " * indent,
        drop_whitespace=True,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def progress_bar() -> Progress:
    """Returns a progress bar on the standard error that vanishes when it is done."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


class Steps:
    """The line of a progress bar that shows what is being done at the moment."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def start(self, doing: str, total: int) -> None:
        """Begins a task, given the number of its steps."""
        self._bar.reset(self._task, total=total, description=doing)

    def advance(self) -> None:
        """One step is done."""
        self._bar.advance(self._task)


class Stopwatch:
    """Says how long the parts of a program took: each when it ends, or all of them at the end.

    >>> clock = Stopwatch()
    >>> with clock("predicting"):
    ...     pass

    Args:
        say: Called with a line when a part ends; None to have them in the summary.
    """

    def __init__(self, say: Callable[[str], object] | None = None) -> None:
        self._start = time.perf_counter()
        self._say = say
        self._parts: list[str] = []

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Times a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            line = f"{part} {time.perf_counter() - start:.0f} s"
            if self._say:
                self._say(line)
            else:
                self._parts.append(line)

    def summary(self) -> str:
        """Returns one line."""
        parts = f" ({', '.join(self._parts)})" if self._parts else ""
        return f"Done in {time.perf_counter() - self._start:.0f} s{parts}."


def several(flag: str, values: Sequence[str]) -> Sequence[str]:
    """Returns the values of a flag that lists some.

    Raises:
        RequestError: There are none.
    """
    if not values:
        raise RequestError(f"{flag} is empty")
    return values


def sizes(flag: str, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Reads sizes such as "4096x14336x4096".

    Raises:
        RequestError: One cannot be read.
    """
    found = []
    for text in several(flag, texts):
        parts = text.split("x")
        if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
            raise RequestError(f"{flag} takes sizes such as 4096x14336x4096, got {text!r}")
        found.append(tuple(map(int, parts)))
    return found


def seconds(flag: str, value: float) -> float:
    """Returns the value of a flag that is a time.

    Raises:
        RequestError: It is none.
    """
    if not math.isfinite(value):
        raise RequestError(f"{flag} must be a number of seconds, got {value}")
    return value


def output_path(text: str | None) -> pathlib.Path | None:
    """Returns the path that a flag names, or None."""
    return pathlib.Path(text).expanduser() if text else None


def make_folder(path: pathlib.Path) -> None:
    """Makes a folder, unless it is there.

    Raises:
        RequestError: It cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"cannot make the folder {path}: {error.strerror or error}") from None


def threads() -> int:
    """Returns how many threads may compile."""
    return max(2, os.cpu_count() or 2)


def each[Job, Made](make: Callable[[Job], Made], jobs: Sequence[Job]) -> dict[Job, Made]:
    """Returns what becomes of each job, which several threads compile."""
    with concurrent.futures.ThreadPoolExecutor(threads()) as pool:
        return dict(zip(jobs, pool.map(make, jobs), strict=True))
