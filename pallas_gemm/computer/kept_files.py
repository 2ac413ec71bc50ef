"""Lowered kernels on disk: their folder, its limit of size, and whose files are trusted.

A kernel is code that the GPU runs. So files and folders that another user could have written are
neither read nor written. The files that were not used for longest go first.
"""

import contextlib
import os
import pathlib
import stat
import time
from collections.abc import Iterator

from pallas_gemm.computer import user_folder

LIMIT_VARIABLE = "PALLAS_GEMM_KEPT_MB"
"""Names the largest size of all files together in megabytes; 0 keeps nothing and reads nothing."""
DEFAULT_MB = 256
UNUSED_DAYS = 30
"""After these days without use, a file goes."""


def folder() -> pathlib.Path:
    """Returns the folder of all kernels, which need not exist.

    Raises:
        OSError: There is none.
    """
    return user_folder.user_folder() / "kernels"


def limit() -> int:
    """Returns the largest size of all files together in bytes.

    Raises:
        ValueError: The variable holds no whole number.
    """
    given = os.environ.get(LIMIT_VARIABLE) or str(DEFAULT_MB)
    if not given.isdecimal():
        raise ValueError(
            f"{LIMIT_VARIABLE} must be a whole number of megabytes, 0 to keep nothing, got"
            f" {given!r}"
        )
    return int(given) * 1_000_000


def read(path: pathlib.Path) -> bytes | None:
    """Returns what a file in the folder holds, and marks the file as used.

    Returns:
        None where there is no such file, or where another user could have written it.
    """
    with contextlib.suppress(OSError):
        if limit() == 0 or why_not_trusted(path.parent):
            return None
        with path.open("rb") as file:
            # Of the file that is open, not of one that took its place since.
            if _why_not(os.fstat(file.fileno())):
                return None
            content = file.read()
        with contextlib.suppress(OSError):
            os.utime(path)
        return content
    return None


def keep(path: pathlib.Path, content: bytes) -> None:
    """Writes a file in the folder, if this is possible and allowed, and keeps to the limit."""
    # A program runs as well where nothing can be kept.
    with contextlib.suppress(OSError):
        if len(content) > limit():
            return
        user_folder.make(path.parent)
        if not why_not_trusted(path.parent):
            user_folder.write(path, content)
            _remove_oldest(limit())


def size() -> int:
    """Returns the size of all files together in bytes."""
    return sum(size for _, size, _ in _files())


def why_not_trusted(inner: pathlib.Path) -> str | None:
    """Returns why nothing is read from a folder or written to it; None if it is trusted.

    Args:
        inner: The folder of all kernels or one within. Each folder around it counts, up to the
            user's.
    """
    top = user_folder.user_folder()
    for each in (inner, *inner.parents):
        with contextlib.suppress(FileNotFoundError):
            if why := _why_not(each.stat()):
                return f"{each} {why}"
        if each == top:
            break
    return None


def _why_not(found: os.stat_result) -> str | None:
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to another user, number {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by other users: chmod go-w ends that"
    return None


def _files() -> Iterator[tuple[float, int, pathlib.Path]]:
    """Yields when each file was used last, its size and its path."""
    for path in folder().glob("*/*"):
        # Another process may have removed it.
        with contextlib.suppress(OSError):
            found = path.stat()
            yield found.st_mtime, found.st_size, path


def _remove_oldest(most: int) -> None:
    """Removes the files that nobody used for long, and the oldest beyond a size of all."""
    since = time.time() - UNUSED_DAYS * 86400
    total = 0
    for used, size, path in sorted(_files(), reverse=True):
        total += size
        if used >= since and total <= most:
            continue
        with contextlib.suppress(OSError):
            path.unlink()
            # Succeeds where the folder of this version is empty now.
            path.parent.rmdir()
