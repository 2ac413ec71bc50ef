"""The `dot_general` of stock layers, by kinds of layers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pallas_gemm

HOOKS: Mapping[str, Any] = MappingProxyType(
    {
        "hooks": pallas_gemm.dot_general,
        "fp8_blocks": pallas_gemm.Recipe().dot_general,
    }
)


def hook_of(layers: str) -> dict[str, Any]:
    """Returns the arguments of stock layers for their hook; none for other kinds."""
    return {"dot_general": HOOKS[layers]} if layers in HOOKS else {}
