"""Layers for Flax whose bias, activation and residual are computed in the kernel of the product.

    from pallas_gemm.flax import linen, nnx

    linen.Dense(4096, activation="gelu")
    nnx.GatedDense(4096, 14336, rngs=rngs)
    query, key, value = nnx.projections(x, [self.query, self.key, self.value])

Parameters have the names, shapes and initial values of the stock layers', so that checkpoints of
the one load into the other. `docs/layers.md` says more, also about other libraries.
"""

try:
    import flax as _flax
except ImportError as error:
    # Only this name: what a broken Flax lacks is what the user must read.
    if error.name != "flax":
        raise
    raise ImportError("pallas_gemm.flax needs Flax: pip install '.[flax]'", name="flax") from None

from pallas_gemm.flax import linen as linen
from pallas_gemm.flax import nnx as nnx
from schedules import _public

del _flax


def __dir__() -> list[str]:
    """Returns the public names."""
    return _public.names(globals(), "linen", "nnx")
