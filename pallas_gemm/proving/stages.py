"""What a proof runs, in order of growing trust: each stage adds one thing to what those before use.

Every product is of small integers, so that its result is known exactly. Their sizes hang over the
last tiles, and make more tiles than a GPU runs at a time.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_gemm.config import GemmConfig
from pallas_gemm.device import Device
from pallas_gemm.kernels.blackwell.config import PAIR, BlackwellConfig
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.planning import heuristics
from pallas_gemm.planning.architectures import Architecture
from pallas_gemm.problem import Epilogue, Problem

How = Literal["once", "replayed", "beside", "checked"]

REPLAYS = 34_000
"""Of the products of one rung together: 100,000 of all three."""
REPLAYS_BESIDE = 5_000
"""Likewise, beside a kernel of higher priority."""
CHOSEN = 12
"""Configs of a product, the predicted fastest, that are run of those that heuristics consider."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A product, and how its kernel computes it."""

    problem: Problem
    config: GemmConfig

    def __str__(self) -> str:
        problem, config = self.problem, self.config
        sizes = f"{problem.batch} x {problem.m} x {problem.n} x {problem.k} {problem.layout}"
        types = f"{problem.a_dtype} x {problem.b_dtype} -> {problem.out_dtype}"
        return " ".join([sizes, types, *problem.epilogue.parts, repr(config)])


@dataclasses.dataclass(frozen=True)
class Stage:
    """Products that are run by one process.

    Attributes:
        name: The new feature that they test.
        cases: The products.
        how: Each is run "once"; "replayed" many times as a CUDA graph; replayed "beside" a kernel
            of higher priority, which wants the SMs; or "checked" by NVIDIA's memcheck.
    """

    name: str
    cases: tuple[Case, ...]
    how: How = "once"


_ONE = BlackwellConfig(
    tile=(128, 128),
    cluster=(1, 1),
    stages=1,
    persistence="none",
    schedule="raster",
    accumulators=1,
    specialised=False,
    direct_store=True,
)
_ROLES = dataclasses.replace(_ONE, stages=4, specialised=True, direct_store=False, store_columns=32)
_DEALT = dataclasses.replace(
    _ROLES, persistence="static", accumulators=2, schedule="hilbert", stages=3
)
_PAIRS = dataclasses.replace(_DEALT, cluster=PAIR)
_BLOCKS = HopperConfig(
    tile=(128, 128), persistence="none", schedule="raster", late_store=False, store_columns=32
)
_SHARES = dataclasses.replace(_BLOCKS, persistence="static", schedule="hilbert")

RUNGS: Mapping[str, Mapping[str, GemmConfig]] = {
    "blackwell": {
        "one CTA, one slot": _ONE,
        "one CTA, roles": _ROLES,
        "one CTA, tiles dealt": _DEALT,
        "one CTA, cut along k": dataclasses.replace(_DEALT, split_k=3),
        "pairs, one slot": dataclasses.replace(_ONE, cluster=PAIR),
        "pairs, roles": dataclasses.replace(_ROLES, cluster=PAIR),
        "pairs, tiles dealt": _PAIRS,
        "pairs, last tiles cut along k": dataclasses.replace(_PAIRS, split_k=3, split_last=2),
        "one CTA, launch control": dataclasses.replace(_DEALT, persistence="dynamic"),
        "pairs, launch control": dataclasses.replace(_PAIRS, persistence="dynamic"),
    },
    "hopper": {
        "a tile each": _BLOCKS,
        "tiles dealt": _SHARES,
        "stored late": dataclasses.replace(_SHARES, late_store=True),
        "in turns": dataclasses.replace(_SHARES, tile=(64, 128), pingpong=True),
        "mirrored": dataclasses.replace(_SHARES, mirrored=True),
        "cut along k": dataclasses.replace(_SHARES, split_k=3),
        "last tiles cut along k": dataclasses.replace(_SHARES, split_k=3, split_last=2),
        "clusters": dataclasses.replace(_SHARES, cluster=(2, 1)),
        "tiles claimed": dataclasses.replace(_SHARES, persistence="dynamic"),
        "claimed by clusters": dataclasses.replace(_SHARES, persistence="dynamic", cluster=(1, 2)),
    },
}
"""The steps by which each kernel is trusted: its modes, by what each adds."""

REPLAYED: Mapping[str, tuple[str, ...]] = {
    "blackwell": ("pairs, tiles dealt", "one CTA, launch control", "pairs, launch control"),
    "hopper": ("tiles dealt", "tiles claimed", "claimed by clusters"),
}
"""The rungs that are replayed, and that compute what there is beside plain products."""

_E4M3, _E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
_TYPES: Sequence[tuple[Any, Any, Any]] = (
    (jnp.bfloat16, jnp.bfloat16, jnp.float32),
    (jnp.float16, jnp.float16, jnp.float16),
    (_E4M3, _E5M2, jnp.bfloat16),
    (_E5M2, _E4M3, jnp.float32),
    (jnp.int8, jnp.int8, jnp.int32),
    (jnp.int8, jnp.int8, jnp.bfloat16),
    (jnp.float32, jnp.float32, jnp.float32),
)
_EPILOGUES = (
    Epilogue(0.5, bias=True, activation=jax.nn.relu),
    Epilogue(beta=0.5, residual=True),
    Epilogue(0.5, 3.0, bias=True, residual=True, activation=jnp.square),
    Epilogue(None, None, row_scale=True, col_scale=True, residual=True),
    Epilogue(gated=True, activation=jax.nn.relu),
    Epilogue(gated=True, bias=True, up_bias=True, up_scale=True, col_scale=True),
)
_RAGGED = Problem(2504, 1352, 200, transpose_b=True)
"""Some 220 tiles of 128 x 128; the last ones, and their last steps, hang over."""
_USUAL = (
    Problem(4096, 2048, 1024, transpose_b=True),
    Problem(2048, 2304, 520),
    Problem(512, 768, 4096, transpose_b=True),
    Problem(16, 4096, 2048),
)


def stages(architecture: Architecture, device: Device) -> tuple[Stage, ...]:
    """Returns the stages by which a kernel is proven on a GPU."""
    rungs = RUNGS[architecture.name]
    top = {name: rungs[name] for name in REPLAYED[architecture.name]}
    # Half of a result is mirrored in squares of 64.
    wide = [dataclasses.replace(config, store_columns=64) for config in rungs.values()]
    found = [Stage(name, _legal(_plain(), [config], device)) for name, config in rungs.items()]
    found += [
        Stage("types", _legal(_of_types(), top.values(), device)),
        Stage("epilogues", _legal(_of_epilogues(), top.values(), device)),
        Stage("batches", _legal(_of_batches(), top.values(), device)),
        Stage("half of a symmetric result", _legal(_symmetric(), wide, device)),
    ]
    found += [_chosen(problem, architecture, device) for problem in _USUAL]
    replayed = {name: _around_whole_waves(config, device) for name, config in top.items()}
    found += [Stage(f"replays: {name}", cases, "replayed") for name, cases in replayed.items()]
    # What deals tiles is no other where a kernel wants its place.
    claimed = [case for cases in list(replayed.values())[1:] for case in cases]
    small = dataclasses.replace(_RAGGED, m=328, n=392, k=264)
    found += [
        Stage("beside a kernel of higher priority", tuple(claimed), "beside"),
        Stage("memcheck", _legal([small], rungs.values(), device), "checked"),
    ]
    return tuple(found)


def _legal(problems: Any, configs: Any, device: Device) -> tuple[Case, ...]:
    pairs = itertools.product(problems, configs)
    return tuple(Case(p, config) for p, config in pairs if not config.refusals(p, device))


def _plain() -> Iterator[Problem]:
    """Yields every layout, and every kind of edge."""
    for transpose_a, transpose_b in itertools.product((False, True), repeat=2):
        # Stored with k first, a last dimension is whole atoms of 64.
        m, n = 2496 if transpose_a else _RAGGED.m, _RAGGED.n if transpose_b else 1344
        layout = {"transpose_a": transpose_a, "transpose_b": transpose_b}
        yield dataclasses.replace(_RAGGED, m=m, n=n, **layout)
    for k in (8, 1032):
        yield dataclasses.replace(_RAGGED, k=k)
    yield dataclasses.replace(_RAGGED, m=9, n=8, k=8)


def _of_types() -> Iterator[Problem]:
    for a, b, out in _TYPES:
        # Rows of a multiple of 16 bytes, of elements of 8 bits too.
        yield dataclasses.replace(_RAGGED, k=272, a_dtype=a, b_dtype=b, out_dtype=out)


def _of_epilogues() -> Iterator[Problem]:
    return (dataclasses.replace(_RAGGED, epilogue=epilogue) for epilogue in _EPILOGUES)


def _of_batches() -> Iterator[Problem]:
    batch = dataclasses.replace(_RAGGED, m=520, n=392, batch=5)
    yield batch
    yield dataclasses.replace(batch, shared_a=True)
    yield dataclasses.replace(batch, shared_b=True, epilogue=Epilogue(bias=True, residual=True))


def _symmetric() -> Iterator[Problem]:
    for size in (1352, 520):
        yield dataclasses.replace(_RAGGED, m=size, n=size, symmetric="gram")


def _chosen(problem: Problem, architecture: Architecture, device: Device) -> Stage:
    """Returns the stage of what is chosen by default for a product."""
    configs = heuristics.rank(problem, device, architecture)[:CHOSEN]
    name = f"chosen for {problem.m} x {problem.n} x {problem.k} {problem.layout}"
    return Stage(name, tuple(Case(problem, config) for config in configs))


def _around_whole_waves(config: GemmConfig, device: Device) -> tuple[Case, ...]:
    """Returns products with the tiles of whole waves, with one tile less, and with one more."""
    workers = config.workers(dataclasses.replace(_RAGGED, m=2**20), device)
    rows, columns = map(math.prod, zip(config.tile, config.cluster, strict=True))
    tiles = [waves * workers + beside for waves in (1, 2) for beside in (-1, 0, 1)]
    # The last row of tiles is not a whole one.
    sizes = [rows * count - 8 for count in tiles]
    return tuple(Case(dataclasses.replace(_RAGGED, m=m, n=columns), config) for m in sizes)
