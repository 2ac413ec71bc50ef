"""Whether a kernel may be taken unasked: where nobody has run it, only where it was proven.

`python -m pallas_gemm doctor --prove` runs a kernel on this computer's GPU, stage by stage, and
writes what came of it into the user's folder: a file for each kind of GPU. It holds for the
sources of the kernel and the versions of JAX that it was run with, and for no others. A kernel that
failed is not taken unasked wherever else it is trusted.
"""

import dataclasses
import functools
import json
import pathlib
from typing import Any, Self

from pallas_gemm.computer import user_folder, versions
from pallas_gemm.device import Device
from pallas_gemm.planning import tables
from pallas_gemm.planning.architectures import Architecture

FORMAT = 1
"""Changes when what an earlier version wrote could be misread."""
UNFINISHED = "it was not completed"
"""How a proof failed that was interrupted, or still goes on."""
COMMAND = "python -m pallas_gemm doctor --prove"
_SHARED = (
    *("schedules/*.py", "pallas_gemm/*.py", "pallas_gemm/kernels/*.py"),
    *("pallas_gemm/kernels/ptx/*.py", "pallas_gemm/kernels/functions/*.py"),
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage, and what came of it.

    Attributes:
        name: The stage that was run.
        outcome: In words.
        seconds: How long it took.
    """

    name: str
    outcome: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Proof:
    """The proof of a kernel on a kind of GPU.

    Attributes:
        kernel: The name of its architecture.
        device: The kind of the GPU, as JAX calls it.
        version: The version of the kernel: see `version_of`.
        when: The day.
        stages: The stages that were run, in order.
        failed: The failure of the last stage; None if the kernel was proven.
        surroundings: Other versions, of the driver and of this package, for who reads it.
    """

    kernel: str
    device: str
    version: str
    when: str
    stages: tuple[Stage, ...]
    failed: str | None = None
    surroundings: str = ""

    def save(self) -> pathlib.Path:
        """Writes it for this user, whole or not at all, and returns the file.

        Raises:
            OSError: It cannot be written.
        """
        path = path_of(self.device)
        user_folder.make(path.parent)
        document = {"format": FORMAT, **dataclasses.asdict(self)}
        user_folder.write(path, (json.dumps(document, indent=1) + "\n").encode())
        return path

    @classmethod
    def loads(cls, text: str) -> Self:
        """Returns what a file holds.

        Raises:
            ValueError: It holds none, or one of another format.
        """
        document: Any = json.loads(text)
        if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
            raise ValueError("it has another format")
        try:
            stages = tuple(Stage(**stage) for stage in document.pop("stages"))
            found = cls(**document, stages=stages)
        except (KeyError, TypeError) as error:
            raise ValueError(f"it is damaged: {error}") from None
        if not stages or not isinstance(found.failed, str | None):
            raise ValueError("it is damaged")
        return found


def version_of(kernel: str) -> str:
    """Returns the version of a kernel: a text that changes with its sources and with JAX."""
    return versions.of_sources(*_SHARED, f"pallas_gemm/kernels/{kernel}/**/*.py")


def path_of(device: str) -> pathlib.Path:
    """Returns the file for a kind of GPU.

    Raises:
        OSError: There is no folder for it.
    """
    return user_folder.user_folder() / "proven" / f"{tables.slug(device)}.json"


def found(kernel: str, device: str) -> Proof | None:
    """Returns what was proven, or failed, of this very version of a kernel; None if nothing was.

    Args:
        kernel: The name of its architecture.
        device: The kind of the GPU.
    """
    known = _of_this_version(kernel, device)
    return None if known is None or known.failed == UNFINISHED else known


def interrupted(kernel: str, device: str) -> Proof | None:
    """Returns what a proof had found that was interrupted; None if none was. See `found`."""
    known = _of_this_version(kernel, device)
    return known if known is not None and known.failed == UNFINISHED else None


def _of_this_version(kernel: str, device: str) -> Proof | None:
    try:
        path = path_of(device)
        now = path.stat()
    except OSError:
        return None
    read = _read(path, (now.st_mtime_ns, now.st_ino, now.st_size))
    if read is None or (read.kernel, read.device) != (kernel, device):
        return None
    return read if read.version == version_of(kernel) else None


def why_untrusted(architecture: Architecture, device: Device) -> str | None:
    """Returns why a kernel is not taken on a GPU unless it is named; None if it is."""
    known = found(architecture.name, device.kind)
    if known is not None and known.failed is not None:
        return f"it failed on this GPU ({known.failed}): once mended, run {COMMAND} again"
    if known is None and architecture.needs_proof:
        return f"not proven on this GPU: run {COMMAND}"
    return None


@functools.lru_cache(maxsize=16)
def _read(path: pathlib.Path, stamp: tuple[int, int, int]) -> Proof | None:  # noqa: ARG001 - the key
    """Reads a file, again only when it has changed. One that is damaged proves nothing."""
    try:
        return Proof.loads(path.read_text())
    except (OSError, ValueError):
        return None
