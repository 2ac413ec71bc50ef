"""Trains a small transformer with and without the multiply, and compares the two.

    python examples/train_transformer.py
        seconds, on any computer
    python examples/train_transformer.py --api=nnx --op=pallas_gemm
    python examples/train_transformer.py --preset=1b
        a billion parameters, one GPU
    python examples/train_transformer.py --layers=fp8_blocks
        products of 8 bits, with a scale for each block
    python examples/train_transformer.py --loss=fused
        the last layer and its loss without an array of logits
    python examples/train_transformer.py --preset=small --mesh=data:2,model:2
    python examples/train_transformer.py --cpu_devices=8 --mesh=data:2,model:4

Both start from the same parameters and see the same examples, so their losses
should agree as far as the roundings of their types let them. They take turns of
a few steps, in each round once in this order and once in the other; times are
medians over the rounds, without the first. `host` is how long Python needs to
start a step, and `memory` what the compiled step takes on each device.
"""

import dataclasses
import importlib
import json
import pathlib
import sys
from typing import Any

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)
    # Says which extra is missing, before an import fails.
    importlib.import_module("bench")

import jax
from absl import flags
from rich.console import Console

from bench import command, report
from examples import comparison
from examples.settings import PRESETS, Settings
from examples.training import APIS, Trainer, mesh_of


def define_flags(values: flags.FlagValues) -> None:
    """Defines what can be asked for on the command line."""
    flags.DEFINE_enum("api", "linen", list(APIS), "Of Flax.", flag_values=values)
    ops = ["both", "stock", "pallas_gemm"]
    flags.DEFINE_enum("op", "both", ops, "Who multiplies.", flag_values=values)
    flags.DEFINE_enum(
        "layers",
        "fused",
        ["fused", "hooks", "fp8_blocks"],
        "What pallas_gemm is: our layers, or stock layers with dot_general= as a hook, in"
        " 16 bits or in blocks of 8 bits.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "loss",
        "stock",
        ["stock", "fused"],
        "What pallas_gemm has after the last block: logits and optax's loss, or both at once.",
        flag_values=values,
    )
    flags.DEFINE_enum("preset", "tiny", list(PRESETS), "The sizes.", flag_values=values)
    for name in ("blocks", "batch", "sequence", "vocabulary"):
        flags.DEFINE_integer(name, None, f"Instead of the preset's {name}.", 1, flag_values=values)
    flags.DEFINE_integer("rounds", 5, "Rounds of two turns of each.", 1, flag_values=values)
    flags.DEFINE_integer(
        "steps",
        5,
        "Steps of a turn; on a GPU, seconds of them tell small differences.",
        1,
        flag_values=values,
    )
    flags.DEFINE_string("mesh", "", "Such as data:2,model:2.", flag_values=values)
    flags.DEFINE_integer(
        "cpu_devices", None, "Run on a CPU as so many devices.", 1, flag_values=values
    )
    flags.DEFINE_enum(
        "attention",
        "auto",
        ["auto", "xla", "cudnn"],
        "Of jax.nn.dot_product_attention; auto is cudnn on a GPU in 16 bits.",
        flag_values=values,
    )
    flags.DEFINE_string("json", None, "Also write what is shown to this file.", flag_values=values)


def value(options: flags.FlagValues, name: str) -> Any:
    """Returns what was asked for under a name."""
    return options[name].value


def settings_of(options: flags.FlagValues) -> Settings:
    """Returns the preset with what was asked for instead."""
    sizes = ("blocks", "batch", "sequence", "vocabulary")
    own = {name: value(options, name) for name in sizes}
    given = {name: size for name, size in own.items() if size is not None}
    return dataclasses.replace(PRESETS[value(options, "preset")], **given)


def trainer_of(options: flags.FlagValues) -> Trainer:
    """Returns what the trainees share.

    Raises:
        ValueError: The options cannot be met.
    """
    report.check_writable(command.output_path(value(options, "json")))
    settings = settings_of(options)
    attention, on_gpu = value(options, "attention"), jax.default_backend() == "gpu"
    if attention == "auto":
        attention = "cudnn" if on_gpu and settings.type().itemsize == 2 else "xla"
    elif attention == "cudnn" and not on_gpu:
        raise ValueError("--attention=cudnn needs a GPU; auto takes what there is")
    mesh = mesh_of(value(options, "mesh"))
    for axis, name in (("data", "batch"), ("model", "width"), ("model", "hidden")):
        size, devices = getattr(settings, name), mesh.shape.get(axis, 1) if mesh else 1
        if size % devices:
            raise ValueError(f"--mesh splits {name}={size}, which {axis}:{devices} cannot")
    fused_loss = value(options, "loss") == "fused"
    return Trainer(settings, value(options, "api"), attention, fused_loss, mesh=mesh)


def run(trainer: Trainer, options: flags.FlagValues, console: Console) -> dict[str, Any]:
    """Trains, and prints and returns what was found."""
    rounds, steps = value(options, "rounds"), value(options, "steps")
    kinds = {"stock": "stock", "pallas_gemm": value(options, "layers")}
    op = value(options, "op")
    asked = {name: kind for name, kind in kinds.items() if op in ("both", name)}
    found = comparison.compare(trainer, asked, rounds, steps, console)
    where = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    mesh = f"mesh {options['mesh'].value} of {where}" if trainer.mesh else f"one of {where}"
    console.print(f"{options['preset'].value} {options['api'].value} on {mesh}")
    comparison.show(console, found, list(asked), trainer.settings)
    if value(options, "json") is not None:
        pathlib.Path(value(options, "json")).write_text(json.dumps(found, indent=2) + "\n")
    return found


def main(options: flags.FlagValues) -> int:
    """Runs the program."""
    if value(options, "cpu_devices") is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", value(options, "cpu_devices"))
    try:
        trainer = trainer_of(options)
    except ValueError as error:
        raise command.RequestError(str(error)) from None
    run(trainer, options, Console())
    return 0


if __name__ == "__main__":
    command.start("train_transformer", main, define_flags)
