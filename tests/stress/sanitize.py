"""Runs each kind of kernel under NVIDIA's sanitizer: `python -m tests.stress.sanitize`.

Four tools look at each kernel, each in a process of its own. What a tool says is a finding; a tool
that breaks off, or needs longer than its limit, is told apart from a kernel that is sound. First, a
tool is shown a kernel with a fault of its kind: one that does not notice it vouches for little.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from pallas_gemm.proving import memcheck
from tests.kernels.taken import as_taken
from tests.stress import processes

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
LIMIT = 100
"""Seconds for one tool and one kernel, with the start of JAX."""
MECHANISMS = (
    *("late", "ping-pong", "claimed", "not persistent", "mirrored", "epilogue", "joined"),
    *("rows in groups", "sums over groups", "relayed"),
)
"""A kind of kernel for each way in which warps hand shared memory to others."""
GROUPS = 5
PLANTED = {"memcheck": "lines beyond the result", "racecheck": "no barrier"}
"""The fault that is planted for a tool, in the kernel of odd rows."""


def _products() -> dict[str, Any]:
    """Returns the kinds of kernels: a problem, small, with ragged edges, and a config each."""
    import dataclasses

    import jax
    import jax.numpy as jnp

    from pallas_gemm.kernels.hopper.config import HopperConfig
    from pallas_gemm.problem import Epilogue, Problem

    ragged = Problem(328, 392, 264, transpose_b=True)
    late = HopperConfig(tile=(128, 128), ctas=8)
    early = dataclasses.replace(late, late_store=False)
    pingpong = dataclasses.replace(early, tile=(64, 128), pingpong=True)
    change = dataclasses.replace
    e4m3 = jnp.float8_e4m3fn
    claimed = change(late, ctas=16, persistence="dynamic")
    groups = {"batch": GROUPS, "shared_a": True, "shared_b": True, "ragged_k": True}
    summed = Problem(256, 256, 8192, transpose_a=True, **groups)
    everything = Epilogue(0.5, 2.0, bias=True, residual=True, activation=jax.nn.relu)
    return {
        "late": (ragged, late),
        "early": (ragged, early),
        "ping-pong": (ragged, pingpong),
        "cluster": (ragged, change(late, cluster=(2, 1))),
        "claimed": (ragged, change(late, persistence="dynamic", cluster=(1, 2))),
        "not persistent": (ragged, change(late, persistence="none")),
        "on-line": (ragged, change(early, schedule="online_swizzle:2")),
        "mirrored": (ragged, change(late, mirrored=True)),
        "transposed": (Problem(320, 448, 264, transpose_a=True), late),
        "batch": (change(ragged, batch=3), late),
        "epilogue": (change(ragged, epilogue=everything), early),
        "gated": (change(ragged, epilogue=Epilogue(gated=True, activation=jax.nn.relu)), early),
        "odd rows": (change(ragged, m=129, n=131), change(late, store_slots=1)),
        "sum of products": (change(ragged, k=320, terms=(192, 128)), late),
        "float8": (change(ragged, k=272, a_dtype=e4m3, b_dtype=e4m3), early),
        "float32": (
            change(ragged, a_dtype=jnp.float32, b_dtype=jnp.float32, out_dtype=jnp.float32),
            change(early, store_columns=32),
        ),
        "integers": (
            change(ragged, k=272, a_dtype=jnp.int8, b_dtype=jnp.int8, out_dtype=jnp.int32),
            change(early, store_columns=32),
        ),
        "joined": (change(ragged, k=1320), change(early, split_k=3, split_last=5)),
        "rows in groups": (
            change(ragged, m=936, groups=GROUPS),
            change(early, schedule="swizzle:8"),
        ),
        "sums over groups": (change(summed, k=936), claimed),
        # Each tool takes minutes for larger ones.
        "relayed": (change(summed, m=128, n=128, k=4224), change(claimed, ctas=8)),
    }


@contextlib.contextmanager
def _planted(fault: str | None) -> Iterator[None]:
    """Has kernels built with a fault."""
    import jax.numpy as jnp

    from pallas_gemm.kernels.hopper.dense import lines, store

    right = lines._store_width

    def beyond(plan: Any, source: Any, target: Any, first: Any, _: Any, width: int) -> None:
        right(plan, source, target, first, jnp.int32(source.shape[0]), width)

    faults = {
        None: contextlib.nullcontext(),
        "lines beyond the result": mock.patch.object(lines, "_store_width", beyond),
        "no barrier": mock.patch.object(store.plgpu, "commit_smem", return_value=None),
    }
    with faults[fault]:
        yield


def compute(name: str, fault: str | None = None) -> None:
    """Computes one product, as it is compiled for a GPU, and compares it: what a tool looks at."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_gemm.device import H200
    from pallas_gemm.kernels.hopper import kernel as hopper
    from pallas_gemm.kernels.hopper.plan import HopperPlan
    from pallas_gemm.proving import products
    from tests import group_products

    problem, config = _products()[name]
    operands = products.small_integers(problem, np.random.default_rng(0))
    kernel = jax.jit(hopper.build(HopperPlan(problem, config, H200)))
    arrays = as_taken(problem, operands)
    if problem.in_groups:
        # The first is crowded.
        sizes = ((problem.k if problem.ragged_k else problem.m) - 336, 0, 70, 3, 263)
        exact = group_products.exact(problem, sizes, *arrays)
        arrays.append(jnp.array(sizes))
    else:
        exact = products.exact(problem, operands)
    with _planted(fault):
        out = np.asarray(kernel(*arrays)).astype(np.float64)
    np.testing.assert_array_equal(out, products.rounded(problem, exact))
    print("computed")


def look(program: str, tool: str, name: str, fault: str | None = None) -> tuple[str, str]:
    """Has a tool look at a kind of kernel; returns a verdict, and what it rests on."""
    command = processes.module(
        "sanitize", f"--compute={name}", *([f"--fault={fault}"] * bool(fault))
    )
    try:
        done = subprocess.run(
            [program, *memcheck.flags(tool), *command],
            cwd=processes.ROOT,
            # An allocation of exactly its size for each array: of others, memcheck does not see
            # what is written beyond the end.
            env=processes.environment(XLA_PYTHON_CLIENT_ALLOCATOR="cuda_async"),
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "no verdict", f"not done after {LIMIT} s"
    return memcheck.verdict(done.returncode, done.stdout + done.stderr, "computed")


def main() -> None:
    """Prints a verdict for each tool and kind of kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compute", help=argparse.SUPPRESS)
    parser.add_argument("--fault", help=argparse.SUPPRESS)
    parser.add_argument("--tool", choices=TOOLS, action="append", help="all by default")
    parser.add_argument("--kind", action="append", help="of kernel; all by default")
    parser.add_argument(
        "--mechanisms", action="store_true", help="only racecheck, of a kernel for each mechanism"
    )
    parser.add_argument("--workers", type=int, default=12)
    own = parser.parse_args()
    if own.compute:
        compute(own.compute, own.fault)
        return
    program = memcheck.sanitizer()
    if program is None:
        parser.error("compute-sanitizer, which comes with the CUDA toolkit, is not on the PATH")
    start = time.time()
    if own.mechanisms:
        own.tool, own.kind = own.tool or ["racecheck"], own.kind or MECHANISMS
    tools = own.tool or TOOLS
    for tool in [tool for tool in tools if tool in PLANTED]:
        result, why = look(program, tool, "odd rows", PLANTED[tool])
        # Numbers that a fault makes wrong are noticed without a tool.
        known = {"FOUND": "noticed", "FAILED": "the numbers are wrong, and the tool says nothing"}
        noticed = known.get(result, f"NOT NOTICED ({result} {why})")
        print(f"{tool:10} {'planted':15} {PLANTED[tool]}: {noticed}", flush=True)
    jobs = [(tool, name) for tool in tools for name in own.kind or _products()]
    found: dict[str, int] = {}
    with concurrent.futures.ThreadPoolExecutor(own.workers) as pool:
        each = functools.partial(look, program)
        for (tool, name), (result, why) in zip(
            jobs, pool.map(lambda job: each(*job), jobs), strict=True
        ):
            found[result] = found.get(result, 0) + 1
            print(f"{tool:10} {name:15} {result:11} {why}", flush=True)
    verdicts = ", ".join(f"{count} {result}" for result, count in sorted(found.items()))
    print(
        f"{len(jobs)} runs of {pathlib.Path(program).name}: {verdicts}, {time.time() - start:.0f} s"
    )
    sys.exit(bool(found.keys() - {"sound", "no verdict"}))


if __name__ == "__main__":
    main()
