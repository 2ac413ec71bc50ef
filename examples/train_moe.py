"""Trains a mixture of experts with our layer and with `lax.ragged_dot`.

    python examples/train_moe.py
        seconds, on any computer
    python examples/train_moe.py --preset=mixtral
        8 experts of 4096 x 14336, 2 for each of 8192 tokens, one GPU
    python examples/train_moe.py --preset=qwen3
        128 experts of 2048 x 768, 8 for each of 4096 tokens, one GPU
    python examples/train_moe.py --layers=fp8_blocks
        products of 8 bits, with a scale for each block
    python examples/train_moe.py --cpu_devices=8 --parallel
        experts and tokens on 8 devices; rows go to their experts and back

Both start from the same parameters and see the same examples, so their losses
should agree as far as the roundings of their types let them. Times are medians
over rounds of turns, without the first; `host` is how long Python needs to
start a step, and `memory` what the compiled step takes on each device.
"""

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
from jax.sharding import AxisType
from rich.console import Console

from bench import command, report
from examples import comparison
from examples.mixture import AXIS, PRESETS, Mixtures


def define_flags(values: flags.FlagValues) -> None:
    """Defines what can be asked for on the command line."""
    flags.DEFINE_enum("preset", "tiny", list(PRESETS), "The sizes.", flag_values=values)
    ops = ["both", "stock", "pallas_gemm"]
    flags.DEFINE_enum("op", "both", ops, "Who multiplies.", flag_values=values)
    flags.DEFINE_enum(
        "layers",
        "experts",
        ["experts", "fp8_blocks"],
        "What pallas_gemm is: our layer in the preset's type, or in blocks of 8 bits.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "parallel",
        False,
        "Split experts and tokens over all devices; lax.ragged_dot remains to XLA's partitioner.",
        flag_values=values,
    )
    flags.DEFINE_integer("rounds", 3, "Rounds of two turns of each.", 1, flag_values=values)
    flags.DEFINE_integer("steps", 3, "Steps of a turn.", 1, flag_values=values)
    flags.DEFINE_integer(
        "cpu_devices", None, "Run on a CPU as so many devices.", 1, flag_values=values
    )
    flags.DEFINE_string("json", None, "Also write what is shown to this file.", flag_values=values)


def value(options: flags.FlagValues, name: str) -> Any:
    """Returns what was asked for under a name."""
    return options[name].value


def training_of(options: flags.FlagValues) -> Mixtures:
    """Returns what the trainees share.

    Raises:
        ValueError: Experts or examples cannot be split over the devices, or no file be written.
    """
    report.check_writable(command.output_path(value(options, "json")))
    settings = PRESETS[value(options, "preset")]
    if not value(options, "parallel"):
        return Mixtures(settings)
    if value(options, "layers") == "fp8_blocks":
        raise ValueError("--parallel has layers of 16 or 32 bits; leave out --layers=fp8_blocks")
    devices = jax.device_count()
    for name in ("experts", "batch"):
        size = getattr(settings, name)
        if size % devices:
            raise ValueError(f"--parallel splits {name}={size}, which {devices} devices cannot")
    mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,))
    return Mixtures(settings, mesh=mesh)


def run(training: Mixtures, options: flags.FlagValues, console: Console) -> dict[str, Any]:
    """Trains, and prints and returns what was found."""
    op = value(options, "op")
    own = "fp8_blocks" if value(options, "layers") == "fp8_blocks" else "pallas_gemm"
    kinds = {"stock": "stock", "pallas_gemm": "parallel" if training.mesh else own}
    asked = {name: kind for name, kind in kinds.items() if op in ("both", name)}
    turns = value(options, "rounds"), value(options, "steps")
    found = comparison.compare(training, asked, *turns, console)
    where = f"{jax.device_count() if training.mesh else 1} x {jax.devices()[0].device_kind}"
    console.print(f"{options['preset'].value} on {where}")
    comparison.show(console, found, list(asked), training.settings)
    if value(options, "json") is not None:
        pathlib.Path(value(options, "json")).write_text(json.dumps(found, indent=2) + "\n")
    return found


def main(options: flags.FlagValues) -> int:
    """Runs the program."""
    if value(options, "cpu_devices") is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", value(options, "cpu_devices"))
    try:
        training = training_of(options)
    except ValueError as error:
        raise command.RequestError(str(error)) from None
    run(training, options, Console())
    return 0


if __name__ == "__main__":
    command.start("train_moe", main, define_flags)
