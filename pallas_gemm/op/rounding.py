"""How often a result is rounded whose derivative needs what comes before its activation."""

import contextlib
from collections.abc import Iterator

import jax

# A context of JAX's own, so that a function that was traced outside a block is traced anew in it.
_ONCE = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def round_once(once: bool = True) -> Iterator[None]:
    """Rounds results under differentiation as often as without it: once.

    >>> with round_once():
    ...     grads = jax.grad(loss)(params, batch)  # doctest: +SKIP

    A derivative needs what an activation is applied to. By default the kernel stores that alone,
    rounded, and XLA applies the activation to it: the result is rounded twice. Inside the block the
    kernel stores both, each rounded once from the float32 sum. It counts where it is traced.

    Args:
        once: False takes back what a block around it says.

    Raises:
        TypeError: It is no bool.
    """
    if not isinstance(once, bool):
        raise TypeError(f"once must be True or False, got {once!r}")
    with _ONCE(once):
        yield


def is_rounded_once() -> bool:
    """Returns what `round_once` says; False outside of it."""
    return _ONCE.value
