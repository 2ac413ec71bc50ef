"""Optimizers for Optax whose products are kernels.

    from pallas_gemm.optax import muon

    optimizer = muon(learning_rate=2e-2)

`muon` has the arguments and the state of `optax.contrib.muon`. `docs/symmetric.md` says more.
"""

try:
    import optax as _optax
except ImportError as error:
    # Only this name: what a broken Optax lacks is what the user must read.
    if error.name != "optax":
        raise
    raise ImportError(
        "pallas_gemm.optax needs Optax: pip install '.[optax]'", name="optax"
    ) from None

from pallas_gemm.optax.muon import muon as muon
from pallas_gemm.optax.muon import orthogonalized as orthogonalized
from pallas_gemm.optax.muon import scale_by_muon as scale_by_muon
from schedules import _public

del _optax


def __dir__() -> list[str]:
    """Returns the public names."""
    return _public.names(globals())
