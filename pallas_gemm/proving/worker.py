"""Runs one stage of a proof in a process of its own: `python -m pallas_gemm.proving.worker NAME`.

It compiles at once, and leaves the GPU alone until a line comes from its standard input. Each
product is a line of JSON before it runs. So the reader knows at which one a process hung or died.
"""

import concurrent.futures
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm.device import Device
from pallas_gemm.planning import targeting
from pallas_gemm.planning.architectures import Architecture, architecture_of
from pallas_gemm.proving import neighbour, products
from pallas_gemm.proving.stages import REPLAYS, REPLAYS_BESIDE, Case, Stage, stages

SURVEY = "survey"
"""In place of a stage: says which GPU this is, and which stages there are."""
WRONG = 70
"""The exit status where a result is wrong."""
DONE = "computed"
"""The last word of a process that has done all of its stage."""
COMPILERS = 2
"""Threads of a process that compile: half of that is Python, in which one of them is at a time."""
UNROLLED = 6
"""Products in one replay of a graph."""

Tell = Callable[[dict[str, Any]], None]


def prepared(
    case: Case, architecture: Architecture, device: Device, replays: int, seed: int = 0
) -> Callable[[], int]:
    """Compiles a product; returns what computes it, and counts the elements that are not exact.

    Args:
        case: The product. No two of a stage are drawn alike, so that what another one left in
            memory is not right.
        architecture: The architecture of its kernel.
        device: On what.
        replays: How often it is computed as a CUDA graph; of those, wrong results are counted, and
            not their elements. 0 to compute it once.
        seed: The seed of the operands.
    """
    problem = case.problem
    with _on_the_host():
        operands = products.small_integers(problem, np.random.default_rng(seed))
        if problem.symmetric:
            operands = operands._replace(b=operands.a)
        expected = products.rounded(problem, products.exact(problem, operands))
    expected = expected.astype(problem.out_dtype)
    arrays = [np.asarray(x) for x in operands.present()]
    kernel = architecture.build(problem, case.config, device, False)
    if replays:
        again = replayed(kernel, replays).lower(expected, arrays).compile()
        return lambda: int(again(expected, arrays))
    once = jax.jit(kernel).lower(*arrays).compile()
    return lambda: int(np.sum(~(np.asarray(once(*arrays)) == expected)))


def _on_the_host() -> contextlib.AbstractContextManager[Any]:
    """Leaves the GPU to the stage whose turn it is, where JAX has the host beside it."""
    with contextlib.suppress(RuntimeError):
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    return contextlib.nullcontext()


def replayed(kernel: Callable[..., jax.Array], count: int) -> Any:
    """Returns a program that runs a plain product `count` times, and counts the wrong results.

    The left operand changes its sign from one to the next, so that no result is right because it is
    still there.
    """

    @jax.jit
    def run(expected: jax.Array, operands: list[jax.Array]) -> jax.Array:
        def once(i: Any, wrong: jax.Array) -> jax.Array:
            sign = 1 - 2 * (i % 2)
            a, *others = operands
            out = kernel(a * sign.astype(a.dtype), *others)
            return wrong + jnp.any(out != expected * sign.astype(out.dtype)).astype(jnp.int32)

        return lax.fori_loop(0, count, once, jnp.int32(0), unroll=min(UNROLLED, count))

    return run


def run(
    stage: Stage,
    architecture: Architecture,
    device: Device,
    tell: Tell,
    wait: Callable[[], object] = lambda: None,
) -> bool:
    """Runs the products of a stage, which are compiled meanwhile; returns whether all are exact.

    Args:
        stage: The stage.
        architecture: The architecture of its kernel.
        device: On what.
        tell: Is handed what is said.
        wait: Returns when the GPU is free.
    """
    replays = {"replayed": REPLAYS, "beside": REPLAYS_BESIDE}.get(stage.how, 0)
    each = -(-replays // len(stage.cases))
    pool = concurrent.futures.ThreadPoolExecutor(COMPILERS)
    ready = [
        pool.submit(prepared, case, architecture, device, each, seed=place)
        for place, case in enumerate(stage.cases)
    ]
    try:
        wait()
        with _surroundings(stage) as note:
            for case, computed in zip(stage.cases, ready, strict=True):
                tell({"begins": str(case)})
                if wrong := computed.result()():
                    what = "results" if replays else "elements"
                    tell({"wrong": f"{wrong} {what} are wrong"})
                    return False
    finally:
        pool.shutdown(cancel_futures=True)
    tell({"done": len(stage.cases), "replays": replays, "note": note()})
    return True


@contextlib.contextmanager
def _surroundings(stage: Stage) -> Iterator[Callable[[], str]]:
    if stage.how != "beside":
        yield lambda: ""
        return
    ordinal = jax.local_devices()[0].local_hardware_id
    with neighbour.beside(ordinal) as launched:
        yield lambda: f"{launched():,} kernels of higher priority beside them"


def _here() -> tuple[Architecture, Device]:
    """Returns the kernel that there is to prove, and on what."""
    device = targeting.first_gpu()
    architecture = architecture_of(device) if device else None
    if device is None or architecture is None:
        raise RuntimeError(
            f"no kernel is for this computer's GPU: {device.kind if device else 'it has none'}"
        )
    return architecture, device


def survey() -> dict[str, Any]:
    """Returns what this process has to prove."""
    architecture, device = _here()
    return {
        "device": device.kind,
        "kernel": architecture.name,
        "driver": jax.local_devices()[0].client.platform_version,
        "stages": [(stage.name, stage.how) for stage in stages(architecture, device)],
    }


def main(name: str) -> int:
    """Runs a stage, and returns the exit status."""

    def tell(line: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    def wait() -> None:
        if not sys.stdin.readline():
            sys.exit("whoever started this is gone")

    if name == SURVEY:
        tell(survey())
        return 0
    architecture, device = _here()
    (stage,) = (stage for stage in stages(architecture, device) if stage.name == name)
    if not run(stage, architecture, device, tell, wait):
        return WRONG
    sys.stdout.write(f"{DONE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
