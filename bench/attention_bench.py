"""Times attention without a kernel for attention, stock and under `accelerate`.

    python bench/attention_bench.py --seed=13
        24 programs of drawn sizes, layouts, masks and types: about two minutes
    python bench/attention_bench.py --rows=drawn.csv
        the programs of a table that this wrote
    python bench/attention_bench.py --seed=13 --csv=drawn.csv

`x stock` is the median over rounds of the time of JAX's own program over ours.
Stock takes part twice: its second turn is the control. Results are checked
beside those of stock first. Times are those of all kernels, in bursts.
"""

import csv
import importlib
import math
import pathlib
import sys
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

from bench import command, gpu, report
from bench.command import RequestError
from bench.workers import Program, Workers
from pallas_gemm import accelerate, target
from pallas_gemm.tuning import accuracy
from pallas_gemm.tuning.measure import Settings, Variant, measure

PROGRAM = "attention_bench"
F32 = jnp.float32

LAYOUTS = {
    "jax.nn.dot_product_attention": "btngd,bsnd->bngts",
    "einsum": "btngd,bsnd->bngts",
    "einsum of repeated keys": "btngd,bsngd->bngts",
    "einsum of heads before tokens": "bngtd,bnsd->bngts",
}
"""Queries by keys: b examples, t and s tokens, n heads of keys, g of queries for each, d wide."""

MASKS = ("none", "causal", "padded", "given", "bias", "alibi", "segments")
"""Padded: one value for each key. Given, and bias: one for each score."""

MOST_SCORES = 2**28

ALLOWED = {"bfloat16": 0.05, "float16": 0.01}
"""How much results may differ, of the largest: sums are added in another order, and rounded."""


class Attention(NamedTuple):
    """One program."""

    layout: str
    batch: int
    queries: int
    keys: int
    heads: int
    """Heads of keys."""
    group: int
    """Heads of queries for each head of keys."""
    width: int
    mask: str
    dtype: str
    gradient: bool
    capped: bool
    scores: str
    """The type of the scores."""

    @property
    def is_library(self) -> bool:
        """Whether the scores are JAX's own to compute."""
        return self.layout == "jax.nn.dot_product_attention"


def drawn(seed: int, number: int) -> list[Attention]:
    """Draws programs."""
    rng = np.random.default_rng(seed)

    def one() -> Attention:
        layout, mask = str(rng.choice(list(LAYOUTS))), str(rng.choice(MASKS))
        queries = int(rng.choice((256, 384, 512, 577, 1000, 1024, 1536, 2048, 3000, 4096)))
        is_other = mask in ("none", "padded", "given") and rng.random() < 0.2
        keys = int(rng.choice((256, 512, 1024, 2048, 4096))) if is_other else queries
        heads = int(rng.choice((1, 2, 4, 8, 12, 16)))
        group = int(rng.choice((1, 1, 2, 4, 8)))
        most = max(1, MOST_SCORES // (queries * keys * heads * group))
        is_jax = layout == "jax.nn.dot_product_attention"
        return Attention(
            layout=layout,
            batch=int(rng.integers(1, min(most, 64), endpoint=True)),
            queries=queries,
            keys=keys,
            heads=heads,
            group=group,
            width=int(rng.choice((32, 64, 64, 80, 96, 128, 128, 256))),
            mask=mask,
            dtype=str(rng.choice(("bfloat16", "bfloat16", "float16"))),
            gradient=bool(rng.random() < 0.4),
            capped=not is_jax and bool(rng.random() < 0.25),
            scores="float32" if is_jax else str(rng.choice(("float32", "float32", "bfloat16"))),
        )

    return [one() for _ in range(number)]


def shapes(one: Attention) -> list[jax.ShapeDtypeStruct]:
    """Returns queries, keys, values, what the mask reads, and the gradient of the result."""
    b, t, s, n, g, d = one.batch, one.queries, one.keys, one.heads, one.group, one.width
    q = (b, n, g, t, d) if LAYOUTS[one.layout].startswith("bng") else (b, t, n, g, d)
    k = (b, n, s, d) if LAYOUTS[one.layout].startswith("bng") else (b, s, n, d)
    q = (b, t, n * g, d) if one.is_library else q
    read = {
        "padded": [((b,), "int32")],
        "given": [((b, 1, t, s), "bool")],
        "bias": [((1, n * g, t, s), one.dtype)],
        "alibi": [((n * g,), "float32")],
        "segments": [((b, t), "int32")],
    }.get(one.mask, [])
    given = [(q, one.dtype)] if one.gradient else []
    return [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in [(q, one.dtype), (k, one.dtype), (k, one.dtype), *read, *given]
    ]


def operands(one: Attention, seed: int) -> list[jax.Array]:
    """Draws them: lengths reach any key, and segments are a few runs of tokens."""
    rng = np.random.default_rng(seed)

    def values(x: jax.ShapeDtypeStruct) -> Any:
        if x.dtype == jnp.bool_:
            return jnp.asarray(rng.random(x.shape, np.float32) < 0.8).at[..., 0].set(True)
        if one.mask == "padded" and x.dtype == jnp.int32:
            return jnp.asarray(rng.integers(1, one.keys, x.shape, np.int32, endpoint=True))
        if x.dtype == jnp.int32:
            return jnp.asarray(np.sort(rng.integers(0, 4, x.shape, np.int32), axis=-1))
        return accuracy.normal(jax.random.key(int(rng.integers(2**31))), x.shape, x.dtype)

    return [values(x) for x in shapes(one)]


def made(one: Attention, is_ours: bool, device: str) -> Callable[..., Any]:
    """Returns the program: the result, or the gradients of queries, keys and values."""

    def run(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        read = rest[: len(rest) - one.gradient]
        if not one.gradient:
            return _attention(one, q, k, v, *read)
        _, back = jax.vjp(lambda q, k, v: _attention(one, q, k, v, *read), q, k, v)
        return back(rest[-1])

    def by_us(*given: Any) -> Any:
        with target(device):
            return accelerate(run)(*given)

    return by_us if is_ours else run


def _attention(one: Attention, q: Any, k: Any, v: Any, *read: Any) -> Any:
    mask, bias = _masked(one, *read)
    if one.is_library:
        return jax.nn.dot_product_attention(q, k, v, bias, mask, implementation="xla")
    if one.layout == "einsum of repeated keys":
        k, v = (jnp.repeat(x[:, :, :, None], one.group, axis=3) for x in (k, v))
    pattern = LAYOUTS[one.layout]
    z = jnp.einsum(pattern, q, k, preferred_element_type=one.scores)
    z = z * jnp.asarray(1 / math.sqrt(one.width), z.dtype)
    z = (30 * jnp.tanh(z / 30) if one.capped else z).astype(F32)
    if bias is not None:
        z += bias.astype(F32).reshape(1, one.heads, one.group, one.queries, one.keys)
    if mask is not None:
        z = jnp.where(mask[:, :, None], z, -1e30)
    queries, keys, scores = pattern.replace("->", ",").split(",")
    return jnp.einsum(f"{scores},{keys}->{queries}", jax.nn.softmax(z, -1).astype(v.dtype), v)


def _masked(one: Attention, *read: Any) -> tuple[Any, Any]:
    """Returns a mask and a bias of batch, heads, queries and keys, or None for each."""
    queries, keys = jnp.arange(one.queries)[:, None], jnp.arange(one.keys)[None]
    match one.mask:
        case "causal":
            return (keys <= queries)[None, None], None
        case "padded":
            return (keys < read[0][:, None])[:, None, None], None
        case "given":
            return read[0], None
        case "bias":
            return None, read[0]
        case "alibi":
            return None, (read[0][:, None, None] * (keys - queries).astype(F32)[None])[None]
        case "segments":
            return (read[0][:, :, None] == read[0][:, None])[:, None], None
    return None, None


def read_rows(path: pathlib.Path) -> list[Attention]:
    """Reads programs from a table.

    Raises:
        RequestError: There is no such file, or it is another table.
    """
    try:
        with path.open() as file:
            rows = list(csv.DictReader(file))
        return [
            Attention(**{name: _value(row[name]) for name in Attention._fields}) for row in rows
        ]
    except (OSError, KeyError) as error:
        raise RequestError(f"--rows={path} is no table of this program: {error}") from None


def _value(text: str) -> Any:
    return {"True": True, "False": False}.get(text, int(text) if text.isdigit() else text)


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command line."""
    text = {"flag_values": values}
    flags.DEFINE_integer("seed", 0, "The programs that are drawn.", 0, **text)
    flags.DEFINE_integer("number", 24, "How many programs are drawn.", 1, **text)
    flags.DEFINE_string("rows", None, "Take the programs of this table instead.", **text)
    flags.DEFINE_integer("burst_rounds", 6, "Rounds of turns.", 1, **text)
    flags.DEFINE_string("csv", None, "Write the rows to this file.", **text)


def run(values: flags.FlagValues) -> int:
    """Times every program, and prints each as soon as it is done.

    Raises:
        RequestError: The request cannot be met.
    """
    given = command.output_path(values.rows)
    programs = read_rows(given) if given else drawn(values.seed, values.number)
    gpu.require()
    settings = Settings(burst_rounds=values.burst_rounds, sustained_rounds=0, energy_seconds=0)
    path = command.output_path(values.csv)
    with Workers() as pool:
        runners = _compiled(programs, pool)
    print(f"{'stock us':>9} {'us':>9} {'x stock':>8} {'stock':>6}  program")
    lines: list[Mapping[str, Any]] = []
    for one, (stock, ours) in zip(programs, runners, strict=True):
        lines.append({**one._asdict(), **_timed(one, stock, ours, values.seed, settings)})
        _show(lines[-1])
        report.write_records(path, lines)
    gains = [float(line["x_stock"]) for line in lines]
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    print(f"{len(gains)} programs, {mean:.3f} x stock in geometric mean, worst {min(gains):.3f}")
    return 0


def _compiled(
    programs: Sequence[Attention], pool: Workers
) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Compiles all programs one after the other: XLA times its own kernels meanwhile."""
    device = gpu.known_name()

    def program(one: Attention, is_ours: bool) -> Program:
        return Program(made, (one, is_ours, device), tuple(shapes(one)))

    ours = [pool.begin(program(one, is_ours=True)) for one in programs]
    stock = [program(one, is_ours=False).compiled() for one in programs]
    return [(one, finish()) for one, finish in zip(stock, ours, strict=True)]


def _timed(
    one: Attention,
    stock: Callable[..., Any],
    ours: Callable[..., Any],
    seed: int,
    settings: Settings,
) -> Mapping[str, str]:
    """Checks and times a program.

    Raises:
        RequestError: A result of ours is further from stock's than rounding explains.
    """
    given = operands(one, seed)
    for expected, result in zip(*(jax.tree.leaves(x(*given)) for x in (stock, ours)), strict=True):
        error, largest = (
            float(jnp.abs(x.astype(F32)).max()) for x in (result - expected, expected)
        )
        if not error <= ALLOWED[one.dtype] * largest:
            raise RequestError(f"{one} differs by {error:.3g}, of {largest:.3g}")
    turns = {"stock": stock, "ours": ours, "stock again": stock}
    variants = [
        Variant(name, lambda _, runner=runner: runner(*given), jax.block_until_ready)
        for name, runner in turns.items()
    ]
    found = measure(variants, gpu.GpuMeter(), settings, baseline="stock")
    burst = {name: result.burst for name, result in found.items() if result.burst}
    return {
        "stock_us": f"{burst['stock'].seconds.median * 1e6:.1f}",
        "ours_us": f"{burst['ours'].seconds.median * 1e6:.1f}",
        "x_stock": f"{burst['ours'].ratio.median:.3f}",
        "control": f"{burst['stock again'].ratio.median:.3f}",
    }


def _show(line: Mapping[str, Any]) -> None:
    described = " ".join(str(line[name]) for name in Attention._fields)
    print(
        f"{line['stock_us']:>9} {line['ours_us']:>9} {line['x_stock']:>8} {line['control']:>6}"
        f"  {described}"
    )


if __name__ == "__main__":
    command.start(PROGRAM, run, define_flags)
