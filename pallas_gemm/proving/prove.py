"""Proves a kernel on this computer's GPU: stage after stage, until one fails or all have passed.

This process leaves the GPU alone: each stage is one of its own, with a time limit, so that a wrong
number, a hang and a crash are all verdicts. Several are started ahead, to compile; one at a time
computes. The outcome is written for dispatch to read.
"""

import collections
import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_gemm._version import __version__
from pallas_gemm.planning import proof
from pallas_gemm.planning.proof import Proof
from pallas_gemm.proving import memcheck, processes, worker
from pallas_gemm.proving.stages import How

PATIENCE: Mapping[How, float] = {"once": 120, "replayed": 180, "beside": 180, "checked": 400}
"""Seconds that one product may take, to be compiled, computed and compared."""
_GRAPHS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL,CUBLAS --xla_gpu_graph_min_graph_size=1"
)

AHEAD = 12
"""The number of stages with a process at a time, if there are enough cores."""

Start = Callable[[str, How], contextlib.AbstractContextManager[processes.Go]]
"""Starts a stage, by its name and how: it compiles, and then waits until it is told to go."""


class NothingToProveError(RuntimeError):
    """There is no GPU that a kernel is for; the message says what there is."""


def in_process(name: str, how: How) -> contextlib.AbstractContextManager[processes.Go]:
    """Starts a stage in a process of its own."""
    command = [sys.executable, "-m", worker.__name__, name]
    settings = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    flags = os.environ.get("XLA_FLAGS", "")
    if how == "checked":
        command = [str(memcheck.sanitizer()), *memcheck.flags("memcheck"), *command]
        # An allocation of exactly its size for each array, beyond the end of which it sees.
        settings["XLA_PYTHON_CLIENT_ALLOCATOR"] = "cuda_async"
    elif how != "once":
        # Flags that begin with a space are taken for the name of a file.
        settings["XLA_FLAGS"] = f"{flags} {_GRAPHS}".strip()
    return processes.started(command, PATIENCE[how], {**os.environ, **settings})


def survey(start: Start) -> Mapping[str, Any]:
    """Returns what there is to prove on this computer.

    Raises:
        NothingToProveError: There is no GPU that a kernel is for.
    """
    lines: list[str] = []
    with start(worker.SURVEY, "once") as go:
        end = go(lines.append)
    found = _json(lines[-1]) if lines and not end.code else None
    if found is None:
        last = [line for line in end.errors.splitlines() if line.strip()][-1:]
        why = "".join(last).removeprefix("RuntimeError: ") or end
        raise NothingToProveError(f"nothing can be proven: {why}")
    return found


def prove(say: Callable[[str], object], start: Start = in_process) -> Proof:
    """Proves the kernel of this computer's GPU, and writes what came of it.

    Stages that passed before it was interrupted are not run again.

    Args:
        say: Is handed text for the user, as it comes: a line may come in two parts.
        start: Starts a stage.

    Returns:
        The proof, or the failure.

    Raises:
        NothingToProveError: There is no GPU that a kernel is for.
        OSError: The outcome cannot be written.
    """
    found = survey(start)
    kernel, device = found["kernel"], found["device"]
    say(f"the {kernel} kernel on {device}, stage by stage; every number is compared\n")
    done = Proof(
        kernel,
        device,
        proof.version_of(kernel),
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        (),
        failed=proof.UNFINISHED,
        surroundings=f"pallas_gemm {__version__}; {found['driver']}",
    )
    before = proof.interrupted(kernel, device)
    if before is not None and before.surroundings == done.surroundings:
        done = dataclasses.replace(done, stages=before.stages)
    # What was proven before is no longer: whoever ends this leaves nothing behind that is trusted.
    done.save()
    for stage in done.stages:
        say(f"{_begun(stage.name)}{stage.outcome}, before it was interrupted\n")
    passed = {stage.name for stage in done.stages}
    left = [(name, how) for name, how in found["stages"] if name not in passed]
    done = _prove_stages(done, left, say, start)
    path = done.save()
    for line in _conclusion(done, str(path)):
        say(f"{line}\n")
    return done


def _prove_stages(
    done: Proof, left: Sequence[tuple[str, How]], say: Callable[[str], object], start: Start
) -> Proof:
    """Runs the stages that are left, and keeps what came of each when it has ended."""
    upcoming, ahead = iter(left), collections.deque[processes.Go | None]()
    most = min(AHEAD, os.cpu_count() or 1)
    with contextlib.ExitStack() as started:
        for name, how in left:
            for next_name, next_how in itertools.islice(upcoming, most - len(ahead)):
                if next_how == "checked" and memcheck.sanitizer() is None:
                    ahead.append(None)
                else:
                    ahead.append(started.enter_context(start(next_name, next_how)))
            say(_begun(name))
            begun = time.monotonic()
            outcome, fine = _outcome(how, ahead.popleft())
            seconds = round(time.monotonic() - begun, 1)
            say(f"{outcome}, {seconds:.0f} s\n")
            stages = (*done.stages, proof.Stage(name, outcome, seconds))
            done = dataclasses.replace(done, stages=stages)
            if not fine:
                return dataclasses.replace(done, failed=f"{name}: {outcome}")
            done.save()
    return dataclasses.replace(done, failed=None)


def _begun(name: str) -> str:
    return f"  {name:<36} "


def _outcome(how: How, go: processes.Go | None) -> tuple[str, bool]:
    """Lets a stage compute; returns what came of it, and whether the next one may follow."""
    if go is None:
        return "not run: compute-sanitizer is not installed", True
    said: list[str] = []
    end = go(said.append)
    told = [line for text in said if (line := _json(text)) is not None]
    running = next((line["begins"] for line in reversed(told) if "begins" in line), "its start")
    wrong = [line["wrong"] for line in told if "wrong" in line]
    done = [line for line in told if "done" in line]
    if wrong:
        return f"WRONG: {wrong[-1]}: {running}", False
    if end.silent:
        return f"HANGS: nothing was said for {PATIENCE[how]:.0f} s: {running}", False
    if how == "checked":
        result, why = memcheck.verdict(end.code, "\n".join([*said, end.errors]), worker.DONE)
        if result != "sound":
            # A tool that breaks off, as on a chip that it does not know, says nothing of a kernel.
            return f"{result}: {why}", result == "no verdict"
    if end.code or not done:
        return f"CRASHES: the process {' '.join(str(end).split())}: {running}", False
    count, replays, note = (done[-1][key] for key in ("done", "replays", "note"))
    extra = [f"{replays:,} replays"] * bool(replays) + [note] * bool(note)
    return ", ".join([f"{count} products are exact", *extra]), True


def _json(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _conclusion(done: Proof, path: str) -> Sequence[str]:
    send = f"please send us {path}, whatever came of it"
    if done.failed is None:
        return (f"proven: {done.device} computes with the {done.kernel} kernel from now on", send)
    return (
        f"failed: {done.failed}",
        f"XLA computes every product on {done.device}, unless the {done.kernel} kernel is named",
        send,
    )
