"""Serves a decoder with weights of 16, 8 and 4 bits, beside JAX's products.

    python examples/serve.py
        seconds, on any computer
    python examples/serve.py --preset=8b-blocks --examples=1
        two blocks of the sizes of an 8B model, one GPU

`--explain` says what would compute each product of the decoder with 4 bits.

The decoder is drawn, so what it says means nothing. It decodes greedily, all
tokens in one jitted loop with a cache. The speed is that of the loop, without
the prompt, in turns. Memory is that of the weights. The error is that of the
prompt's logits, relative to their norm, beside the weights before they were
rounded to 16, 8 or 4 bits, all in float32.
"""

import functools
import importlib
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)
    # Says which extra is missing, before an import fails.
    importlib.import_module("bench")

import jax
import jax.numpy as jnp
from absl import flags
from rich.console import Console
from rich.table import Table

import pallas_gemm
from bench import command
from examples.decoder import OURS, PRESETS, STOCK, Products, Sizes, decode, parameters, read
from pallas_gemm import QuantizedWeight, explain, quantize_weights

WHO = {"stock": STOCK, "pallas_gemm": OURS}
BITS: dict[str, Any] = {
    "bfloat16": None,
    "int8, a scale per column": {"bits": 8},
    "int4, groups of {group}": {"bits": 4},
}


class Request(NamedTuple):
    """The values of the flags of the command line.

    Attributes:
        examples: How many prompts there are.
        prompt: Tokens of each.
        tokens: Tokens that follow each.
        group: Elements that share a scale of 4 bits.
        rounds: Turns of each variant.
    """

    examples: int = 4
    prompt: int = 16
    tokens: int = 16
    group: int = 32
    rounds: int = 3


def weights(sizes: Sizes, group: int) -> tuple[Any, Iterator[tuple[str, Any]]]:
    """Returns the weights in float32, and an iterator over names and the same in fewer bits."""
    exact = jax.jit(functools.partial(parameters, sizes, dtype=jnp.float32))(jax.random.key(0))

    def each() -> Iterator[tuple[str, Any]]:
        narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), exact)
        for name, how in BITS.items():
            own = how if how is None or how["bits"] == 8 else how | {"group": group}
            made = narrow if own is None else quantize_weights(narrow, **own)
            yield name.format(group=group), made

    return exact, each()


def gigabytes(params: Any) -> float:
    """Returns the memory of weights on a GPU."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, QuantizedWeight))
    return sum(x.nbytes for x in leaves) / 1e9


class Programs(NamedTuple):
    """The programs of a server: one reads prompts, one decodes in a loop."""

    read: Any
    decode: Any

    @classmethod
    def of(cls, who: Products, sizes: Sizes, asked: Request) -> Self:
        """Returns the programs that multiply by someone's products."""
        positions = asked.prompt + asked.tokens
        return cls(
            jax.jit(functools.partial(read, who, sizes, positions)),
            jax.jit(functools.partial(decode, who, sizes, asked.tokens)),
        )


def run(sizes: Sizes, asked: Request, console: Console) -> dict[tuple[str, str], dict[str, float]]:
    """Decodes by each and shows it; returns what each takes by the weights and who multiplies."""
    exact, each = weights(sizes, asked.group)
    prompt = jax.random.randint(
        jax.random.key(1), (asked.examples, asked.prompt), 0, sizes.vocabulary
    )
    with jax.default_matmul_precision("highest"):
        wanted, _ = Programs.of(STOCK, sizes, asked).read(exact, prompt)
    found: dict[tuple[str, str], dict[str, float]] = {}
    for name, params in each:
        own = {who: Programs.of(products, sizes, asked) for who, products in WHO.items()}
        states = {who: programs.read(params, prompt) for who, programs in own.items()}
        seconds = _in_turns(own, params, states, asked.rounds)
        for who, (logits, _) in states.items():
            error = jnp.linalg.norm(logits - wanted) / jnp.linalg.norm(wanted)
            found[name, who] = {
                "seconds": seconds[who] / asked.tokens,
                "gigabytes": gigabytes(params),
                "error": float(error),
            }
    _show(found, asked, console)
    return found


def _in_turns(programs: Any, params: Any, states: Any, rounds: int) -> dict[str, float]:
    """Returns how long each takes to decode, the median over turns."""
    taken: dict[str, list[float]] = {who: [] for who in programs}
    for turn in range(1 + rounds):
        for who, own in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(own.decode(params, *states[who]))
            # The first time, it is compiled.
            if turn:
                taken[who].append(time.perf_counter() - start)
    return {who: statistics.median(own) for who, own in taken.items()}


def _show(found: Any, asked: Request, console: Console) -> None:
    baseline = next(iter(found.values()))["seconds"]
    table = Table(
        title=f"{asked.examples} examples, {asked.prompt} + {asked.tokens} tokens of each"
    )
    for column in ("weights", "products", "GB", "error", "tokens/s", "times as fast"):
        table.add_column(column)
    for (name, who), own in found.items():
        speed = asked.examples / own["seconds"]
        table.add_row(
            *(name, who, f"{own['gigabytes']:.3f}", f"{own['error']:.4f}"),
            *(f"{speed:.0f}", f"{baseline / own['seconds']:.2f}"),
        )
    console.print(table)
    if jax.default_backend() != "gpu":
        console.print("No GPU: speeds say nothing of one.")


def explained(sizes: Sizes, asked: Request) -> Any:
    """Returns what would compute the products of the decoder with 4 bits, without running it."""
    make = functools.partial(parameters, sizes, dtype=jnp.bfloat16)
    params = jax.eval_shape(make, jax.random.key(0))
    params = quantize_weights(params, bits=4, group=asked.group)
    prompt = jax.ShapeDtypeStruct((asked.examples, asked.prompt), jnp.int32)
    programs = Programs.of(OURS, sizes, asked)

    def serve(params: Any, prompt: Any) -> Any:
        return programs.decode(params, *programs.read(params, prompt))

    with pallas_gemm.target("h200"):
        return explain(serve, params, prompt)


def main(values: flags.FlagValues) -> int:
    """Runs what the command line asks for."""
    given: dict[str, Any] = {name: values[name].value for name in Request._fields}
    sizes, asked = PRESETS[values.preset], Request(**given)
    if values.explain:
        Console().print(str(explained(sizes, asked)), markup=False, highlight=False)
    else:
        run(sizes, asked, Console())
    return 0


if __name__ == "__main__":
    flags.DEFINE_enum("preset", "tiny", list(PRESETS), "The sizes.")
    flags.DEFINE_bool("explain", False, "Show what would compute each product, and run nothing.")
    flags.DEFINE_integer("examples", Request().examples, "Prompts.", 1)
    flags.DEFINE_integer("prompt", Request().prompt, "Tokens of each prompt.", 1)
    flags.DEFINE_integer("tokens", Request().tokens, "Tokens that follow each.", 1)
    flags.DEFINE_integer("group", Request().group, "Elements that share a scale of 4 bits.", 1)
    flags.DEFINE_integer("rounds", Request().rounds, "Turns of each variant.", 1)
    command.start("serve", main)
