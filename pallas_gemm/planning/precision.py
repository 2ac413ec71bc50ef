"""The meaning of `precision=`, and whether the kernels compute exactly that.

The kernels multiply 16-bit floats and int8 exactly and add up in float32 or int32. They multiply
float32 as TF32, as JAX documents for `Precision.DEFAULT` and `HIGH` on a GPU. They multiply 8-bit
floats with the tensor cores' own accumulation, and so does XLA below `HIGHEST`. `scheme.py` says
what is computed where a product asks for more. All else goes to XLA.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import dot as stock_dot

from pallas_gemm.kernels.element_types import FLOATS_8, SINGLE

_EXACT_PRESETS = {
    lax.DotAlgorithmPreset.BF16_BF16_F32: (jnp.bfloat16,),
    lax.DotAlgorithmPreset.F16_F16_F32: (jnp.float16,),
    lax.DotAlgorithmPreset.TF32_TF32_F32: (jnp.float32,),
    lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM: (jnp.float8_e4m3fn, jnp.float8_e5m2),
}


def resolve(precision: Any) -> Any:
    """Returns `precision` as JAX understands it, with `jax.default_matmul_precision` for None.

    The answer is never None, so that it no longer depends on the settings when it is used.

    Raises:
        ValueError: It is nothing that `lax.dot_general` takes.
    """
    if precision is None:
        precision = jax.config.jax_default_matmul_precision
    if isinstance(precision, list):
        precision = tuple(precision)
    try:
        return _as_jax_reads_it(precision)
    except (TypeError, ValueError) as error:
        raise ValueError(f"precision={precision!r} is not legal: {error}") from None


@functools.lru_cache(maxsize=64)
def _as_jax_reads_it(precision: Any) -> Any:
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return stock_dot(a, b, precision=precision)

    read = jax.make_jaxpr(dot)(one, one).eqns[0].params["precision"]
    return (lax.Precision.DEFAULT,) * 2 if read is None else read


def kernel_refusal(precision: Any, operand_dtypes: tuple[Any, Any]) -> str | None:
    """Returns why the kernels do not compute what `precision` asks for, None if they do."""
    dtypes = {np.dtype(dtype) for dtype in operand_dtypes}
    if isinstance(precision, tuple):
        # Kernels widen 8-bit floats beside 16 bits, and multiply those.
        is_less = SINGLE in dtypes or dtypes <= FLOATS_8
        if lax.Precision.HIGHEST in precision and is_less:
            names = ", ".join(sorted(map(str, dtypes)))
            return f"precision HIGHEST of {names} is more than the tensor cores compute"
        return None
    if precision is None or precision == lax.DotAlgorithmPreset.DEFAULT:
        return None
    if dtypes <= {np.dtype(dtype) for dtype in _EXACT_PRESETS.get(precision, ())}:
        return None
    names = ", ".join(sorted(map(str, dtypes)))
    return (
        f"precision {getattr(precision, 'name', precision)} of {names} is not what kernels compute"
    )
