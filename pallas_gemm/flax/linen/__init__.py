"""Layers for `flax.linen`."""

from pallas_gemm.flax.linen.dense import Dense as Dense
from pallas_gemm.flax.linen.dense import GatedDense as GatedDense
from pallas_gemm.flax.linen.dense import projections as projections
from pallas_gemm.flax.linen.experts import Experts as Experts
from pallas_gemm.flax.linen.experts import Fp8Experts as Fp8Experts
from pallas_gemm.flax.linen.fp8 import Fp8Dense as Fp8Dense
from pallas_gemm.flax.linen.quantized import QuantizedDense as QuantizedDense
from pallas_gemm.flax.linen.quantized import quantized as quantized
from schedules import _public


def __dir__() -> list[str]:
    """Returns the public names."""
    return _public.names(globals())
