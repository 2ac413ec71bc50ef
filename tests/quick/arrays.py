"""Has JAX take NumPy's arrays as they are: stock JAX compiles a program for each shape and type.

The program returns what it is given. Where a mesh is set it may also lay that out, and stays.
"""

from typing import Any

import jax
import numpy as np
import pytest
from jax._src.lax import lax  # noqa: TID251 - no setting


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the program for as long as the patch lasts."""
    stock = lax.stage_p.impl

    def staged(value: Any) -> Any:
        if isinstance(value, jax.Array) or not jax.sharding.get_abstract_mesh().empty:
            return stock(value)
        # An array may change later: a device of the CPU uses its memory.
        return jax.device_put(value.copy() if isinstance(value, np.ndarray) else value)

    monkeypatch.setattr(lax.stage_p, "impl", staged)
