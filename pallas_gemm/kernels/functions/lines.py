"""Lines of the user's program: which of them made an equation."""

import os
import pathlib
import sysconfig
from collections.abc import Iterator
from types import CodeType
from typing import Any

# Here are no lines of the caller's: this package, Python's own library, what is installed.
_PACKAGE = f"{pathlib.Path(__file__).parents[2]}{os.sep}"
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_API = pathlib.Path(__file__).parents[2] / "api"
_CALLERS = (str(_API / "explaining" / "explain.py"), str(_API / "accelerate.py"))
"""Files that call the user's function: what called them made nothing of it."""


def _codes(source: Any) -> Iterator[tuple[CodeType, int]]:
    """Yields the code within the user's function that made an equation, innermost first.

    Each comes with a place in it. To look up its line takes longer than all the rest.
    """
    frames = ((), ()) if source.traceback is None else source.traceback.raw_frames()
    for code, place in zip(*frames, strict=True):
        if code.co_filename in _CALLERS:
            return
        yield code, place


def is_ours(source: Any) -> bool:
    """Whether this package made an equation, for a product that it leaves to XLA.

    The user's own function may have been called by this package.
    """
    for code, _ in _codes(source):
        if code.co_filename.startswith(_PACKAGE):
            return True
        if not code.co_filename.startswith(_LIBRARIES):
            return False
    return False


def is_library(file: str) -> bool:
    """Whether a file is this package's, Python's own or an installed one."""
    return file.startswith((_PACKAGE, *_LIBRARIES))


def place(source: Any) -> str | None:
    """Returns the innermost line of the caller's own program that made an equation."""
    for code, place in _codes(source):
        if not is_library(code.co_filename):
            line = source.traceback.code_addr2line(code, place)
            return f"{pathlib.Path(code.co_filename).name}:{line}"
    return None
