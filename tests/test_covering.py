"""Few cases hold all that may meet."""

import itertools

import pytest

from tests import covering

OPTIONS = {"a": (1, 2, 3), "b": (4, 5), "c": (6, 7, 8, 9)}


@pytest.mark.parametrize(("strength", "most"), [(2, 13), (3, 20)])
def test_every_legal_meeting_is_in_a_case(strength: int, most: int) -> None:
    def is_legal(case: covering.Case) -> bool:
        return (case["a"], case["b"]) != (1, 5)

    cases = covering.pairs(OPTIONS, is_legal, 500, strength=strength)
    assert all(map(is_legal, cases))
    legal = [dict(zip(OPTIONS, x, strict=True)) for x in itertools.product(*OPTIONS.values())]
    for names in itertools.combinations(OPTIONS, strength):
        wanted = {tuple(x[name] for name in names) for x in legal if is_legal(x)}
        assert {tuple(x[name] for name in names) for x in cases} == wanted
    assert len(cases) <= most
