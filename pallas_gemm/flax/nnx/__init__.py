"""Layers for `flax.nnx`."""

from pallas_gemm.flax.nnx.experts import Experts as Experts
from pallas_gemm.flax.nnx.experts import Fp8Experts as Fp8Experts
from pallas_gemm.flax.nnx.fp8 import Fp8Linear as Fp8Linear
from pallas_gemm.flax.nnx.fp8 import OverwriteWithGradient as OverwriteWithGradient
from pallas_gemm.flax.nnx.linear import Dense as Dense
from pallas_gemm.flax.nnx.linear import GatedDense as GatedDense
from pallas_gemm.flax.nnx.linear import Linear as Linear
from pallas_gemm.flax.nnx.linear import projections as projections
from pallas_gemm.flax.nnx.quantized import Quantized as Quantized
from pallas_gemm.flax.nnx.quantized import QuantizedLinear as QuantizedLinear
from schedules import _public


def __dir__() -> list[str]:
    """Returns the public names."""
    return _public.names(globals())
