"""How often a result is rounded whose derivative needs what comes before its activation."""

import contextlib
from collections.abc import Iterator

import jax

# A context of JAX's own, so that a function that was traced outside a block is traced anew in it.
_ONCE = jax.make_user_context(default_value=True)


@contextlib.contextmanager
def round_once(once: bool = True) -> Iterator[None]:
    """Says whether results are rounded as often under differentiation as without it: once.

    >>> with round_once(False):
    ...     grads = jax.grad(loss)(params, batch)  # doctest: +SKIP

    A derivative needs what an activation is applied to. By default the kernel stores both, each
    rounded once from the float32 sum. Inside `round_once(False)` it stores that alone, and XLA
    applies the activation to what was rounded: the result is rounded twice. A block counts where it
    is traced.

    Args:
        once: True takes back what a block around it says.

    Raises:
        TypeError: It is no bool.
    """
    if not isinstance(once, bool):
        raise TypeError(f"once must be True or False, got {once!r}")
    with _ONCE(once):
        yield


def is_rounded_once() -> bool:
    """Returns what `round_once` says; True outside of it."""
    return _ONCE.value
