"""Hardware counters through Nsight Compute, which runs a program of ours again under itself."""

import contextlib
import csv
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from bench.command import RequestError

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "l2_sectors": "lts__t_sectors.sum",
        "l2_hit_rate": "lts__t_sector_hit_rate.pct",
        "l2_hits": "lts__t_sectors_lookup_hit.sum",
        "l2_misses": "lts__t_sectors_lookup_miss.sum",
        "dram_read_bytes": "dram__bytes_read.sum",
        "dram_write_bytes": "dram__bytes_write.sum",
        "long_scoreboard": "smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct",
        "mio_throttle": "smsp__warp_issue_stalled_mio_throttle_per_warp_active.pct",
        "duration": "gpu__time_duration.sum",
        "cycles": "sm__cycles_elapsed.max",
    }
)
"""The counters, by the names of our tables; percentages become shares, times are in seconds."""

_NO_PERMISSION = "ERR_NVGPUCTRPERM"


def missing() -> str | None:
    """Returns why no counters can be read here, or None."""
    if shutil.which("ncu") is None:
        return "counters need Nsight Compute: there is no ncu on the PATH"
    return None


class CountingError(RuntimeError):
    """Nothing was counted; the message is one line that says why."""


def collect(
    program: Sequence[str], kernels: str, *, expected: int, seconds: float
) -> list[dict[str, float]]:
    """Runs a program under Nsight Compute.

    Args:
        program: Its command line. Only its own process is looked at, not those that it starts.
        kernels: A regular expression that the names of the kernels to count match.
        expected: How many such kernels the program launches.
        seconds: After so long it is ended, with all that it started.

    Returns:
        The counters of each, in the order of their launches.

    Raises:
        RequestError: The counters may not be read.
        CountingError: The program failed or took too long, or ncu wrote something else.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        log = folder / "ncu.csv"
        status, said = ended([*_ncu(kernels, log), *program], folder, seconds)
        text = log.read_text(errors="replace") if log.exists() else ""
    if _NO_PERMISSION in text + said:
        raise RequestError(
            "this user may not read GPU counters (ERR_NVGPUCTRPERM); the administrator can allow it"
        )
    if status is None:
        raise CountingError(f"ended after {seconds:g} s; the last words: {_last_words(text, said)}")
    if status:
        raise CountingError(f"ncu failed with status {status}: {_last_words(text, said)}")
    try:
        found = parse(text)
    except (KeyError, ValueError) as error:
        raise CountingError(f"ncu wrote what cannot be read: {error!r}") from error
    if len(found) != expected:
        raise CountingError(f"ncu counted {len(found)} kernels where {expected} were launched")
    return found


def _ncu(kernels: str, log: pathlib.Path) -> list[str]:
    """Returns the command line of ncu before that of the program."""
    return [
        "ncu",
        # The clocks are the machine's business, and other programs may share them.
        "--clock-control=none",
        # To watch a process costs it time, and those that only lower launch nothing.
        "--target-processes=application-only",
        "--csv",
        "--page=raw",
        "--print-units=base",
        f"--log-file={log}",
        f"--kernel-name=regex:{kernels}",
        f"--metrics={','.join(METRICS.values())}",
    ]


def ended(
    command: Sequence[str],
    folder: pathlib.Path,
    seconds: float,
    *,
    inside: bool = False,
) -> tuple[int | None, str]:
    """Runs a command for at most so long.

    Args:
        command: The program and its arguments.
        folder: Where what it prints is kept meanwhile.
        seconds: After so long it is ended, with all that it started.
        inside: It runs in that folder, instead of here.

    Returns:
        Its exit status, None if the time was over, and what it printed, stderr last.
    """
    # Files, for what is in a pipe when the time is over is lost.
    printed = folder / "stdout", folder / "stderr"
    with printed[0].open("wb") as stdout, printed[1].open("wb") as stderr:
        process = subprocess.Popen(
            command,
            cwd=folder if inside else None,
            # The process that waits may hold memory of the same GPU.
            env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    status = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(seconds)
    finally:
        # Whoever is left of the group, for whatever reason, would keep the GPU.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return status, "".join(path.read_text(errors="replace") for path in printed)


def _last_words(log: str, said: str) -> str:
    """Returns what ncu gives as the error, and the last line that it or the program printed."""
    errors = [line for line in log.splitlines() if line.startswith("==ERROR==")]
    words = [*errors[-1:], *said.strip().splitlines()[-1:]]
    return "; ".join(word.strip() for word in words) or "no message"


def parse(text: str) -> list[dict[str, float]]:
    """Returns the counters of each kernel from what Nsight Compute wrote as CSV."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if not lines:
        return []
    header, units, *rows = csv.reader(lines)
    found = []
    for row in rows:
        cells = dict(zip(header, zip(row, units, strict=True), strict=True))
        found.append({name: _number(*cells[metric]) for name, metric in METRICS.items()})
    return found


def _number(text: str, unit: str) -> float:
    """Returns a cell as a number: a share for a percentage, seconds for a time."""
    value = float(text.replace(",", ""))
    scale = {"%": 1e-2, "nsecond": 1e-9, "ns": 1e-9}.get(unit, 1.0)
    return value * scale
