"""Tuned configs: what was found fastest for a problem, kept as JSON, and where dispatch finds it.

`find` asks three tables in turn: the innermost `with table:` block's, the user's own, and the one
that this package ships for the GPU. The user's lies in the folder `PALLAS_GEMM_CACHE_DIR`, by
default where the platform keeps caches. A table is data for one kind of GPU:

    table = pallas_gemm.autotune(f, *args)  # or Table.load(path)
    with table:
        f(*args)  # is compiled with what the table says
    (table | another).save(path)

A file that cannot be used is warned about once and then ignored: no program may break because of
its cache.
"""

import contextlib
import dataclasses
import fcntl
import functools
import importlib.resources
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

import jax

from pallas_gemm._version import __version__
from pallas_gemm.computer import user_folder
from pallas_gemm.config import GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.planning import config_json, ignored
from pallas_gemm.planning.within import Within
from pallas_gemm.problem import Problem

FORMAT = 1
"""Changes when what an earlier version wrote could be misread."""

Source = Literal["context", "user", "packaged"]


class CacheWarning(UserWarning):
    """A table of tuned configs cannot be used."""


class TableError(ValueError):
    """A text is no table of tuned configs, or none for this version."""


@dataclasses.dataclass(frozen=True, order=True)
class Key:
    """What a tuned config is filed under: the problem, without what no config depends on.

    Attributes:
        batch: How many products.
        m: Rows of the result.
        n: Columns of the result.
        k: The contracted size.
        layout: Such as "NT".
        dtypes: Names of the element types of both operands and of the result.
        epilogue: The parts of the epilogue that take time, such as "bias activation". Also "gram"
            or "product" where half of a symmetric result is computed, and "parts:4" where sums in
            four parts are promised.
    """

    batch: int
    m: int
    n: int
    k: int
    layout: str
    dtypes: tuple[str, str, str]
    epilogue: str = ""

    @classmethod
    def of(cls, problem: Problem) -> Self:
        """Returns the key of a problem."""
        epilogue = problem.epilogue
        parts = {
            "bias": epilogue.bias,
            "activation": epilogue.activation is not None,
            "residual": epilogue.residual and problem.residual_dtype is None,
            f"residual:{problem.residual_dtype}": problem.residual_dtype is not None,
            "gated": epilogue.gated,
            problem.symmetric: bool(problem.symmetric),
            f"parts:{problem.parts}": problem.parts > 0,
            f"{problem.blocks}".replace(" ", "_"): problem.blocks is not None,
        }
        return cls(
            problem.batch,
            problem.m,
            problem.n,
            problem.k,
            problem.layout,
            (problem.a_dtype.name, problem.b_dtype.name, problem.out_dtype.name),
            " ".join(name for name, present in parts.items() if present),
        )


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tuned config.

    Attributes:
        config: The fastest config.
        seconds: The time of its kernel when it was; None if nobody looked.
        over_xla: How much faster that is than XLA, likewise: below one, XLA computes the product.
    """

    config: GemmConfig
    seconds: float | None = None
    over_xla: float | None = None


@dataclasses.dataclass(frozen=True)
class Found:
    """The entry of a table, and which table it is."""

    entry: Entry
    source: Source


@dataclasses.dataclass(frozen=True)
class Table(Within):
    """Tuned configs for one kind of GPU. `with table:` puts it into use.

    >>> with Table.load("mine.json"):  # doctest: +SKIP
    ...     train_step(params, batch)

    Attributes:
        device: The `device_kind` of JAX.
        entries: (key, entry) pairs, in the order of their keys.
    """

    device: str
    entries: tuple[tuple[Key, Entry], ...] = ()

    @classmethod
    def of(cls, device: str, entries: Mapping[Key, Entry]) -> Self:
        """Returns the table of a mapping."""
        return cls(device, tuple(sorted(entries.items(), key=lambda pair: pair[0])))

    @functools.cached_property
    def by_key(self) -> Mapping[Key, Entry]:
        """The entries as a mapping."""
        return dict(self.entries)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.device, self.entries))

    def __hash__(self) -> int:
        # Within a `with` block the table is part of the key of every call of a jitted function.
        return self._hash

    def __len__(self) -> int:
        return len(self.entries)

    def __or__(self, other: "Table") -> "Table":
        """Merges two tables; where both have a config for a problem, the right one's counts."""
        if not isinstance(other, Table):
            return NotImplemented
        if self.device != other.device:
            raise ValueError(
                "tables for different devices cannot be merged, got"
                f" {self.device!r} and {other.device!r}"
            )
        return Table.of(self.device, {**self.by_key, **other.by_key})

    def _block(self) -> contextlib.AbstractContextManager[Any]:
        """See `Within`; the table comes before every other."""
        active = _ACTIVE.value
        return _ACTIVE(dataclasses.replace(active, tables=(self, *active.tables)))

    def dumps(self) -> str:
        """Returns the table as JSON.

        Raises:
            ValueError: The schedule of a config is an object, which has no name to be written.
        """
        document = {
            "pallas_gemm": __version__,
            "format": FORMAT,
            "device": self.device,
            "entries": [
                {
                    **dataclasses.asdict(key),
                    "config": config_json.written(entry.config),
                    "seconds": entry.seconds,
                    "over_xla": entry.over_xla,
                }
                for key, entry in self.entries
            ],
        }
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def loads(cls, text: str) -> Self:
        """Returns the table that JSON holds.

        Raises:
            TableError: It holds none, or one of another version of the format.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise TableError(f"it is not JSON: {error}") from None
        if not isinstance(document, dict) or "pallas_gemm" not in document:
            raise TableError("it is not a table of tuned configs")
        if document.get("format") != FORMAT:
            raise TableError(f"its format is {document.get('format')!r}, this version's {FORMAT}")
        try:
            pairs = [_pair(**entry) for entry in document["entries"]]
            return cls.of(document["device"], dict(pairs))
        except (KeyError, TypeError, ValueError) as error:
            raise TableError(f"it is damaged: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the table to a file, whole or not at all."""
        user_folder.write(path, self.dumps().encode())

    def save_for_user(self) -> pathlib.Path:
        """Merges the table into the user's own, which every program of this user finds.

        Returns:
            The file.

        Raises:
            OSError: It cannot be written; the message says how to choose another folder.
        """
        path = user_path(self.device)
        try:
            user_folder.make(path.parent)
            with _alone_in(path.parent):
                before = _user_table(self.device)
                (before | self if before else self).save(path)
        except OSError as error:
            raise OSError(
                f"cannot write tuned configs to {path}: {error.strerror or error};"
                f" {user_folder.FOLDER_VARIABLE} names another folder"
            ) from error
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Returns the table in a file.

        Raises:
            OSError: It cannot be read.
            TableError: It holds no table that this version can use.
        """
        try:
            return cls.loads(pathlib.Path(path).read_text())
        except UnicodeDecodeError as error:
            raise TableError(f"{path}: it is not text: {error}") from None
        except TableError as error:
            raise TableError(f"{path}: {error}") from None


@contextlib.contextmanager
def _alone_in(folder: pathlib.Path) -> Iterator[None]:
    """Waits until no other process merges its entries into a file of this folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems know no locks: there the last one to write counts.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@dataclasses.dataclass(frozen=True)
class _Active:
    """The tables that are in use in this thread.

    Attributes:
        tables: The tables of the `with` blocks, the innermost first.
        record: Collects every problem that is looked up, while `autotune` traces; None otherwise.
    """

    tables: tuple[Table, ...] = ()
    record: "Record | None" = None


class Record:
    """The problems that were looked up in a `recording` block.

    It is a part of the key of every call of a jitted function, which no dictionary can be.
    """

    def __init__(self) -> None:
        self.problems: dict[tuple[Key, str], tuple[Problem, Device]] = {}

    def add(self, problem: Problem, device: Device) -> None:
        """Adds a problem, unless one with the same key is there."""
        self.problems.setdefault((Key.of(problem), device.kind), (problem, device))


# A context of JAX's own, so that a function that was traced outside a block is traced anew in it.
_ACTIVE = jax.make_user_context(default_value=_Active())


def may_be_tuned(problem: Problem) -> bool:
    """Whether configs are tuned for a problem: nobody draws operands for the others."""
    is_special = problem.in_groups or problem.arrays or problem.scales
    return not is_special and problem.epilogue.program is None


def find(problem: Problem, device: Device) -> Found | None:
    """Returns what the tables say of a problem on a device, or None.

    The answer depends on the `with` blocks around the call and on files: a caller that keeps it
    must keep it for one trace only.

    Args:
        problem: The problem of the kernel, after any realignment of the operands.
        device: The GPU that it is for.
    """
    active = _ACTIVE.value
    if active.record is not None:
        active.record.add(problem, device)
    # What was found without a promise is as good where it keeps one.
    keys = dict.fromkeys((Key.of(problem), Key.of(dataclasses.replace(problem, parts=0))))
    for source, table in _tables(active, device):
        for key in keys:
            entry = table.by_key.get(key)
            if entry is not None and not entry.config.refusals(problem, device):
                return Found(entry, source)
    return None


@contextlib.contextmanager
def recording() -> Iterator[Record]:
    """Collects the problems that are looked up in this thread, traced anew even if known."""
    record = Record()
    with _ACTIVE(dataclasses.replace(_ACTIVE.value, record=record)):
        yield record


def user_path(device: str) -> pathlib.Path:
    """Returns the file of the user's own table for a kind of GPU.

    Raises:
        OSError: There is no folder for it, as where a user has no home.
    """
    return user_folder.user_folder() / f"{slug(device)}.json"


def _pair(
    *,
    dtypes: list[str],
    config: Any,
    seconds: float | None,
    over_xla: float | None = None,
    **key: Any,
) -> tuple[Key, Entry]:
    """Returns the key and the entry that one entry of the JSON holds."""
    first, second, result = dtypes
    entry = Entry(config_json.read(config), seconds, over_xla)
    return Key(dtypes=(first, second, result), **key), entry


def _tables(active: _Active, device: Device) -> Iterator[tuple[Source, Table]]:
    """Yields the tables for a device in the order in which they count."""
    for table in active.tables:
        if table.device == device.kind:
            yield "context", table
    if (user := _user_table(device.kind)) is not None:
        yield "user", user
    if (packaged := _packaged_table(device.kind)) is not None:
        yield "packaged", packaged


def _user_table(device: str) -> Table | None:
    try:
        path = user_path(device)
    except OSError as error:
        _warn_once(str(error))
        return None
    try:
        now = path.stat()
    except OSError:
        return None
    # Clocks of files tick a few times in a hundredth of a second, and each save makes a new file.
    return _read(path, (now.st_mtime_ns, now.st_ino, now.st_size), device)


@functools.lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    ignored.warn(message, CacheWarning)


@functools.lru_cache(maxsize=64)
def _read(
    path: pathlib.Path,
    stamp: tuple[int, int, int],  # noqa: ARG001 - the key
    device: str,
) -> Table | None:
    """Reads a user's table; again only when the file has changed, and so warns only once."""
    try:
        table = Table.load(path)
        if table.device != device:
            raise TableError(f"{path}: it is for {table.device!r}, not for {device!r}")
        version = json.loads(path.read_text())["pallas_gemm"]
        if version != __version__:
            raise TableError(f"{path}: it was tuned with version {version}, this is {__version__}")
    except (OSError, TableError) as error:
        ignored.warn(f"tuned configs are ignored: {error}", CacheWarning)
        return None
    return table


@functools.lru_cache(maxsize=16)
def _packaged_table(device: str) -> Table | None:
    file = importlib.resources.files("pallas_gemm") / "tuned" / f"{slug(device)}.json"
    return Table.loads(file.read_text()) if file.is_file() else None


def slug(device: str) -> str:
    """Returns a device's kind as the name of a file: "NVIDIA H200" is nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
