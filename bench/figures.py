"""Writes the tables of the README and docs, and draws their figures, from rows.

    python bench/figures.py                    every figure, and every table

Needs no GPU: the rows are those of bench/results, whose README says which
command wrote them.
"""

import pathlib
import sys
from collections.abc import Callable, Mapping

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from absl import flags

from bench import claims, command, plots, report, tables

PROGRAM = "figures"

ROOT = pathlib.Path(__file__).resolve().parent.parent

DEVICE = "one NVIDIA H200 (700 W), JAX 0.11.2, bfloat16 N(0, 1)"


def summary() -> bytes:
    """Returns the README's figure."""
    return plots.claims(claims.claims(), DEVICE)


def study(name: str) -> Callable[[], bytes]:
    """Returns what draws a study of orders."""
    return lambda: plots.orders(claims.rows(name), "8192 cubed, bfloat16, on one NVIDIA H200")


FIGURES: Mapping[str, Callable[[], bytes]] = {
    "h200.png": summary,
    "h200_study_128x128.png": study("h200_study_128x128"),
    "h200_study_128x256.png": study("h200_study_128x256"),
}
"""The function that draws each file."""


def write(_: flags.FlagValues) -> int:
    """Writes every table, then every figure.

    Raises:
        RequestError: matplotlib is missing.
    """
    for name in tables.PAGES:
        page = ROOT / name
        report.write(page, tables.filled(name, page.read_text()).encode())
        print(page)
    for name, figure in FIGURES.items():
        try:
            content = figure()
        except ImportError:
            raise command.RequestError("figures need matplotlib: pip install '.[viz]'") from None
        report.write(claims.RESULTS / name, content)
        print(claims.RESULTS / name)
    return 0


if __name__ == "__main__":
    command.start(PROGRAM, write)
