"""Times functions as epilogues: our kernel, XLA's program and the bare product.

    python bench/function_bench.py
        five functions at two sizes: about a minute on one GPU
    python bench/function_bench.py --size=8192x8192x8192 --sustained_rounds=6
    python bench/function_bench.py --function=rows,columns --csv=out.csv

`x bare` is the time of our kernel with the function over its time without one.
`x XLA` is the median over rounds of the time of XLA's program over ours. XLA
takes part twice: its second turn is the control. Results are checked beside
XLA's before they are timed. Times are those of the kernels alone, in bursts,
and call after call with --sustained_rounds.
"""

import importlib
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
from absl import flags

from bench import command, gpu, report
from bench.command import RequestError
from bench.workers import Program, Workers
from pallas_gemm import gemm, target
from pallas_gemm.tuning import accuracy
from pallas_gemm.tuning.measure import Result, Settings, Variant, measure

PROGRAM = "function_bench"
BF16, F32 = jnp.bfloat16, jnp.float32
SIZES = ("8192x8192x8192", "4096x14336x4096")


def kept(s: Any, bias: Any) -> Any:
    """Bias and gelu, and the pre-activation for the derivative."""
    z = s + bias
    return jax.nn.gelu(z).astype(BF16), z.astype(BF16)


def columns(s: Any, pre: Any) -> Any:
    """The derivative of gelu times the cotangent, and the gradient of the bias."""
    pre = pre.astype(F32)
    _, slope = jax.jvp(jax.nn.gelu, (pre,), (jnp.ones_like(pre),))
    g = s * slope
    return g.astype(BF16), jnp.sum(g, 0)


def rows(s: Any, residual: Any) -> Any:
    """A residual, and the sum of squares of each row for the next norm."""
    z = s + residual.astype(F32)
    return z.astype(BF16), jnp.sum(z * z, -1)


def largest(s: Any) -> Any:
    """Gelu, and the largest absolute value of each row."""
    z = jax.nn.gelu(s)
    return z.astype(BF16), jnp.max(jnp.abs(z), -1)


def quantized(s: Any, scale: Any) -> Any:
    """A copy of 8 bits with a scale that is known before, and the largest value."""
    return jnp.clip(s * scale, -448, 448).astype(jnp.float8_e4m3fn), jnp.max(jnp.abs(s))


class Function(NamedTuple):
    """A function, and the dimensions and type of each of its operands."""

    run: Callable[..., Any]
    operands: tuple[tuple[str, Any], ...]


FUNCTIONS: Mapping[str, Function] = {
    "kept": Function(kept, (("n", F32),)),
    "columns": Function(columns, (("mn", BF16),)),
    "rows": Function(rows, (("mn", BF16),)),
    "largest": Function(largest, ()),
    "quantized": Function(quantized, (("", F32),)),
}


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command line."""
    text = {"flag_values": values}
    flags.DEFINE_list("function", list(FUNCTIONS), f"Of {', '.join(FUNCTIONS)}.", **text)
    flags.DEFINE_list("size", list(SIZES), "Sizes, rows x columns x k.", **text)
    flags.DEFINE_integer("burst_rounds", 8, "Rounds of burst turns.", 1, **text)
    flags.DEFINE_integer("sustained_rounds", 0, "Rounds of sustained turns.", 0, **text)
    flags.DEFINE_float("turn_seconds", 2.0, "Length of a sustained turn.", 0.001, **text)
    flags.DEFINE_string("csv", None, "Write the rows to this file.", **text)


def made(name: str, by: str, device: str) -> Callable[..., Any]:
    """Returns the program of one who takes part."""
    run = FUNCTIONS[name].run

    def by_xla(a: jax.Array, b: jax.Array, *operands: jax.Array) -> Any:
        return run(jnp.dot(a, b, preferred_element_type=F32), *operands)

    def by_us(a: jax.Array, b: jax.Array, *operands: jax.Array) -> Any:
        with target(device):
            if by == "bare":
                return gemm(a, b)
            return gemm(a, b, epilogue=run, operands=operands)

    return by_xla if by == "xla" else by_us


def shapes(name: str, size: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of the operands of a case."""
    m, n, k = size
    of = {"mn": (m, n), "n": (n,), "": ()}
    own = [jax.ShapeDtypeStruct(of[kind], dtype) for kind, dtype in FUNCTIONS[name].operands]
    return [jax.ShapeDtypeStruct((m, k), BF16), jax.ShapeDtypeStruct((k, n), BF16), *own]


def run(values: flags.FlagValues) -> int:
    """Times every case, and prints each as soon as it is done.

    Raises:
        RequestError: The request cannot be met.
    """
    sizes, names = (
        command.sizes("--size", values.size),
        command.several("--function", values.function),
    )
    for name in names:
        if name not in FUNCTIONS:
            raise RequestError(f"--function={name} is unknown; legal: {', '.join(FUNCTIONS)}")
    gpu.require()
    settings = Settings(
        burst_rounds=values.burst_rounds,
        sustained_rounds=values.sustained_rounds,
        turn_seconds=values.turn_seconds,
        energy_seconds=0,
    )
    path = command.output_path(values.csv)
    cases = [(name, size) for size in sizes for name in names]
    lines: list[dict[str, Any]] = []
    with Workers() as pool:
        runners = _compiled(cases, pool)
    print(f"{'size':>18} {'function':10} {'us':>8} {'x bare':>7} {'x XLA':>7} {'XLA':>6}")
    for name, size in cases:
        found = _timed(name, size, runners, settings)
        lines += _lines(name, size, found)
        _show(lines[-(1 + (found["ours"].sustained is not None)) :])
        report.write_records(path, lines)
    return 0


Runners = Mapping[tuple[str, tuple[int, ...], str], Callable[..., Any]]
BY = ("xla", "ours", "bare")


def _compiled(cases: Sequence[tuple[str, tuple[int, ...]]], pool: Workers) -> Runners:
    """Compiles all programs, ours in other processes."""
    device = gpu.known_name()

    def build(job: tuple[str, tuple[int, ...], str]) -> Callable[..., Any]:
        name, size, by = job
        operands = shapes(name, size)[: 2 if by == "bare" else None]
        program = Program(made, (name, by, device), tuple(operands))
        return program.compiled() if by == "xla" else pool.build(program)

    jobs = [(name, size, by) for name, size in cases for by in BY]
    return command.each(build, jobs)


def _timed(
    name: str, size: tuple[int, ...], runners: Runners, settings: Settings
) -> Mapping[str, Result]:
    """Checks and times a case.

    Raises:
        RequestError: A result of ours errs more than twice as much as XLA's.
    """
    keys = jax.random.split(jax.random.key(0), 5)
    drawn = zip(keys, shapes(name, size), strict=False)
    operands = [accuracy.normal(key, x.shape, x.dtype) for key, x in drawn]
    wide = [x.astype(F32) for x in operands[:2]]
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(made(name, "xla", ""))(*wide, *operands[2:])
    results = [jax.tree.leaves(runners[name, size, by](*operands)) for by in BY[:2]]
    for reference, *found in zip(jax.tree.leaves(exact), *results, strict=True):
        stock, ours = (jnp.abs(x.astype(F32) - reference.astype(F32)).max() for x in found)
        if not ours <= accuracy.ALLOWED * stock:
            raise RequestError(f"{name} at {size} errs {ours:.3g}, XLA {stock:.3g}")
    variants = [
        _variant(by, runners[name, size, by.removesuffix(" again")], operands)
        for by in (*BY, "xla again")
    ]
    return measure(variants, gpu.GpuMeter(), settings, baseline="xla")


def _variant(by: str, runner: Callable[..., Any], operands: Sequence[Any]) -> Variant:
    taken = operands[:2] if by == "bare" else operands
    return Variant(by, lambda _: runner(*taken), jax.block_until_ready)


def _lines(name: str, size: tuple[int, ...], found: Mapping[str, Result]) -> list[dict[str, Any]]:
    """Returns the rows of a case, one for each mode."""
    lines = []
    for mode in ("burst", "sustained"):
        of = {by: getattr(result, mode) for by, result in found.items()}
        if of["ours"] is None:
            continue
        seconds = {by: timing.seconds.median for by, timing in of.items()}
        lines.append(
            {
                "size": "x".join(map(str, size)),
                "function": name,
                "mode": mode,
                "ours_us": f"{seconds['ours'] * 1e6:.1f}",
                "bare_us": f"{seconds['bare'] * 1e6:.1f}",
                "xla_us": f"{seconds['xla'] * 1e6:.1f}",
                "x_bare": f"{seconds['ours'] / seconds['bare']:.3f}",
                "x_xla": f"{of['ours'].ratio.median:.3f}",
                "control": f"{of['xla again'].ratio.median:.3f}",
            }
        )
    return lines


def _show(lines: Sequence[Mapping[str, Any]]) -> None:
    for line in lines:
        mark = "" if line["mode"] == "burst" else " sustained"
        print(
            f"{line['size']:>18} {line['function']:10} {line['ours_us']:>8} {line['x_bare']:>7}"
            f" {line['x_xla']:>7} {line['control']:>6}{mark}"
        )


if __name__ == "__main__":
    command.start(PROGRAM, run, define_flags)
