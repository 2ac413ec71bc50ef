"""The commands `explain`, `precompile`, `tune` and `bench` of `python -m pallas_gemm`.

Each takes shapes, as `4096x14336x4096` or with a batch in front, and functions: `module:function`,
followed by its operands as `bf16[8192,4096]`. A function without operands is called, and returns
what to look at: a function and its arguments.
"""

import argparse
import contextlib
import functools
import importlib
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.api import arguments, precompile
from pallas_gemm.api.explaining.explain import explain
from pallas_gemm.api.gemm import gated_gemm, gemm
from pallas_gemm.device import DEVICES
from pallas_gemm.planning import targeting
from pallas_gemm.tuning import autotune as tuning
from pallas_gemm.tuning.measure import Meter, Result, Settings, Variant, measure
from pallas_gemm.tuning.progress import Progress

_SHAPE = re.compile(r"\d+(?:x\d+){2,3}")
_OPERAND = re.compile(r"(\w+)\[((?:\d+(?:,\d+)*)?)\]")
_FUNCTION = re.compile(r"([\w.]+):([\w.]+)")


class Work(NamedTuple):
    """A program that a command is about.

    Attributes:
        name: How it was given.
        run: The function.
        args: Its arguments, or shapes and types of them.
        by_xla: The same by XLA alone; None if nobody but the program knows.
    """

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    by_xla: Callable[..., Any] | None = None


def add_to(commands: Any) -> None:
    """Adds the commands to a parser's subcommands; each sets `run`."""
    about = {
        "explain": "what would compute each product, why, and how long it and XLA would take",
        "precompile": "compile the kernels for a GPU that need not be there; say what they need",
        "tune": "find the fastest configs by running them on this computer's GPU, and keep them",
        "bench": "time programs on this computer's GPU, shapes beside XLA",
    }
    for name, text in about.items():
        own = commands.add_parser(name, help=text, description=f"{text}. {_GRAMMAR}")
        own.add_argument("work", nargs="+", metavar="WORK", help="shapes and functions")
        own.add_argument("--dtype", default="bf16", help="of the operands of shapes (bf16)")
        own.add_argument("--activation", help="of shapes, such as gelu")
        own.add_argument("--bias", action="store_true", help="shapes have a bias")
        own.add_argument("--gated", action="store_true", help="shapes are of a gated_gemm")
        own.add_argument("--transpose_b", action="store_true", help="b of shapes is [n, k]")
        own.set_defaults(run=globals()[f"run_{name}"])
        if name in ("explain", "precompile"):
            which = "the GPU to plan for, such as h200; this computer's by default"
            own.add_argument("--target", choices=sorted(DEVICES), metavar="GPU", help=which)
        if name == "explain":
            own.add_argument("--configs", action="store_true", help="print every config, too")
            own.add_argument("--json", action="store_true", help="print JSON")
        if name == "tune":
            own.add_argument("--save", metavar="FILE", help="instead of the user's own table")


_GRAMMAR = (
    "WORK is a shape, 4096x14336x4096 for m, n and k, with a batch in front if there is one; or"
    " module:function, followed by its operands as bf16[8192,4096]. A function without operands is"
    " called, and returns a function and its arguments."
)


def works(given: argparse.Namespace) -> list[Work]:
    """Returns the programs that a command line names.

    Raises:
        ValueError: A word is neither a shape, a function nor an operand.
    """
    found: list[Work] = []
    words = list(given.work)
    while words:
        word = words.pop(0)
        if _SHAPE.fullmatch(word):
            found.append(_of_shape(word, given))
        elif match := _FUNCTION.fullmatch(word):
            operands = []
            while words and (operand := _OPERAND.fullmatch(words[0])):
                operands.append(_operand(operand[1], operand[2]))
                words.pop(0)
            found.append(_of_function(word, match[1], match[2], operands))
        else:
            raise ValueError(
                f"{word!r} must be a shape such as 4096x4096x4096, a module:function, or an operand"
                " of the function before it, such as bf16[8192,4096]"
            )
    return found


def _operand(dtype: str, sizes: str) -> jax.ShapeDtypeStruct:
    shape = tuple(int(size) for size in sizes.split(",") if size)
    return jax.ShapeDtypeStruct(shape, arguments.number_type("the operand's type", dtype))


def _of_shape(word: str, given: argparse.Namespace) -> Work:
    *batch, m, n, k = map(int, word.split("x"))
    dtype = arguments.number_type("--dtype", given.dtype)
    right = (n, k) if given.transpose_b else (k, n)
    names = ("w_gate", "w_up") if given.gated else ("b",)
    operands = {"a": jax.ShapeDtypeStruct((*batch, m, k), dtype)}
    operands |= {name: jax.ShapeDtypeStruct((*batch, *right), dtype) for name in names}
    if given.bias:
        operands["gate_bias" if given.gated else "bias"] = jax.ShapeDtypeStruct((n,), jnp.float32)
    options = {"activation": given.activation, "transpose_b": given.transpose_b}
    multiply = gated_gemm if given.gated else gemm

    def run(operands: dict[str, Any], implementation: str | None = None) -> jax.Array:
        return multiply(**operands, **options, implementation=implementation)

    by_xla = functools.partial(run, implementation="xla")
    return Work(word, run, (operands,), by_xla)


def _of_function(word: str, module: str, name: str, operands: Sequence[Any]) -> Work:
    if (here := str(pathlib.Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        f: Any = importlib.import_module(module)
        for part in name.split("."):
            f = getattr(f, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{word}: {error}") from error
    if operands:
        return Work(word, f, tuple(operands))
    made = f()
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise ValueError(
            f"{word} is given no operands, so it must return a function and its arguments, got"
            f" {type(made).__name__}"
        )
    return Work(word, made[0], made[1:])


def run_explain(given: argparse.Namespace) -> int:
    """Prints what would compute each product."""
    with _planning(given.target):
        found = {
            work.name: explain(work.run, *work.args, configs=given.configs) for work in works(given)
        }
    if given.json:
        every = {name: json.loads(one.json()) for name, one in found.items()}
        _say(json.dumps(every, indent=1))
        return 0
    for name, one in found.items():
        _say(f"{name}\n{one}" if len(found) > 1 else str(one))
    return 0


def _planning(target: str | None) -> contextlib.AbstractContextManager[Any]:
    if target is not None:
        return targeting.target(target)
    if targeting.first_gpu() is None:
        raise ValueError(f"there is no GPU here; --target says which: {', '.join(DEVICES)}")
    return contextlib.nullcontext()


def run_precompile(given: argparse.Namespace) -> int:
    """Compiles every distinct kernel, and prints what each needs."""
    device = targeting.device_named(given.target) if given.target else targeting.first_gpu()
    kind = None if device is None else device.kind
    target = next((name for name, own in DEVICES.items() if own.kind == kind), given.target)
    if target is None:
        raise ValueError(f"--target must say which GPU: {', '.join(DEVICES)}")
    with targeting.target(target):
        problems = [
            decision.problem
            for work in works(given)
            for decision in explain(work.run, *work.args).products
            if decision.plan is not None
        ]
    if not problems:
        raise ValueError(f"no kernel computes these products on {target}; `explain` says why")
    with Progress(len(set(problems)), "compiling") as progress:
        found = precompile.precompile(
            dict.fromkeys(problems), target, progress=lambda own: progress.advance(str(own))
        )
    spilled = [own for own in found if own.spill_bytes]
    _say(f"{len(found)} kernels for {target}, {len(spilled)} of which spill registers")
    return 1 if spilled else 0


def run_tune(given: argparse.Namespace) -> int:
    """Finds the fastest configs, and keeps them."""
    table = functools.reduce(
        lambda one, other: one | other,
        (tuning.autotune(work.run, *work.args) for work in works(given)),
    )
    place = table.save(given.save) if given.save else table.save_for_user()
    _say(f"{len(table)} configs are in {place or given.save}")
    return 0


def run_bench(given: argparse.Namespace) -> int:
    """Times programs in turns: shapes beside XLA, functions beside the first of them."""
    asked = works(given)
    meter, settings = _meter(), Settings(burst_rounds=4, sustained_rounds=6, energy_seconds=0)
    together = [work for work in asked if work.by_xla is None]
    contests = [
        [("XLA", work.by_xla, work.args), ("pallas_gemm", work.run, work.args)]
        for work in asked
        if work.by_xla is not None
    ]
    titles = [work.name for work in asked if work.by_xla is not None]
    if together:
        contests.append([(work.name, work.run, work.args) for work in together])
        titles.append("functions" if len(together) > 1 else together[0].name)
    for title, contest in zip(titles, contests, strict=True):
        _say("\n".join(_timed(title, contest, meter, settings)))
    return 0


def _timed(title: str, contest: Sequence[Any], meter: Meter, settings: Settings) -> Iterator[str]:
    """Yields what programs took, against the first of them."""
    variants = []
    for i, (name, run, args) in enumerate(contest):
        drawn = jax.tree.map(_drawn, args)
        compiled = jax.jit(run).lower(*drawn).compile()
        known = [variant.name for variant in variants]
        own = f"{name} ({i})" if name in known else name
        variants.append(_variant(own, compiled, drawn))
    with Progress(settings.turns(len(variants)), f"timing {title}") as progress:
        found = measure(
            variants,
            meter,
            settings,
            baseline=variants[0].name,
            advance=progress.advance,
        )
    yield title
    yield from (_result_text(name, result) for name, result in found.items())


def _variant(name: str, run: Callable[..., Any], args: tuple[Any, ...]) -> Variant:
    return Variant(name, lambda _: run(*args), jax.block_until_ready)


def _drawn(x: Any) -> Any:
    """Returns an array for a shape: of N(0, 1), and of small integers; what is there stays."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    rng = np.random.default_rng(0)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jax.random.normal(jax.random.key(0), x.shape, jnp.float32).astype(x.dtype)
    return jnp.asarray(rng.integers(0, 5, x.shape), x.dtype)


def _result_text(name: str, result: Result) -> str:
    parts = [f"  {name:<24}"]
    for mode, timing in (("burst", result.burst), ("sustained", result.sustained)):
        if timing is not None:
            parts.append(
                f"{mode} {timing.seconds.median * 1e6:.1f} us, {timing.ratio.median:.3f} times the"
                f" first's speed ({timing.ratio.low:.3f} to {timing.ratio.high:.3f})"
            )
    return "; ".join(parts).replace(";", "", 1)


def _meter() -> Meter:
    if targeting.first_gpu() is None:
        raise RuntimeError("bench needs a GPU, because it times kernels")
    from pallas_gemm.tuning.timing import KernelMeter

    return KernelMeter()


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
