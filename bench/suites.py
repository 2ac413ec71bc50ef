"""Named suites of cases: what models have, and what is there to show something."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bench.shapes import LAYOUTS, Case


def suite(name: str) -> tuple[Case, ...]:
    """Returns the cases of a suite.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {name!r}")
    return SUITES[name]


def _square(size: int, **fields: Any) -> Case:
    return Case(size, size, size, source="square", **fields)


def _layers(
    source: str, rows: tuple[int, ...], weights: Mapping[str, tuple[int, int]]
) -> tuple[Case, ...]:
    """Returns the products of activations with each weight, given as (outputs, inputs)."""
    return tuple(
        Case(m, n, k, source=f"{source} {layer}") for m in rows for layer, (n, k) in weights.items()
    )


# Llama 3: hidden sizes 4096 and 8192, feed-forward 14336 and 28672, 8 key-value heads of 128,
# vocabulary 128256 ("The Llama 3 Herd of Models", table 3).
_LLAMA_8B: Mapping[str, tuple[int, int]] = {
    "qkv": (6144, 4096),
    "attention out": (4096, 4096),
    "gate and up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
_LLAMA_70B: Mapping[str, tuple[int, int]] = {
    "qkv": (10240, 8192),
    "attention out": (8192, 8192),
    "gate and up": (57344, 8192),
    "down": (8192, 28672),
    "head": (128256, 8192),
}
# The same model with each layer cut into eight, for eight GPUs.
_LLAMA_70B_EIGHTH: Mapping[str, tuple[int, int]] = {
    "qkv, 1 of 8": (1280, 8192),
    "attention out, 1 of 8": (8192, 1024),
    "gate and up, 1 of 8": (7168, 8192),
    "down, 1 of 8": (8192, 3584),
}
# DeepSeek-V3: the dense shapes that DeepGEMM publishes for it, and its router's projection.
_DEEPSEEK_V3: Mapping[str, tuple[int, int]] = {
    "q and kv down": (2112, 7168),
    "q up": (24576, 1536),
    "kv up": (32768, 512),
    "attention out": (7168, 16384),
    "gate and up": (4096, 7168),
    "down": (7168, 2048),
    "kv down": (576, 7168),
}

_SQUARES = tuple(
    map(_square, (256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192, 10240, 12288, 16384))
)
_DECODE = tuple(
    case
    for m in (1, 8, 16, 64, 128, 256)
    for case in _layers("decode, Llama 3 70B", (m,), {"attention out": (8192, 8192)})
) + _layers("decode, Llama 3 8B", (16, 64), {"gate and up": (28672, 4096), "down": (4096, 14336)})
_WGRAD = tuple(
    Case(m, n, k, layout="TN", source="gradient of a weight: few tiles, deep")
    for m, n, k in (
        (128, 128, 65536),
        (256, 256, 32768),
        (512, 512, 65536),
        (1024, 1024, 32768),
        (4096, 4096, 16384),
    )
)
_WAVES = tuple(
    Case(m, n, 4096, source="just more tiles of 128x256 than the SMs of an H100 or H200 take")
    for m, n in ((128 * 19, 256 * 7), (128 * 53, 256 * 5), (128 * 57, 256 * 7))
)
_ODD = tuple(
    Case(m, n, k, source="no multiple of any tile")
    for m, n, k in (
        (1000, 1000, 1000),
        (1001, 1000, 1000),
        (4095, 4095, 4095),
        (4100, 4104, 4112),
        (4104, 4104, 4104),
        (8191, 8191, 8191),
        (8200, 8200, 8200),
        (4096, 50257, 1024),
    )
)
_SHALLOW = tuple(
    Case(m, n, k, source="shallow: few steps for each of many tiles")
    for m, n, k in (
        (4096, 4096, 256),
        (4096, 4096, 512),
        (8192, 8192, 256),
        (8192, 8192, 512),
        (8192, 8192, 1024),
        (16384, 16384, 512),
    )
)
_BATCHED = (
    Case(2048, 2048, 128, batch=32, source="attention scores"),
    Case(1024, 4096, 4096, batch=16, source="experts of equal load"),
    Case(512, 512, 512, batch=64, source="many small products"),
)
_DTYPES = (
    *(
        _square(size, dtype=dtype, layout="NT")
        for dtype in ("bf16", "f16", "f32", "e4m3", "int8")
        for size in (4096, 8192)
    ),
    _square(4096, dtype="f32"),
)
_LAYOUTS = tuple(_square(size, layout=layout) for layout in LAYOUTS for size in (4096, 8192))
_EPILOGUES = (
    *(
        Case(m, n, k, epilogue=epilogue, source="fused")
        for epilogue in ("bias", "bias_gelu", "residual")
        for m, n, k in ((8192, 8192, 8192), (4096, 14336, 4096))
    ),
    Case(4096, 14336, 4096, epilogue="swiglu", source="Llama 3 8B feed-forward, fused"),
)
_GRADIENTS = (
    _square(4096, direction="backward"),
    _square(8192, direction="both"),
    Case(4096, 14336, 4096, direction="backward", source="Llama 3 8B gate"),
)
# Rows are 8192 tokens of Mixtral 8x7B with two experts each, a device's share of 8192 tokens of
# DeepSeek-V3 (8 of 256 experts, over 8 devices), 4096 tokens of Qwen3-30B-A3B (8 of 128) and 4096
# of gpt-oss-20b (4 of 32); of each the gate, the up projection beside it where a model has them in
# one matrix, and down.
_EXPERTS: Mapping[str, tuple[tuple[int, int, int, int], ...]] = {
    "experts, square": ((16384, 4096, 4096, 8), (16384, 2048, 2048, 64)),
    "Mixtral 8x7B gate": ((16384, 14336, 4096, 8),),
    "Mixtral 8x7B down": ((16384, 4096, 14336, 8),),
    "DeepSeek-V3 gate": ((8192, 2048, 7168, 32),),
    "DeepSeek-V3 down": ((8192, 7168, 2048, 32),),
    "Qwen3-30B gate": ((32768, 768, 2048, 128),),
    "Qwen3-30B down": ((32768, 2048, 768, 128),),
    "gpt-oss-20b gate and up": ((16384, 5760, 2880, 32),),
    "gpt-oss-20b down": ((16384, 2880, 2880, 32),),
}
_GROUPED = tuple(
    Case(m, n, k, groups=groups, routing=routing, direction=direction, source=source)
    for source, shapes in _EXPERTS.items()
    for m, n, k, groups in shapes
    for direction in ("forward", "backward")
    for routing in ("uniform", "zipf")
) + tuple(
    Case(16384, 2048, 2048, groups=64, routing=routing, direction=direction, source="routing")
    for direction in ("forward", "backward")
    for routing in ("one", "empty")
)
# What Muon and Shampoo begin with: a matrix by its own transpose.
_SYMMETRIC = tuple(
    Case(m, m, k, layout=layout, batch=batch, factors="gram", source="matrix by its transpose")
    for m, k, batch, layout in (
        (2048, 8192, 1, "NT"),
        (4096, 4096, 1, "NT"),
        (8192, 8192, 1, "NT"),
        (8192, 8192, 1, "TN"),
        (1024, 4096, 32, "NT"),
        (512, 512, 1, "NT"),
    )
)
# Those that DeepSeek-V3 and Llama 3 8B have of a few thousand tokens, a few tokens, and a square.
_BLOCKS = tuple(
    dataclasses.replace(case, dtype="e4m3", layout="NT", scales="blocks")
    for case in (
        _square(4096),
        _square(8192),
        *(
            Case(m, n, 7168, source="DeepSeek-V3")
            for m, n in ((4096, 2048), (4096, 18432), (64, 18432))
        ),
        *_layers(
            "DeepSeek-V3",
            (4096,),
            {name: _DEEPSEEK_V3[name] for name in ("q up", "attention out", "down")},
        ),
        *_layers(
            "Llama 3 8B",
            (8192,),
            {name: _LLAMA_8B[name] for name in ("qkv", "attention out", "gate and up", "down")},
        ),
    )
)
_SHORT = (
    _square(1024),
    _square(2048),
    _square(4096),
    _square(8192),
    _square(8192, layout="NT"),
    Case(8192, 8192, 1024, source="shallow"),
    Case(4096, 14336, 4096, source="Llama 3 8B gate"),
    Case(8192, 28672, 8192, source="Llama 3 70B gate"),
    Case(512, 512, 65536, source="gradient of a weight: few tiles, deep"),
    Case(16, 8192, 8192, source="decode, Llama 3 70B attention out"),
    _square(4104),
)

SUITES: Mapping[str, tuple[Case, ...]] = MappingProxyType(
    {
        "short": _SHORT,
        "squares": _SQUARES,
        "llama8b": _layers("Llama 3 8B", (128, 512, 2048, 8192), _LLAMA_8B),
        "llama70b": _layers("Llama 3 70B", (128, 2048, 8192), _LLAMA_70B)
        + _layers("Llama 3 70B", (128, 2048, 8192), _LLAMA_70B_EIGHTH),
        "deepseek": _layers("DeepSeek-V3", (128, 4096), _DEEPSEEK_V3),
        "decode": _DECODE,
        "wgrad": _WGRAD,
        "waves": _WAVES,
        "odd": _ODD,
        "shallow": _SHALLOW,
        "batched": _BATCHED,
        "dtypes": _DTYPES,
        "layouts": _LAYOUTS,
        "epilogues": _EPILOGUES,
        "gradients": _GRADIENTS,
        "grouped": _GROUPED,
        "symmetric": _SYMMETRIC,
        "blocks": _BLOCKS,
    }
)
"""The suites by name; "short" is the one that a person runs first."""
