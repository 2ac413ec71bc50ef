"""`python -m pallas_gemm doctor`."""

import pathlib

import jax
import pytest

from pallas_gemm import __main__, __version__, offline
from pallas_gemm._version import NEWEST_TESTED_JAX
from pallas_gemm.api import doctor
from pallas_gemm.computer import kept_files
from pallas_gemm.computer.user_folder import FOLDER_VARIABLE


def test_the_doctor_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in (
        f"pallas_gemm {__version__}",
        "devices of the default backend, cpu",
        "why           no GPU is planned for",
        "  xla        exact",
        "  interpret  exact",
    ):
        assert part in text, text


@pytest.mark.parametrize("missing", [(), ("nvidia-cuda-nvcc",)], ids=["all", "none"])
def test_the_doctor_says_whether_there_is_a_compiler(
    missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "missing_packages", lambda: missing)
    answer = "no: pip install '.[aot]'" if missing else "yes"
    assert f"compile for absent GPUs: {answer}" in list(doctor._versions())


def test_the_doctor_says_whether_kernels_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    kept_files.keep(kept_files.folder() / "version" / "kernel", bytes(300_000))
    assert doctor._kept() == f"0.3 of at most 256 MB in {tmp_path / 'kernels'}"
    monkeypatch.setenv(kept_files.LIMIT_VARIABLE, "0")
    assert doctor._kept() == "no: PALLAS_GEMM_KEPT_MB is 0"
    monkeypatch.setenv(kept_files.LIMIT_VARIABLE, "2G")
    assert "must be a whole number of megabytes" in doctor._kept()
    tmp_path.chmod(0o777)
    monkeypatch.delenv(kept_files.LIMIT_VARIABLE)
    assert doctor._kept() == f"no: {tmp_path} can be written by other users: chmod go-w ends that"


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        ((0, 11, 2), False),
        (NEWEST_TESTED_JAX, False),
        ((*NEWEST_TESTED_JAX, 1), True),
        ((0, 12, 1), True),
    ],
)
def test_the_doctor_says_that_jax_is_newer_than_tested(
    version: tuple[int, ...], newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_jax_version", lambda: version)
    said = "newer than 0.12.0.1, the newest JAX that this version was tested with"
    assert (said in "\n".join(doctor._versions())) == newer


@pytest.mark.parametrize(
    ("platforms", "plugins", "fix"),
    [
        ("cpu", doctor.PLUGINS, "unset JAX_PLATFORMS, which is 'cpu'"),
        ("", ("no_such_plugin",), "pip install '.[cuda13]'"),
        ("", ("jax",), "JAX_PLATFORMS=cuda python -c"),
    ],
)
def test_where_jax_does_not_use_the_gpu_that_is_there_it_says_what_to_do(
    platforms: str, plugins: tuple[str, ...], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "CUDA's driver" not in "".join(doctor._devices())
    monkeypatch.setattr(doctor.driver, "found", lambda: True)
    monkeypatch.setattr(doctor, "PLUGINS", plugins)
    monkeypatch.setattr(doctor, "_platforms", lambda: platforms)
    *_, last = doctor._devices()
    assert f"JAX uses no GPU: {fix}" in last


def test_the_simulator_runs_on_the_cpu_whatever_the_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = []
    right = doctor.gemm

    def gemm(*args: jax.Array, implementation: str, **kwargs: object) -> jax.Array:
        places.append((implementation, args[0].device))
        return right(*args, **kwargs)

    monkeypatch.setattr(doctor, "gemm", gemm)
    # Here the other devices are CPUs as well, but not the first one.
    with jax.default_device(jax.devices()[3]):
        assert [fine for _, _, fine in doctor._checks()] == [True, True]
    assert places == [("xla", jax.devices()[3]), ("interpret", jax.devices()[0])]


def test_a_wrong_product_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = doctor.gemm
    monkeypatch.setattr(doctor, "gemm", lambda *args, **kwargs: right(*args, **kwargs) + 1)
    assert __main__.main(["doctor"]) == 1
    assert f"{70 * 136} elements are wrong" in capsys.readouterr().out


def test_a_failing_product_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*args: object, **kwargs: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(doctor, "gemm", failing)
    assert __main__.main(["doctor"]) == 1
    assert "failed: RuntimeError: out of order" in capsys.readouterr().out


def test_another_command_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        __main__.main(["surgeon"])
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "invalid choice: 'surgeon'" in error


def test_without_a_command_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main([]) == 0
    assert "doctor" in capsys.readouterr().out
    with pytest.raises(SystemExit) as raised:
        __main__.main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == f"pallas-gemm {__version__}\n"
