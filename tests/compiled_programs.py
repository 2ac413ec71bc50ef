"""Compiles programs for an H200 that need not be there, and prints what each consists of as JSON.

`tests/test_compiled_programs.py` runs this in a process of its own, because the compiler keeps the
architecture that it saw first. The kernels are empty: what is told is what surrounds them.
"""

import functools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
import pytest

import pallas_gemm
from pallas_gemm import (
    checkpoint_policies,
    dot_general,
    gated_gemm,
    gemm,
    offline,
    projections,
    ragged_dot,
    target,
)
from tests import known_kernels

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

    def ensemble(a: jax.Array, b: jax.Array, bias: jax.Array) -> jax.Array:
        return gemm(a, b, bias=bias)

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
        "ensemble of one input": (
            jax.vmap(ensemble, (None, 0, 0)),
            (square, shape(4, SIZE, SIZE), shape(4, SIZE, dtype=jnp.float32)),
        ),
        "one layer with biases": (
            jax.vmap(ensemble, (0, None, 0)),
            (shape(4, SIZE, SIZE), square, shape(4, SIZE, dtype=jnp.float32)),
        ),
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
        "groups": (
            ragged_dot,
            (shape(8 * SIZE, SIZE), shape(64, SIZE, SIZE), shape(64, dtype=jnp.int32)),
        ),
    }


def _contents(text: str) -> Counter[str]:
    """Counts what a compiled program does, other than renaming."""
    entry = text[text.index("\nENTRY") :]
    names = re.findall(r" = [^=]*? ([a-z-]+)\(", entry)
    free = {"parameter", "bitcast", "constant", "tuple", "get-tuple-element", "custom-call"}
    found = Counter(name for name in names if name not in free)
    # What is as large as a result has its type: a wider one costs twice the bytes.
    found["float32 matrix"] = len(re.findall(r" = f32\[(?:\d+,)*\d{3,},\d{3,}\]", entry))
    found["kernel"] = entry.count('custom_call_target="mosaic_gpu_v2"')
    return found


def _views(shape: Callable[..., Any]) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Programs in which a kernel could read from, or write to, a part of a larger array."""
    odd = SIZE + 8

    def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (gemm(x, w), None), x, weights)[0]

    def each(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.map(lambda rows: gemm(rows, w), x)

    def biased(a: jax.Array, b: jax.Array, biases: jax.Array) -> jax.Array:
        return gemm(a, b, bias=biases[3 : 3 + SIZE])

    square = shape(SIZE, SIZE)
    return {
        "rows": (lambda x, w: gemm(x[8 : 8 + SIZE], w), (shape(SIZE + 8, SIZE), square)),
        "odd rows": (lambda x, w: gemm(x[3 : 3 + SIZE], w), (shape(odd, odd), shape(odd, SIZE))),
        "one row": (lambda x, w: gemm(x[:, 8 : 8 + SIZE], w), (shape(1, SIZE + 16), square)),
        "one column": (
            lambda x, w: gemm(x[8 : 8 + SIZE], w, transpose_a=True),
            (shape(SIZE + 16, 1), square),
        ),
        "weights": (layers, (square, shape(4, SIZE, SIZE))),
        "results": (each, (shape(4, SIZE, SIZE), square)),
        "odd results": (each, (shape(4, SIZE, odd), shape(odd, odd))),
        "bias": (biased, (square, square, shape(2 * SIZE, dtype=jnp.float32))),
    }


def _by_groups(shape: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradients of a product of groups, of the rows and of the matrices."""

    def both(a: jax.Array, b: jax.Array, sizes: jax.Array, g: jax.Array) -> Any:
        return jax.vjp(lambda a, b: ragged_dot(a, b, sizes), a, b)[1](g)

    square = shape(8 * SIZE, SIZE)
    return both, (square, shape(64, SIZE, SIZE), shape(64, dtype=jnp.int32), square)


Stock = tuple[Callable[..., Any], tuple[Any, ...]]


def _beside_stock(shape: Callable[..., Any]) -> dict[str, Callable[[Any], Stock]]:
    """Programs of products of intermediates, given the functions that multiply."""

    def gram(own: Any) -> Stock:
        def run(x: jax.Array, w: jax.Array) -> jax.Array:
            y = jnp.tanh(own.matmul(x, w))
            return own.matmul(y, y.T)

        return run, (shape(2 * SIZE, SIZE), shape(SIZE, SIZE))

    def values(own: Any) -> Stock:
        run = functools.partial(own.einsum, "BTSKG,BSKH->BTKGH")
        return run, (shape(2, 512, 512, 4, 8), shape(2, 512, 4, 128))

    def attention(own: Any) -> Stock:
        def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            scores = own.einsum("BTKGH,BSKH->BTKGS", q, k).astype(jnp.float32)
            weights = jax.nn.softmax(scores, -1).astype(v.dtype)
            return own.einsum("BTKGS,BSKH->BTKGH", weights, v).astype(jnp.float32).sum()

        keys = shape(2, 512, 4, 128)
        return jax.grad(run, (0, 1, 2)), (shape(2, 512, 4, 8, 128), keys, keys)

    def logits(own: Any) -> Stock:
        def loss(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
            z = own.matmul(x, w, preferred_element_type=jnp.float32)
            own_z = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
            return (jax.nn.logsumexp(z, -1) - own_z).mean()

        labels = shape(SIZE, dtype=jnp.int32)
        return jax.grad(loss, (0, 1)), (shape(SIZE, SIZE), shape(SIZE, 8 * SIZE), labels)

    return {
        "gram": gram,
        "values": values,
        "attention's gradients": attention,
        "logits": logits,
    }


def _last_layers(
    shape: Callable[..., Any],
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Last layers of language models: forward alone, and with gradients in the least memory."""

    def of(tokens: int, width: int, words: int) -> tuple[Any, ...]:
        return shape(tokens, width), shape(width, words), shape(tokens, dtype=jnp.int32)

    least = functools.partial(pallas_gemm.linear_cross_entropy, memory="least")
    wide, long = of(4096, 4096, 128256), of(8192, 2048, 151936)
    return {
        "wide": (pallas_gemm.linear_cross_entropy, wide),
        "long": (pallas_gemm.linear_cross_entropy, long),
        "wide, with gradients": (jax.value_and_grad(least, (0, 1)), wide),
        "long, with gradients": (jax.value_and_grad(least, (0, 1)), long),
    }


def _moved(program: jax.stages.Compiled) -> tuple[int, int]:
    """Returns the bytes of a program's temporaries, and of what it transposes or copies."""
    memory: Any = program.memory_analysis()
    arrays = re.findall(r" = bf16\[([\d,]+)\]\S* (?:transpose|copy)\(", program.as_text() or "")
    turned = sum(2 * math.prod(map(int, sizes.split(","))) for sizes in arrays)
    return memory.temp_size_in_bytes, turned


def _of_each_round(text: str) -> int:
    """Returns how many kernels each round of a program's loop has."""
    (name,) = re.findall(r" while\(.*body=%([\w.]+)", text)
    (body,) = re.findall(
        rf"^%{re.escape(name)} [^\n]*\{{\n(.*?)^\}}", text, re.MULTILINE | re.DOTALL
    )
    allocated = body.count('custom_call_target="AllocateBuffer"')
    return len(re.findall(r" (?:fusion|fusion-start|custom-call|copy)\(", body)) - allocated


def _own_memory(program: jax.stages.Compiled) -> float:
    """Returns what a program takes beside its operands and results, as a share of them."""
    memory: Any = program.memory_analysis()
    given = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return memory.temp_size_in_bytes / given


def _handed_over(text: str) -> list[str]:
    """Returns what is done around kernels in place, without a copy."""
    bodies = re.findall(r"^%dynamic-slice-fusion[^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    done = " (dynamic-update-slice|dynamic-slice|slice)\\("
    return sorted(found for body in bodies for found in re.findall(done, body))


def main() -> None:
    """Prints the contents of every program."""
    sharding = offline._device_sharding("h200")

    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    def compiled(f: Callable[..., Any], operands: tuple[Any, ...]) -> jax.stages.Compiled:
        return jax.jit(f).lower(*operands).compile()

    with pytest.MonkeyPatch.context() as patch:
        known_kernels.emptied(patch)
        _print(shape, compiled)


def _print(shape: Callable[..., Any], compiled: Callable[..., jax.stages.Compiled]) -> None:
    def text(program: tuple[Callable[..., Any], tuple[Any, ...]]) -> str:
        return compiled(*program).as_text() or ""

    contents = {name: _contents(text(program)) for name, program in _programs(shape).items()}
    with target("h200"):
        views = {name: _handed_over(text(program)) for name, program in _views(shape).items()}
        memory = _own_memory(compiled(*_by_groups(shape)))
        layers = {name: compiled(*program) for name, program in _last_layers(shape).items()}
        losses = {name: _moved(program)[0] / 1e6 for name, program in layers.items()}
        rounds = _of_each_round(layers["long, with gradients"].as_text() or "")
        beside = {
            name: [_moved(compiled(*program(own))) for own in (pallas_gemm, jnp)]
            for name, program in _beside_stock(shape).items()
        }
    found = {"contents": contents, "views": views, "memory": memory, "beside stock": beside}
    found |= {"losses": losses, "rounds": rounds}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
