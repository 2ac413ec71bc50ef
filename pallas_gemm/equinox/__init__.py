"""Layers for Equinox whose bias, activation and residual are computed in the kernel of the product.

    from pallas_gemm.equinox import GatedLinear, Linear, replaced

    Linear(4096, 14336, activation="gelu", key=key)
    GatedLinear(4096, 14336, key=key)
    model = replaced(model)  # every eqx.nn.Linear becomes a Linear with the same arrays

Arrays have the names, shapes and initial values of the stock layers'. `docs/layers.md` says more.
"""

try:
    import equinox as _equinox
except ImportError as error:
    # Only this name: what a broken Equinox lacks is what the user must read.
    if error.name != "equinox":
        raise
    raise ImportError(
        "pallas_gemm.equinox needs Equinox: pip install '.[equinox]'", name="equinox"
    ) from None

from pallas_gemm.equinox.linear import GatedLinear as GatedLinear
from pallas_gemm.equinox.linear import Linear as Linear
from pallas_gemm.equinox.linear import replaced as replaced
from schedules import _public

del _equinox


def __dir__() -> list[str]:
    """Returns the public names."""
    return _public.names(globals())
