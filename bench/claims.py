"""What the README claims of our speed: how many times as fast as which peer, and from which rows.

The README's table and chart and the tables of the docs are made of these rows (`bench/figures.py`).
"""

import csv
import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence

RESULTS = pathlib.Path(__file__).resolve().parent / "results"

Row = Mapping[str, str]

PLAIN = (
    "2048x2048x2048",
    "4096x4096x4096",
    "8192x8192x8192",
    "8192x28672x8192",
    "4096x14336x4096",
    "8192x8192x1024",
)
FUSED = (
    "8192x8192x8192:bias_gelu",
    "4096x14336x4096:bias_gelu",
    "4096x14336x4096:swiglu",
)
ODD = ("1001x1001x1001", "4095x4095x4095", "8191x8191x8191")


@dataclasses.dataclass(frozen=True)
class Claim:
    """One line of the README's table.

    Attributes:
        product: The product.
        peer: The library that computed it beside us.
        burst: Times as fast as the peer after a pause, for each case.
        sustained: The same at the power limit; empty where it was not measured.
        source: The file with the rows, without its ending.
    """

    product: str
    peer: str
    burst: Mapping[str, float]
    sustained: Mapping[str, float]
    source: str


def rows(name: str) -> Sequence[Row]:
    """Returns the rows of a file of results."""
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def noted(run: str) -> Sequence[Row]:
    """Returns the rows of a run that were noted by hand."""
    return [row for row in rows("h200_noted") if row["run"] == run]


def claims() -> Sequence[Claim]:
    """Returns all claims, those first that no other library makes."""
    return [
        _experts("experts, forward", "torch", "torch", _is_forward),
        _experts("experts, both gradients", "torch", "torch", _is_backward),
        _noted("experts, unseen sizes, measured independently", "torch", noted("unseen")),
        _beside_tokamax(),
        _beside_jax(),
        _experts("experts, forward and backward", "xla", "`lax.ragged_dot`", lambda _: True),
        _noted("training step with experts", "`lax.ragged_dot`", noted("step of experts")),
        _noted("Muon, update of all parameters", "optax", noted("muon")[:1]),
        _noted(
            "symmetric results (`x @ x.T`)", "XLA's full product", noted("symmetric")[:_PRODUCTS]
        ),
        _noted("int8, scales, bias and gelu, to bfloat16", "XLA's fused program", _scaled("int8")),
        _noted("fp8, scales, bias and gelu, to bfloat16", "XLA's fused program", _scaled("fp8")),
        _dense("odd sizes", "XLA", "h200_products", ODD),
        _dense("bias and gelu, SwiGLU", "XLA's fused program", "h200_products", FUSED),
        _dense("plain products", "XLA", "h200_short", PLAIN),
        _noted("training step of four blocks of an 8B model", "stock Flax", noted("step")[1:]),
    ]


_PRODUCTS = 10
"""The first rows of symmetric results are single products; those after them are five steps."""

_FEW = 5
"""Fewer ratios than these have no mean: it would say little."""


def microseconds(name: str) -> Mapping[str, Mapping[str, float]]:
    """Returns the time of each peer that computed a case, by case and peer."""
    times: dict[str, dict[str, float]] = {}
    for row in rows(name):
        if took := row["burst_us"]:
            times.setdefault(row["case"], {})[row["peer"]] = float(took)
    return times


def jax_groups() -> Mapping[str, float]:
    """Returns what JAX's kernels for groups took, by case, in microseconds."""
    return {row["case"]: float(row["peer_us"]) for row in noted("groups")}


def _is_backward(case: str) -> bool:
    return case.endswith(":backward")


def _is_forward(case: str) -> bool:
    return not _is_backward(case)


def _experts(product: str, peer: str, shown: str, chosen: Callable[[str], bool]) -> Claim:
    times = {case: of for case, of in microseconds("h200_grouped").items() if chosen(case)}
    ratios = {case: of[peer] / of["ours"] for case, of in times.items()}
    return Claim(product, shown, ratios, {}, "h200_grouped")


def _beside_tokamax() -> Claim:
    times = microseconds("h200_groups")
    ratios = {case: of["tokamax"] / of["ours"] for case, of in times.items() if "tokamax" in of}
    return Claim("experts, forward", "tokamax, not tuned", ratios, {}, "h200_groups")


def _beside_jax() -> Claim:
    ours = microseconds("h200_grouped")
    ratios = {case: took / ours[case]["ours"] for case, took in jax_groups().items()}
    peer = "JAX's Hopper kernels"
    return Claim("experts, forward and backward", peer, ratios, {}, "h200_noted")


def _noted(product: str, peer: str, of: Sequence[Row]) -> Claim:
    def ratios(column: str) -> Mapping[str, float]:
        return {row["case"]: float(row[column]) for row in of if row[column]}

    return Claim(product, peer, ratios("burst_ratio"), ratios("sustained_ratio"), "h200_noted")


def _scaled(dtype: str) -> Sequence[Row]:
    return [row for row in noted("scales") if dtype in row["case"]]


def _dense(product: str, peer: str, name: str, cases: Sequence[str]) -> Claim:
    ours = {row["case"]: row for row in rows(name) if row["peer"] == "ours"}
    burst, sustained = (
        {case: float(ours[case][f"{mode}_ratio"]) for case in cases}
        for mode in ("burst", "sustained")
    )
    return Claim(product, peer, burst, sustained, name)


def spread(ratios: Mapping[str, float]) -> str:
    """Returns the least and the greatest ratio, and the geometric mean of five and more."""
    if not ratios:
        return ""
    low, high = (_rounded(pick(ratios.values())) for pick in (min, max))
    if low == high:
        return low
    if len(ratios) < _FEW:
        return f"{low} to {high}"
    return f"{low} to {high}, mean {_rounded(statistics.geometric_mean(list(ratios.values())))}"


def _rounded(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2f}"
