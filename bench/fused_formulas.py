"""What functions after a product cost: `gemm(..., epilogue=f)` beside XLA and the bare product.

python bench/fused_formulas.py --check        the results beside a float64 reference, and exit
python bench/fused_formulas.py --out=FILE     times of all, XLA and the bare kernel in turns
"""

import csv
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from pallas_gemm import gemm
from pallas_gemm.tuning.measure import Result, Settings, Variant, measure
from pallas_gemm.tuning.timing import KernelMeter

SHAPES = flags.DEFINE_list("shapes", ["8192x8192x8192", "4096x14336x4096"], "m x n x k of each")
CHECK = flags.DEFINE_bool("check", False, "only check the results")
OUT = flags.DEFINE_string("out", None, "a file for the table, as CSV")
TURN = flags.DEFINE_float("turn_seconds", 2.0, "length of a sustained turn")
ROUNDS = flags.DEFINE_integer("sustained_rounds", 2, "rounds of sustained turns; 0 for none")


class Formula(NamedTuple):
    """What happens to a product.

    Attributes:
        function: Of the float32 product and of operands.
        operands: The kind of each: "mn", "n", "m" or "", and its type.
    """

    function: Callable[..., Any]
    operands: tuple[tuple[str, Any], ...]


def gelu_and_kept(s: jax.Array, bias: jax.Array) -> Any:
    """Bias, gelu, and the pre-activation kept."""
    z = s + bias
    return jax.nn.gelu(z).astype(jnp.bfloat16), z.astype(jnp.bfloat16)


def times_derivative(s: jax.Array, pre: jax.Array, scale: jax.Array) -> Any:
    """Times gelu'(pre) of another array, and column sums: the gradient of a bias."""
    _, pull = jax.vjp(jax.nn.gelu, pre.astype(jnp.float32))
    (g,) = pull(s * scale.astype(jnp.float32))
    return g.astype(jnp.bfloat16), jnp.sum(g, 0)


def residual_and_squares(s: jax.Array, residual: jax.Array) -> Any:
    """Plus residual, and each row's sum of squares."""
    z = s + residual.astype(jnp.float32)
    return z.astype(jnp.bfloat16), jnp.sum(z * z, -1)


def gelu_and_largest(s: jax.Array) -> Any:
    """Gelu, and each row's largest absolute value."""
    y = jax.nn.gelu(s).astype(jnp.bfloat16)
    return y, jnp.max(jnp.abs(y.astype(jnp.float32)), -1)


def quantized_and_largest(s: jax.Array, scale: jax.Array) -> Any:
    """A quantized copy with a scale known before, and its largest value."""
    y = s * scale
    q = jnp.clip(y, -448.0, 448.0).astype(jnp.float8_e4m3fn)
    return q, jnp.max(jnp.abs(s))


FORMULAS: dict[str, Formula] = {
    "bias, gelu, pre-activation": Formula(gelu_and_kept, (("n", jnp.float32),)),
    "gelu' of two arrays, column sums": Formula(
        times_derivative, (("mn", jnp.bfloat16), ("mn", jnp.bfloat16))
    ),
    "residual, squares of rows": Formula(residual_and_squares, (("mn", jnp.bfloat16),)),
    "gelu, largest of rows": Formula(gelu_and_largest, ()),
    "quantized, largest": Formula(quantized_and_largest, (("", jnp.float32),)),
}


def shape_of(kind: str, m: int, n: int) -> tuple[int, ...]:
    """Returns the shape of an operand."""
    return {"mn": (m, n), "m": (m, 1), "n": (n,), "": ()}[kind]


def ours(name: str) -> Callable[..., Any]:
    """Returns the formula as one call."""
    function = FORMULAS[name].function
    return lambda a, b, *operands: gemm(a, b, epilogue=function, operands=operands)


def by_xla(name: str) -> Callable[..., Any]:
    """Returns the formula as XLA has it."""
    function = FORMULAS[name].function

    def run(a: jax.Array, b: jax.Array, *operands: jax.Array) -> Any:
        return function(jnp.matmul(a, b, preferred_element_type=jnp.float32), *operands)

    return run


def operands_of(name: str, m: int, n: int, k: int) -> list[jax.Array]:
    """Returns N(0, 1) operands of a formula."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    a = jax.random.normal(next(keys), (m, k), jnp.bfloat16)
    b = jax.random.normal(next(keys), (k, n), jnp.bfloat16) * jnp.bfloat16(k**-0.5)
    own = [
        jax.random.normal(next(keys), shape_of(kind, m, n), dtype)
        for kind, dtype in FORMULAS[name].operands
    ]
    return [a, b, *own]


def check(name: str, operands: Sequence[jax.Array]) -> tuple[float, float]:
    """Returns the largest errors of our results and of XLA's, of the results' largest values."""
    function = FORMULAS[name].function

    @jax.jit
    def exact(a: jax.Array, b: jax.Array, *rest: jax.Array) -> Any:
        whole = jnp.matmul(*(x.astype(jnp.float32) for x in (a, b)), precision="highest")
        return function(whole, *rest)

    found, other = (jax.jit(of(name))(*operands) for of in (ours, by_xla))
    errors = [[0.0], [0.0]]
    for want, *got in zip(exact(*operands), found, other, strict=True):
        reference = np.asarray(want, np.float32)
        for kept, x in zip(errors, got, strict=True):
            difference = np.abs(np.asarray(x, np.float32) - reference)
            assert np.isfinite(difference).all(), name
            kept.append(float(difference.max() / np.abs(reference).max()))
    mine, theirs = map(max, errors)
    assert mine <= 2 * theirs + 1e-6, (name, mine, theirs)
    return mine, theirs


def timed(name: str, operands: Sequence[jax.Array]) -> dict[str, Result]:
    """Times our program, XLA's, the bare product, and XLA's a second time as the control."""
    programs = {
        "ours": (jax.jit(ours(name)), operands),
        "xla": (jax.jit(by_xla(name)), operands),
        "bare": (jax.jit(gemm), operands[:2]),
        "xla again": (jax.jit(by_xla(name)), operands),
    }
    variants = [
        Variant(key, lambda _, run=run, own=own: run(*own), jax.block_until_ready)
        for key, (run, own) in programs.items()
    ]
    for variant in variants:
        variant.wait(variant.launch(0))
    settings = Settings(
        burst_rounds=8,
        sustained_rounds=ROUNDS.value,
        turn_seconds=TURN.value,
        warm_seconds=TURN.value,
        energy_seconds=0,
    )
    return measure(variants, KernelMeter(), settings, baseline="xla")


def row_of(shape: str, name: str) -> dict[str, Any]:
    """Checks a formula, and times it unless told otherwise."""
    operands = operands_of(name, *map(int, shape.split("x")))
    mine, theirs = check(name, operands)
    row: dict[str, Any] = {"shape": shape, "formula": name, "error": mine, "XLA's": theirs}
    if CHECK.value:
        return row
    found = timed(name, operands)
    for mode in ("burst", "sustained") if ROUNDS.value else ("burst",):
        times = {key: getattr(result, mode).seconds.median * 1e6 for key, result in found.items()}
        row |= {f"{key} {mode} us": round(us, 1) for key, us in times.items()}
        row[f"x bare {mode}"] = round(times["ours"] / times["bare"], 3)
        row[f"over XLA {mode}"] = round(times["xla"] / times["ours"], 3)
    return row


def main(_: Sequence[str]) -> None:
    """Prints a line for each formula and shape."""
    rows = []
    for shape, name in itertools.product(SHAPES.value, FORMULAS):
        rows.append(row_of(shape, name))
        print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if OUT.value:
        with pathlib.Path(OUT.value).open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)


if __name__ == "__main__":
    app.run(main)
