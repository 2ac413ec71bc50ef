"""Trains in bfloat16 and in blocks of 8 bits from several seeds, compares losses.

    python examples/recipe_losses.py
        2,000 steps from three seeds of each: minutes on a CPU
    python examples/recipe_losses.py --steps=200 --seeds=0,1

A seed says the parameters before the first step; all see the same examples. How
far the seeds lie apart in bfloat16 is the noise. Losses are means over the last
steps up to the one that a row names.
"""

import dataclasses
import importlib
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)
    # Says which extra is missing, before an import fails.
    importlib.import_module("bench")

import jax
import numpy as np
from absl import flags

from bench import command
from examples.settings import Settings
from examples.training import APIS, Trainer

KINDS = {"bfloat16": "fused", "8 bits": "fp8_blocks"}
"""Layers by what they multiply in."""
SETTINGS = Settings(2, 256, 4, 512, 32, 32, 8, "bfloat16", 1e-3)
"""Every product has several blocks along what it contracts."""
ROWS = 8
"""Rows of the table."""


@dataclasses.dataclass(frozen=True)
class Seeded(Trainer):
    """A trainer whose parameters are those of a seed."""

    seed: int = 0

    def params(self) -> Any:
        """Returns the parameters before the first step."""
        return APIS[self.api].init(self.settings, jax.random.key(self.seed))


def curves(settings: Settings, seeds: Sequence[int], steps: int) -> dict[str, np.ndarray]:
    """Returns the losses before each step by kind of layers, `[seeds, steps]`."""
    attention = "cudnn" if jax.default_backend() == "gpu" else "xla"
    found: dict[str, list[np.ndarray]] = {kind: [] for kind in KINDS}
    batches = [Seeded(settings, "linen", attention).batch(step) for step in range(steps)]
    for seed in seeds:
        trainer = Seeded(settings, "linen", attention, seed=seed)
        for kind, layers in KINDS.items():
            trainee = trainer.trainee(kind, layers)
            for tokens in batches:
                trainee.train(tokens)
            found[kind].append(trainee.curve)
    return {kind: np.stack(own) for kind, own in found.items()}


def table(found: dict[str, np.ndarray]) -> list[str]:
    """Returns the lines of a table: means of losses over the last steps of each part."""
    seeds, steps = found["bfloat16"].shape
    lines = [f"| up to step | {' | '.join(f'{kind}, {seeds} seeds' for kind in found)} |"]
    lines.append(f"|{'---|' * (1 + len(found))}")
    for part in np.array_split(np.arange(steps), min(ROWS, steps)):
        cells = []
        for own in found.values():
            means = sorted(own[:, part].mean(1))
            cells.append(" ".join(f"{x:.4f}" for x in means))
        lines.append(f"| {part[-1] + 1:,} | {' | '.join(cells)} |")
    return lines


def verdict(found: dict[str, np.ndarray]) -> str:
    """Says how far the means of both kinds are apart at the end, and the seeds of one."""
    steps = next(iter(found.values())).shape[1]
    last = {kind: own[:, -max(1, steps // ROWS) :].mean(1) for kind, own in found.items()}
    apart = last["8 bits"].mean() - last["bfloat16"].mean()
    noise = last["bfloat16"].max() - last["bfloat16"].min()
    return f"8 bits - bfloat16: {apart:+.4f} at the end; seeds of bfloat16 differ by {noise:.4f}"


def define_flags(values: flags.FlagValues) -> None:
    """Defines what can be asked for on the command line."""
    flags.DEFINE_integer("steps", 2000, "Steps.", 1, flag_values=values)
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds, integers.", flag_values=values)


def main(values: flags.FlagValues) -> int:
    """Runs the program."""
    asked: Any = values["seeds"].value
    steps: Any = values["steps"].value
    try:
        seeds = [int(seed) for seed in asked]
    except ValueError:
        seeds = []
    if not seeds:
        given = ",".join(asked)
        raise command.RequestError(f"--seeds takes integers such as 0,1,2, got {given!r}")
    found = curves(SETTINGS, seeds, steps)
    sys.stdout.write("\n".join((*table(found), verdict(found))) + "\n")
    return 0


if __name__ == "__main__":
    command.start("recipe_losses", main, define_flags)
