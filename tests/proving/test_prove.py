"""Proving a kernel on a made-up GPU, with made-up faults: what is written, and then computed."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_gemm
from pallas_gemm import __main__, explain, gemm
from pallas_gemm.computer.user_folder import FOLDER_VARIABLE
from pallas_gemm.device import B200, H200
from pallas_gemm.planning import proof
from pallas_gemm.planning.architectures import ARCHITECTURES
from pallas_gemm.proving import memcheck, processes, prove, worker
from pallas_gemm.proving.stages import REPLAYS, REPLAYS_BESIDE, stages

BLACKWELL = ARCHITECTURES[1]
STAGES = stages(BLACKWELL, B200)
SQUARE = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
SOUND = "========= ERROR SUMMARY: 0 errors"
ENDED = processes.End(0, False, "")
AHEAD = 3

Fault = Callable[[Callable[[str], None]], processes.End]


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(memcheck, "sanitizer", lambda: "/usr/bin/compute-sanitizer")
    monkeypatch.setattr(prove.os, "cpu_count", lambda: AHEAD)
    yield tmp_path
    proof._read.cache_clear()


class MadeUpGpu:
    """A B200 on which every stage passes, but one that may not."""

    def __init__(self, stage: str = "", fault: Fault | None = None) -> None:
        self.stage, self.fault = stage, fault
        self.started: list[str] = []
        self.run: list[str] = []

    @contextlib.contextmanager
    def __call__(self, name: str, _: str) -> Iterator[processes.Go]:
        self.started.append(name)
        # As many as compile ahead, and no more, are there at a time.
        assert len(self.started) <= len(self.run) + AHEAD
        yield functools.partial(self._go, name)

    def _go(self, name: str, told: Callable[[str], None]) -> processes.End:
        self.run.append(name)
        if name == worker.SURVEY:
            kinds = [(stage.name, stage.how) for stage in STAGES]
            found = {"device": B200.kind, "kernel": "blackwell", "driver": "13.1", "stages": kinds}
            told(json.dumps(found))
            return ENDED
        # What was proven before counts no more while this goes on.
        assert computed() == "xla"
        told(json.dumps({"begins": "256 x 256"}))
        if name == self.stage and self.fault:
            return self.fault(told)
        told("a warning of somebody's")
        (stage,) = (stage for stage in STAGES if stage.name == name)
        replays = {"replayed": REPLAYS, "beside": REPLAYS_BESIDE}.get(stage.how, 0)
        note = "2,071 kernels of higher priority beside them" * (stage.how == "beside")
        told(json.dumps({"done": len(stage.cases), "replays": replays, "note": note}))
        told(worker.DONE)
        told(SOUND)
        return ENDED


def computed() -> str:
    with pallas_gemm.target(B200):
        return explain(gemm, SQUARE, SQUARE).implementation


def test_what_is_proven_is_taken_and_is_said(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(step=9)
    monkeypatch.setattr(prove.time, "monotonic", lambda: next(clock))
    said: list[str] = []
    gpu = MadeUpGpu()
    done = prove.prove(said.append, gpu)
    assert gpu.run == [worker.SURVEY, *(stage.name for stage in STAGES)]
    assert (done.failed, len(done.stages)) == (None, len(STAGES))
    assert computed() == "blackwell"
    assert proof.Proof.loads(proof.path_of(B200.kind).read_text()) == done
    text = "".join(said).replace(str(folder), "~/.cache/pallas_gemm")
    page = (pathlib.Path(__file__).parents[2] / "docs" / "prove.md").read_text()
    # How many there are goes with what is considered for a product.
    shown, printed = (re.sub(r"\d+ products", "# products", words) for words in (page, text))
    assert printed in shown


def _wrong(told: Callable[[str], None]) -> processes.End:
    told(json.dumps({"wrong": "12 elements are wrong"}))
    return processes.End(worker.WRONG, False, "")


def _finding(told: Callable[[str], None]) -> processes.End:
    told("========= Invalid __global__ write of size 16 bytes")
    told("========= ERROR SUMMARY: 3 errors")
    return processes.End(memcheck.FOUND, False, "")


FAULTS: dict[str, tuple[str, Fault, str]] = {
    "wrong": ("types", _wrong, "WRONG: 12 elements are wrong: 256 x 256"),
    "hangs": (
        "pairs, launch control",
        lambda _: processes.End(-9, True, ""),
        "HANGS: nothing was said for 120 s: 256 x 256",
    ),
    "crashes": (
        "replays: pairs, tiles dealt",
        lambda _: processes.End(-6, False, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        "CRASHES: the process ended -6: CUDA_ERROR_ILLEGAL_ADDRESS: 256 x 256",
    ),
    "leaves": ("epilogues", lambda _: ENDED, "CRASHES: the process ended 0: 256 x 256"),
    "memory": ("memcheck", _finding, "FOUND: ========= Invalid __global__ write"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_at_a_fault_it_stops_and_xla_computes(fault: str) -> None:
    stage, happens, verdict = FAULTS[fault]
    prove.prove(lambda _: None, MadeUpGpu())
    gpu, said = MadeUpGpu(stage, happens), list[str]()
    done = prove.prove(said.append, gpu)
    assert gpu.run[-1] == stage
    assert done.failed is not None
    assert done.failed.startswith(f"{stage}: {verdict[:-1]}")
    assert verdict in " ".join(said)
    assert "XLA computes every product on NVIDIA B200" in " ".join(said)
    assert computed() == "xla"
    with pallas_gemm.target(B200):
        assert "it failed on this GPU" in " ".join(str(explain(gemm, SQUARE, SQUARE)).split())


def test_who_is_interrupted_has_proven_nothing_and_goes_on_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(told: Callable[[str], None]) -> processes.End:
        raise KeyboardInterrupt

    names = [stage.name for stage in STAGES]
    passed = names.index("batches")
    prove.prove(lambda _: None, MadeUpGpu())
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        prove.prove(said.append, MadeUpGpu("batches", interrupted))
    assert said[-1].split() == ["batches"]
    assert computed() == "xla"
    gpu, again = MadeUpGpu(), list[str]()
    assert prove.prove(again.append, gpu).failed is None
    assert gpu.run == [worker.SURVEY, *names[passed:]]
    assert [line.endswith("before it was interrupted\n") for line in again[1 : passed + 2]] == [
        *[True] * passed,
        False,
    ]
    assert computed() == "blackwell"
    # What another version of the kernel had passed is run again.
    with pytest.raises(KeyboardInterrupt):
        prove.prove(lambda _: None, MadeUpGpu("batches", interrupted))
    monkeypatch.setattr(proof, "version_of", lambda _: "another one")
    prove.prove(lambda _: None, gpu := MadeUpGpu())
    assert gpu.run == [worker.SURVEY, *names]


def test_a_kernel_that_was_trusted_is_while_its_proof_is_interrupted() -> None:
    stages = (proof.Stage("tiles dealt", "7 products are exact", 9.0),)
    begun = proof.Proof(
        "hopper", H200.kind, proof.version_of("hopper"), "", stages, proof.UNFINISHED
    )
    begun.save()
    assert proof.why_untrusted(ARCHITECTURES[0], H200) is None
    dataclasses.replace(begun, failed="types: WRONG").save()
    assert proof.why_untrusted(ARCHITECTURES[0], H200) is not None


def test_memcheck_is_left_out_where_it_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = MadeUpGpu("memcheck", lambda _: processes.End(1, False, "Device not supported"))
    done = prove.prove(lambda _: None, broken)
    assert done.failed is None
    assert done.stages[-1].outcome.startswith("no verdict: the tool ended 1 without a summary")
    monkeypatch.setattr(memcheck, "sanitizer", lambda: None)
    gpu = MadeUpGpu()
    done = prove.prove(lambda _: None, gpu)
    assert "memcheck" not in gpu.run
    assert done.stages[-1].outcome == "not run: compute-sanitizer is not installed"


def test_each_stage_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(processes, "started", lambda *given: asked.append(given))
    for how in prove.PATIENCE:
        prove.in_process("a stage", how)
    ways = {how: (given[0], given[2]) for how, given in zip(prove.PATIENCE, asked, strict=True)}
    own = [sys.executable, "-m", "pallas_gemm.proving.worker", "a stage"]
    assert ways["once"][0] == ways["beside"][0] == own
    command, environment = ways["checked"]
    assert command[:2] == ["/usr/bin/compute-sanitizer", "--tool=memcheck"]
    assert command[-4:] == own
    assert environment["XLA_PYTHON_CLIENT_ALLOCATOR"] == "cuda_async"
    graphs = "--xla_gpu_enable_command_buffer"
    assert [graphs in ways[how][1].get("XLA_FLAGS", "") for how in prove.PATIENCE] == [
        how in ("replayed", "beside") for how in prove.PATIENCE
    ]


def test_without_a_gpu_there_is_nothing_to_prove(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="no kernel is for this computer's GPU") as raised:
        worker.main(worker.SURVEY)
    end = processes.End(1, False, f"Traceback\nRuntimeError: {raised.value}\n\n")
    ended = contextlib.nullcontext(lambda _: end)
    monkeypatch.setattr(processes, "started", lambda *_: ended)
    assert __main__.main(["doctor", "--prove"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "no kernel is for this computer's GPU: it has none" in line
    assert not list(folder.iterdir())


def test_a_process_waits_until_it_is_told_to_go() -> None:
    program = "import sys; print('ready', flush=True); print([sys.stdin.readline()])"
    command, said = [sys.executable, "-c", program], list[str]()
    with processes.started(command, 60, os.environ) as go:
        assert (go(said.append), said) == (ENDED, ["ready", "['\\n']"])
    program = "import sys, time; print('ready', flush=True); time.sleep(60)"
    with processes.started([sys.executable, "-c", program], 0.5, os.environ) as go:
        assert go(said.append).silent
    # Leaving ends what still waits.
    with processes.started([sys.executable, "-c", program], 60, os.environ):
        pass


def test_the_command_says_whether_it_was_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    right = prove.prove
    for gpu, status in ((MadeUpGpu(), 0), (MadeUpGpu("types", _wrong), 1)):
        monkeypatch.setattr(prove, "prove", lambda say, gpu=gpu: right(say, gpu))
        assert __main__.main(["doctor", "--prove"]) == status
