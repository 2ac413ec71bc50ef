"""In which type devices send the partial sums of a product to one another."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.problem import element_type

# A context of JAX's own, so that a function that was traced outside a block is traced anew in it.
_REDUCED = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def reduce_in(dtype: Any) -> Iterator[None]:
    """Sends partial sums from GPU to GPU in another type than the result's, gradients' included.

    >>> with reduce_in(jnp.float32):
    ...     y = train_step(params, batch)  # doctest: +SKIP

    A sum in float32 is twice the bytes of one in bfloat16, which JAX's own product of bfloat16
    sends. But no device rounds its part before they are added. It counts where it is traced.

    Args:
        dtype: A floating-point type, such as `jnp.float32` or "f32".

    Raises:
        ValueError: It is none.
    """
    try:
        wanted = jnp.dtype(element_type(dtype))
    except TypeError:
        wanted = None
    if wanted is None or not jnp.issubdtype(wanted, jnp.floating):
        raise ValueError(f"dtype={dtype!r} must be a floating-point type")
    with _REDUCED(wanted):
        yield


def reduction_dtype() -> np.dtype | None:
    """Returns what `reduce_in` says; None outside of it."""
    return _REDUCED.value


def travelling_dtype(sums: Any, out_dtype: Any, asked: np.dtype | None) -> np.dtype:
    """Returns the type in which sums travel: the result's, but not one of 8 bits.

    Args:
        sums: The type in which they are made.
        out_dtype: The result's.
        asked: The answer of `reduce_in` where the product was traced.
    """
    if not jnp.issubdtype(sums, jnp.floating):
        return np.dtype(sums)
    usual = jnp.bfloat16 if np.dtype(out_dtype).itemsize == 1 else out_dtype
    return np.dtype(asked or usual)
