"""Hardware counters through Nsight Compute, which runs a program of ours again under itself."""

import csv
import os
import pathlib
import shutil
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
"""What is read, by the names of our tables; percentages are given as shares, times in seconds."""

_NO_PERMISSION = "ERR_NVGPUCTRPERM"


def missing() -> str | None:
    """Returns why no counters can be read here, or None."""
    if shutil.which("ncu") is None:
        return "counters need Nsight Compute: there is no ncu on the PATH"
    return None


def collect(program: Sequence[str], kernels: str, expected: int) -> list[dict[str, float]]:
    """Runs a program under Nsight Compute.

    Args:
        program: Its command line.
        kernels: A regular expression that the names of the kernels to count match.
        expected: How many such kernels the program launches.

    Returns:
        The counters of each, in the order of their launches.

    Raises:
        RequestError: The counters may not be read, or the program failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "ncu.csv"
        command = [
            "ncu",
            # The clocks are the machine's business, and other programs may share them.
            "--clock-control=none",
            "--csv",
            "--page=raw",
            "--print-units=base",
            f"--log-file={log}",
            f"--kernel-name=regex:{kernels}",
            f"--metrics={','.join(METRICS.values())}",
            *program,
        ]
        # The process that waits may hold memory of the same GPU.
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        text = log.read_text() if log.exists() else ""
    said = text + done.stdout + done.stderr
    if _NO_PERMISSION in said:
        raise RequestError(
            "this user may not read GPU counters (ERR_NVGPUCTRPERM); the administrator can allow it"
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or said.strip().splitlines() or ["no message"]
        raise RequestError(f"ncu failed with status {done.returncode}: {lines[-1]}")
    found = parse(text)
    if len(found) != expected:
        raise RequestError(f"ncu counted {len(found)} kernels where {expected} were launched")
    return found


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
