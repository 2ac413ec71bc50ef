"""Muon with symmetric products, beside optax's own on a transformer.

    python examples/muon.py                       seconds, on any computer
    python examples/muon.py --preset=small        a GPU

`pallas_gemm.optax.muon` makes five steps of Newton and Schulz. In each,
`x @ x.T` and its square are symmetric, and the kernels compute half of them.
Weights of one size are orthogonalized as one batch. The yardstick is
`optax.contrib.muon`, whose update must be the same but for roundings. Times are
those of the kernels of a call, in turns.
"""

import functools
import importlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)
    # Says which extra is missing, before an import fails.
    importlib.import_module("bench")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from optax import contrib
from rich.console import Console
from rich.table import Table

from bench import command
from examples.sequences import Task
from examples.settings import PRESETS, Settings
from examples.training import APIS
from pallas_gemm.optax import muon
from pallas_gemm.tuning.measure import Settings as Turns
from pallas_gemm.tuning.measure import Variant, measure
from pallas_gemm.tuning.timing import KernelMeter

OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "optax": contrib.muon,
    "pallas_gemm": muon,
}


def loss(settings: Settings, params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the loss of the examples' transformer in layers of `pallas_gemm`."""
    logits = APIS["linen"].apply(settings, "fused", "xla", params, tokens[:, :-1])
    wide = logits.astype(jnp.promote_types(settings.type(), jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(wide, tokens[:, 1:]).mean()


def first_update(name: str, settings: Settings, params: Any, gradients: Any) -> Any:
    """Returns what an optimizer adds to the parameters in its first step."""
    optimizer = OPTIMIZERS[name](settings.learning_rate)
    return optimizer.update(gradients, optimizer.init(params), params)[0]


def step(name: str, settings: Settings, params: Any, tokens: jax.Array) -> Any:
    """Returns the parameters after their first step."""
    gradients = jax.grad(functools.partial(loss, settings))(params, tokens)
    return optax.apply_updates(params, first_update(name, settings, params, gradients))


def drawn(settings: Settings, seed: int) -> Any:
    """Returns numbers of the shapes of the parameters."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(functools.partial(APIS["linen"].init, settings), jax.random.key(0))
    return jax.tree.map(
        lambda x: jnp.asarray(0.02 * rng.standard_normal(x.shape), settings.type()), shapes
    )


@jax.jit
def error(found: Any, exact: Any) -> jax.Array:
    """Returns the largest error of an update, in units of the norm of what it is of."""
    each = jax.tree.map(
        lambda x, y: jnp.linalg.norm(x.astype(jnp.float32) - y) / jnp.linalg.norm(y), found, exact
    )
    return jnp.max(jnp.stack(jax.tree.leaves(each)))


def run(settings: Settings, console: Console) -> dict[str, float]:
    """Compares both optimizers and shows them; returns the error of each."""
    params, gradients = (drawn(settings, seed) for seed in (0, 1))
    tokens = jnp.asarray(Task(settings.vocabulary).batch(0, settings.batch, settings.sequence))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (params, gradients))
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(functools.partial(first_update, "optax", settings))(*wide)
    errors, parts = {}, {"update": [], "step": []}
    for name in OPTIMIZERS:
        for part, call, given in (
            ("update", first_update, (params, gradients)),
            ("step", step, (params, tokens)),
        ):
            program = jax.jit(functools.partial(call, name, settings)).lower(*given).compile()
            result = program(*given)
            if part == "update":
                errors[name] = float(error(result, exact))
            launch = functools.partial(lambda _, run, given: run(*given), run=program, given=given)
            parts[part].append(Variant(name, launch, jax.block_until_ready))
    times = {}
    if jax.default_backend() == "gpu":
        turns = Turns(burst_rounds=5, sustained_rounds=0, energy_seconds=0)
        meter = KernelMeter()
        times = {
            part: measure(variants, meter, turns, baseline="optax")
            for part, variants in parts.items()
        }
    table = Table("optimizer", "error of an update", *(f"{part}, ms" for part in times))
    for name, own in errors.items():
        bursts = [found[name].burst for found in times.values()]
        shown = [f"{1e3 * b.seconds.median:.3f} ({b.ratio.median:.2f}x)" for b in bursts if b]
        table.add_row(name, f"{own:.2g}", *shown)
    console.print(table)
    if not times:
        console.print("No GPU: errors only.")
    return errors


def main(values: flags.FlagValues) -> int:
    """Runs what the command line asks for."""
    run(PRESETS[str(values["preset"].value)], Console())
    return 0


if __name__ == "__main__":
    flags.DEFINE_enum("preset", "tiny", list(PRESETS), "The sizes.")
    command.start("muon", main)
