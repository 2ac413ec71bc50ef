"""Trains a feed-forward layer, puts it into 8 bits, and shows what that costs.

    python examples/quantize_layer.py
        seconds, on any computer
    python examples/quantize_layer.py --width=4096 --hidden=14336 --rows=4096
        on a GPU

The layer learns in stock layers of Flax. The same parameters are then loaded
into layers of `pallas_gemm.flax.linen`. One has them as they are, one makes
8-bit floats of them in each call, and one stores weights of 8 bits with a
scale for each column. Errors are of the outputs' norm, against the layer in
float32. Times are those of the kernels of a call, all in turns.
"""

import functools
import importlib
import pathlib
import sys
from typing import Any

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)
    # Says which extra is missing, before an import fails.
    importlib.import_module("bench")

import jax
import jax.numpy as jnp
import optax
from absl import flags
from flax import linen as nn
from rich.console import Console
from rich.table import Table

from bench import command
from pallas_gemm.flax import linen as fused
from pallas_gemm.tuning.measure import Settings, Variant, measure
from pallas_gemm.tuning.timing import KernelMeter

TURNS = Settings(burst_rounds=5, sustained_rounds=0, energy_seconds=0)
STOCK = "stock"
SIZES = ("width", "hidden", "rows", "steps")
"""The flags of the command line."""


class FeedForward(nn.Module):
    """Two layers with gelu between them.

    Attributes:
        hidden: Columns of the first.
        up: Makes the first, with gelu.
        down: Makes the second.
    """

    hidden: int
    up: Any
    down: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the number of columns that `x` has."""
        return self.down(x.shape[-1], name="down")(self.up(self.hidden, name="up")(x))


def _stock_with_gelu(features: int, *, name: str, **fields: Any) -> Any:
    layer = nn.Dense(features, name=name, **fields)
    return lambda x: nn.gelu(layer(x))


def models(hidden: int) -> dict[str, FeedForward]:
    """Returns the same layer in several kinds."""

    def ours(kind: Any, **fields: Any) -> FeedForward:
        make = functools.partial(kind, dtype="bf16", **fields)
        return FeedForward(hidden, functools.partial(make, activation="gelu"), make)

    narrow = {"dtype": jnp.bfloat16}
    return {
        STOCK: FeedForward(
            hidden,
            functools.partial(_stock_with_gelu, **narrow),
            functools.partial(nn.Dense, **narrow),
        ),
        "fused": ours(fused.Dense),
        "fp8, current scaling": ours(fused.Fp8Dense),
        "int8 per channel": ours(fused.QuantizedDense),
        "fp8 per channel": ours(fused.QuantizedDense, quantized_dtype="e4m3"),
    }


def trained(model: FeedForward, x: jax.Array, steps: int) -> Any:
    """Returns the variables of a layer that has learnt a smooth function of its inputs."""
    wanted = jnp.sin(2 * x) + jnp.roll(x, 1, axis=-1)
    optimiser = optax.adam(1e-3)

    def loss(variables: Any) -> jax.Array:
        result: Any = model.apply(variables, x)
        return jnp.mean(jnp.square(result - wanted))

    @jax.jit
    def step(variables: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(variables)
        change, state = optimiser.update(gradient, state)
        return optax.apply_updates(variables, change), state, value

    variables = jax.jit(model.init)(jax.random.key(0), x)
    state = optimiser.init(variables)
    for _ in range(steps):
        variables, state, _ = step(variables, state)
    return variables


def loaded(model: FeedForward, trained: Any, x: jax.Array) -> Any:
    """Returns what a kind of layer is served with: its weights of 8 bits, all others of 16."""
    abstract = jax.eval_shape(model.init, jax.random.key(0), x)
    variables = fused.quantized(abstract, trained) if "quantized" in abstract else trained
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables["params"])
    return variables | {"params": narrow}


def run(width: int, hidden: int, rows: int, steps: int, console: Console) -> dict[str, float]:
    """Trains, quantizes and shows; returns the error of each kind of layer."""
    x = jax.random.normal(jax.random.key(1), (rows, width), jnp.float32)
    exact = FeedForward(hidden, _stock_with_gelu, nn.Dense)
    learnt = trained(exact, x, steps)
    wanted = exact.apply(learnt, x)
    narrow, errors, variants = x.astype(jnp.bfloat16), {}, []
    for name, model in models(hidden).items():
        own = loaded(model, learnt, narrow)
        call = jax.jit(model.apply)
        difference = call(own, narrow).astype(jnp.float32) - wanted
        errors[name] = float(jnp.linalg.norm(difference) / jnp.linalg.norm(wanted))
        launch = functools.partial(lambda _, call, own: call(own, narrow), call=call, own=own)
        variants.append(Variant(name, launch, jax.block_until_ready))
    times = {}
    if jax.default_backend() == "gpu":
        times = measure(variants, KernelMeter(), TURNS, baseline=STOCK)
    table = Table(title=f"{rows} rows, {width} to {hidden} to {width}")
    for column in ("layer", "error", "time", f"times as fast as {STOCK}"):
        table.add_column(column)
    for name, error in errors.items():
        burst = times[name].burst if name in times else None
        shown = (
            [f"{burst.seconds.median * 1e6:.0f} us", f"{burst.ratio.median:.3f}"] if burst else []
        )
        table.add_row(name, f"{error:.4f}", *shown)
    console.print(table)
    if not times:
        console.print("No GPU: errors only.")
    return errors


def main(values: flags.FlagValues) -> int:
    """Runs what the command line asks for."""
    sizes: dict[str, Any] = {name: values[name].value for name in SIZES}
    run(**sizes, console=Console())
    return 0


if __name__ == "__main__":
    flags.DEFINE_integer("width", 128, "Columns of the inputs.", 1)
    flags.DEFINE_integer("hidden", 512, "Columns between the layers.", 1)
    flags.DEFINE_integer("rows", 1024, "Inputs.", 1)
    flags.DEFINE_integer("steps", 100, "Steps of training.", 0)
    command.start("quantize_layer", main)
