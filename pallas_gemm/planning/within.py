"""Values that a `with` block puts into use for all products that are traced within it."""

import contextvars
from contextlib import AbstractContextManager
from typing import Any, Self

_OPEN: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("open", default=())
"""The blocks around the running code, the innermost last."""


class Within:
    """A value that may be in use in several blocks at once, nested or in several threads."""

    def _block(self) -> AbstractContextManager[Any]:
        """Returns a block in which the value is in use."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Begins a block, in which functions under `jax.jit` are traced anew."""
        block = self._block()
        block.__enter__()
        _OPEN.set((*_OPEN.get(), block))
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the innermost block."""
        *outer, block = _OPEN.get()
        _OPEN.set(tuple(outer))
        block.__exit__(*error)
