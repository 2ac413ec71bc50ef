"""The wheel: what is in it, and that it works where nothing of the source tree is."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from typing import Any

import pytest
import yaml

import pallas_gemm
from pallas_gemm import offline

ROOT = pathlib.Path(__file__).parent.parent
# What setuptools reads to build. A copy is built, so that two runs never share a build folder.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "pallas_gemm", "schedules")
PACKAGES = {"pallas_gemm", "schedules"}
IMPORTS = """
import json, os
# A platform that does not exist makes the first look for a device fail.
os.environ["JAX_PLATFORMS"] = "none_such"
import pallas_gemm, schedules, jax
try:
    jax.devices()
    devices = "some were there already"
except RuntimeError:
    devices = "none was asked for"
from pallas_gemm import offline
print(json.dumps({
    "files": [pallas_gemm.__file__, schedules.__file__],
    "version": pallas_gemm.__version__,
    "devices": devices,
    "targets": [target for target in offline.targets() if offline.described(target)],
}))
"""


@dataclasses.dataclass(frozen=True)
class Installed:
    """The wheel, installed in an environment that holds nothing else.

    Attributes:
        wheel: The file that was installed.
        python: The environment's interpreter.
        site: Where the environment keeps its packages.
        elsewhere: An empty folder outside the source tree.
    """

    wheel: pathlib.Path
    python: pathlib.Path
    site: pathlib.Path
    elsewhere: pathlib.Path

    def run(self, code: str, *first_on_path: pathlib.Path) -> subprocess.CompletedProcess[str]:
        """Runs code there.

        NumPy and JAX come from the environment of the tests, which saves installing them again: on
        PYTHONPATH its folder lends the packages that lie in it, but not this project, which it only
        knows through a .pth file, and those are not read from PYTHONPATH.
        """
        lent = sysconfig.get_paths()["purelib"]
        path = os.pathsep.join([*map(str, first_on_path), lent])
        return subprocess.run(
            [str(self.python), "-c", code],
            cwd=self.elsewhere,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    # Folders that must stay out, though they look like packages.
    for stray in ("tests", "bench", "docs", "examples"):
        (source / stray).mkdir()
        (source / stray / "__init__.py").touch()
    # As pip would call it, which takes longer to start.
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    python = folder / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    install = ["--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    return Installed(wheel, python, site, elsewhere)


def test_the_wheel_holds_the_two_packages_and_nothing_else(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as wheel:
        top = {pathlib.PurePath(name).parts[0] for name in wheel.namelist()}
    version = pallas_gemm.__version__
    assert top == PACKAGES | {f"pallas_gemm-{version}.dist-info"}


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_the_wheel_holds_every_file_of_a_package(installed: Installed, package: str) -> None:
    suffixes = {".py", ".typed", ".txtpb", ".json", ".html"}
    in_tree = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / package).rglob("*")
        if path.suffix in suffixes or path.name == "py.typed"
    }
    with zipfile.ZipFile(installed.wheel) as wheel:
        in_wheel = {name for name in wheel.namelist() if name.startswith(f"{package}/")}
    assert in_wheel == in_tree
    assert f"{package}/py.typed" in in_wheel


@pytest.fixture(scope="module")
def imported(installed: Installed) -> dict[str, Any]:
    """What one process found that imported the packages from another folder."""
    done = installed.run(IMPORTS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_installed_packages_import_from_another_folder(
    installed: Installed, imported: dict[str, Any]
) -> None:
    packages = ("pallas_gemm", "schedules")
    assert imported["files"] == [str(installed.site / name / "__init__.py") for name in packages]
    assert imported["version"] == pallas_gemm.__version__


def test_the_installed_targets_are_found(imported: dict[str, Any]) -> None:
    assert imported["targets"] == list(offline.targets())


def test_no_module_of_schedules_imports_jax(installed: Installed) -> None:
    # With None in its place, an import of jax raises, even one that is guarded by `try`.
    done = installed.run(
        "import importlib, pkgutil, sys\n"
        "sys.modules['jax'] = None\n"
        "import schedules\n"
        "names = [m.name for m in pkgutil.walk_packages(schedules.__path__, 'schedules.')]\n"
        "for name in names:\n"
        "    importlib.import_module(name)\n"
        "print(len(names), sorted(n for n in sys.modules if n.startswith(('jax', 'pallas'))))"
    )
    assert done.returncode == 0, done.stderr
    modules, loaded = done.stdout.split(maxsplit=1)
    assert int(modules) > 0
    assert loaded.strip() == "['jax']"


def test_importing_the_op_does_not_start_a_device(imported: dict[str, Any]) -> None:
    assert imported["devices"] == "none was asked for"


def test_a_foreign_package_named_schedules_is_named(
    installed: Installed, tmp_path: pathlib.Path
) -> None:
    foreign = tmp_path / "schedules" / "__init__.py"
    foreign.parent.mkdir()
    foreign.write_text("def every(minutes): ...\n")
    done = installed.run("import pallas_gemm", tmp_path)
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: pallas_gemm needs the package `schedules`")
    assert str(foreign) in message


def test_a_missing_package_inside_schedules_is_not_blamed_on_a_foreign_one(
    installed: Installed,
) -> None:
    done = installed.run("import sys; sys.modules['numpy'] = None; import pallas_gemm")
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert "numpy" in message
    assert "schedules" not in message


def test_everything_that_names_the_version_names_the_same() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == pallas_gemm.__version__
    assert f"## [{pallas_gemm.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_constraints_name_one_release_of_all_that_is_installed_but_jax() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    releases = [line for line in lines if not line.startswith("#")]
    # Neither hashes nor addresses: any index of packages will do.
    assert [line for line in releases if not re.fullmatch(r"[a-z0-9-]+==[\w.]+", line)] == []
    named = [line.partition("==")[0] for line in releases]
    assert named == sorted(set(named))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["test"], *extras["docs"], *extras["release"]]
    for extra in ("aot", "bench", "equinox", "flax", "optax", "viz"):
        asked += extras[extra]
    needed = {re.split(r"[^\w-]", each)[0] for each in asked}
    assert needed - set(named) == {"jax", "pallas-gemm"}
    assert {"pip", "setuptools"} <= set(named)


def test_a_report_of_a_defect_asks_for_the_doctor() -> None:
    for name in ("wrong", "slow"):
        form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
        asked = {part["id"]: part for part in form["body"]}
        assert "python -m pallas_gemm doctor" in asked["doctor"]["attributes"]["label"]
        assert asked["doctor"]["validations"]["required"]


def test_what_is_published_is_what_was_built_and_checked() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())["jobs"]
    assert {"run": "make dist"} in jobs["build"]["steps"]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
