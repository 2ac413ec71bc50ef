"""Lines of the user's program: which of them made an equation."""

import os
import pathlib
import sysconfig
from collections.abc import Iterator
from typing import Any

# Here are no lines of the caller's: this package, Python's own library, what is installed.
_PACKAGE = f"{pathlib.Path(__file__).parents[1]}{os.sep}"
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_API = pathlib.Path(__file__).parents[1] / "api"
_CALLERS = (str(_API / "explaining" / "explain.py"), str(_API / "accelerate.py"))
"""Files that call the user's function: what called them made nothing of it."""


def _files(source: Any) -> Iterator[tuple[str, int]]:
    """Yields the lines within the user's function that made an equation, innermost first."""
    for frame in () if source.traceback is None else source.traceback.frames:
        if frame.file_name in _CALLERS:
            return
        yield frame.file_name, frame.line_num


def is_ours(source: Any) -> bool:
    """Whether this package made an equation, for a product that it leaves to XLA.

    The user's own function may have been called by this package.
    """
    for file, _ in _files(source):
        if file.startswith(_PACKAGE):
            return True
        if not file.startswith(_LIBRARIES):
            return False
    return False


def is_library(file: str) -> bool:
    """Whether a file is this package's, Python's own or an installed one."""
    return file.startswith((_PACKAGE, *_LIBRARIES))


def place(source: Any) -> str | None:
    """Returns the innermost line of the caller's own program that made an equation."""
    for file, line in _files(source):
        if not is_library(file):
            return f"{pathlib.Path(file).name}:{line}"
    return None
