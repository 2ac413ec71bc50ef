"""Hardware counters: what Nsight Compute writes is read right, and what it refuses is said."""

import os
import pathlib
import shlex
import time
from collections.abc import Callable

import pytest

from bench import counters
from bench.command import RequestError

# From the log of a study on an H200, by --csv --page=raw --print-units=base: the header, the units,
# and a raster and a swizzled launch at 8192 cubed, without most of the columns about the device.
HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","device__attribute_display_name","dram__bytes_read.avg",'
    '"dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum",'
    '"lts__t_sector_hit_rate.pct","lts__t_sectors.sum","lts__t_sectors_lookup_hit.sum",'
    '"lts__t_sectors_lookup_miss.sum","profiler__replayer_passes","sm__cycles_elapsed.avg",'
    '"sm__cycles_elapsed.max","smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct",'
    '"smsp__warp_issue_stalled_mio_throttle_per_warp_active.pct"'
)
UNITS = (
    '"","","","","","","","","","","","","byte","byte","byte","ns","%","sector","sector",'
    '"sector","pass","cycle","cycle","%","%"'
)
RASTER = (
    '"0","3095","python3.12","127.0.0.1","pallas_gemm_hopper_mosaic_gpu_kernel","1","14",'
    '"(384, 1, 1)","(132, 1, 1)","0","9.0","NVIDIA H200","139,976,085.33","6,718,852,096",'
    '"135,295,744","1,920,800","42.88","630,017,269","270,146,386","331,425,994","4",'
    '"2,787,028.50","2,814,574","59.37","3.23"'
)
SWIZZLED = (
    '"6","3095","python3.12","127.0.0.1","pallas_gemm_hopper_mosaic_gpu_kernel","1","14",'
    '"(384, 1, 1)","(66, 2, 1)","0","9.0","NVIDIA H200","38,544,085.33","1,850,116,096",'
    '"132,900,864","1,477,888","75.46","423,078,093","319,269,351","111,714,555","4",'
    '"2,156,679.65","2,193,328","18.21","11.81"'
)
LOG = (
    "==WARNING== Note: Running with unmodified GPU clocks.\n"
    "==PROF== Connected to process 3095 (/usr/bin/python3.12)\n"
    "==PROF== Disconnected from process 3095\n"
    f"{HEADER}\n{UNITS}\n{RASTER}\n{SWIZZLED}\n"
)

Ncu = Callable[..., pathlib.Path]


@pytest.fixture
def ncu(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Ncu:
    """Puts a program named ncu on the PATH that writes a log and runs some more of a shell's work.

    The folder that it returns then holds the arguments and the environment that it was given.
    """

    def install(log: str = LOG, rest: str = "") -> pathlib.Path:
        program = tmp_path / "ncu"
        (tmp_path / "log").write_text(log)
        here = shlex.quote(str(tmp_path))
        program.write_text(
            "#!/bin/sh\n"
            f"printf '%s\\n' \"$@\" > {here}/arguments; env > {here}/environment\n"
            'for given in "$@"; do case $given in\n'
            f'--log-file=*) cp {here}/log "${{given#--log-file=}}";; esac; done\n{rest}\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return tmp_path

    return install


def test_every_counter_is_read_in_the_unit_of_our_tables() -> None:
    raster, swizzled = counters.parse(LOG)
    assert raster == pytest.approx(
        {
            "l2_sectors": 630_017_269,
            "l2_hit_rate": 0.4288,
            "l2_hits": 270_146_386,
            "l2_misses": 331_425_994,
            "dram_read_bytes": 6_718_852_096,
            "dram_write_bytes": 135_295_744,
            "long_scoreboard": 0.5937,
            "mio_throttle": 0.0323,
            "duration": 1.9208e-3,
            "cycles": 2_814_574,
        }
    )
    assert swizzled["l2_hit_rate"] == pytest.approx(0.7546)
    assert swizzled["dram_read_bytes"] == 1_850_116_096


def test_older_names_of_a_unit_are_known() -> None:
    (found,) = counters.parse(f"{HEADER}\n{UNITS.replace('"ns"', '"nsecond"')}\n{RASTER}\n")
    assert found["duration"] == pytest.approx(1.9208e-3)


@pytest.mark.parametrize("text", ["", "==WARNING== No kernels were profiled.\n"])
def test_a_log_without_kernels_has_no_counters(text: str) -> None:
    assert counters.parse(text) == []


def collect(expected: int = 2, seconds: float = 60) -> list[dict[str, float]]:
    program = ["python", "study.py", "--replay"]
    return counters.collect(program, "pallas_gemm", expected=expected, seconds=seconds)


def test_the_program_runs_under_ncu_with_every_metric(ncu: Ncu) -> None:
    folder = ncu()
    assert collect() == counters.parse(LOG)
    arguments = (folder / "arguments").read_text().splitlines()
    assert arguments[-3:] == ["python", "study.py", "--replay"]
    assert "--kernel-name=regex:pallas_gemm" in arguments
    assert "--clock-control=none" in arguments
    # Nobody is to wait for the processes that only lower.
    assert "--target-processes=application-only" in arguments
    (metrics,) = (part for part in arguments if part.startswith("--metrics="))
    assert set(metrics.removeprefix("--metrics=").split(",")) == set(counters.METRICS.values())
    # The process that waits holds memory of the same GPU.
    environment = (folder / "environment").read_text().splitlines()
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in environment
    assert f"HOME={os.environ['HOME']}" in environment


@pytest.mark.parametrize(
    ("log", "rest", "message"),
    [
        ("", "exit 1", "ncu failed with status 1: no message"),
        ("==ERROR== bad\n==ERROR== worse", "exit 9", "ncu failed with status 9: ==ERROR== worse"),
        ("", "echo boom >&2; echo KeyError: 3 >&2; exit 2", "failed with status 2: KeyError: 3"),
        ("", "echo no GPU; exit 2", "ncu failed with status 2: no GPU"),
        ("==ERROR== it died", "echo launched 3 >&2; exit 5", "5: ==ERROR== it died; launched 3$"),
        (LOG, "", "ncu counted 2 kernels where 3 were launched"),
        (LOG.replace("630,017,269", "n/a"), "", "ncu wrote what cannot be read: .*n/a"),
        (LOG.replace("lts__t_sectors.sum", "other"), "", "cannot be read: .*lts__t_sectors.sum"),
        (f"{HEADER}\n", "", "ncu wrote what cannot be read"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(ncu: Ncu, log: str, rest: str, message: str) -> None:
    ncu(log, rest)
    with pytest.raises(counters.CountingError, match=message) as caught:
        collect(expected=3)
    assert "\n" not in str(caught.value)


def test_a_missing_permission_is_a_matter_for_the_user(ncu: Ncu) -> None:
    ncu("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "exit 1")
    with pytest.raises(RequestError, match="may not read GPU counters"):
        collect()


def test_what_takes_too_long_is_ended_with_all_that_it_started(
    ncu: Ncu, tmp_path: pathlib.Path
) -> None:
    # A child that shows whether it lives.
    alive = tmp_path / "alive"
    ncu(
        LOG,
        f"(while :; do echo . >> {shlex.quote(str(alive))}; sleep 0.02; done) &\n"
        "echo launched 3 of 30 >&2\nsleep 600",
    )
    start = time.perf_counter()
    with pytest.raises(counters.CountingError, match=r"ended after 1 s; .*: launched 3 of 30$"):
        collect(seconds=1)
    assert time.perf_counter() - start < 60
    written = alive.stat().st_size
    assert written > 0
    time.sleep(0.3)
    assert alive.stat().st_size == written


def test_a_computer_without_ncu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda _: None)
    assert counters.missing() == "counters need Nsight Compute: there is no ncu on the PATH"
    monkeypatch.setattr(counters.shutil, "which", lambda _: "/usr/bin/ncu")
    assert counters.missing() is None
