"""`einsum`: JAX's own, which comes down to one `dot_general` after the other, with ours."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_gemm.api.gemm import dot_general


def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    out: None = None,
    optimize: Any = "auto",
    precision: Any = None,
    preferred_element_type: Any = None,
    _dot_general: Callable[..., jax.Array] = dot_general,
    out_sharding: Any = None,
) -> jax.Array:
    """Computes `jnp.einsum`, with the same arguments, its products by `dot_general`.

    >>> layer = nnx.Einsum("bsd,dhk->bshk", (512, 8, 64), einsum_op=einsum)  # doctest: +SKIP

    Args:
        subscripts: As for `jnp.einsum`.
        *operands: As for `jnp.einsum`; more than two are multiplied in pairs.
        out: None; there is no other value that `jnp.einsum` takes.
        optimize: As for `jnp.einsum`: how the pairs are found.
        precision: Of every product, as for `lax.dot_general`.
        preferred_element_type: Type of the result, and of those in between.
        _dot_general: What multiplies a pair; layers of neural networks pass theirs.
        out_sharding: The result's sharding under an explicit mesh.

    Returns:
        The result.
    """
    return jnp.einsum(
        subscripts,
        *operands,
        out=out,
        optimize=optimize,
        precision=precision,
        preferred_element_type=preferred_element_type,
        _dot_general=_dot_general,
        out_sharding=out_sharding,
    )
