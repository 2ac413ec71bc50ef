"""Losses of training steps with `linear_cross_entropy` beside stock JAX's.

    python bench/loss_curve.py
        1,000 steps of a small model: a minute on a CPU
    python bench/loss_curve.py --tokens=4096 --width=1024 --words=32000
        the same in bfloat16 on a GPU
    python bench/loss_curve.py --memory=fastest --csv=losses.csv

The model is an embedding, a layer and a last layer. Each is trained by SGD with
momentum on sequences that a rule makes. `reversed` is stock JAX with its words
in the opposite order: the same program but for the order of its sums. So it
says how far roundings alone bring losses apart.

Programs are compiled side by side. It prints how long each is compiled, and
trained.
"""

import concurrent.futures
import functools
import importlib
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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

from bench import command, report
from pallas_gemm import linear_cross_entropy

PROGRAM = "loss_curve"
SEEN = 64
"""Words that are read: few are seen often enough to be learnt."""
NOISE = 0.1
"""How often a token is any word at all, instead of the one that follows."""
RATE, MOMENTUM = 32, 0.9
"""The rate of a step, times the width: a logit moves with the square of a token."""
POINTS = (0, 9, 99, 299, 499, 699, 999)
Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Sizes(NamedTuple):
    """The sizes of the model and its batches.

    Attributes:
        tokens: Tokens of a step.
        width: Elements of a token.
        words: How many words there are.
        dtype: The type of parameters and activations.
    """

    tokens: int
    width: int
    words: int
    dtype: Any


def stock(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean loss by an array of all logits."""
    logits = jnp.matmul(hidden, weight).astype(jnp.float32)
    own = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - own)


def reversed_stock(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the same with the words in the opposite order."""
    return stock(hidden, weight[:, ::-1], weight.shape[1] - 1 - labels)


def losses_of(memory: Any) -> dict[str, Loss]:
    """Returns what is compared, by name."""
    fused = functools.partial(linear_cross_entropy, memory=memory)
    return {"stock": stock, "reversed": reversed_stock, "fused": fused}


def parameters(sizes: Sizes) -> list[jax.Array]:
    """Returns the parameters before the first step: embedding, layer, last layer."""
    _, width, words, dtype = sizes
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((SEEN, width), (width, width), (width, words))
    scales = (1.0, width**-0.5, width**-0.5)
    drawn = zip(keys, shapes, scales, strict=True)
    return [(jax.random.normal(key, own) * scale).astype(dtype) for key, own, scale in drawn]


def batches(sizes: Sizes, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns which of the words that are read each token of all steps is, and what follows it."""
    rng = np.random.default_rng(0)
    follows = rng.permutation(sizes.words)[:SEEN]
    tokens = rng.integers(0, SEEN, (steps, sizes.tokens))
    other = rng.integers(0, sizes.words, tokens.shape)
    labels = np.where(rng.random(tokens.shape) < NOISE, other, follows[tokens])
    return tokens.astype(np.int32), labels.astype(np.int32)


def training(loss: Loss) -> Callable[..., jax.Array]:
    """Returns a function of parameters, moments and batches: the loss before each step."""

    def of(params: Sequence[jax.Array], tokens: jax.Array, labels: jax.Array) -> jax.Array:
        embedding, layer, last = params
        # As a product: its gradient adds up in the same order in every run.
        hidden = jnp.matmul(jax.nn.one_hot(tokens, SEEN, dtype=embedding.dtype), embedding)
        hidden = hidden + jax.nn.gelu(jnp.matmul(hidden, layer))
        return loss(hidden, last, labels)

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        found, gradients = jax.value_and_grad(of)(params, *batch)
        moments = [
            MOMENTUM * x + g.astype(x.dtype) for x, g in zip(moments, gradients, strict=True)
        ]
        rate = RATE / params[1].shape[0]
        params = [(p - rate * x).astype(p.dtype) for p, x in zip(params, moments, strict=True)]
        return (params, moments), found

    return lambda state, *batch: jax.lax.scan(step, state, batch)[1]


def curves(losses: Mapping[str, Loss], sizes: Sizes, steps: int) -> dict[str, np.ndarray]:
    """Trains with each loss, and returns the losses before each step."""
    params = parameters(sizes)
    moments = [jnp.zeros(x.shape, jnp.float32) for x in params]
    operands = (params, moments), *map(jnp.asarray, batches(sizes, steps))

    def compiled(loss: Loss) -> Callable[..., jax.Array]:
        return jax.jit(training(loss)).lower(*operands).compile()

    found, since = {}, time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name, run in zip(losses, pool.map(compiled, losses.values()), strict=True):
            print(f"{name}: compiled after {time.perf_counter() - since:.1f} s", file=sys.stderr)
            begun = time.perf_counter()
            found[name] = np.asarray(run(*operands))
            taken = time.perf_counter() - begun
            print(f"{name}: {steps:,} steps in {taken:.1f} s", file=sys.stderr)
    return found


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command line."""
    text = {"flag_values": values}
    flags.DEFINE_integer("steps", 1000, "Steps.", 1, **text)
    flags.DEFINE_integer("tokens", 128, "Tokens of a step.", 1, **text)
    flags.DEFINE_integer("width", 64, "Elements of a token.", 1, **text)
    flags.DEFINE_integer("words", 9000, "Words.", 1, **text)
    flags.DEFINE_enum("memory", "least", ["least", "fastest"], "As for the loss.", **text)
    flags.DEFINE_string("csv", None, "Write the losses of all steps to this file.", **text)


def run(values: flags.FlagValues) -> int:
    """Trains with each loss, and prints a table of some steps.

    Raises:
        RequestError: The request cannot be met.
    """
    path = command.output_path(values.csv)
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    sizes = Sizes(values.tokens, values.width, values.words, dtype)
    found = curves(losses_of(values.memory), sizes, values.steps)
    print(f"| step | {' | '.join(found)} |\n|{'---|' * (1 + len(found))}")
    for step in POINTS:
        if step < values.steps:
            losses = " | ".join(f"{own[step]:.4f}" for own in found.values())
            print(f"| {step + 1:,} | {losses} |")
    for name in list(found)[1:]:
        apart = np.abs(found[name] - found["stock"])
        print(f"{name}: {apart.max():.2g} from stock at most, {apart.mean():.2g} in the mean")
    if path:
        rows = zip(*(own.tolist() for own in found.values()), strict=True)
        lines = [",".join(found), *(",".join(map(repr, row)) for row in rows)]
        report.write(path, ("\n".join(lines) + "\n").encode())
    return 0


if __name__ == "__main__":
    command.start(PROGRAM, run, define_flags)
