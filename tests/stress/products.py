"""Attacks with random products: `python -m tests.stress.products --count=5000`.

On the CPU (`--platform=cpu --count=300`) the kernels are simulated, with small products, and races
are recorded. Each product that is wrong is one line with the command that computes it again.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import os
import sys
import threading
import time
from typing import Any

from pallas_gemm.computer import driver
from tests.stress import processes

PATIENCE = {"gpu": 120, "cpu": 600}
"""Seconds that one product may take, to be compiled, computed and compared."""
FORGET = 40
"""Products after which a process drops what was compiled."""
ANOTHER = 75
"""Exit status of a worker that leaves the next products to another process."""


@dataclasses.dataclass
class Count:
    """What was done, over all workers.

    Attributes:
        kinds: Products of each kind.
        by: Products that each implementation computed.
        guarded: Products whose result lay between two guard bands.
        failures: What was wrong, one line each.
    """

    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    by: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    guarded: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)

    def add(self, done: dict[str, Any]) -> None:
        """Counts one product."""
        self.kinds[done["kind"]] += 1
        self.by[done["by"]] += 1
        self.guarded += done["guarded"]

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        by = ", ".join(f"{count} by {name}" for name, count in sorted(self.by.items()))
        return (
            f"{sum(self.kinds.values())} products ({kinds}; {by}; {self.guarded} between guard"
            f" bands), {len(self.failures)} wrong"
        )


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000, help="products")
    parser.add_argument("--start", type=int, default=0, help="index of the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seconds", type=float, default=420, help="no product starts after them")
    parser.add_argument("--platform", choices=["gpu", "cpu"], default="gpu")
    # What a worker is told: which products are its own, and when to stop.
    parser.add_argument("--step", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0, help=argparse.SUPPRESS)
    own = parser.parse_args()
    if own.platform == "gpu" and not driver.found():
        parser.exit(2, f"{parser.prog}: error: needs a GPU; --platform=cpu simulates the kernels\n")
    return own


def settings(platform: str) -> dict[str, str]:
    """Returns the variables of a worker's environment."""
    flags = os.environ.get("XLA_FLAGS", "")
    if platform == "cpu":
        # The simulator's threads wait inside XLA's thread pool: it has to have one for each of
        # them, which it has for many devices, and a product may want no second one.
        threads = "--xla_force_host_platform_device_count=32 --xla_cpu_multi_thread_eigen=false"
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{flags} {threads}"}
    # XLA's own products are only what is compared with; to tune them takes longer than to run.
    return {"XLA_FLAGS": f"{flags} --xla_gpu_autotune_level=0"}


def supervise(own: argparse.Namespace, worker: int, count: Count, lock: threading.Lock) -> None:
    """Has one worker's products computed, by one process after the other if they die."""
    next_index = own.start + worker
    last = own.start + own.count
    running: int | None = None

    def told(line: str) -> None:
        nonlocal next_index, running
        try:
            done = json.loads(line)
        except ValueError:
            return
        if "begins" in done:
            running = done["begins"]
            return
        running, next_index = None, done["index"] + own.workers
        with lock:
            count.add(done)
            if done["wrong"]:
                report(own, done["index"], done["wrong"], count)

    while next_index < last and time.time() < own.until:
        before = next_index
        options = {
            "count": last - next_index,
            "start": next_index,
            "seed": own.seed,
            "step": own.workers,
            "until": own.until,
            "platform": own.platform,
        }
        command = processes.module("products", *(f"--{k}={v}" for k, v in options.items()))
        end = processes.run(command, told, PATIENCE[own.platform], settings(own.platform))
        if end.code in (0, ANOTHER) and not end.silent:
            continue
        with lock:
            report(own, next_index if running is None else running, f"the process {end}", count)
        if running is None and next_index == before:
            # It does not even start.
            return
        next_index = (next_index if running is None else running) + own.workers
        running = None


def report(own: argparse.Namespace, index: int, what: str, count: Count) -> None:
    """Prints a failure with the command that shows it again."""
    from tests.stress import cases

    scale = cases.SIMULATED if own.platform == "cpu" else cases.GPU
    again = f"--platform={own.platform} --seed={own.seed} --start={index} --count=1 --workers=1"
    what = " ".join(what.split())
    line = f"{what}\n  {cases.draw(own.seed, index, scale)}\n  python -m tests.stress.products "
    count.failures.append(line + again)
    print(f"WRONG {line}{again}", flush=True)


def work(own: argparse.Namespace) -> None:
    """Computes every so many-th product and prints what became of it, as lines of JSON."""
    import jax

    from tests import races
    from tests.stress import cases, check

    scale, recorded = cases.GPU, functools.partial(contextlib.nullcontext, lambda: False)
    if own.platform == "cpu":
        record_races()
        scale, recorded = cases.SIMULATED, races.recorded
    else:
        assert jax.default_backend() == "gpu", "no GPU; --platform=cpu simulates the kernels"
    for turn, index in enumerate(range(own.start, own.start + own.count, own.step)):
        if time.time() > own.until:
            return
        print(json.dumps({"begins": index}), flush=True)
        case = cases.draw(own.seed, index, scale)
        outcome, wrong = check.Outcome("nothing"), None
        try:
            with recorded() as raced:
                outcome = check.check(case, scale)
                wrong = "a race" if outcome.by == "interpret" and raced() else None
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"[:600]
        done = {"index": index, "kind": case.kind, "wrong": wrong, **dataclasses.asdict(outcome)}
        print(json.dumps(done), flush=True)
        if wrong:
            # What follows an illegal access, or a simulation that broke off, may fail too.
            sys.exit(ANOTHER)
        if turn % FORGET == FORGET - 1:
            jax.clear_caches()


def record_races() -> None:
    """Lets the simulator record races."""
    from jax.experimental.pallas import mosaic_gpu

    plain = mosaic_gpu.InterpretGPUParams
    mosaic_gpu.InterpretGPUParams = functools.partial(plain, detect_races=True)  # type: ignore[misc]


def main() -> None:
    """Runs the workers and prints what they found."""
    own = arguments()
    if own.step:
        work(own)
        return
    own.workers = min(own.workers, own.count)
    start = time.time()
    own.until = start + own.seconds
    count, lock = Count(), threading.Lock()
    threads = [
        threading.Thread(target=supervise, args=(own, worker, count, lock))
        for worker in range(own.workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{count}, seed {own.seed} from {own.start}, {time.time() - start:.0f} s")
    sys.exit(bool(count.failures) or not count.kinds)


if __name__ == "__main__":
    main()
