"""How far products are from exact ones, for each choice of their numerics.

    python bench/error_bench.py
        every choice at two sizes: half a minute on one GPU
    python bench/error_bench.py --size=1024x1024x16384 --seeds=3
    python bench/error_bench.py --simulate
        small sizes in the simulator, without a GPU; tensor cores cut off more

Errors are those against float64, over the root mean square of the exact
results. `x XLA` divides each by the error of XLA's product of the same types
and precision. Operands are normal: positive and negative terms cancel.
"""

import functools
import importlib
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)
    # Says which extra is missing, before JAX is imported.
    importlib.import_module("bench")

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax

from bench import command, gpu
from pallas_gemm import gemm, numerics

PROGRAM = "error_bench"
SIZES = ("512x2048x8192", "1024x4096x4096")
SIMULATED = ("64x64x512",)
BF16, F16, F32, E4M3 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn
_PRESET = lax.DotAlgorithmPreset


class Choice(NamedTuple):
    """One way to make a product.

    Attributes:
        name: The words of the table.
        dtype: The type of the operands.
        result: The type of the result.
        precision: The precision, for XLA too; None for the default.
        promise: Makes `numerics=` of k; None for the default.
    """

    name: str
    dtype: Any
    result: Any
    precision: Any = None
    promise: Any = None


def _rows(_: int) -> numerics:
    return numerics(invariant="rows")


def _whole(k: int) -> numerics:
    return numerics(part=k)


def _sixteen(k: int) -> numerics:
    return numerics(part=k // 16)


def choices(*, simulate: bool) -> list[Choice]:
    """Returns what is compared; without a promise a CPU computes by XLA, which is no choice."""
    found = []
    for dtype, result in ((BF16, BF16), (BF16, F32), (F16, F32), (E4M3, F32)):
        found.append(Choice("default", dtype, result))
        found.append(Choice('invariant="rows"', dtype, result, promise=_rows))
        if (dtype, result) == (BF16, F32):
            found.append(Choice("part=k", dtype, result, promise=_whole))
            if not simulate:
                found.append(Choice("part=k/16", dtype, result, promise=_sixteen))
    found.append(Choice("default: TF32", F32, F32))
    found.append(Choice('invariant="rows"', F32, F32, promise=_rows))
    for preset in (_PRESET.BF16_BF16_F32_X3, _PRESET.BF16_BF16_F32_X6):
        found.append(Choice(f'precision="{preset.name}"', F32, F32, preset, _rows))
    found.append(Choice('precision="highest"', F32, F32, "highest", _rows))
    return [own for own in found if own.promise or not simulate]


class Error(NamedTuple):
    """The error of a product, over the root mean square of the exact results.

    Attributes:
        largest: The largest of one element.
        mean_square: The root of the mean of the squares.
    """

    largest: float
    mean_square: float


def error(found: Any, exact: np.ndarray) -> Error:
    """Returns how far results are from exact ones."""
    apart = np.asarray(found, np.float64) - exact
    size = np.sqrt(np.mean(exact**2))
    return Error(float(np.abs(apart).max() / size), float(np.sqrt(np.mean(apart**2)) / size))


def errors(
    choice: Choice, size: Sequence[int], seed: int, *, simulate: bool
) -> tuple[Error, Error]:
    """Returns the error of a choice, and that of XLA's product."""
    m, n, k = size
    keys = jax.random.split(jax.random.key(seed), 2)
    a, b = (
        jax.random.normal(key, shape, F32).astype(choice.dtype)
        for key, shape in zip(keys, ((m, k), (k, n)), strict=True)
    )
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    how: dict[str, Any] = {
        "preferred_element_type": choice.result,
        "precision": choice.precision,
    }
    stock = jax.jit(functools.partial(jnp.matmul, **how))
    promised = {"numerics": choice.promise(k)} if choice.promise else {}
    simulated = {"implementation": "interpret"} if simulate else {}
    ours = jax.jit(functools.partial(gemm, **how, **promised, **simulated))
    return error(ours(a, b), exact), error(stock(a, b), exact)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command line."""
    text = {"flag_values": values}
    flags.DEFINE_list("size", None, "Sizes, rows x columns x k.", **text)
    flags.DEFINE_integer("seeds", 1, "Draws of operands.", 1, **text)
    flags.DEFINE_bool("simulate", False, "Simulate the kernels, without a GPU.", **text)


def run(values: flags.FlagValues) -> int:
    """Prints a line of a table for each choice and size.

    Raises:
        RequestError: The request cannot be met.
    """
    sizes = command.sizes("--size", values.size or (SIMULATED if values.simulate else SIZES))
    if not values.simulate:
        gpu.require()
    print("| size | operands, result | choice | rms error | x XLA | largest | x XLA |")
    print("|---|---|---|---|---|---|---|")
    for size in sizes:
        for choice in choices(simulate=values.simulate):
            print(_line(choice, size, values), flush=True)
    return 0


def _line(choice: Choice, size: Sequence[int], values: flags.FlagValues) -> str:
    found = [errors(choice, size, seed, simulate=values.simulate) for seed in range(values.seeds)]
    ours, stock = (_worst([pair[i] for pair in found]) for i in (0, 1))
    types = ", ".join(str(np.dtype(x)) for x in (choice.dtype, choice.result))
    return (
        f"| {'x'.join(map(str, size))} | {types} | {choice.name} | {ours.mean_square:.2g} |"
        f" {ours.mean_square / stock.mean_square:.2f} | {ours.largest:.2g} |"
        f" {ours.largest / stock.largest:.2f} |"
    )


def _worst(found: Sequence[Error]) -> Error:
    return Error(*map(max, zip(*found, strict=True)))


if __name__ == "__main__":
    command.start(PROGRAM, run, define_flags)
