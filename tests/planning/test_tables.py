"""Tables of tuned configs: what is written, what is read, what is ignored, and which one counts."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import stat
import sys
import threading
import warnings
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from pallas_gemm.call import Call, Options
from pallas_gemm.computer.user_folder import FOLDER_VARIABLE
from pallas_gemm.config import GemmConfig
from pallas_gemm.device import H100, H200, Device, device_named
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.planning import config_json, dispatch, tables
from pallas_gemm.planning.tables import CacheWarning, Entry, Key, Table, TableError
from pallas_gemm.problem import Epilogue, Problem
from schedules import raster
from tests import forks

SHIPPED = sorted((pathlib.Path(tables.__file__).parents[1] / "tuned").glob("*.json"))
PROBLEM = Problem(512, 768, 1024)
OTHER = Problem(512, 768, 2048)
# None of these is what the heuristics choose.
FIRST = HopperConfig(tile=(128, 128), stages=3, ctas=8, schedule="hilbert")
SECOND = HopperConfig(tile=(128, 128), stages=4, ctas=9, schedule="raster")
THIRD = HopperConfig(tile=(64, 128), stages=5, consumers=1, cluster=(2, 1), schedule="swizzle:3")


@pytest.fixture(autouse=True)
def no_packaged_tables() -> None:
    """Packaged tables are what is tested here."""


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """The user's folder, empty, and a package without tables."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "user"))
    monkeypatch.setattr(tables.importlib.resources, "files", lambda _: tmp_path / "package")
    tables._packaged_table.cache_clear()
    tables._read.cache_clear()
    yield tmp_path / "user"
    tables._packaged_table.cache_clear()


def table(config: HopperConfig, problem: Problem = PROBLEM, device: str = H200.kind) -> Table:
    return Table.of(device, {Key.of(problem): Entry(config, 1e-5)})


def config_for(problem: Problem, device: Device) -> GemmConfig | None:
    found = tables.find(problem, device)
    return found.entry.config if found else None


def package(tmp_path: pathlib.Path, content: Table) -> None:
    path = tmp_path / "package" / "tuned" / "nvidia_h200.json"
    path.parent.mkdir(parents=True)
    content.save(path)


def test_a_table_comes_back_from_its_json() -> None:
    dtypes = (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16)
    epilogue = Epilogue(bias=True, activation=jax.nn.relu)
    many = (
        PROBLEM,
        Problem(1, 8, 64, *dtypes, transpose_b=True, batch=3),
        dataclasses.replace(OTHER, epilogue=epilogue),
    )
    entries = zip(many, (FIRST, SECOND, THIRD), strict=True)
    before = Table.of(H200.kind, {Key.of(p): Entry(c, 1.25e-4) for p, c in entries})
    after = Table.loads(before.dumps())
    assert after == before
    assert hash(after) == hash(before)
    assert after.by_key[Key.of(PROBLEM)].config == FIRST


def test_an_entry_without_a_time_is_legal() -> None:
    before = Table.of(H200.kind, {Key.of(PROBLEM): Entry(FIRST)})
    assert Table.loads(before.dumps()) == before


def test_what_a_config_leaves_out_has_its_default() -> None:
    found = config_json.read({"tile": [64, 64], "consumers": 1})
    assert found == HopperConfig(tile=(64, 64), consumers=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "a config must be an object"),
        ({"kernel": "pascal"}, "kernel must be one of hopper.*got 'pascal'"),
        ({"tiles": [1, 2]}, "has no 'tiles'; it has tile, stages"),
    ],
)
def test_json_that_is_no_config_is_refused(fields: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_json.read(fields)


def test_a_schedule_that_is_an_object_has_no_json() -> None:
    config = HopperConfig(schedule=raster(4, 3))
    with pytest.raises(ValueError, match="whose schedule is a name"):
        table(config).dumps()


def test_merging_takes_the_right_one_where_both_have_one() -> None:
    merged = table(FIRST) | table(SECOND) | table(THIRD, OTHER)
    assert merged.by_key == {
        Key.of(PROBLEM): Entry(SECOND, 1e-5),
        Key.of(OTHER): Entry(THIRD, 1e-5),
    }
    assert len(merged) == 2


def test_tables_for_different_gpus_do_not_merge() -> None:
    with pytest.raises(ValueError, match="'NVIDIA H200' and 'NVIDIA H100 80GB HBM3'"):
        _ = table(FIRST) | table(FIRST, device=H100.kind)
    with pytest.raises(TypeError):
        _ = table(FIRST) | {}  # type: ignore[operator]


def test_nothing_is_found_where_there_is_nothing() -> None:
    assert tables.find(PROBLEM, H200) is None


def test_the_user_counts_before_the_package_and_a_block_before_both(tmp_path: pathlib.Path) -> None:
    package(tmp_path, table(THIRD))
    assert tables.find(PROBLEM, H200) == tables.Found(tables.Entry(THIRD, 1e-5), "packaged")
    table(SECOND).save_for_user()
    assert tables.find(PROBLEM, H200) == tables.Found(tables.Entry(SECOND, 1e-5), "user")
    with table(FIRST):
        assert tables.find(PROBLEM, H200) == tables.Found(tables.Entry(FIRST, 1e-5), "context")
        with table(THIRD):
            assert tables.find(PROBLEM, H200) == tables.Found(tables.Entry(THIRD, 1e-5), "context")
        with table(THIRD, OTHER):
            assert tables.find(PROBLEM, H200) == tables.Found(tables.Entry(FIRST, 1e-5), "context")
    assert tables.find(PROBLEM, H200) == tables.Found(tables.Entry(SECOND, 1e-5), "user")


def test_dispatch_takes_the_argument_then_the_tables_then_the_heuristics(
    tmp_path: pathlib.Path,
) -> None:
    def planned(config: HopperConfig | None = None) -> tuple[object, str]:
        call = Call(jnp.bfloat16, options=Options(config=config, target=H200))
        bf16 = jnp.dtype(jnp.bfloat16)
        plan = dispatch.decide(call, (((512, 1024), bf16), ((1024, 768), bf16))).plan
        assert plan is not None
        return plan.config, plan.source

    heuristic, source = planned()
    assert source == "heuristics"
    assert heuristic not in (FIRST, SECOND, THIRD)
    package(tmp_path, table(THIRD))
    tables._packaged_table.cache_clear()
    assert planned() == (THIRD, "tuned (packaged)")
    table(SECOND).save_for_user()
    assert planned() == (SECOND, "tuned (user)")
    with table(FIRST):
        assert planned() == (FIRST, "tuned (context)")
        assert planned(SECOND) == (SECOND, "argument")


def test_a_config_that_is_not_legal_here_is_passed_over(tmp_path: pathlib.Path) -> None:
    package(tmp_path, table(THIRD))
    with table(HopperConfig(tile=(128, 256), stages=30)):
        assert tables.find(PROBLEM, H200) == tables.Found(tables.Entry(THIRD, 1e-5), "packaged")


def test_a_table_for_another_gpu_is_passed_over() -> None:
    with table(FIRST, device=H100.kind):
        assert tables.find(PROBLEM, H200) is None
        assert config_for(PROBLEM, H100) == FIRST


def test_a_jitted_function_is_traced_anew_in_a_block() -> None:
    traced = []

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        traced.append(config_for(PROBLEM, H200))
        return x

    f(jnp.zeros(1))
    with table(FIRST):
        f(jnp.zeros(1))
        f(jnp.zeros(1))
    f(jnp.zeros(1))
    assert traced == [None, FIRST]


def test_a_block_holds_in_its_own_thread_and_ends_with_an_error() -> None:
    seen = []
    with contextlib.suppress(KeyError), table(FIRST):
        thread = threading.Thread(target=lambda: seen.append(tables.find(PROBLEM, H200)))
        thread.start()
        thread.join()
        raise KeyError
    assert seen == [None]
    assert tables.find(PROBLEM, H200) is None


def test_what_is_looked_up_is_recorded_once() -> None:
    with tables.recording() as record:
        tables.find(PROBLEM, H200)
        tables.find(OTHER, H200)
        tables.find(PROBLEM, H200)
    tables.find(dataclasses.replace(PROBLEM, batch=2), H200)
    assert list(record.problems.values()) == [(PROBLEM, H200), (OTHER, H200)]


def test_saving_for_the_user_keeps_what_was_there() -> None:
    table(FIRST).save_for_user()
    path = table(SECOND, OTHER).save_for_user()
    assert Table.load(path) == table(FIRST) | table(SECOND, OTHER)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


SAVES = """
import os, sys, time
from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.planning.tables import Entry, Key, Table
from pallas_gemm.problem import Problem

save = Table.save

def slowly(table, path):
    # Between what was read and what is written, the other process has its turn.
    time.sleep(0.01)
    save(table, path)

Table.save = slowly
other = os.fork()
for m in map(int, sys.argv[1 + bool(other) :: 2]):
    entry = {Key.of(Problem(m, 768, 1024)): Entry(HopperConfig(), 1e-5)}
    Table.of(H200.kind, entry).save_for_user()
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def test_processes_that_save_at_once_keep_what_the_others_saved(folder: pathlib.Path) -> None:
    rows = range(64, 64 + 8 * 40, 8)
    saved = forks.of_session().run([sys.executable, "-c", SAVES, *map(str, rows)])
    assert saved.returncode == 0, saved.stderr
    assert {key.m for key in Table.load(tables.user_path(H200.kind)).by_key} == set(rows)


def test_a_changed_file_is_read_again() -> None:
    path = table(FIRST).save_for_user()
    assert config_for(PROBLEM, H200) == FIRST
    table(SECOND).save(path)
    os.utime(path, ns=(1, 1))
    assert config_for(PROBLEM, H200) == SECOND


def test_the_folder_has_a_default_and_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "~/tuned")
    assert tables.user_path(H200.kind) == pathlib.Path("~/tuned/nvidia_h200.json").expanduser()
    monkeypatch.delenv(FOLDER_VARIABLE)
    path = tables.user_path(H100.kind)
    assert path.name == "nvidia_h100_80gb_hbm3.json"
    assert path.parent.name == "pallas_gemm"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_is_shipped_is_legal_and_filed_under_its_gpu(path: pathlib.Path) -> None:
    shipped = Table.load(path)
    device = device_named(shipped.device)
    assert tables.slug(device.kind) == path.stem
    assert len(shipped) > 0
    for key, entry in shipped.entries:
        parts = key.epilogue.split()
        epilogue = Epilogue(
            bias="bias" in parts,
            residual="residual" in parts,
            activation=jax.nn.relu if "activation" in parts else None,
            gated="gated" in parts,
        )
        problem = Problem(
            *(key.m, key.n, key.k, *key.dtypes),
            transpose_a=key.layout[0] == "T",
            transpose_b=key.layout[1] == "T",
            batch=key.batch,
            epilogue=epilogue,
        )
        assert tables.Key.of(problem) == key
        assert entry.config.refusals(problem, device) == (), key
        assert entry.seconds is not None


def test_without_a_folder_there_is_one_warning_and_no_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    platformdirs = pytest.importorskip("platformdirs")

    def homeless(*_: object, **__: object) -> str:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv(FOLDER_VARIABLE)
    monkeypatch.setattr(platformdirs, "user_cache_dir", homeless)
    tables._warn_once.cache_clear()
    with pytest.warns(CacheWarning, match=f"the home directory.*{FOLDER_VARIABLE} names one"):
        assert tables.find(PROBLEM, H200) is None
    assert tables.find(PROBLEM, H200) is None
    with pytest.raises(OSError, match="there is no folder to keep"):
        table(FIRST).save_for_user()


@pytest.mark.parametrize(
    "change",
    [
        {"tile": ["a", "b"]},
        {"tile": [128, None]},
        {"tile": [128, 256, 64]},
        {"cluster": [True, True]},
        {"stages": True},
        {"ctas": "x"},
        {"schedule": 8},
    ],
    ids=str,
)
def test_a_config_of_other_types_is_refused(change: dict) -> None:
    with pytest.raises(TypeError, match=f"^{next(iter(change))} must be .*got "):
        config_json.read(config_json.written(FIRST) | change)


def damaged_files() -> dict[str, tuple[bytes, str]]:
    """Contents of a file, and the words that tell what is wrong with it."""
    good = json.loads(table(FIRST).dumps())

    def changed(**fields: object) -> bytes:
        return json.dumps(good | fields).encode()

    entry = good["entries"][0]
    return {
        "empty": (b"", "it is not JSON"),
        "cut short": (table(FIRST).dumps().encode()[:200], "it is not JSON"),
        "bytes": (b"\xff\xfe\x00", "it is not text"),
        "something else": (b'{"tiles": 3}', "it is not a table"),
        "a list": (b"[]", "it is not a table"),
        "another format": (changed(format=99), "its format is 99"),
        "another version": (changed(pallas_gemm="0.0.1"), "tuned with version 0.0.1"),
        "another GPU": (changed(device="NVIDIA A100"), "it is for 'NVIDIA A100'"),
        "no entries": (changed(entries=None), "it is damaged"),
        "an entry that is none": (changed(entries=[3]), "it is damaged"),
        "a config that is none": (changed(entries=[entry | {"config": 3}]), "it is damaged"),
        "an unknown field": (changed(entries=[entry | {"colour": 3}]), "it is damaged"),
        "two dtypes": (changed(entries=[entry | {"dtypes": ["a", "b"]}]), "it is damaged"),
    }


@pytest.mark.parametrize("name", damaged_files())
def test_a_file_that_cannot_be_used_is_warned_about_once(folder: pathlib.Path, name: str) -> None:
    content, words = damaged_files()[name]
    folder.mkdir()
    path = folder / "nvidia_h200.json"
    path.write_bytes(content)
    with pytest.warns(CacheWarning, match=words) as caught:
        assert tables.find(PROBLEM, H200) is None
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tables.find(PROBLEM, H200) is None
    assert path.read_bytes() == content


def test_a_file_that_may_not_be_read_is_warned_about(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table(FIRST).save_for_user()

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pathlib.Path, "read_text", refuse)
    with pytest.warns(CacheWarning, match="Permission denied"):
        assert tables.find(PROBLEM, H200) is None


def test_a_folder_that_cannot_be_written_is_named(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    # A file in the folder's place: even an administrator cannot write into it.
    folder.touch()
    message = f"cannot write tuned configs to {folder}.*{FOLDER_VARIABLE}"
    with pytest.raises(OSError, match=message):
        table(FIRST).save_for_user()
    assert sorted(tmp_path.iterdir()) == [folder]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table(FIRST).save_for_user()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "replace", fail)
    with pytest.raises(OSError, match="No space left on device"):
        table(SECOND).save_for_user()
    assert Table.load(path) == table(FIRST)
    assert list(folder.iterdir()) == [path]


def test_a_table_that_cannot_be_written_leaves_no_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="whose schedule is a name"):
        table(HopperConfig(schedule=raster(4, 3))).save(tmp_path / "table.json")
    assert list(tmp_path.iterdir()) == []


def test_loading_says_which_file_is_wrong(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("{")
    with pytest.raises(TableError, match=f"{path}: it is not JSON"):
        Table.load(path)
    with pytest.raises(FileNotFoundError):
        Table.load(tmp_path / "missing.json")


def test_a_file_is_read_that_an_earlier_version_wrote_in_this_format() -> None:
    text = """{"pallas_gemm": "0.1", "format": 1, "device": "NVIDIA H200", "entries": [{
        "batch": 1, "m": 512, "n": 768, "k": 1024, "layout": "NN", "epilogue": "",
        "dtypes": ["bfloat16", "bfloat16", "bfloat16"], "seconds": 1e-05,
        "config": {"tile": [128, 128], "stages": 3, "ctas": 8, "schedule": "hilbert"}
    }]}"""
    assert Table.loads(text) == table(FIRST)


def test_only_one_process_at_a_time_merges_into_a_folder(tmp_path: pathlib.Path) -> None:
    def is_free() -> bool:
        handle = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(handle)
        return True

    with tables._alone_in(tmp_path):
        assert not is_free()
    assert is_free()
    with pytest.raises(RuntimeError), tables._alone_in(tmp_path):
        raise RuntimeError
    assert is_free()
