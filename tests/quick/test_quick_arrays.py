"""Arrays that JAX takes without a program are those that its program would return."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lax import lax  # noqa: TID251
from jax.sharding import AxisType

VALUES = (
    *(
        3,
        2.5,
        True,
        1j,
        np.float64(2),
        np.int64(3),
        np.ones((2, 3)),
        np.arange(5),
        np.zeros((0, 3)),
    ),
    *(
        np.asarray(7),
        np.ones(3, jnp.bfloat16),
        np.ones(3, bool),
        np.ones((2, 3)).T,
        np.arange(6)[::2],
    ),
)
SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "alone": contextlib.nullcontext,
    "another device": lambda: jax.default_device(jax.devices()[3]),
    "auto": lambda: jax.set_mesh(jax.make_mesh((2,), "x", axis_types=(AxisType.Auto,))),
    "explicit": lambda: jax.set_mesh(jax.make_mesh((2,), "x", axis_types=(AxisType.Explicit,))),
}


def told(value: Any) -> tuple[Any, ...]:
    array = jnp.asarray(value)
    # Of what is committed to no device, JAX says that it is on the default one.
    return array.aval, array.weak_type, array.sharding, array.committed, np.asarray(array).tolist()


@pytest.mark.parametrize("where", SURROUNDINGS)
def test_arrays_are_as_jax_makes_them(
    where: str, quick_arrays: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with SURROUNDINGS[where]():
        quick = list(map(told, VALUES))
        assert lax.stage_p.impl is not quick_arrays
        monkeypatch.setattr(lax.stage_p, "impl", quick_arrays)
        assert quick == list(map(told, VALUES))


def test_what_becomes_of_an_array_later_is_not_seen() -> None:
    numbers = np.zeros(3, np.float32)
    taken = jnp.asarray(numbers)
    numbers[:] = 1
    assert taken.tolist() == [0, 0, 0]
