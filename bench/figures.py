"""Draws the figures of the README and docs from the rows that are kept.

    python bench/figures.py                    every figure, into bench/results

Needs no GPU: the rows are those of bench/results, whose README says which
command wrote them.
"""

import csv
import pathlib
import sys
from collections.abc import Callable, Mapping

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from absl import app

from bench import command, plots, report

PROGRAM = "figures"

RESULTS = pathlib.Path(__file__).resolve().parent / "results"

DEVICE = "one NVIDIA H200 (700 W), JAX 0.11.2, bfloat16 N(0, 1)"

PLAIN = {
    "2048x2048x2048": "2048\ncubed",
    "4096x4096x4096": "4096\ncubed",
    "8192x8192x8192": "8192\ncubed",
    "8192x28672x8192": "8192 x\n28672 x\n8192",
    "4096x14336x4096": "4096 x\n14336 x\n4096",
    "8192x8192x1024": "8192 x\n8192 x\n1024",
}
FUSED = {
    "8192x8192x8192:bias_gelu": "bias, gelu\n8192\ncubed",
    "4096x14336x4096:bias_gelu": "bias, gelu\n4096 x\n14336 x\n4096",
    "4096x14336x4096:swiglu": "SwiGLU\n4096 x\n14336 x\n4096",
}
ODD = {
    "1001x1001x1001": "1001\ncubed",
    "4095x4095x4095": "4095\ncubed",
    "8191x8191x8191": "8191\ncubed",
}


def rows(name: str) -> list[Mapping[str, str]]:
    """Returns the rows of a file of results."""
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def summary() -> bytes:
    """Returns the README's figure."""
    plain, products = rows("h200_short"), rows("h200_products")
    ours = {"ours": "pallas_gemm"}
    peers = {**ours, "torch": "torch", "jax": "JAX's example kernel, best config"}
    panels = [
        plots.Panel("plain products", plain, PLAIN, peers),
        plots.Panel("fused epilogues", products, FUSED, ours),
        plots.Panel("odd sizes", products, ODD, ours),
    ]
    return plots.summary(panels, f"{DEVICE}; whiskers: quartiles over rounds")


def study(name: str) -> Callable[[], bytes]:
    """Returns what draws a study of orders."""
    return lambda: plots.orders(rows(name), "8192 cubed, bfloat16, on one NVIDIA H200")


FIGURES: Mapping[str, Callable[[], bytes]] = {
    "h200.png": summary,
    "h200_study_128x128.png": study("h200_study_128x128"),
    "h200_study_128x256.png": study("h200_study_128x256"),
}
"""What draws each file."""


def main(_: list[str]) -> int:
    """Draws all of them."""
    return command.guarded(PROGRAM, draw)


def draw() -> int:
    """Writes every figure.

    Raises:
        RequestError: matplotlib is missing.
    """
    for name, figure in FIGURES.items():
        try:
            content = figure()
        except ImportError:
            raise command.RequestError("figures need matplotlib: pip install '.[viz]'") from None
        report.write(RESULTS / name, content)
        print(RESULTS / name)
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=command.parser(PROGRAM))
