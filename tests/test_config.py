"""What is legal: each refusal says which argument, what it was, and what it may be."""

import ast
import dataclasses
import inspect
import itertools
import re
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedules
from pallas_gemm import config as config_module
from pallas_gemm.call import Call, Options
from pallas_gemm.config import CLUSTERS, GemmConfig
from pallas_gemm.device import B200, H200, Device
from pallas_gemm.kernels import element_types
from pallas_gemm.kernels.blackwell.config import BlackwellConfig
from pallas_gemm.kernels.functions.activations import ACTIVATIONS
from pallas_gemm.kernels.functions.elementwise import branches, divides
from pallas_gemm.kernels.hopper import config as hopper_config
from pallas_gemm.kernels.hopper import kernel as hopper
from pallas_gemm.kernels.hopper import problems
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.kernels.hopper.plan import HopperPlan
from pallas_gemm.kernels.hopper.widened.config import WidenedConfig
from pallas_gemm.planning import dispatch
from pallas_gemm.planning.candidates.draft import finished
from pallas_gemm.planning.candidates.hopper import MOST_STAGES, drafts
from pallas_gemm.problem import Blocks, Epilogue, Problem
from pallas_gemm.program import Operand, Program, Result
from tests import epilogues, summaries

PROBLEM = Problem(4096, 4096, 4096)
NT = dataclasses.replace(PROBLEM, transpose_b=True)
HALF = dataclasses.replace(NT, symmetric="gram")
GROUPS = dataclasses.replace(NT, groups=8)
SUMS_OVER_GROUPS = dataclasses.replace(PROBLEM, transpose_a=True, batch=8, ragged_k=True)
EARLY = HopperConfig(late_store=False)
NO_CLUSTERS = dataclasses.replace(H200, measured_clusters=((1, 132), (2, 66), (4, 0)))
RESIDUAL = dataclasses.replace(PROBLEM, epilogue=Epilogue(residual=True))
GATED = dataclasses.replace(PROBLEM, epilogue=Epilogue(gated=True))
FLOAT32 = dataclasses.replace(PROBLEM, out_dtype=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A refusal and what it has to say.

    Attributes:
        says: Parts of the message: the argument, what is legal, and last its value.
        config: The config that is refused.
        problem: For this problem.
        device: On this device.
        among: How many refusals there are, where one fault has several consequences.
    """

    says: tuple[str, ...]
    config: GemmConfig = EARLY
    problem: Problem = PROBLEM
    device: Device = H200
    among: int = 1

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.config.refusals(self.problem, self.device)


def config(**changes: Any) -> HopperConfig:
    return dataclasses.replace(EARLY, **changes)


def problem(**changes: Any) -> Problem:
    return dataclasses.replace(PROBLEM, **changes)


def nt(dtype: Any, **changes: Any) -> Problem:
    return dataclasses.replace(NT, a_dtype=dtype, b_dtype=dtype, **changes)


def function_of(kinds: list[str]) -> Program:
    """A program that returns the sum in bfloat16, and reads such operands."""
    operands = tuple(Operand(kind, np.dtype(jnp.bfloat16)) for kind in kinds)
    return Program(1, np.dtype(np.float32), operands, (), (Result(0, np.dtype(jnp.bfloat16)),))


REDUCED = dataclasses.replace(
    function_of([]),
    results=(Result(0, np.dtype(jnp.bfloat16)), Result(0, np.dtype(np.float32), "m", "sum")),
)

IN_BLOCKS = nt(jnp.float8_e4m3fn, blocks=Blocks(128, 1, 128))


CASES = {
    # Whatever the problem.
    "capability": Case(("compute capability 9.0", "NVIDIA B200 has 10.0"), device=B200),
    "no such cluster": Case(
        ("cluster: NVIDIA H200 runs no cluster of (2, 2)",),
        config(cluster=(2, 2)),
        device=NO_CLUSTERS,
    ),
    # The order of the tiles.
    "schedule's rows": Case(
        ("schedule: ", "rows must be at most 65535, got 65537"),
        config(tile=(64, 256)),
        problem(m=64 * 65536 + 8),
    ),
    "schedule's grid": Case(
        ("schedule must be made for the grid (32, 16)", "got (32, 32)"),
        config(schedule=schedules.build("raster", 32, 32)),
    ),
    "schedule on-line, of half": Case(
        ("a symmetric result needs a schedule that is a table", "got an online one"),
        config(stages=3, schedule="online_raster"),
        HALF,
    ),
    "schedule of another half": Case(
        (
            "schedule must visit Triangle(rows=32, tile=(1, 2))",
            "got one of Triangle(rows=32, tile=(1",
        ),
        config(stages=3, schedule=schedules.raster(32, 16).within(schedules.Triangle(32))),
        HALF,
    ),
    "schedule of half": Case(
        ("schedule must visit every tile", "got one of Triangle"),
        config(schedule=schedules.raster(32, 16).within(schedules.Triangle(32))),
    ),
    # A symmetric result.
    "half of no square": Case(
        ("a symmetric result is square", "got m=2048 and n=4096"),
        config(stages=3),
        dataclasses.replace(HALF, m=2048),
    ),
    "half of 32 bits": Case(
        ("a symmetric result is one of 16 bits", "got float32"),
        config(tile=(128, 128), stages=3, store_columns=32),
        dataclasses.replace(HALF, out_dtype=jnp.float32),
    ),
    "half of an odd length": Case(
        ("a symmetric result has rows of a multiple of 16 bytes", "got 4095"),
        config(stages=3),
        dataclasses.replace(HALF, m=4095, n=4095),
    ),
    "half with a bias": Case(
        ("a symmetric result has no bias",),
        config(tile=(128, 128), stages=3),
        dataclasses.replace(HALF, epilogue=Epilogue(bias=True)),
    ),
    "half with a wide residual": Case(
        ("a symmetric result has a residual of its type", "got float32"),
        config(tile=(128, 128), stages=3, store_columns=32),
        dataclasses.replace(HALF, epilogue=Epilogue(residual=True), residual_dtype=jnp.float32),
    ),
    "half, mirrored": Case(
        ("a symmetric product is not mirrored",), config(stages=3, mirrored=True), HALF
    ),
    "half in rectangles": Case(
        ("store_columns must be 64", "got 32 and tile=(128, 256)"),
        config(stages=3, store_columns=32),
        dataclasses.replace(HALF, symmetric="product"),
    ),
    "half in pieces of k": Case(
        ("split_k must be 1 for a symmetric result", "got 2"), config(stages=3, split_k=2), HALF
    ),
    # Groups.
    "groups, claimed": Case(
        ("rows in groups are not claimed: persistence='static' fits", "got 'dynamic'"),
        config(persistence="dynamic"),
        GROUPS,
    ),
    "groups, too many columns": Case(
        ("tiles of groups must be in at most 65536 rows and columns", "65538) of tile=(128, 256)"),
        config(stages=3),
        dataclasses.replace(GROUPS, n=2**24 + 512),
    ),
    "sums over groups, too many rows": Case(
        ("tiles of groups must be in at most 65536 rows and columns", "(65537, "),
        config(stages=3),
        dataclasses.replace(SUMS_OVER_GROUPS, m=128 * 65537),
    ),
    "groups, cut along k": Case(
        ("groups need split_k=1", "got 2"), config(stages=3, split_k=2), SUMS_OVER_GROUPS
    ),
    "groups, left operand transposed": Case(
        ("rows in groups are those of one left operand stored [m, k]",),
        config(),
        dataclasses.replace(GROUPS, transpose_a=True),
    ),
    "groups with a residual": Case(
        ("rows in groups have no residual",),
        config(),
        dataclasses.replace(GROUPS, epilogue=Epilogue(residual=True)),
    ),
    "groups with odd rows": Case(
        ("rows in groups need a result with rows of a multiple of 16 bytes", "got 4092 columns"),
        config(stages=3),
        dataclasses.replace(GROUPS, n=4092),
    ),
    "groups, too many": Case(
        (f"rows must be in at most {problems.MOST_GROUPS} groups", "got 40000"),
        config(),
        dataclasses.replace(GROUPS, groups=40000),
    ),
    "groups in chunks": Case(
        ("tile columns per consumer must be a multiple of store_columns for rows in groups", "176"),
        config(tile=(128, 176)),
        GROUPS,
    ),
    "sums over groups in turns": Case(
        ("sums over groups need cooperative consumers", "got pingpong=True"),
        config(tile=(128, 128), pingpong=True),
        SUMS_OVER_GROUPS,
    ),
    "sums over groups, of several products": Case(
        ("sums over groups are of two operands stored [k, m] and [k, n]",),
        config(),
        dataclasses.replace(SUMS_OVER_GROUPS, terms=(2048, 2048)),
    ),
    # The tile and who computes it.
    "columns of a consumer": Case(
        (
            "tile columns per consumer must be a multiple of 64 for layout NN",
            "got tile=(64, 160); the nearest is (64, 128)",
        ),
        config(tile=(64, 160)),
    ),
    "columns of a tile in turns": Case(
        (
            "tile columns per consumer must be a multiple of 64 for layout NN",
            "got tile=(128, 160); the nearest is (128, 128)",
        ),
        config(tile=(128, 160), pingpong=True),
    ),
    "more than a panel of fewer columns": Case(
        (
            "a tile must have 64 columns where groups have fewer than 64 and b is stored [k, n]",
            "got tile=(128, 128); the nearest is (128, 64)",
        ),
        config(tile=(128, 128)),
        problem(groups=4, n=40),
    ),
    "columns of sums over groups": Case(
        (
            "tile columns per consumer must be a multiple of 64 for layout TN",
            "got tile=(128, 160); the nearest is (128, 128)",
        ),
        config(tile=(128, 160)),
        SUMS_OVER_GROUPS,
    ),
    "columns to be multicast": Case(
        ("tile columns must be a multiple of 32 to be multicast", "got 80"),
        config(tile=(128, 80), cluster=(4, 1)),
        NT,
    ),
    "chunks of 16 bytes": Case(
        ("chunks of a float8_e4m3fn result must be at least 32 columns wide", "some of 16"),
        config(tile=(128, 208), stages=3),
        dataclasses.replace(NT, out_dtype=jnp.float8_e4m3fn),
    ),
    "store_columns of 32 bits": Case(
        ("store_columns must be at most 32 for float32", "got 64"), config(stages=3), FLOAT32
    ),
    # The mode.
    "late_store of three": Case(
        ("late_store", "one or two cooperative consumers", "consumers=3, pingpong=False"),
        HopperConfig(tile=(192, 128), stages=3, consumers=3, late_store=True),
    ),
    "late_store in turns": Case(
        ("late_store", "cooperative", "pingpong=True"),
        HopperConfig(tile=(64, 128), pingpong=True, late_store=True),
    ),
    "late_store on-line": Case(
        ("late_store", "a schedule that is a table", "schedule='online_raster'"),
        HopperConfig(schedule="online_raster", late_store=True),
    ),
    "late_store of 32 bits": Case(
        ("late_store", "at most 16 bits", "out_dtype=float32"),
        HopperConfig(store_columns=32, tile=(128, 128)),
        FLOAT32,
    ),
    "late_store of a residual": Case(
        ("late_store", "no residual", "residual=True"), HopperConfig(), RESIDUAL
    ),
    "late_store of many registers": Case(
        ("late_store", "at most 128 accumulator registers", "192 registers"),
        HopperConfig(tile=(256, 192), stages=3, store_columns=64, store_slots=1, late_store=True),
    ),
    "late_store of many chunks": Case(
        ("late_store", "at most 4 chunks", "128 registers, 8 "),
        HopperConfig(store_columns=32, late_store=True),
    ),
    "late_store of pieces": Case(
        ("late_store", "split_k=1", "split_k=2"), HopperConfig(split_k=2, late_store=True)
    ),
    "split_k beyond k": Case(
        ("split_k must be at most 16, the steps of 64 in k=1024, got 17",),
        config(split_k=17),
        problem(k=1024),
    ),
    "more tiles cut than there are": Case(
        ("split_last must be below the 32 cluster tiles", "got 32; split_last=None cuts all"),
        config(split_k=2, split_last=32),
        problem(m=1024, n=1024, k=1024),
    ),
    "last tiles of a computed order": Case(
        ("split_last needs a schedule that is a table, got 'online_raster'",),
        config(split_k=2, split_last=3, schedule="online_raster"),
    ),
    "partial_sums beyond a piece": Case(
        ("partial_sums must be at most 8, the fewest steps of 64 of a tile or piece", "got 9"),
        config(tile=(128, 128), split_k=2, partial_sums=9),
        problem(k=1024),
    ),
    "other parts than are promised": Case(
        ("each sum over k=1024 is made in 4 parts: split_k times partial_sums", "got split_k=4"),
        config(tile=(128, 128), split_k=4, partial_sums=2),
        problem(k=1024, parts=4),
    ),
    "pieces of several promised parts in a table": Case(
        ("of which a piece makes several only in an order that is computed", "got 'swizzle:8'"),
        config(tile=(128, 128), split_k=2, partial_sums=2),
        problem(k=1024, parts=4),
    ),
    "partial_sums over groups": Case(
        ("partial_sums must be 1 for sums over groups", "got 2"),
        config(tile=(128, 128), partial_sums=2),
        SUMS_OVER_GROUPS,
    ),
    "dynamic in turns": Case(
        ("persistence='dynamic' needs cooperative consumers", "got pingpong=True"),
        config(tile=(64, 128), persistence="dynamic", pingpong=True),
    ),
    "dynamic on-line": Case(
        ("persistence='dynamic' needs a schedule that is a table", "got an online one"),
        config(persistence="dynamic", schedule="online_raster"),
    ),
    "dynamic and many tiles": Case(
        ("persistence='dynamic'", "fewer than 8191 rows and columns", "got (8191, 1)"),
        config(tile=(64, 128), persistence="dynamic"),
        problem(m=8190 * 64 + 8, n=128),
    ),
    "dynamic and many stages": Case(
        ("persistence='dynamic' takes at most 31 stages", "got stages=32"),
        config(tile=(64, 64), consumers=1, stages=32, persistence="dynamic"),
        device=dataclasses.replace(H200, shared_memory=3 * H200.shared_memory),
    ),
    "gated": Case(
        ("must share the rows of a tile", "a multiple of 128 for 2 of them", "tile=(64, 256)"),
        config(tile=(64, 256)),
        GATED,
    ),
    "gated columns": Case(
        ("tile columns must be a multiple of 128 for a gated epilogue", "got tile=(128, 192)"),
        config(tile=(128, 192)),
        GATED,
    ),
    "mirrored 32 bits": Case(
        ("a mirrored product has a result of 16 bits", "got float32"),
        config(mirrored=True, stages=2, store_columns=32),
        FLOAT32,
    ),
    "mirrored residual": Case(
        ("a mirrored product has neither a residual nor a gate",), config(mirrored=True), RESIDUAL
    ),
    # A function as epilogue.
    "blocks on Blackwell": Case(
        ("scales of blocks of 1 x 128 of a and 128 x 128 of b", "on Hopper alone"),
        BlackwellConfig(),
        IN_BLOCKS,
        B200,
    ),
    "short sums on Blackwell": Case(
        ("sums of 128 elements are added up on Hopper alone",),
        BlackwellConfig(),
        dataclasses.replace(IN_BLOCKS, blocks=Blocks(128)),
        B200,
    ),
    "blocks of 16 bits": Case(
        ("where both operands are 8-bit floats", "got bfloat16 and bfloat16"),
        problem=nt(jnp.bfloat16, blocks=Blocks(128, 1, 128)),
    ),
    "short blocks": Case(
        ("blocks of k must be powers of two from 32 on, got 16",),
        config(tile=(128, 128)),
        dataclasses.replace(IN_BLOCKS, blocks=Blocks(16, 1, 128)),
    ),
    "blocks that do not divide k": Case(
        ("k must be a multiple of the blocks of 128, got 2112",),
        problem=dataclasses.replace(IN_BLOCKS, k=2112),
    ),
    "blocks mirrored": Case(
        ("a product in blocks is not mirrored",),
        config(tile=(128, 128), mirrored=True),
        IN_BLOCKS,
    ),
    "blocks of several products": Case(
        ("scales of blocks are those of one product of two operands, or of products of groups",),
        problem=dataclasses.replace(IN_BLOCKS, terms=(2048, 2048)),
    ),
    "blocks cut": Case(
        ("a product in blocks needs partial_sums=1, got 2",),
        config(tile=(128, 128), partial_sums=2),
        IN_BLOCKS,
    ),
    "function of columns of groups": Case(
        ("rows in groups are reduced along each row alone",),
        problem=dataclasses.replace(
            GROUPS,
            epilogue=Epilogue(
                program=dataclasses.replace(
                    REDUCED, results=(Result(0, np.dtype(np.float32), "n", "sum"),)
                )
            ),
        ),
    ),
    "function of groups": Case(
        ("a function as epilogue is for one product of two operands",),
        problem=problem(epilogue=Epilogue(program=REDUCED), terms=(2048, 2048)),
    ),
    "function of many arrays": Case(
        ("a function may have at most 6 results and operands", "got 1 and 6"),
        problem=problem(epilogue=Epilogue(program=function_of(["mn"] * 6))),
        among=3,
    ),
    "function of integers": Case(
        ("sums of int8 are not reduced",),
        problem=nt(jnp.int8, epilogue=Epilogue(program=REDUCED)),
    ),
    "function with short rows": Case(
        ("results and operands of a function need rows of a multiple of 16 bytes", "got 4100"),
        problem=dataclasses.replace(NT, n=4100, epilogue=Epilogue(program=function_of(["mn"]))),
        among=2,
    ),
    "function mirrored": Case(
        ("a mirrored product has a function with one result",),
        config(mirrored=True),
        problem(epilogue=Epilogue(program=REDUCED)),
    ),
    "function cut": Case(
        ("a function that reduces needs split_k=1", "got 2"),
        config(split_k=2),
        problem(epilogue=Epilogue(program=REDUCED)),
    ),
    "sums along rows in another order": Case(
        ("a consumer's tile must have 128 columns where sums along rows are promised", "got 256"),
        config(),
        problem(epilogue=Epilogue(program=REDUCED), parts=1),
    ),
    # What an SM has.
    "registers of an epilogue": Case(
        ("a consumer has at most 240 registers", "192 accumulators of tile=(128, 192)", "(128, "),
        config(tile=(128, 192), stages=4, pingpong=True),
        dataclasses.replace(NT, epilogue=Epilogue(residual=True, activation=jax.nn.silu)),
    ),
    "registers of no tile": Case(
        ("are too few for residual and gelu_exact", "fewer rows would fit"),
        config(tile=(256, 64), stages=2, pingpong=True),
        problem(epilogue=Epilogue(residual=True, activation=ACTIVATIONS["gelu_exact"])),
    ),
    "shared memory": Case(
        ("shared memory: needs 279552 bytes of 232448", "fewer stages than 5", "than (128, 256)"),
        config(stages=5),
    ),
    # The problem.
    "no rows": Case(("sizes must be positive", "m=0"), problem=problem(m=0), among=2),
    "no batch": Case(
        ("m, n and batch must be positive", "got (0, 4096, 4096)"),
        problem=problem(batch=0),
        among=2,
    ),
    "empty batch": Case(("sizes must be positive", "batch=0"), problem=problem(batch=0), among=2),
    "rows of a": Case(
        ("last dimension of a must be a multiple of 8 for bfloat16", "got 4100", "next is 4104"),
        problem=dataclasses.replace(NT, k=4100),
        among=2,
    ),
    "rows of b": Case(
        ("last dimension of b must be a multiple of 8", "got 4100"),
        problem=dataclasses.replace(NT, k=4100, transpose_a=True),
    ),
    "b stored [k, n]": Case(
        ("n to be a multiple of 64 and k a multiple of 8", "n=4104, k=4096"),
        problem=problem(n=4104),
    ),
    "pieces": Case(
        ("a sum of products must be positive multiples of 64 for bfloat16", "got (4064, 32)"),
        problem=problem(terms=(4064, 32)),
    ),
    "an empty piece": Case(
        ("a sum of products must be positive multiples of 64", "got (4096, 0)"),
        problem=problem(terms=(4096, 0)),
    ),
    "many pieces": Case(
        ("a sum must have at most 8 products", "got 16"), problem=problem(terms=(256,) * 16)
    ),
    "more in a batch than rows": Case(
        ("schedule: rows must be at most 65535", "rows are those of a batch of 70000"),
        config(schedule="swizzle:8"),
        problem(m=64, n=64, k=64, batch=70_000),
    ),
    "arrays cut along k": Case(
        ("operands that are sums of arrays need split_k=1", "got 2"),
        config(split_k=2),
        problem(terms=(2048, 2048), arrays=((1, 0), (0, 0))),
    ),
    "arrays of a symmetric product": Case(
        ("operands that are sums of arrays are those of one product",),
        config(stages=3),
        problem(symmetric="gram", terms=(2048, 2048), arrays=((1, 0), (0, 0))),
    ),
    "too few partial sums": Case(
        ("partial_sums must be at least 32, for sums of at most 64 elements", "got 1"),
        problem=problem(terms=(2048, 2048), arrays=((1, 0), (0, 0)), longest_sum=64),
    ),
    # Its types.
    "two dtypes": Case(
        ("one dtype, or two of 8-bit floats", "got bfloat16 and float16"),
        problem=problem(b_dtype=jnp.float16),
    ),
    "dtype": Case(
        ("operands must be bfloat16, float16, float32, float8 or int8", "got int16"),
        problem=nt(jnp.int16, out_dtype=jnp.bfloat16),
    ),
    "layout": Case(
        ("int8 operands must be stored with k last (layout NT)", "got layout NN"),
        config(store_columns=32, tile=(128, 128)),
        problem(a_dtype=jnp.int8, b_dtype=jnp.int8, out_dtype=jnp.int32),
    ),
    "result": Case(
        ("the result of int8 must be one of bfloat16, ", "float8_e5m2, int32, got int8"),
        config(tile=(128, 128)),
        nt(jnp.int8, out_dtype=jnp.int8),
    ),
    "epilogue of integers": Case(
        ("the result of int8 with an epilogue must be one of bfloat16, ", "float8_e5m2, got int32"),
        config(store_columns=32, tile=(128, 128)),
        nt(jnp.int8, out_dtype=jnp.int32, epilogue=Epilogue(alpha=2.0)),
    ),
    "residual of integers": Case(
        ("the residual must be one of bfloat16, ", "got int32"),
        config(store_columns=32, tile=(128, 128)),
        dataclasses.replace(RESIDUAL, residual_dtype=jnp.int32),
    ),
    "columns of a wide residual": Case(
        ("store_columns must be at most 32 for float32, got 64",),
        config(tile=(128, 128)),
        dataclasses.replace(RESIDUAL, residual_dtype=jnp.float32),
    ),
}


IMPOSSIBLE = {
    "cluster": ({"cluster": (3, 1)}, "cluster must be one of ((1, 1), (2, 1)", "got (3, 1)"),
    "cluster of none": ({"cluster": (0, 1)}, "cluster must be one of", "got (0, 1)"),
    "large tile": ({"tile": (512, 512)}, "tile must be from (1, 1) to (256, 256)", "(512, 512)"),
    "no tile": ({"tile": (0, 128)}, "tile must be from (1, 1)", "got (0, 128)"),
    "consumers": ({"consumers": 4}, "consumers must be 1, 2 or 3", "got 4"),
    "no consumers": ({"consumers": 0}, "consumers must be 1, 2 or 3", "got 0"),
    "no tiles to cut": (
        {"split_k": 2, "split_last": 0},
        "split_last must be at least 1, or None for all tiles",
        "got 0",
    ),
    "one piece of the last tiles": (
        {"split_last": 3},
        "split_last needs split_k of at least 2",
        "got split_last=3",
    ),
    "no pieces": ({"split_k": 0}, "split_k must be at least 1", "got 0"),
    "no sums": ({"partial_sums": 0}, "partial_sums must be at least 1", "got 0"),
    "sums of large tiles": (
        {"partial_sums": 2, "late_store": False},
        "at most 192 accumulator registers per thread, tile=(128, 256) needs 256",
        "the nearest tile that fits is (128, 192)",
    ),
    "sums in turns": (
        {"partial_sums": 2, "tile": (64, 128), "pingpong": True, "late_store": False},
        "partial_sums needs cooperative consumers and late_store=False",
        "got partial_sums=2, pingpong=True, late_store=False",
    ),
    "pieces in turns": (
        {"split_k": 2, "tile": (64, 128), "pingpong": True},
        "split_k needs cooperative consumers",
        "got split_k=2, pingpong=True",
    ),
    "pieces of one worker each": (
        {"split_k": 2, "persistence": "none"},
        "split_k needs persistence='static'",
        "got split_k=2 and persistence='none'",
    ),
    "persistence": (
        {"persistence": "lazy"},
        "persistence must be 'none', 'static' or 'dynamic'",
        "got 'lazy'",
    ),
    "ctas": ({"cluster": (2, 1), "ctas": 1}, "ctas must be at least one cluster (2)", "got 1"),
    "store_columns": ({"store_columns": 48}, "store_columns must be one of (64, 32, 16)", "got 48"),
    "store_slots": ({"store_slots": 0}, "store_slots must be at least 1", "got 0"),
    "pingpong": (
        {"tile": (128, 128), "pingpong": True, "consumers": 1},
        "pingpong needs 2 consumers",
        "got 1",
    ),
    "rows of a consumer": (
        {"tile": (96, 128)},
        "tile rows per consumer must be a multiple of 64",
        "got tile=(96, 128)",
    ),
    "columns of a consumer": (
        {"tile": (128, 72)},
        "tile columns per consumer must be a multiple of 16",
        "got tile=(128, 72)",
    ),
    "columns that cannot be shared": ({"tile": (64, 97)}, "a multiple of 16", "got tile=(64, 97)"),
    "stages": ({"stages": 1}, "stages must be from 2 to 32", "got 1"),
    "stages in turns": (
        {"tile": (64, 16), "stages": 17, "pingpong": True},
        "stages must be from 2 to 16",
        "got 17",
    ),
    "registers": (
        {"tile": (256, 224), "stages": 2},
        "at most 208 accumulator registers per thread, tile=(256, 224) needs 224",
        "the nearest tile that fits is (256, 208)",
    ),
    "registers of three": (
        {"tile": (192, 256), "stages": 2, "consumers": 3},
        "at most 96 accumulator registers per thread, tile=(192, 256) needs 128",
        "the nearest tile that fits is (192, 192)",
    ),
}


def why_impossible(config: GemmConfig, changes: dict[str, Any]) -> str:
    """What is said where a config is made that no product could be computed with."""
    with pytest.raises(ValueError, match=r"must|needs|at most|is no order") as caught:
        dataclasses.replace(config, **changes)
    return str(caught.value)


@pytest.mark.parametrize(("changes", "legal", "value"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_impossible_config_is_refused_where_it_is_made(changes, legal, value):
    reason = why_impossible(EARLY, changes)
    assert reason.startswith("HopperConfig: ")
    assert legal in reason
    assert value in reason
    # One line, about what is wrong and nothing else.
    assert len(reason) < 200
    assert ";" not in reason.replace("; the nearest tile that fits", "")


TILES = [
    (rows, cols, consumers, pingpong)
    for rows, cols in itertools.product(range(64, 257, 64), range(16, 257, 16))
    for consumers, pingpong in ((1, False), (2, False), (3, False), (2, True))
]


def test_the_defaults_of_a_config_fit_its_tile():
    possible = 0
    for (rows, cols, consumers, pingpong), mirrored in itertools.product(TILES, (False, True)):
        made = {"consumers": consumers, "pingpong": pingpong, "mirrored": mirrored}
        try:
            config = HopperConfig(tile=(rows, cols), stages=2, **made)
        except ValueError:
            continue
        possible += 1
        config = HopperConfig(tile=(rows, cols), **made)
        # Of the largest tiles, some leave too few registers whatever the defaults are.
        registers = "a consumer has at most"
        assert [r for r in config.refusals(NT, H200) if not r.startswith(registers)] == []
    assert possible > len(TILES)
    tall = HopperConfig(tile=(256, 192))
    assert (tall.stages, tall.store_columns, tall.late_store) == (3, 32, False)
    usual = HopperConfig()
    assert (usual.stages, usual.store_columns, usual.late_store) == (4, 64, True)


@pytest.mark.parametrize("results", [1, 2])
def test_a_mirrored_function_has_one_result(results):
    program = dataclasses.replace(function_of([]), results=function_of([]).results * results)
    reasons = config(mirrored=True).refusals(problem(epilogue=Epilogue(program=program)), H200)
    assert any("a function with one result" in why for why in reasons) == (results > 1), reasons


def test_what_is_given_is_kept_beside_defaults_that_fit():
    config = HopperConfig(tile=(256, 192), store_columns=64, store_slots=1)
    assert (config.stages, config.store_columns) == (3, 64)
    again = dataclasses.replace(config, tile=(64, 64))
    assert (again.stages, again.store_columns, again.late_store) == (3, 64, False)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_refusal_says_which_argument_and_what_is_legal(case):
    found = [reason for reason in case.reasons if all(part in reason for part in case.says)]
    assert (len(found), len(case.reasons)) == (1, case.among), case.reasons
    with pytest.raises(ValueError, match="config cannot compute this problem: ") as caught:
        case.config.check(case.problem, case.device)
    assert found[0] in str(caught.value)


def written_reasons(*modules: ModuleType) -> set[str]:
    """The longest constant text of every message in the functions that refuse."""
    found = set()
    for module in modules:
        for function in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(function, ast.FunctionDef) and (
                function.name in ("_malformed", "_impossible") or function.name.endswith("refusals")
            ):
                found.update(map(longest_text, ast.walk(function)))
    return {text for text in found if " " in text.strip()}


def longest_text(node: ast.AST) -> str:
    """Of a message, an f-string or what is yielded, the longest part that is always the same."""
    if isinstance(node, ast.JoinedStr):
        texts = [part.value for part in node.values if isinstance(part, ast.Constant)]
        return max(map(str, texts), key=len)
    if isinstance(node, ast.Yield) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return ""


@pytest.mark.parametrize(
    "text", sorted(written_reasons(config_module, hopper_config, problems, element_types))
)
def test_every_refusal_that_is_written_has_a_case(text):
    said = [reason for case in CASES.values() for reason in case.reasons]
    said += [why_impossible(EARLY, changes) for changes, _, _ in IMPOSSIBLE.values()]
    assert any(text in reason for reason in said)


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("tile", 128, "a pair of integers"),
        ("tile", (128.0, 256), "a pair of integers"),
        ("tile", "128x256", "a pair of integers"),
        ("tile", (64, 64, 64), "a pair of integers"),
        ("cluster", None, "a pair of integers"),
        ("cluster", (True, 1), "a pair of integers"),
        ("stages", 4.0, "an integer"),
        ("stages", True, "an integer"),
        ("ctas", "128", "an integer or None"),
        ("pingpong", 1, "True or False"),
        ("persistence", None, "'none', 'static' or 'dynamic'"),
        ("schedule", 8, "a name such as 'swizzle:8', a Schedule or an OnlineSchedule"),
    ],
)
def test_a_value_of_another_type_is_refused_where_a_config_is_made(field, value, legal):
    with pytest.raises(TypeError, match=f"^{field} must be ") as caught:
        config(**{field: value})
    assert legal in str(caught.value)
    assert str(caught.value).endswith(f"got {value!r}")


def test_an_order_that_there_is_not_is_refused_where_a_config_is_made():
    with pytest.raises(ValueError, match="there is no order 'zigzag'"):
        config(schedule="zigzag")


def test_lists_and_integers_of_numpy_are_taken():
    taken = config(tile=[128, 256], stages=np.int32(4), pingpong=np.bool_(False))
    assert taken == config(tile=(128, 256), stages=4)
    assert hash(taken) == hash(config(tile=(128, 256), stages=4))


def test_all_reasons_come_at_once():
    with pytest.raises(ValueError, match=r"store_columns .*; store_slots .*; stages"):
        config(store_columns=1, store_slots=0, stages=1)


@given(
    tile=st.tuples(st.integers(-1, 320), st.integers(-1, 320)),
    cluster=st.tuples(st.integers(-1, 4), st.integers(-1, 4)),
    numbers=st.fixed_dictionaries(
        {
            name: st.integers(-1, 40)
            for name in ("stages", "consumers", "ctas", "store_columns", "store_slots")
        }
    ),
    sizes=st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300)),
    gated=st.booleans(),
)
def test_nonsense_is_refused_and_never_an_error_of_another_kind(
    tile, cluster, numbers, sizes, gated
):
    try:
        nonsense = config(tile=tile, cluster=cluster, **numbers)
        reasons = nonsense.refusals(Problem(*sizes, epilogue=Epilogue(gated=gated)), H200)
    except ValueError as error:
        reasons = (str(error),)
    for reason in reasons:
        assert re.search(r"must|needs|at most|fewer", reason)


LEGAL = {
    "default": (HopperConfig(), PROBLEM),
    "pingpong": (config(tile=(64, 256), pingpong=True, stages=4), PROBLEM),
    "tall": (config(tile=(256, 192), stages=3, store_columns=32), PROBLEM),
    "residual": (config(tile=(256, 128), stages=3, store_slots=4, store_columns=32), RESIDUAL),
    "ragged chunks": (config(tile=(128, 208), stages=4), NT),
    "float32": (config(store_columns=32), FLOAT32),
    "float8": (config(tile=(128, 128), stages=6), nt(jnp.float8_e4m3fn)),
    "gated": (config(tile=(128, 256)), GATED),
    "gated in turns": (config(tile=(64, 128), pingpong=True), GATED),
    "result of odd rows": (config(store_slots=1), dataclasses.replace(NT, n=4095)),
    "residual of odd rows": (
        config(stages=3),
        dataclasses.replace(NT, n=4095, epilogue=Epilogue(residual=True)),
    ),
    "small": (config(tile=(64, 16), stages=16, consumers=1, store_columns=16), NT),
}


@pytest.mark.parametrize(("config", "problem"), LEGAL.values(), ids=LEGAL)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_legal_configs_have_no_refusal(config, problem, cluster):
    if config.tile[1] % (8 * cluster[0]) == 0:
        config = dataclasses.replace(config, cluster=cluster)
    assert config.refusals(problem, H200) == ()
    config.check(problem, H200)


@pytest.mark.parametrize("changes", [{"store_columns": 16}, {"tile": (128, 208)}])
def test_chunks_of_16_bytes_are_refused(changes):
    assert config(**changes).refusals(dataclasses.replace(NT, out_dtype=jnp.float8_e4m3fn), H200)


@pytest.mark.parametrize("problem", [PROBLEM, NT, FLOAT32, RESIDUAL, GATED])
def test_candidates_fit_into_shared_memory_and_one_stage_more_does_not(problem):
    for candidate in finished(drafts(problem, H200)):
        deeper = dataclasses.replace(candidate, stages=candidate.stages + 1)
        assert not [reason for reason in candidate.refusals(problem, H200) if "shared" in reason]
        assert candidate.stages == MOST_STAGES or any(
            "shared memory" in reason for reason in deeper.refusals(problem, H200)
        )


def of_four_arrays(x: jax.Array) -> jax.Array:
    sine, power, tangent = jnp.sin(x), jnp.exp(x), jnp.tanh(x)
    return sine * power + tangent * x


EPILOGUE_TYPES = (
    (jnp.bfloat16, jnp.bfloat16),
    (jnp.bfloat16, jnp.float32),
    (jnp.float32, jnp.float32),
    (jnp.float16, jnp.float16),
    (jnp.float8_e4m3fn, jnp.bfloat16),
)


# Of those that take as many registers, one.
TELLING_ACTIVATIONS = {
    (program.live, divides(program.primitives), branches(program.primitives)): function
    for function in (*ACTIVATIONS.values(), of_four_arrays)
    for program in (epilogues.of_activation(function),)
}


@pytest.mark.parametrize("size", [(1, 1, 1), (130, 70, 200), (4096, 4096, 4096), (8192, 16, 520)])
@pytest.mark.parametrize("activation", [None, *TELLING_ACTIVATIONS.values()])
def test_registers_never_leave_a_product_without_a_config(activation, size):
    m, n, k = size
    layouts, flags = ("NN", "NT", "TN", "TT"), (False, True)
    # Any three of these meet in every way; five types in turn, another one first for another size,
    # so that each comes with every layout and every part of an epilogue.
    combinations = [
        (layout, *parts)
        for layout, *parts in itertools.product(layouts, flags, flags, flags)
        if (layouts.index(layout) + sum(parts)) % 2
    ]
    for turn, (layout, bias, residual, scaled) in enumerate(combinations, start=m):
        dtype, out = EPILOGUE_TYPES[turn % len(EPILOGUE_TYPES)]
        epilogue = Epilogue(
            alpha=0.5 if scaled else 1.0,
            beta=2.0 if scaled and residual else 1.0,
            bias=bias,
            residual=residual,
            activation=activation,
        )
        call = Call(
            out,
            transpose_a=layout[0] == "T",
            transpose_b=layout[1] == "T",
            epilogue=epilogue,
            options=Options("hopper", target=H200),
        )
        signature = [
            ((k, m) if call.transpose_a else (m, k), np.dtype(dtype)),
            ((n, k) if call.transpose_b else (k, n), np.dtype(dtype)),
            *[((n,), np.dtype(jnp.float32))] * bias,
            *[((m, n), np.dtype(out))] * residual,
        ]
        plan = dispatch.decide(call, tuple(signature)).plan
        assert plan is not None
        assert plan.realigned.unfused is None
        # Float32 stored [k, n] goes through registers where that is faster.
        assert isinstance(plan.config, HopperConfig | WidenedConfig)


def test_shared_memory_is_predicted_to_the_next_1024_bytes():
    for config, problem in LEGAL.values():
        kernel = hopper.build(HopperPlan(problem, config, H200))
        shapes = operand_shapes(problem)
        (found,) = summaries.KEPT.of(kernel, *shapes, target="h200")
        spare = config.shared_memory_bytes(problem) - found.shared_memory_bytes
        assert 0 <= spare < 1024


def operand_shapes(problem: Problem) -> list[jax.ShapeDtypeStruct]:
    epilogue = problem.epilogue
    shapes = [(problem.a_shape, problem.a_dtype)]
    shapes += [(problem.b_shape, problem.b_dtype)] * problem.sums
    if epilogue.residual:
        shapes.append((problem.residual_shape, problem.out_dtype))
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]
