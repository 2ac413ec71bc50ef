"""Times weights of few bits: our products, bfloat16 by XLA, and torch's.

    python bench/few_bits_bench.py
        six products in int4 and int8: a minute on one GPU
    python bench/few_bits_bench.py --unseen=7
        30 shapes of models with 1 to 128 rows, drawn from a seed
    python bench/few_bits_bench.py --experts
        8 experts of 4096 x 14336, each token to two of them
    python bench/few_bits_bench.py --size=16x14336x4096 --bits=4 --csv=out.csv

`x bf16` is the median over rounds of the time of XLA's product of weights in
bfloat16 over ours; for experts that product is our own. XLA takes part twice:
its second turn is the control. Each call takes other weights, so that they
come from memory. Results are checked before they are timed. Times are those of
the kernels alone, in bursts.
"""

import importlib
import importlib.util
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

from bench import command, gpu, random_suite, report, torch_peers
from bench.command import RequestError
from bench.workers import Program, Workers
from pallas_gemm import QuantizedWeight, gemm, grouped_gemm, target
from pallas_gemm.tuning import accuracy
from pallas_gemm.tuning.measure import Result, Settings, Variant, measure

PROGRAM = "few_bits_bench"
BF16, F32 = jnp.bfloat16, jnp.float32
SIZES = (
    "1x14336x4096",
    "16x14336x4096",
    "1x8192x8192",
    "64x28672x8192",
    "256x28672x8192",
    "4096x14336x4096",
)
EXPERTS, CHOSEN, EXPERT_SIZES = 8, 2, (14336, 4096)
TOKENS = (1, 2, 4, 8, 16, 32, 64)
UNSEEN, UNSEEN_ROWS = 30, 128
COLD_BYTES = 256e6
"""What the weights of calls in a row hold together: five times the L2 cache."""


class Case(NamedTuple):
    """A product.

    Attributes:
        m: Rows of the activations; of experts, of all of them together.
        n: Columns.
        k: The contracted dimension.
        bits: How many a weight has.
        group: Weights along k that share a scale; 0 for all of a column.
        sizes: Rows of each expert, or empty.
    """

    m: int
    n: int
    k: int
    bits: int
    group: int
    sizes: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The sizes and the type, as they are printed."""
        experts = f" of {len(self.sizes)} experts" if self.sizes else ""
        return f"{self.m}x{self.n}x{self.k}{experts} int{self.bits}/{self.group or 'column'}"

    @property
    def operands(self) -> tuple[Any, ...]:
        """Shapes: activations, values, scales, and the rows of each expert."""
        batch = (len(self.sizes),) if self.sizes else ()
        scales = (self.k // self.group, self.n) if self.group else (self.n,)
        values = jnp.int4 if self.bits == 4 else jnp.int8
        shapes: list[Any] = [((self.m, self.k), BF16), ((*batch, self.k, self.n), values)]
        shapes.append(((*batch, *scales), BF16 if self.group else F32))
        shapes += [(batch, jnp.int32)] if self.sizes else []
        return tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)

    @property
    def widened(self) -> tuple[Any, ...]:
        """The shapes of the same product of weights in bfloat16."""
        x, values, _, *rest = self.operands
        return x, jax.ShapeDtypeStruct(values.shape, BF16), *rest


def define_flags(values: flags.FlagValues) -> None:
    """Defines the command line."""
    text = {"flag_values": values}
    flags.DEFINE_list("size", list(SIZES), "Sizes, rows x columns x k.", **text)
    flags.DEFINE_integer("unseen", None, "The seed of 30 other sizes.", 0, **text)
    flags.DEFINE_bool("experts", False, "Experts in place of sizes.", **text)
    flags.DEFINE_list("bits", ["4", "8"], "How many a weight has: 4, 8 or both.", **text)
    flags.DEFINE_integer("group", 128, "Weights that share a scale; 0: a column.", 0, **text)
    flags.DEFINE_integer("burst_rounds", 8, "Rounds of burst turns.", 1, **text)
    flags.DEFINE_string("csv", None, "Write the rows to this file.", **text)


def cases(values: flags.FlagValues) -> list[Case]:
    """Returns what the command line asks for.

    Raises:
        RequestError: It cannot be read.
    """
    texts = command.several("--bits", values.bits)
    if not set(texts) <= {"4", "8"}:
        raise RequestError(f"--bits takes 4, 8 or 4,8, got {','.join(texts)!r}")
    if values.experts:
        n, k = EXPERT_SIZES
        routed = [_routed(tokens) for tokens in TOKENS]
        products = [(sum(sizes), n, k, sizes) for sizes in routed]
    elif values.unseen is None:
        products = [(*size, ()) for size in command.sizes("--size", values.size)]
    else:
        products = [(*size, ()) for size in unseen(values.unseen)]
    if values.group and any(k % values.group for _, _, k, _ in products):
        raise RequestError(f"--group={values.group} does not divide k of every product")
    return [
        Case(m, n, k, int(bits), values.group, sizes)
        for bits in texts
        for m, n, k, sizes in products
    ]


def unseen(seed: int) -> list[tuple[int, int, int]]:
    """Returns sizes of models with 1 to 128 rows."""
    rng = np.random.default_rng(seed)
    sizes = [size for size in random_suite.MODEL_SIZES if size <= 29568 and size % 256 == 0]
    found: set[tuple[int, int, int]] = set()
    while len(found) < UNSEEN:
        m = int(np.exp(rng.uniform(0, np.log(UNSEEN_ROWS + 1))))
        n, k = (int(rng.choice(sizes)) for _ in range(2))
        # Layers of models are no larger.
        if n * k <= 8192 * 29568:
            found.add((m, n, k))
    return sorted(found)


def _routed(tokens: int) -> tuple[int, ...]:
    """Returns the rows of each expert, where each token goes to two of them."""
    rng = np.random.default_rng(tokens)
    chosen = [rng.choice(EXPERTS, CHOSEN, replace=False) for _ in range(tokens)]
    return tuple(map(int, np.bincount(np.concatenate(chosen), minlength=EXPERTS)))


def made(by: str, device: str) -> Callable[..., Any]:
    """Returns the program of one who takes part."""

    def ours(x: jax.Array, values: jax.Array, scale: jax.Array, *sizes: jax.Array) -> jax.Array:
        with target(device):
            if sizes:
                return grouped_gemm(x, values, *sizes, col_scale=scale)
            return gemm(x, values, col_scale=scale)

    def bf16(x: jax.Array, w: jax.Array, *sizes: jax.Array) -> jax.Array:
        if not sizes:
            return jnp.dot(x, w)
        with target(device):
            return grouped_gemm(x, w, *sizes)

    return ours if by == "ours" else bf16


def widened(case: Case) -> Callable[..., jax.Array]:
    """Returns what makes weights of bfloat16."""

    def make(values: jax.Array, scale: jax.Array) -> jax.Array:
        scale = scale if case.group else scale[..., None, :]
        return QuantizedWeight(values, scale).widened(BF16)

    return jax.jit(make)


def drawn(case: Case, key: jax.Array) -> tuple[jax.Array, ...]:
    """Draws the operands of a call."""
    of_x, of_values, of_scale = jax.random.split(key, 3)
    x, values, scale, *_ = case.operands
    most = 2 ** (case.bits - 1)
    numbers = jax.random.randint(of_values, values.shape, -most, most, jnp.int8)
    scales = jax.random.uniform(of_scale, scale.shape, F32, 0.5, 1.5) / (most * math.sqrt(case.k))
    rest = [jnp.array(case.sizes, jnp.int32)] if case.sizes else []
    return (
        accuracy.normal(of_x, x.shape, x.dtype),
        numbers.astype(values.dtype),
        scales.astype(scale.dtype),
        *rest,
    )


class Torch(NamedTuple):
    """PyTorch's product of int4 with scales of groups, or of int8 with scales of columns."""

    case: Case

    def refusal(self) -> str | None:
        """Returns why it takes no part, or None."""
        case = self.case
        if reason := torch_peers.Torch().absent():
            return reason
        if case.sizes or (case.bits == 4) != bool(case.group):
            return "torch has no such product"
        return None

    def operands(self, x: jax.Array, values: jax.Array, scale: jax.Array) -> tuple[Any, ...]:
        """Returns the operands of a call as torch takes them."""
        torch: Any = importlib.import_module("torch")
        # JAX takes memory back without asking torch, so that all is copied before this returns.
        given = jax.block_until_ready((x, scale, values.astype(jnp.int8)))
        own, scales, narrow = (torch.from_dlpack(a).clone() for a in given)
        torch.cuda.synchronize()
        rows = narrow.t().contiguous()
        if self.case.bits == 8:
            return own, rows, scales.to(torch.bfloat16)
        unsigned = (rows + 8).to(torch.uint8)
        both = (unsigned[:, ::2] << 4) | unsigned[:, 1::2]
        packed = torch._convert_weight_to_int4pack(both.contiguous(), 8)  # noqa: SLF001 - its only name
        return own, packed, torch.stack([scales, torch.zeros_like(scales)], -1).contiguous()

    def run(self, x: Any, w: Any, scale: Any) -> Any:
        """Starts the product."""
        torch: Any = importlib.import_module("torch")
        if self.case.bits == 8:
            return torch._weight_int8pack_mm(x, w, scale)  # noqa: SLF001 - its only name
        return torch._weight_int4pack_mm(x, w, self.case.group, scale)  # noqa: SLF001 - its only name

    def wait(self, _: Any) -> None:
        """Returns when all that was launched has been computed."""
        torch: Any = importlib.import_module("torch")
        torch.cuda.synchronize()


def run(values: flags.FlagValues) -> int:
    """Times every case, and prints each as soon as it is done.

    Raises:
        RequestError: The request cannot be met.
    """
    chosen = cases(values)
    gpu.require()
    settings = Settings(values.burst_rounds, sustained_rounds=0, energy_seconds=0)
    path = command.output_path(values.csv)
    with Workers() as pool:
        runners = _compiled(chosen, pool)
    print(f"{'product':42} {'us':>8} {'bf16':>8} {'x bf16':>7} {'bf16':>6} {'torch':>8}")
    lines: list[dict[str, str]] = []
    for case in chosen:
        lines.append(_line(case, _timed(case, runners, settings)))
        print("{:42} {:>8} {:>8} {:>7} {:>6} {:>8}".format(*lines[-1].values()))
        report.write_records(path, lines)
    faster = np.exp(np.mean([np.log(float(line["x_bf16"])) for line in lines]))
    print(f"geometric mean {faster:.3f}, least {min(float(line['x_bf16']) for line in lines)}")
    return 0


Runners = Mapping[tuple[Case, str], Callable[..., Any]]
BY = ("bf16", "ours")


def _compiled(chosen: Sequence[Case], pool: Workers) -> Runners:
    """Compiles all programs, ours in other processes."""
    device = gpu.known_name()

    def build(job: tuple[Case, str]) -> Callable[..., Any]:
        case, by = job
        operands = case.operands if by == "ours" else case.widened
        program = Program(made, (by, device), operands)
        return pool.build(program) if by == "ours" or case.sizes else program.compiled()

    jobs = [(case, by) for case in chosen for by in BY]
    return command.each(build, jobs)


def _timed(case: Case, runners: Runners, settings: Settings) -> Mapping[str, Result]:
    """Checks and times a case.

    Raises:
        RequestError: A result errs more than twice as much as XLA's.
    """
    read = case.k * case.n * max(1, len(case.sizes)) * case.bits / 8
    keys = jax.random.split(jax.random.key(0), max(2, math.ceil(COLD_BYTES / read)))
    narrow = [drawn(case, key) for key in keys]
    widen = widened(case)
    wide = [(x, widen(values, scale), *rest) for x, values, scale, *rest in narrow]
    of = {"bf16": wide, "ours": narrow, "bf16 again": wide}
    variants = [_variant(by, runners[case, by.removesuffix(" again")], of[by]) for by in of]
    results = {by: jax.tree.leaves(runners[case, by](*of[by][0]))[0] for by in BY}
    torch = Torch(case)
    if torch.refusal() is None:
        adopted = [torch.operands(*own) for own in narrow]
        result = torch.run(*adopted[0])
        torch.wait(result)
        results["torch"] = jnp.from_dlpack(result)
        variants.append(Variant("torch", lambda i: torch.run(*adopted[i % len(keys)]), torch.wait))
    _check(case, wide[0], results)
    return measure(variants, gpu.GpuMeter(), settings, baseline="bf16")


def _check(case: Case, operands: Sequence[Any], results: Mapping[str, jax.Array]) -> None:
    x, w, *sizes = (a.astype(F32) if a.dtype == BF16 else a for a in operands)
    with jax.default_matmul_precision("highest"):
        exact = jax.lax.ragged_dot(x, w, *sizes) if sizes else jnp.dot(x, w)
    errors = {by: float(jnp.abs(y.astype(F32) - exact).max()) for by, y in results.items()}
    for by, error in errors.items():
        if not error <= accuracy.ALLOWED * errors["bf16"]:
            raise RequestError(f"{by}: {case.name} errs {error:.3g}, bf16 {errors['bf16']:.3g}")


def _variant(by: str, runner: Callable[..., Any], sets: Sequence[Any]) -> Variant:
    return Variant(by, lambda i: runner(*sets[i % len(sets)]), jax.block_until_ready)


def _line(case: Case, found: Mapping[str, Result]) -> dict[str, str]:
    bursts = {by: result.burst for by, result in found.items() if result.burst}
    micros = {by: f"{timing.seconds.median * 1e6:.2f}" for by, timing in bursts.items()}
    return {
        "product": case.name,
        "ours_us": micros["ours"],
        "bf16_us": micros["bf16"],
        "x_bf16": f"{bursts['ours'].ratio.median:.3f}",
        "control": f"{bursts['bf16 again'].ratio.median:.3f}",
        "torch_us": micros.get("torch", ""),
    }


if __name__ == "__main__":
    command.start(PROGRAM, run, define_flags)
