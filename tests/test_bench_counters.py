"""Hardware counters: what Nsight Compute writes is read right, and what it refuses is said."""

import dataclasses
import os
import pathlib
import subprocess
from collections.abc import Sequence

import pytest

from bench import counters
from bench.command import RequestError

# The lines of one kernel of a study on an H200, in the layout of --csv --page=raw
# --print-units=base: a header, the units, and a line for each kernel.
HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","dram__bytes_read.sum","dram__bytes_write.sum",'
    '"gpu__time_duration.sum","lts__t_sector_hit_rate.pct","lts__t_sectors.sum",'
    '"lts__t_sectors_lookup_hit.sum","lts__t_sectors_lookup_miss.sum","sm__cycles_elapsed.max",'
    '"smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct",'
    '"smsp__warp_issue_stalled_mio_throttle_per_warp_active.pct"'
)
UNITS = (
    '"","","","","","","","","","","","byte","byte","ns","%","sector","sector","sector","cycle",'
    '"%","%"'
)
KERNEL = (
    '"0","4711","python3.12","127.0.0.1","pallas_gemm_hopper_kernel","1","13","(384, 1, 1)",'
    '"(132, 1, 1)","0","9.0","1,641,040,000","132,203,000","1,463,232","76.35","391,033,000",'
    '"298,556,000","88,886,600","2,243,570","15.02","9.14"'
)
LOG = f"==PROF== Connected to process 4711 (python3.12)\n{HEADER}\n{UNITS}\n{KERNEL}\n{KERNEL}\n"


@dataclasses.dataclass
class MadeUpNcu:
    """Stands in for the process: what it writes and how it ends, and how it was started."""

    log: str = LOG
    status: int = 0
    stderr: str = ""
    command: Sequence[str] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def run(
        self, command: Sequence[str], *, env: dict[str, str], **_: object
    ) -> subprocess.CompletedProcess[str]:
        self.command, self.environment = command, env
        path = next(part for part in command if part.startswith("--log-file="))
        pathlib.Path(path.removeprefix("--log-file=")).write_text(self.log)
        return subprocess.CompletedProcess(list(command), self.status, "", self.stderr)


@pytest.fixture
def ncu(monkeypatch: pytest.MonkeyPatch) -> MadeUpNcu:
    made_up = MadeUpNcu()
    monkeypatch.setattr(counters.subprocess, "run", made_up.run)
    return made_up


def test_every_counter_is_read_in_the_unit_of_our_tables() -> None:
    first, second = counters.parse(LOG)
    assert first == second
    assert first == pytest.approx(
        {
            "l2_sectors": 391_033_000,
            "l2_hit_rate": 0.7635,
            "l2_hits": 298_556_000,
            "l2_misses": 88_886_600,
            "dram_read_bytes": 1_641_040_000,
            "dram_write_bytes": 132_203_000,
            "long_scoreboard": 0.1502,
            "mio_throttle": 0.0914,
            "duration": 1.463232e-3,
            "cycles": 2_243_570,
        }
    )


def test_older_names_of_a_unit_are_known() -> None:
    (found,) = counters.parse(f"{HEADER}\n{UNITS.replace('"ns"', '"nsecond"')}\n{KERNEL}\n")
    assert found["duration"] == pytest.approx(1.463232e-3)


@pytest.mark.parametrize("text", ["", "==WARNING== No kernels were profiled.\n"])
def test_a_log_without_kernels_has_no_counters(text: str) -> None:
    assert counters.parse(text) == []


def test_the_program_runs_under_ncu_with_every_metric(ncu: MadeUpNcu) -> None:
    found = counters.collect(["python", "study.py", "--replay"], "pallas_gemm", expected=2)
    assert len(found) == 2
    assert ncu.command[0] == "ncu"
    assert ncu.command[-3:] == ["python", "study.py", "--replay"]
    assert "--kernel-name=regex:pallas_gemm" in ncu.command
    assert "--clock-control=none" in ncu.command
    (metrics,) = (part for part in ncu.command if part.startswith("--metrics="))
    assert set(metrics.removeprefix("--metrics=").split(",")) == set(counters.METRICS.values())
    # The process that waits holds memory of the same GPU.
    assert ncu.environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert os.environ.items() <= ncu.environment.items()


@pytest.mark.parametrize(
    ("log", "status", "stderr", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not", 1, "", "may not read GPU counters"),
        ("", 1, "", "ncu failed with status 1: no message"),
        ("==ERROR== bad\n==ERROR== worse", 9, "", "ncu failed with status 9: ==ERROR== worse"),
        ("", 2, "boom\nKeyError: 3\n", "ncu failed with status 2: KeyError: 3"),
        (LOG, 0, "", "ncu counted 2 kernels where 3 were launched"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(
    ncu: MadeUpNcu, log: str, status: int, stderr: str, message: str
) -> None:
    ncu.log, ncu.status, ncu.stderr = log, status, stderr
    with pytest.raises(RequestError, match=message) as caught:
        counters.collect(["python"], "pallas_gemm", expected=3)
    assert "\n" not in str(caught.value)


def test_a_computer_without_ncu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda _: None)
    assert counters.missing() == "counters need Nsight Compute: there is no ncu on the PATH"
    monkeypatch.setattr(counters.shutil, "which", lambda _: "/usr/bin/ncu")
    assert counters.missing() is None
