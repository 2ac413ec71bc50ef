"""How far long work is, and how long the rest will take: a bar on a terminal, lines elsewhere."""

import importlib.util
import sys
import time
from typing import Any, Self, TextIO

PAUSE = 5.0
"""Seconds between lines that say no more than how far it is."""


class Progress:
    """Shows what is done of some pieces of work.

    With `rich`, on a terminal, there is a bar with the time that is left under the lines that are
    said; elsewhere each line says it.

    Args:
        total: How many pieces there are.
        what: The word for the work on them.
        stream: Where it is shown; None for the standard error.
    """

    def __init__(self, total: int, what: str, stream: TextIO | None = None) -> None:
        self._total, self._done, self._start = total, 0, time.monotonic()
        self._said = self._start
        self._stream = sys.stderr if stream is None else stream
        self._bar = self._task = None
        if self._stream.isatty() and importlib.util.find_spec("rich") is not None:
            self._bar = _bar(self._stream)
            self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, line: str = "") -> None:
        """Notes that one more piece is done, and says what came of it.

        Args:
            line: The line to show. Without one, lines come no more often than every `PAUSE`
                seconds.
        """
        self._done += 1
        if self._bar is not None:
            if line:
                self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
            self._bar.advance(self._task)
            return
        now = time.monotonic()
        if not line and now - self._said < PAUSE:
            return
        self._said, left = now, self._total - self._done
        rest = (now - self._start) / self._done * left
        words = [f"{self._done}/{self._total}", line, f"({left_text(rest)} left)" if left else ""]
        self._stream.write(f"{' '.join(filter(None, words))}\n")
        self._stream.flush()


def left_text(seconds: float) -> str:
    """Returns a time in a few characters."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def _bar(stream: TextIO) -> Any:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        *(progress.TextColumn("{task.description}"), progress.BarColumn()),
        *(progress.MofNCompleteColumn(), progress.TimeRemainingColumn()),
        console=Console(file=stream),
        transient=True,
    )
