"""Kernels on disk: their limit of size, and files and folders of other users."""

import os
import pathlib
import time

import pytest

from pallas_gemm.computer import kept_files, user_folder

CONTENT = b"a kernel"


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """Where a kernel belongs; no folder of it exists."""
    monkeypatch.setenv(user_folder.FOLDER_VARIABLE, str(tmp_path / "own"))
    return kept_files.folder() / "version" / "kernel"


def _used(path: pathlib.Path, days_ago: float) -> None:
    then = time.time() - days_ago * 86400
    os.utime(path, (then, then))


def test_what_is_kept_is_read_again(path: pathlib.Path) -> None:
    assert kept_files.read(path) is None
    kept_files.keep(path, CONTENT)
    assert kept_files.read(path) == CONTENT
    assert kept_files.size() == len(CONTENT)


def test_no_umask_makes_a_folder_that_others_can_write(path: pathlib.Path) -> None:
    before = os.umask(0)
    try:
        kept_files.keep(path, CONTENT)
    finally:
        os.umask(before)
    made = (path, path.parent, path.parent.parent, path.parent.parent.parent)
    assert [each.stat().st_mode & 0o777 for each in made] == [0o644, 0o755, 0o755, 0o755]


@pytest.mark.parametrize("up", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_nothing_is_read_that_another_user_can_write(
    path: pathlib.Path, up: int, mode: int
) -> None:
    kept_files.keep(path, CONTENT)
    (path, *path.parents)[up].chmod(mode)
    assert kept_files.read(path) is None


@pytest.mark.parametrize("up", [0, 1, 2])
def test_nothing_is_written_where_another_user_can_write(path: pathlib.Path, up: int) -> None:
    user_folder.make(path.parent)
    path.parents[up].chmod(0o775)
    kept_files.keep(path, CONTENT)
    assert not path.exists()
    assert kept_files.why_not_trusted(path.parent) == (
        f"{path.parents[up]} can be written by other users: chmod go-w ends that"
    )


@pytest.mark.parametrize("up", [0, 1, 2, 3])
def test_nothing_is_read_that_belongs_to_another_user(
    path: pathlib.Path, up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_files.keep(path, CONTENT)
    if os.geteuid() == 0:
        os.chown((path, *path.parents)[up], 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert kept_files.read(path) is None


def test_folders_around_the_users_own_do_not_count(path: pathlib.Path) -> None:
    kept_files.keep(path, CONTENT)
    user_folder.user_folder().parent.chmod(0o777)
    assert kept_files.read(path) == CONTENT


def test_what_was_not_used_for_longest_goes_first(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kept_files.LIMIT_VARIABLE, "1")
    content = bytes(400_000)
    first, second = path.with_name("first"), path.parent.with_name("another") / "second"
    for days, each in ((3, first), (2, second)):
        kept_files.keep(each, content)
        _used(each, days)
    # Reading is using.
    assert kept_files.read(first) == content
    kept_files.keep(path, content)
    assert kept_files.read(second) is None
    assert kept_files.read(first) == kept_files.read(path) == content
    # With its last file the folder of a version goes.
    assert not second.parent.exists()
    # What is larger than the limit by itself is not kept, and nothing goes for it.
    kept_files.keep(second, bytes(1_000_001))
    assert not second.exists()
    assert kept_files.size() == 800_000


def test_what_was_not_used_for_long_goes(path: pathlib.Path) -> None:
    old, recent = path.parent.with_name("old") / "kernel", path.with_name("recent")
    for each, days in ((old, kept_files.UNUSED_DAYS + 1), (recent, kept_files.UNUSED_DAYS - 1)):
        kept_files.keep(each, CONTENT)
        _used(each, days)
    kept_files.keep(path, CONTENT)
    assert (old.parent.exists(), recent.exists(), path.exists()) == (False, True, True)


def test_nothing_is_kept_or_read_where_that_is_switched_off(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_files.keep(path, CONTENT)
    monkeypatch.setenv(kept_files.LIMIT_VARIABLE, "0")
    assert kept_files.read(path) is None
    kept_files.keep(path.with_name("another"), CONTENT)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("given", ["a lot", "-1", "1.5", "2G"])
def test_a_limit_that_is_no_number_is_refused(
    given: str, path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kept_files.LIMIT_VARIABLE, given)
    with pytest.raises(ValueError, match=f"megabytes, 0 to keep nothing, got '{given}'"):
        kept_files.read(path)
