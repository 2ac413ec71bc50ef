"""Compiles programs for an H200 that need not be there, and prints what each consists of as JSON.

`tests/test_compiled_programs.py` runs this in a process of its own, because the compiler keeps the
architecture that it saw first.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp

from pallas_gemm import checkpoint_policies, dot_general, gated_gemm, gemm, offline, projections

SIZE = 1024


def _programs(shape: Callable[..., Any]) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    square = shape(SIZE, SIZE)
    odd = shape(SIZE - 1, SIZE - 1)
    bias = shape(SIZE, dtype=jnp.float32)

    def step(f: Callable[..., Any]) -> Callable[..., Any]:
        """Forward and backward."""

        def both(g: Any, *operands: jax.Array) -> Any:
            result, pull = jax.vjp(f, *operands)
            return result, pull(g)

        return both

    def biased(a: jax.Array, b: jax.Array, bias: jax.Array) -> jax.Array:
        return gemm(a, b, bias=bias, activation="gelu")

    def layers(a: jax.Array, b: jax.Array) -> jax.Array:
        return gemm(gemm(a, b, activation="gelu"), b)

    def three(a: jax.Array, *weights: jax.Array) -> Any:
        return projections(a, weights)

    saved = jax.checkpoint(layers, policy=checkpoint_policies.dots_saveable)
    heads = (((2, 3), (0, 1)), ((), ()))
    return {
        "plain": (gemm, (square, square)),
        "sequence": (gemm, (shape(4, SIZE // 4, SIZE), square)),
        "fused": (biased, (square, square, bias)),
        "gated": (gated_gemm, (square, square, square)),
        "unaligned": (gemm, (odd, odd)),
        "mapped": (jax.vmap(gemm, (0, None)), (shape(4, SIZE // 4, SIZE), square)),
        "attention output": (
            lambda x, w: dot_general(x, w, heads),
            (shape(4, SIZE // 4, 8, SIZE // 8), shape(8, SIZE // 8, SIZE)),
        ),
        "training step": (step(gemm), (square, square, square)),
        "training step of a layer": (step(biased), (square, square, square, bias)),
        "training step of a gated layer": (step(gated_gemm), (square,) * 4),
        "training step of projections": (step(three), ((square,) * 3, *(square,) * 4)),
        "examples": (
            jax.grad(lambda w, x: jnp.sum(jax.vmap(lambda row: gemm(row, w))(x)).astype(float)),
            (square, square),
        ),
        "checkpoint": (step(saved), (square, square, square)),
    }


def _contents(text: str) -> Counter[str]:
    """Counts what a compiled program does, other than renaming."""
    entry = text[text.index("\nENTRY") :]
    names = re.findall(r" = [^=]*? ([a-z-]+)\(", entry)
    free = {"parameter", "bitcast", "constant", "tuple", "get-tuple-element", "custom-call"}
    found = Counter(name for name in names if name not in free)
    found["kernel"] = entry.count('custom_call_target="mosaic_gpu_v2"')
    return found


def main() -> None:
    """Prints the contents of every program."""
    sharding = offline._device_sharding("h200")

    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    contents = {
        name: _contents(jax.jit(f).lower(*operands).compile().as_text())
        for name, (f, operands) in _programs(shape).items()
    }
    json.dump(contents, sys.stdout)


if __name__ == "__main__":
    main()
