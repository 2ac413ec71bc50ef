"""NVIDIA's sanitizer, where it is installed, and what it says of a program."""

import re
import shutil

FOUND = 86
"""Exit status for findings, which no program of ours has."""
SIGNALS = (6, 11)
"""Exit status of the tool where it, or the program as it ends, is ended by a signal."""
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+)", re.MULTILINE)
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")


def sanitizer() -> str | None:
    """Returns where the tool is; None if it is not installed."""
    return shutil.which("compute-sanitizer") or next(
        (path for place in _PLACES if (path := shutil.which("compute-sanitizer", path=place))),
        None,
    )


def flags(tool: str) -> list[str]:
    """Returns how one of its tools is asked to look at our kernels."""
    # Only ours: what XLA launches beside it is not what is looked at. To know what has been
    # written, initcheck has to see all kernels.
    only = [] if tool == "initcheck" else ["--kernel-regex", "kns=pallas_gemm"]
    # By default racecheck analyses races, and tells of none between warps of one kernel.
    report = ["--racecheck-report", "all"] if tool == "racecheck" else []
    return [f"--tool={tool}", f"--error-exitcode={FOUND}", "--print-limit=3", *report, *only]


def verdict(code: int, said: str, done: str) -> tuple[str, str]:
    """Tells a sound kernel from a finding, and both from a tool or a program that broke off.

    Args:
        code: The tool's exit status.
        said: The output of the tool and of the program.
        done: A word that the program says when it has done all.
    """
    summary = _SUMMARY.findall(said)
    last = " | ".join(line for line in said.splitlines()[-6:])[-300:]
    if not summary:
        return "no verdict", f"the tool ended {code} without a summary: {last}"
    if any(map(int, summary)) or code == FOUND:
        lines = [line for line in said.splitlines() if line.startswith("=")]
        return "FOUND", " | ".join(lines)[:600]
    if done in said.split() and code in SIGNALS:
        return "no verdict", f"the tool ended {code} after the program had done all: {last}"
    if code or done not in said.split():
        return "FAILED", f"the program ended {code}: {last}"
    return "sound", ""
