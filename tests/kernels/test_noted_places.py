"""Where operations are in the source is noted in the tests of this folder that ask for it."""

import jax
import pytest


def _is_noted() -> bool:
    (equation,) = jax.make_jaxpr(lambda x: x + 1)(0.5).eqns
    return equation.source_info.traceback is not None


def test_no_place_is_noted() -> None:
    assert not _is_noted()


@pytest.mark.places
def test_places_are_noted() -> None:
    assert _is_noted()
