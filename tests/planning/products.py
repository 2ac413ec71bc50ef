"""Products that planning is asked about, for `considered.txt` and `decided.txt` beside it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_gemm import BlackwellConfig, HopperConfig
from pallas_gemm.call import (
    DIMENSIONS,
    Call,
    GroupedCall,
    Numerics,
    Options,
    Signature,
    SumCall,
    SymmetricCall,
)
from pallas_gemm.config import GemmConfig
from pallas_gemm.device import B200, H100, H200, Device
from pallas_gemm.kernels.hopper.widened.config import WidenedConfig
from pallas_gemm.planning import numerics
from pallas_gemm.planning.architectures import ARCHITECTURES, WIDENED, Architecture
from pallas_gemm.problem import OF_FACTORS, Blocks, Epilogue, Problem
from pallas_gemm.program import Operand, Program, Result
from schedules import build, split_k

HOPPER, BLACKWELL = ARCHITECTURES
BF16, F16, F32 = (np.dtype(x) for x in (jnp.bfloat16, jnp.float16, jnp.float32))
E4M3, INT8, INT4, INT32 = map(np.dtype, (jnp.float8_e4m3fn, jnp.int8, jnp.int4, jnp.int32))
PRESET, HIGHEST = lax.DotAlgorithmPreset, (lax.Precision.HIGHEST,) * 2
SWIGLU = Epilogue(gated=True, activation=jax.nn.silu)
WHOLE, OF_ROWS = Result(0, BF16), Result(0, F32, "m", "logsumexp")
PLACES = Result(0, F32, "m", "argmax")


def program(*results: Result, loads: int = 0) -> Epilogue:
    """Returns a function as epilogue that loads some arrays of the result's shape."""
    return Epilogue(program=Program(1, F32, (Operand("mn", BF16),) * loads, (), results))


class Considered(NamedTuple):
    """A product for a kernel of which all configs are listed."""

    problem: Problem
    architecture: Architecture = HOPPER
    device: Device = H200


def _nt(m: int, n: int, k: int, **fields: Any) -> Problem:
    return Problem(m, n, k, **{"transpose_b": True} | fields)


def _few(m: int, n: int, k: int, **fields: Any) -> Problem:
    return _nt(m, n, k, **{"b_dtype": INT4, "blocks": Blocks(128, 0, 1)} | fields)


def _of(dtype: Any, out: Any = None) -> dict[str, Any]:
    return {"a_dtype": dtype, "b_dtype": dtype, "out_dtype": dtype if out is None else out}


OF_K: Mapping[str, Any] = {"shared_a": True, "shared_b": True, "ragged_k": True}
OF_8_BITS = _of(E4M3, BF16) | {"blocks": Blocks(128, 1, 128)}

CONSIDERED: Mapping[str, Considered] = {
    name: own if isinstance(own, Considered) else Considered(own)
    for name, own in {
        "a large square": Problem(4096, 4096, 4096),
        "a few waves": _nt(2688, 2688, 2688),
        "a last wave of few tiles": Problem(2560, 2560, 8192, transpose_a=True),
        "few tiles and a long k": Problem(512, 768, 16384),
        "few rows": _nt(16, 8192, 8192),
        "few rows that leave most SMs idle": _nt(17, 1408, 8448),
        "few columns": Problem(8192, 40, 2048, **_of(F16)),
        "a short k": Problem(2048, 2048, 128, batch=4),
        "a ring that turns twice": Problem(4096, 4096, 504),
        "as many tiles as SMs": Problem(1408, 3072, 192),
        "steps that wait beside idle cycles": _nt(
            240, 1296, 16, out_dtype=F32, batch=8, epilogue=Epilogue(residual=True)
        ),
        "a residual": _nt(4096, 4096, 1024, epilogue=Epilogue(residual=True)),
        "a residual and a short k": _nt(2048, 2048, 512, epilogue=Epilogue(residual=True)),
        "a float32 result": Problem(8192, 4096, 1024, **_of(BF16, F32)),
        "a float32 result of few tiles": _nt(512, 512, 4096, **_of(BF16, F32)),
        "float32 operands": _nt(2048, 3072, 1024, **_of(F32)),
        "operands of 8 bits": _nt(4096, 4096, 2048, **_of(E4M3, BF16)),
        "integers": _nt(1024, 2048, 2048, **_of(INT8, INT32)),
        "a gated product": _nt(2048, 2816, 2048, epilogue=SWIGLU),
        "half of a symmetric result": _nt(4096, 4096, 4096, symmetric="gram"),
        "symmetric results": _nt(1024, 1024, 2048, symmetric="gram", batch=32),
        "two loaded and two stored": _nt(4096, 4096, 2048, epilogue=program(WHOLE, WHOLE, loads=2)),
        "the sums of rows alone": _nt(4096, 4096, 2048, epilogue=program(OF_ROWS)),
        "a result and sums of its rows": _nt(
            4096, 4096, 2048, epilogue=program(WHOLE, OF_ROWS, loads=1)
        ),
        "rows in groups": _nt(8192, 2048, 2048, groups=32),
        "large groups of rows": _nt(16384, 4096, 2048, groups=8),
        "sums over groups": Problem(2048, 1408, 8192, transpose_a=True, batch=16, **OF_K),
        "blocks with scales": _nt(4096, 2048, 7168, **OF_8_BITS),
        "groups of blocks with scales": _nt(8192, 2048, 2048, **OF_8_BITS, groups=16),
        "promised parts": _nt(1024, 1536, 8192, parts=4),
        "six products in one sum": _nt(
            1024, 2048, 6144, **_of(BF16, F32), terms=(1024,) * 6, longest_sum=256
        ),
        "another GPU": Considered(Problem(4096, 14336, 4096), device=H100),
        "a large square by Blackwell": Considered(Problem(4096, 4096, 4096), BLACKWELL, B200),
        "a long k by Blackwell": Considered(_nt(512, 768, 8192), BLACKWELL, B200),
        "few rows by Blackwell": Considered(_nt(40, 4096, 4096), BLACKWELL, B200),
        "a gated product by Blackwell": Considered(
            _nt(2048, 2816, 512, epilogue=SWIGLU), BLACKWELL, B200
        ),
        "float32 by Blackwell": Considered(_nt(4096, 8192, 512, **_of(BF16, F32)), BLACKWELL, B200),
        "parts by Blackwell": Considered(_nt(1024, 1536, 8192, parts=4), BLACKWELL, B200),
        "few bits and one row": Considered(_few(1, 2048, 2048), WIDENED),
        "few bits and few rows": Considered(_few(16, 14336, 4096), WIDENED),
        "few bits and rows that are shared": Considered(_few(100, 9216, 4096), WIDENED),
        "few bits and few steps": Considered(_few(100, 2048, 2048), WIDENED),
        "few bits and a gated product": Considered(
            _few(40, 4096, 4096, b_dtype=INT8, blocks=None, epilogue=SWIGLU), WIDENED
        ),
        "few bits and many rows": Considered(
            _few(4096, 4096, 8192, transpose_b=False, blocks=Blocks(64, 0, 1)), WIDENED, H100
        ),
        "few bits and groups": Considered(_few(200, 2048, 4096, groups=16), WIDENED),
    }.items()
}


class Predicted(NamedTuple):
    """A product, and configs that the heuristics may not choose for it."""

    problem: Problem
    configs: tuple[GemmConfig, ...]
    architecture: Architecture = HOPPER
    device: Device = H200


_PLAIN = HopperConfig((128, 256), stages=4, store_columns=64)
_SMALL = HopperConfig((128, 128), stages=5, late_store=False)
_TURNS = HopperConfig((128, 128), stages=5, late_store=False, pingpong=True)


def _with(config: Any, *changes: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(dataclasses.replace(config, **change) for change in changes)


_ORDERS = [
    {"schedule": order} for order in ("raster", "raster:cols", "swizzle:3", "swizzle:5:cols")
]
_ORDERS += [{"schedule": order} for order in ("hilbert", "online_swizzle:4", "swizzle:64")]
_ORDERS += [{"schedule": order} for order in ("log_swizzle:1", "nested_swizzle:2x2")]
_CLUSTERS = [{"cluster": cluster} for cluster in ((2, 1), (1, 2))]
PREDICTED: Mapping[str, Predicted] = {
    "orders and clusters": Predicted(
        Problem(8192, 2048, 2048), _with(_PLAIN, *_ORDERS, *_CLUSTERS, {"ctas": 60}, {"stages": 3})
    ),
    "a long k": Predicted(
        _nt(1024, 768, 32768),
        (
            *_with(_SMALL, *({"split_k": pieces} for pieces in (1, 2, 3, 8))),
            *_with(_SMALL, {"split_k": 4, "cluster": (2, 1)}, {"split_k": 4, "split_last": 20}),
            *_with(_SMALL, {"split_k": 4, "partial_sums": 3}, {"partial_sums": 4}),
        ),
    ),
    "several results": Predicted(
        _nt(4096, 4096, 512, epilogue=program(WHOLE, WHOLE, OF_ROWS, loads=1)),
        (_TURNS, _SMALL, *_with(_TURNS, {"store_slots": 1}, {"stages": 2})),
    ),
    "exp in the epilogue": Predicted(
        _nt(4096, 4096, 512, epilogue=program(OF_ROWS)), (_TURNS, _SMALL, _PLAIN)
    ),
    "places of the largest values": Predicted(
        _nt(16384, 16384, 64, epilogue=program(PLACES, Result(0, F32, "m", "max"))),
        (_TURNS, _PLAIN),
    ),
    "a symmetric result": Predicted(
        _nt(4096, 4096, 1024, symmetric="gram"), (_TURNS, _SMALL, _PLAIN)
    ),
    "groups of rows": Predicted(
        _nt(8192, 2048, 1024, groups=48), (_PLAIN, _TURNS, *_with(_SMALL, *_CLUSTERS))
    ),
    "few rows in groups": Predicted(_nt(40, 2048, 1024, groups=48), (_PLAIN, _SMALL)),
    "sums over groups": Predicted(
        Problem(2048, 1408, 8192, transpose_a=True, batch=16, **OF_K), (_PLAIN, _SMALL)
    ),
    "blocks with scales": Predicted(_nt(4096, 2048, 2048, **OF_8_BITS), (_SMALL,)),
    "half as many bits": Predicted(_nt(4096, 2048, 2048, **_of(INT8, INT32)), (_PLAIN, _SMALL)),
    "Blackwell": Predicted(
        _nt(2048, 2048, 4096),
        _with(
            BlackwellConfig(stages=4),
            *({}, {"cluster": (1, 1)}, {"tile": (128, 64)}, {"split_k": 3}, {"step_bytes": 256}),
            *({"accumulators": 1}, {"schedule": "raster"}, {"persistence": "dynamic"}),
        ),
        BLACKWELL,
        B200,
    ),
    "few bits": Predicted(
        _few(300, 4096, 4096, batch=2, shared_b=True),
        _with(
            WidenedConfig((128, 64), consumers=1, along_k=2, stages=4),
            *({}, {"stages": 8}, {"along_k": 1}, {"ctas_along_k": 2}, {"step": 64}),
            *({"persistence": "static"}, {"consumers": 2}),
        ),
        WIDENED,
    ),
}


class Asked(NamedTuple):
    """A product that something is decided for.

    Attributes:
        call: The product, without its operands.
        sizes: Rows, columns and what is contracted.
        types: Of the operands that are multiplied.
        batch: How many products of a batch there are, or groups; 0 for neither.
        own: The operands of which each product of the batch, or each group, has its own.
        blocks: Of the factors, which have scales.
    """

    call: Call
    sizes: tuple[int, int, int]
    types: tuple[np.dtype, np.dtype] = (BF16, BF16)
    batch: int = 0
    own: str = "a b up residual"
    blocks: Blocks | None = None

    @property
    def resolved(self) -> Call:
        """The call with the parts that keep what is promised."""
        return numerics.resolved_call(self.call, self.sizes[1], self.sizes[2], self.types[0])

    @property
    def signature(self) -> Signature:
        """The shapes and types of the operands."""
        found = [self._operand(name) for name in self.call.names]
        if isinstance(self.call, SumCall):
            return (*found, *found)
        if isinstance(self.call, GroupedCall):
            found.insert(3 if self.call.epilogue.gated else 2, ((self.batch,), INT32))
        return tuple(found)

    def _operand(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        sizes: dict[str, int] = dict(zip("mnk", self.sizes, strict=True))
        if name in OF_FACTORS:
            assert self.blocks is not None
            wide = self.blocks.rows if name == "row_blocks" else self.blocks.columns
            sizes = {x: y // (self.blocks.k if x == "k" else wide) for x, y in sizes.items()}
        shape = tuple(sizes[letter] for letter in DIMENSIONS[name])
        of_left = name in ("a", "row_blocks")
        turned = self.call.transpose_a if of_left else self.call.transpose_b
        if turned and name in ("a", "b", "up"):
            shape = shape[::-1]
        if self.batch and name in self.own.split():
            shape = (self.batch, *shape)
        types = {"a": self.types[0], "b": self.types[1], "up": self.types[1]}
        return shape, types.get(name, self.call.out_dtype if name == "residual" else F32)


def asked(
    sizes: tuple[int, int, int],
    layout: str = "NT",
    *,
    types: tuple[Any, Any, Any] = (BF16, BF16, BF16),
    options: Options | None = None,
    kind: type[Call] = Call,
    target: Device | None = H200,
    promised: Numerics | None = None,
    **fields: Any,
) -> Asked:
    """Returns a product as callers ask for it."""
    own = {name: fields.pop(name) for name in ("batch", "own", "blocks") if name in fields}
    options = dataclasses.replace(options or Options(), target=target, numerics=promised)
    call = kind(types[2], layout[0] == "T", layout[1] == "T", options=options, **fields)
    return Asked(call, sizes, types[:2], **own)


def _groups(sizes: tuple[int, int, int], groups: int, layout: str = "NT", **fields: Any) -> Asked:
    own = "b up col_blocks up_blocks bias"
    return asked(sizes, layout, batch=groups, own=own, kind=GroupedCall, **fields)


def _preset(name: str, *types: Any) -> Mapping[str, Any]:
    return {"precision": getattr(PRESET, name), "types": types}


SINGLES, BYTES, WHOLES = (F32, F32, F32), (E4M3, E4M3, BF16), (INT8, INT8, INT32)
SCALED = {"blocks": Blocks(128, 1, 128), "epilogue": Epilogue(row_blocks=True, col_blocks=True)}
WEIGHTS = {
    "blocks": Blocks(128, 0, 1),
    "epilogue": Epilogue(col_blocks=True),
    "types": (BF16, INT4, BF16),
}
LARGE = (4096, 4096, 4096)
SYMBOL: Any = jax.export.symbolic_shape("m")[0]
FUSED = Epilogue(alpha=0.5, bias=True, row_scale=True, col_scale=True, activation=jax.nn.gelu)
CUT = HopperConfig((128, 128), late_store=False, split_k=4)

ASKED: Mapping[str, Asked] = {
    "a square": asked(LARGE, "NN"),
    "of 16 bits that are two types": asked(LARGE, types=(BF16, F16, BF16)),
    "of 16 and of 32 bits": asked(LARGE, types=(BF16, F32, F32)),
    "of float32": asked(LARGE, types=SINGLES),
    "of float32, with bias and gelu": asked(
        LARGE, types=SINGLES, epilogue=Epilogue(bias=True, activation=jax.nn.gelu)
    ),
    "of 8 bits": asked(LARGE, types=BYTES),
    "of 8 bits that are turned": asked((2048, 4096, 8192), "TN", types=BYTES),
    "of integers": asked(LARGE, types=WHOLES),
    "of float64": asked(LARGE, types=(np.dtype("f8"),) * 3),
    "on an H100": asked((4096, 14336, 4096), "NN", target=H100),
    "on a B200, whose kernel is not proven": asked(LARGE, target=B200),
    "on a B200, by name": asked(LARGE, target=B200, options=Options("blackwell")),
    "on no GPU": asked(LARGE, target=None),
    "on another GPU": asked(
        LARGE, target=dataclasses.replace(H200, kind="old", compute_capability=(8, 0))
    ),
    "simulated, with a config of Blackwell": asked(
        (256, 512, 512),
        options=Options("interpret", config=BlackwellConfig(cluster=(1, 1))),
        target=None,
    ),
    "simulated": asked((256, 512, 512), options=Options("interpret"), target=None),
    "by XLA": asked(LARGE, options=Options("xla")),
    "of nothing": asked((0, 64, 64)),
    "with all of a vector": asked(LARGE, epilogue=FUSED),
    "with a residual": asked(
        (8192, 4096, 1024), epilogue=Epilogue(residual=True, beta=0.5, bias=True)
    ),
    "with an unknown activation": asked(LARGE, epilogue=Epilogue(activation=lax.lgamma)),
    "gated": asked((4096, 14336, 4096), "NN", epilogue=SWIGLU),
    "gated, with an unknown activation": asked(
        (4096, 8192, 4096), epilogue=Epilogue(gated=True, activation=lax.lgamma, residual=True)
    ),
    "with a function": asked(LARGE, epilogue=program(WHOLE)),
    "with a function that reduces rows": asked((2048, 4096, 1024), epilogue=program(OF_ROWS)),
    "misaligned": asked((1001, 1003, 1005), "NN"),
    "misaligned and turned": asked((1001, 1003, 1005), "TT"),
    "misaligned in k alone": asked((2048, 3072, 2047)),
    "misaligned in the result alone": asked((2048, 3071, 2048)),
    "misaligned in the result, and a short k": asked((4096, 4097, 768)),
    "two misaligned rows": asked((2, 1001, 1003)),
    "one misaligned row": asked((1, 1001, 1003)),
    "misaligned with a residual": asked((999, 1023, 4096), epilogue=Epilogue(residual=True)),
    "misaligned integers": asked((1024, 1030, 2046), "NN", types=WHOLES),
    "a batch": asked((1024, 512, 768), batch=24),
    "a batch with one left operand": asked((1024, 512, 768), batch=24, own="b up residual"),
    "a batch with one right operand": asked((1024, 512, 768), batch=24, own="a residual"),
    "a turned batch with one right operand": asked((1024, 512, 768), "TT", batch=24, own="a"),
    "a batch of one": asked((4096, 2048, 4096), batch=1),
    "a batch of one on the right": asked((4096, 2048, 4096), batch=1, own="b"),
    "rows of a batch that become one product": asked(
        (40, 4096, 4096), batch=8, own="a row_scale", epilogue=Epilogue(row_scale=True, bias=True)
    ),
    "small matrices": asked((128, 128, 128), batch=40000),
    "a short k": asked((4096, 4096, 512)),
    "few columns": asked((4096, 64, 4096)),
    "few columns of short sums": asked((65536, 4, 256)),
    "one column": asked((4096, 1, 4096)),
    "few columns of long sums": asked((4096, 3, 4248)),
    "few rows": asked((16, 8192, 8192)),
    "few rows stored by columns": asked((24, 4096, 8192), "TN"),
    "a vector": asked((1, 2048, 4096)),
    "a tiny product": asked((8, 512, 896)),
    "few tiles": asked((384, 512, 8192)),
    "rows within lines": asked((4104, 4104, 4104), "NN"),
    "half of a symmetric result": asked(LARGE, kind=SymmetricCall),
    "half of a small symmetric result": asked((1024, 1024, 1024), kind=SymmetricCall),
    "half of a product": asked((2048, 2048, 4096), kind=SymmetricCall, types=(BF16, BF16, F32)),
    "a sum of products": asked((4096, 4096, 2048), kind=SumCall),
    "HIGHEST": asked(LARGE, types=SINGLES, precision=HIGHEST),
    "HIGHEST, gated": asked((1024, 2048, 1024), types=SINGLES, precision=HIGHEST, epilogue=SWIGLU),
    "HIGHEST of few rows": asked((32, 1024, 1024), types=SINGLES, precision=HIGHEST),
    "HIGHEST of 8 bits": asked(LARGE, types=BYTES, precision=HIGHEST),
    "X3": asked(LARGE, **_preset("BF16_BF16_F32_X3", F32, F32, F32)),
    "X6 with a bias": asked(
        LARGE, **_preset("BF16_BF16_F32_X6", F32, F32, F32), epilogue=Epilogue(bias=True)
    ),
    "X9, misaligned": asked((1001, 1024, 2001), **_preset("BF16_BF16_F32_X9", F32, F32, F32)),
    "X3 of a batch": asked((512, 512, 4096), batch=4, **_preset("BF16_BF16_F32_X3", F32, F32, F32)),
    "TF32 X3": asked(LARGE, **_preset("TF32_TF32_F32_X3", F32, F32, F32)),
    "TF32 X3 of a short k": asked((512, 512, 512), **_preset("TF32_TF32_F32_X3", F32, F32, F32)),
    "cast to bfloat16": asked(LARGE, **_preset("BF16_BF16_F32", F32, F32, F32)),
    "one cast to float16": asked(LARGE, **_preset("F16_F16_F32", F16, F32, F32)),
    "cast to tf32": asked((2048, 3072, 1024), **_preset("TF32_TF32_F32", BF16, F32, F32)),
    "without tensor cores": asked(LARGE, **_preset("F32_F32_F32", F32, F32, F32)),
    "blocks with scales": asked((4096, 2048, 7168), types=BYTES, **SCALED),
    "blocks of 16 bits with scales": asked((1024, 2048, 2048), **SCALED),
    "weights of 4 bits": asked((16, 14336, 4096), "NN", **WEIGHTS),
    "weights of 4 bits and many rows": asked((8192, 14336, 4096), "NN", **WEIGHTS),
    "weights of 4 bits and more rows": asked((16384, 2048, 2048), **WEIGHTS),
    "weights of 8 bits": asked((300, 4096, 4096), types=(BF16, INT8, BF16)),
    "weights of 8 bits and many rows": asked((8192, 4096, 4096), types=(BF16, INT8, BF16)),
    "weights of 8 bits, gated": asked((64, 4096, 4096), types=(BF16, INT8, BF16), epilogue=SWIGLU),
    "weights of 4 bits that no kernel takes": asked(
        (16, 1000, 4100), **WEIGHTS | {"blocks": Blocks(4100, 0, 1)}
    ),
    "groups": _groups((8192, 2048, 2048), 32),
    "groups of matrices that are stored by rows": _groups((8192, 2048, 2056), 32, "NN"),
    "groups that are turned": _groups((4096, 1000, 2048), 8, "NN"),
    "groups with a bias": _groups((8192, 2048, 2048), 32, epilogue=Epilogue(bias=True)),
    "groups of few columns": _groups((8192, 32, 4096), 8, "NN"),
    "groups of 64 columns": _groups((8192, 64, 4096), 8, "NN"),
    "groups of few columns that are stored by rows": _groups((2048, 16, 4096), 8),
    "groups of few rows and columns": _groups((512, 32, 4096), 8),
    "groups of few columns, in float32": _groups((2048, 16, 4096), 8, types=(BF16, BF16, F32)),
    "gated groups": _groups((8192, 2816, 2048), 16, epilogue=SWIGLU),
    "groups with an unknown activation": _groups(
        (8192, 2048, 2048), 8, epilogue=Epilogue(activation=lax.lgamma)
    ),
    "groups of float32": _groups((8192, 2048, 2048), 8, types=SINGLES),
    "groups as X3": _groups((8192, 2048, 2048), 8, **_preset("BF16_BF16_F32_X3", F32, F32, F32)),
    "groups of blocks with scales": _groups((8192, 2048, 2048), 16, types=BYTES, **SCALED),
    "groups of weights of 4 bits": _groups((64, 2048, 4096), 8, **WEIGHTS),
    "rows keep their bits": asked((1024, 1536, 8192), promised=Numerics("rows")),
    "float32 results of rows that keep their bits": asked(
        (64, 4096, 14336), promised=Numerics("rows"), types=(BF16, BF16, F32)
    ),
    "rows keep their bits, gated": asked(
        (64, 512, 8192), promised=Numerics("rows"), epilogue=SWIGLU
    ),
    "rows keep their bits beside blocks with scales": asked(
        (1024, 1536, 8192), types=BYTES, **SCALED, promised=Numerics("rows")
    ),
    "stated parts": asked((512, 1024, 8192), promised=Numerics("run", part=2048)),
    "integers, with a promise": asked((64, 512, 512), types=WHOLES, promised=Numerics("rows")),
    "HIGHEST, with a promise": asked(
        (64, 1024, 4096), types=SINGLES, precision=HIGHEST, promised=Numerics("rows")
    ),
    "a config": asked(LARGE, options=Options(config=CUT)),
    "a config that does not fit": asked(
        LARGE, options=Options(config=HopperConfig((128, 256), stages=9))
    ),
    "a config of another kernel": asked(LARGE, options=Options(config=BlackwellConfig())),
    "an order": asked(LARGE, options=Options(schedule="hilbert")),
    "an order of another grid": asked(LARGE, options=Options(schedule=build("raster", 16, 7))),
    "pieces": asked(
        (512, 768, 4096), options=Options(schedule=split_k(build("raster", 4, 6), 64, 4))
    ),
    "pieces that a config does not make": asked(
        (512, 768, 4096),
        options=Options(
            config=dataclasses.replace(CUT, split_k=2),
            schedule=split_k(build("raster", 4, 6), 64, 4),
        ),
    ),
    "an order of many grids": asked(
        (512, 768, 4096), options=Options(schedule=build("raster", 9, 2))
    ),
    "an order of few grids": asked((16, 24, 64), options=Options(schedule=build("raster", 9, 2))),
    "groups whose rows keep their bits": _groups((8192, 2048, 8192), 4, promised=Numerics("rows")),
    "a size that is a symbol": asked((SYMBOL, 512, 512)),
    "a size that is a symbol, by name": asked((SYMBOL, 512, 512), options=Options("hopper")),
    "a size that is a symbol, with a promise": asked((SYMBOL, 512, 512), promised=Numerics("rows")),
}
