"""What goes on around a product on a GPU: `python -m tests.stress.surroundings`.

Each part runs in a process of its own, and prints what it looked at.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import gemm
from pallas_gemm.computer import driver
from pallas_gemm.kernels.hopper.config import HopperConfig
from tests import reference
from tests.stress import processes

PATIENCE = 240
"""Seconds that a part may take."""


def _integers(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return reference.integers(np.random.default_rng(seed), shape, dtype)


def _kernel(a: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
    return gemm(a, b, implementation="hopper", **options)


@jax.jit
def _same_bits(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.all(x.view(jnp.int16) == y.view(jnp.int16))


def graphs() -> str:
    """Products replayed as a CUDA graph, with operands that change between replays."""

    @jax.jit
    def chain(a: jax.Array, b: jax.Array) -> jax.Array:
        for _ in range(6):
            # Small integers again, so that the chain is exact however long it is.
            a = jnp.clip(_kernel(a, b), -2, 2)
        return a

    def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        for _ in range(6):
            a = np.clip(a @ b, -2, 2)
        return a

    with tempfile.TemporaryDirectory() as folder:
        lowered = chain.lower(_integers(0, 520, 512), _integers(1, 512, 512))
        run = lowered.compile(compiler_options={"xla_dump_to": folder})
        (steps,) = pathlib.Path(folder).glob("*after_thunk_passes.txt")
        graph = re.search(r"kCommandBuffer.*\n((?: +\d+: .*\n?)+)", steps.read_text())
    replayed = graph[1].count(": kCustomCall") if graph else 0
    assert replayed == 6, f"XLA put {replayed} of 6 kernels into a command buffer"
    for seed in range(40):
        a, b = _integers(seed, 520, 512), _integers(seed + 100, 512, 512)
        reference.assert_exact(run(a, b), exact(reference.wide(a), reference.wide(b)))
    return "40 replays of a graph of 6 products"


_NEIGHBOUR = """
import time, jax, jax.numpy as jnp
x = jnp.ones((8192, 8192), jnp.bfloat16)
end = time.time() + 60
print("runs", flush=True)
while time.time() < end:
    jnp.matmul(x, x).block_until_ready()
"""


def neighbour() -> str:
    """Products beside another process that keeps the GPU busy."""
    command = [sys.executable, "-c", _NEIGHBOUR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "runs\n"
        count = 0
        for seed, persistence in enumerate(("static", "dynamic", "none")):
            config = HopperConfig(persistence=persistence, cluster=(2, 1))
            f = jax.jit(lambda a, b, config=config: _kernel(a, b, config=config))
            a, b = _integers(seed, 3001, 1032), _integers(seed + 9, 1032, 2048)
            first = f(a, b)
            reference.assert_exact(first, reference.wide(a) @ reference.wide(b))
            count += sum(bool(_same_bits(f(a, b), first)) for _ in range(200))
        beside = other.poll() is None
        other.kill()
    assert beside, "the other process ended early"
    assert count == 600
    return "600 products, exact"


def memory() -> str:
    """A result for which there is no memory, and the next call."""
    f = jax.jit(_kernel)
    small = _integers(0, 256, 128), _integers(1, 128, 256)
    for _ in range(3):
        # 128 GiB where there are 3.
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            jax.block_until_ready(
                f(jnp.ones((1 << 18, 64), jnp.bfloat16), jnp.ones((64, 1 << 18), jnp.bfloat16))
            )
        reference.assert_exact(f(*small), reference.wide(small[0]) @ reference.wide(small[1]))
    return "3 refusals, each with a right product after it"


def _as_xla(a: jax.Array, b: jax.Array, **options: Any) -> None:
    ours, xlas = _kernel(a, b, **options), gemm(a, b, implementation="xla", **options)
    ours, xlas = np.asarray(ours, np.float32), np.asarray(xlas, np.float32)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(xlas))
    kept = ~np.isnan(xlas)
    np.testing.assert_array_equal(ours[kept], xlas[kept])
    np.testing.assert_array_equal(np.signbit(ours[kept]), np.signbit(xlas[kept]))


def special() -> str:
    """NaN, infinities, denormals, signed zeros and overflow, where XLA has them."""
    count = 0
    eye = np.eye(256, dtype=np.float32)
    for dtype in (jnp.bfloat16, jnp.float16):
        info = jnp.finfo(dtype)
        smallest = float(info.smallest_subnormal)
        least = float(info.smallest_normal)
        values = [np.nan, np.inf, -np.inf, -0.0, 0.0, smallest, -3 * smallest, least - smallest]
        values += [float(info.max), -float(info.max), 1.0]
        rng = np.random.default_rng(3)
        drawn = jnp.asarray(rng.choice(values, (264, 256)), dtype)
        finite = jnp.asarray(rng.choice(values[3:], (264, 256)), dtype)
        # One term of each sum: every value as it is, beside zeros.
        _as_xla(finite, jnp.asarray(eye, dtype))
        _as_xla(finite, jnp.asarray(2 * eye, dtype))
        _as_xla(finite, jnp.asarray(-0.5 * eye, dtype))
        # What is not finite spreads over its row.
        _as_xla(drawn, jnp.asarray(eye, dtype))
        zeros = jnp.asarray(rng.choice([0.0, -0.0], (264, 256)), dtype)
        _as_xla(zeros, jnp.asarray(rng.choice([1.0, -1.0], (256, 264)), dtype))
        _as_xla(zeros, zeros.T, residual=zeros[:, :1] * jnp.ones((1, 264), dtype))
        large = jnp.full((264, 256), info.max, dtype)
        _as_xla(large, jnp.ones((256, 264), dtype))
        _as_xla(large, -jnp.ones((256, 264), dtype))
        count += 8
    return f"{count} products with the bits of XLA's"


def large() -> str:
    """A result, and an operand, of more than 2^32 elements."""
    rows = (1 << 16) + 8
    a, b = _integers(0, rows, 16), _integers(1, 16, rows)
    f = jax.jit(_kernel)
    result = f(a, b)
    assert result.size > 1 << 32

    @jax.jit
    def right(result: jax.Array, a: jax.Array, b: jax.Array, start: jax.Array) -> jax.Array:
        size = min(512, result.shape[0])
        part = jax.lax.dynamic_slice_in_dim(result, start, size)
        own = jax.lax.dynamic_slice_in_dim(a, start, size)
        return jnp.all(part == jnp.matmul(own, b))

    # The last part overlaps the one before: a start past the end is moved back.
    assert all(right(result, a, b, start) for start in range(0, rows, 512))
    del result
    tall = (1 << 20) + 8
    # Made on the GPU, where it is soon done.
    a = (jax.lax.broadcasted_iota(jnp.int32, (tall, 4104), 0) * 7919 % 5 - 2).astype(jnp.bfloat16)
    b = _integers(2, 4104, 64)
    assert a.size > 1 << 32
    result = f(a, b)
    assert all(right(result, a, b, start) for start in range(0, tall, 512))
    return f"{rows * rows:,} elements of a result, {a.size:,} of an operand"


def repeats() -> str:
    """The same product again and again, bit for bit."""
    rng = np.random.default_rng(0)
    a = reference.normal(rng, (2048, 1024), jnp.bfloat16)
    b = reference.normal(rng, (1024, 2048), jnp.bfloat16)
    count = 0
    for persistence in ("none", "static", "dynamic"):
        for cluster in ((1, 1), (2, 1), (1, 2)):
            config = HopperConfig(persistence=persistence, cluster=cluster)
            f = jax.jit(lambda a, b, config=config: _kernel(a, b, config=config))
            first = f(a, b)
            same = [_same_bits(f(a, b), first) for _ in range(500)]
            assert all(map(bool, same)), config
            count += len(same)
    return f"{count} runs"


def threads() -> str:
    """Products of many shapes, traced, compiled and run by several threads at once."""

    def one(i: int) -> None:
        m, n, k = 128 + 40 * (i % 12), 192 + 8 * (i % 7), 64 + 24 * (i % 5)
        a, b = _integers(i, m, k), _integers(i + 99, k, n)
        reference.assert_exact(jax.jit(_kernel)(a, b), reference.wide(a) @ reference.wide(b))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(48)))
    return "48 products from 8 threads"


PARTS: dict[str, tuple[Callable[[], str], dict[str, str]]] = {
    "graphs": (
        graphs,
        {
            "XLA_FLAGS": "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL,CUBLAS"
            " --xla_gpu_graph_min_graph_size=1"
        },
    ),
    "neighbour": (neighbour, {}),
    # 3 GB of an H200's 141.
    "memory": (memory, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.02"}),
    "special": (special, {}),
    "large": (large, {}),
    "repeats": (repeats, {}),
    "threads": (threads, {}),
}
"""What is looked at, and the variables of its environment."""


def main() -> None:
    """Runs every part, or one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, help="only this one, in this process")
    own = parser.parse_args()
    if not driver.found():
        parser.exit(2, f"{parser.prog}: error: needs a GPU, and there is none\n")
    if own.part:
        print(PARTS[own.part][0]())
        return
    failed = 0
    for name, (_, settings) in PARTS.items():
        start, said = time.time(), list[str]()
        command = processes.module("surroundings", f"--part={name}")
        # Flags that are a space are taken for the name of a file.
        flags = f"{os.environ.get('XLA_FLAGS', '')} {settings.get('XLA_FLAGS', '')}".strip()
        end = processes.run(command, said.append, PATIENCE, {**settings, "XLA_FLAGS": flags})
        failed += bool(end.code)
        what = "; ".join(said) if end.code == 0 else f"FAILED: the process {end}"
        print(f"{name:10} {time.time() - start:4.0f} s  {what}", flush=True)
    print(f"{len(PARTS)} parts, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
