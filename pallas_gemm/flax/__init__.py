"""Layers for Flax whose bias, activation and residual are computed in the kernel of the product.

    from pallas_gemm.flax import linen, nnx

    linen.Dense(4096, activation="gelu")
    nnx.GatedDense(4096, 14336, rngs=rngs)
    query, key, value = nnx.projections(x, [self.query, self.key, self.value])

Parameters have the names, shapes and initial values of the stock layers', so that checkpoints of
the one load into the other. `docs/layers.md` says more, also about other libraries.
"""

import dataclasses as _dataclasses
from typing import Any as _Any

try:
    import flax as _flax
except ImportError as error:
    # Only this name: what a broken Flax lacks is what the user must read.
    if error.name != "flax":
        raise
    raise ImportError("pallas_gemm.flax needs Flax: pip install '.[flax]'", name="flax") from None

from flax import serialization as _serialization

from pallas_gemm.api.few_bits.weights import QuantizedWeight as _QuantizedWeight
from pallas_gemm.flax import linen as linen
from pallas_gemm.flax import nnx as nnx
from schedules import _public

del _flax

_ARRAYS = ("values", "scale", "zero")


def _state(record: _QuantizedWeight) -> dict[str, _Any]:
    """Returns the arrays of a record, for checkpoints of Flax."""
    arrays = {name: getattr(record, name) for name in _ARRAYS}
    return {name: x for name, x in arrays.items() if x is not None}


_serialization.register_serialization_state(
    _QuantizedWeight, _state, lambda record, state: _dataclasses.replace(record, **state)
)


def __dir__() -> list[str]:
    """Returns the public names."""
    return _public.names(globals(), "linen", "nnx")
