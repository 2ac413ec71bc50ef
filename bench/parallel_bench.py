"""Times a tensor-parallel layer on several GPUs: our products and JAX's own.

    python bench/parallel_bench.py
        all GPUs, and one, for the efficiency
    python bench/parallel_bench.py --devices=2,4 --json=out.json
    python bench/parallel_bench.py --layout=replicated
        whole rows on every GPU, one all-reduce
    python bench/parallel_bench.py --option=xla_gpu_use_memcpy_local_p2p=true

The layer is `gelu(x @ w) @ v`: `w` is split by columns and `v` by rows. In the
layout "sequence" the rows of `x` and of the result are split too. They are
gathered before the first product, and reduced and scattered after the second.
In "replicated" every GPU has all rows.

Who takes part:

    stock         `jnp.dot`, shared out by XLA, with its own collectives
    ours          `gemm`, shared out by its own rule; sums travel in bfloat16,
                  as XLA's do
    ours-f32      the same, with `reduce_in(jnp.float32)`
    fused         `all_gather_gemm` and `gemm_reduce_scatter`: the kernels
                  gather rows, too
    fused-f32     the same, with `reduce_in(jnp.float32)`

A time is read from the host's clock, from the first call of a turn until the
last has come back, over the calls. So work that does not overlap shows. All
take turns, round after round; `x stock` is the median over rounds of stock's
time over theirs in the same round. The efficiency is what one GPU takes for
the whole layer, over what N take times N. Results are checked against float32
before anything is timed: their error must be at most twice stock's. `--check`
does no more than that, and needs no GPU.
"""

import dataclasses
import functools
import importlib
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

if __package__ in (None, ""):
    # Started as a script: the packages lie beside this file's folder, not in it.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)
    # Says which extra is missing, before an import fails.
    importlib.import_module("bench")

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bench import command, gpu, report
from pallas_gemm import gemm, reduce_in
from pallas_gemm.api.collective import all_gather_gemm, gemm_reduce_scatter

PROGRAM = "parallel_bench"
AXIS = "model"
STOCK = "stock"
DIRECTIONS = ("forward", "forward+backward")

Layer = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the command line.

    Attributes:
        tokens: Rows of x.
        width: Columns of x.
        hidden: Columns of the layer in between.
        devices: On how many GPUs, one run for each.
        layout: "sequence" or "replicated".
        rounds: How often each takes a turn.
        calls: Calls of one turn.
        compiler: Options of XLA.
        json: File to write, or None.
        check: Whether results are checked and nothing is timed, on whatever devices there are.
    """

    tokens: int
    width: int
    hidden: int
    devices: tuple[int, ...]
    layout: str
    rounds: int
    calls: int
    compiler: dict[str, Any]
    json: pathlib.Path | None
    check: bool = False


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command line."""
    text = {"flag_values": values}
    flags.DEFINE_integer("tokens", 8192, "Rows of x.", 1, **text)
    flags.DEFINE_integer("width", 4096, "Columns of x.", 1, **text)
    flags.DEFINE_integer("hidden", 14336, "Columns in between.", 1, **text)
    flags.DEFINE_list("devices", [], "On how many GPUs; by default 1 and all.", **text)
    flags.DEFINE_enum("layout", "sequence", ("sequence", "replicated"), "How x is split.", **text)
    flags.DEFINE_integer("rounds", 15, "Rounds of turns.", 1, **text)
    flags.DEFINE_integer("calls", 10, "Calls of one turn.", 1, **text)
    flags.DEFINE_multi_string("option", [], "An option of XLA, as name=value.", **text)
    flags.DEFINE_bool("check", False, "Check results and time nothing, on any devices.", **text)
    flags.DEFINE_string("json", None, "Write everything to this file.", **text)


def options_from(values: flags.FlagValues) -> Options:
    """Returns what the flags ask for.

    Raises:
        RequestError: It cannot be done.
    """
    present = len(jax.devices())
    try:
        devices = tuple(int(count) for count in values.devices) or (1, present)
    except ValueError:
        raise command.RequestError(f"devices: {values.devices} are not numbers") from None
    devices = tuple(sorted(set(devices)))
    if not 0 < devices[0] <= devices[-1] <= present:
        raise command.RequestError(f"devices: {list(devices)} of the {present} that there are")
    for count in devices:
        for name, size in (("tokens", values.tokens), ("hidden", values.hidden)):
            if size % count:
                raise command.RequestError(f"{name}: {count} devices do not divide {size}")
    compiler = {}
    for option in values.option:
        name, equals, value = option.partition("=")
        if not equals:
            raise command.RequestError(f"option: {option!r} is not name=value")
        compiler[name] = {"true": True, "false": False}.get(value, value)
    path = command.output_path(values.json)
    report.check_writable(path)
    return Options(
        values.tokens,
        values.width,
        values.hidden,
        devices,
        values.layout,
        values.rounds,
        values.calls,
        compiler,
        path,
        values.check,
    )


@dataclasses.dataclass(frozen=True)
class Split:
    """How the layer lies on a mesh.

    Attributes:
        mesh: The GPUs.
        rows: How x and the result are split.
    """

    mesh: Mesh
    rows: P

    def sharding(self, spec: P) -> NamedSharding:
        """Returns a spec on this mesh."""
        return NamedSharding(self.mesh, spec)

    @property
    def operands(self) -> tuple[NamedSharding, ...]:
        """How x, w and v are split."""
        return tuple(map(self.sharding, (self.rows, P(None, AXIS), P(AXIS, None))))


def _stock(split: Split, x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(jnp.dot(x, w))
    hidden = jax.lax.with_sharding_constraint(hidden, split.sharding(P(None, AXIS)))
    return jax.lax.with_sharding_constraint(jnp.dot(hidden, v), split.sharding(split.rows))


def _ours(split: Split, x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    hidden = gemm(x, w, activation="gelu")
    hidden = jax.lax.with_sharding_constraint(hidden, split.sharding(P(None, AXIS)))
    return jax.lax.with_sharding_constraint(gemm(hidden, v), split.sharding(split.rows))


def _fused(split: Split, x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    def local(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return gemm_reduce_scatter(all_gather_gemm(x, w, AXIS, activation="gelu"), v, AXIS)

    specs = tuple(sharding.spec for sharding in split.operands)
    return jax.shard_map(local, mesh=split.mesh, in_specs=specs, out_specs=split.rows)(x, w, v)


def _wide(layer: Callable[..., jax.Array], split: Split, *operands: jax.Array) -> jax.Array:
    """Lets sums travel in float32."""
    with reduce_in(jnp.float32):
        return layer(split, *operands)


def layers(split: Split) -> dict[str, Layer]:
    """Returns who takes part, by name."""
    found: dict[str, Callable[..., jax.Array]] = {
        STOCK: _stock,
        "ours": _ours,
        "ours-f32": functools.partial(_wide, _ours),
    }
    if split.rows != P():
        found |= {"fused": _fused, "fused-f32": functools.partial(_wide, _fused)}
    return {name: functools.partial(layer, split) for name, layer in found.items()}


def program(layer: Layer, direction: str, split: Split) -> Any:
    """Returns a layer, or one with its gradients, for `jax.jit`; results are split as operands."""

    def both(*operands: jax.Array) -> Any:
        result, pull = jax.vjp(layer, *operands)
        # Its own result is as good a cotangent as any.
        return result, pull(result)

    rows = split.sharding(split.rows)
    if direction == "forward":
        return jax.jit(layer, out_shardings=rows)
    return jax.jit(both, out_shardings=(rows, split.operands))


def compiled(
    layer: Layer, direction: str, split: Split, operands: Sequence[jax.Array], options: Options
) -> Callable[[], Any]:
    """Compiles a layer, and returns what calls it."""
    lowered = program(layer, direction, split).lower(*operands)
    return functools.partial(lowered.compile(compiler_options=options.compiler), *operands)


def make_operands(split: Split, options: Options) -> list[jax.Array]:
    """Makes x, w and v, N(0, 1) and scaled so that the layer's result is about as large."""
    shapes = (
        (options.tokens, options.width),
        (options.width, options.hidden),
        (options.hidden, options.width),
    )
    found = []
    for key, shape, sharding in zip(
        jax.random.split(jax.random.key(0), 3), shapes, split.operands, strict=True
    ):
        scale = 1.0 if not found else shape[0] ** -0.5

        def make(key: jax.Array, shape: Any = shape, scale: float = scale) -> jax.Array:
            return (scale * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)

        found.append(jax.jit(make, out_shardings=sharding)(key))
    return found


def check(
    runs: dict[str, Callable[[], Any]], split: Split, direction: str, operands: Sequence[jax.Array]
) -> dict[str, float]:
    """Returns the largest error of each, over stock's.

    Raises:
        RequestError: One is more than twice stock's.
    """
    wide = [x.astype(jnp.float32) for x in operands]

    def exact(*operands: jax.Array) -> Any:
        with jax.default_matmul_precision("highest"):
            result, pull = jax.vjp(functools.partial(_stock, split), *operands)
            # The cotangent that the others take: their own result, rounded.
            return result, pull(result.astype(jnp.bfloat16).astype(jnp.float32))

    reference = jax.tree.leaves(jax.jit(exact)(*wide))
    if direction == "forward":
        reference = reference[:1]

    def errors(run: Callable[[], Any]) -> list[float]:
        results = jax.tree.leaves(run())
        return [
            float(jnp.linalg.norm(x.astype(jnp.float32) - y))
            for x, y in zip(results, reference, strict=True)
        ]

    stock = errors(runs[STOCK])
    found = {
        name: max(ours / theirs for ours, theirs in zip(errors(run), stock, strict=True))
        for name, run in runs.items()
    }
    wrong = {name: ratio for name, ratio in found.items() if not ratio <= 2}
    if wrong:
        raise command.RequestError(f"wrong results, by error over stock's: {wrong}")
    return found


def time_in_turns(
    runs: dict[str, Callable[[], Any]], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Returns the seconds per call of each, one number for each round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run())
    for turn in range(rounds):
        # Another one begins each time.
        names = np.roll(list(runs), turn)
        for name in map(str, names):
            start = time.perf_counter()
            result = None
            for _ in range(calls):
                result = runs[name]()
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


@dataclasses.dataclass(frozen=True)
class Row:
    """How one of them did.

    Attributes:
        devices: On how many GPUs.
        direction: One of `DIRECTIONS`.
        name: The name of who takes part.
        error: Its error over stock's.
        seconds: Per call, the median; None if nothing was timed.
        times_stock: Stock's time over its own, the median; None if nothing was timed.
        efficiency: One GPU's time over its own and the number of GPUs; None if not measured.
    """

    devices: int
    direction: str
    name: str
    error: float
    seconds: float | None = None
    times_stock: float | None = None
    efficiency: float | None = None

    def __str__(self) -> str:
        text = f"{self.devices:4} {self.direction:17} {self.name:12} {self.error:6.2f}"
        if self.seconds is None:
            return text
        text += f" {self.seconds * 1e6:10.1f} {self.times_stock:8.3f}"
        return text + (f" {self.efficiency:8.1%}" if self.efficiency is not None else "")


def run(options: Options, say: Callable[[str], None], timed: bool) -> list[Row]:
    """Checks and times all on each number of GPUs."""
    rows: list[Row] = []
    say(f"{'GPUs':>4} {'direction':17} {'who':12} {'error':>6} {'us':>10} {'x stock':>8} scaling")
    for count in options.devices:
        mesh = Mesh(np.array(jax.devices()[:count]), (AXIS,), axis_types=(AxisType.Auto,))
        split = Split(mesh, P(AXIS, None) if options.layout == "sequence" else P())
        operands = make_operands(split, options)
        for direction in DIRECTIONS:
            runs = {
                name: compiled(layer, direction, split, operands, options)
                for name, layer in layers(split).items()
            }
            errors = check(runs, split, direction, operands)
            seconds = time_in_turns(runs, options.rounds, options.calls)
            for name in runs:
                row = Row(count, direction, name, errors[name])
                row = _with_times(row, seconds, rows) if timed else row
                rows.append(row)
                say(str(row))
    return rows


def _with_times(row: Row, seconds: dict[str, list[float]], before: Sequence[Row]) -> Row:
    own = statistics.median(seconds[row.name])
    ratios = [stock / time for stock, time in zip(seconds[STOCK], seconds[row.name], strict=True)]
    alone = [
        other.seconds
        for other in before
        if (other.devices, other.direction, other.name) == (1, row.direction, row.name)
    ]
    efficiency = alone[0] / (own * row.devices) if alone and alone[0] is not None else None
    return dataclasses.replace(
        row, seconds=own, times_stock=statistics.median(ratios), efficiency=efficiency
    )


def _run(values: flags.FlagValues) -> int:
    """Runs the benchmark.

    Returns:
        0; 2 for a request that cannot be met, or a wrong result.
    """
    if not values.check and (reason := gpu.missing_gpu()):
        raise command.RequestError(f"{reason}; --check checks results on any devices")
    options = options_from(values)
    console = command.console()
    rows = run(options, console.print, timed=not options.check)
    if options.json:
        content = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "options": dataclasses.asdict(options) | {"json": str(options.json)},
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        report.write(options.json, json.dumps(content, indent=1))
    return 0


if __name__ == "__main__":
    command.start(PROGRAM, _run, define_flags)
