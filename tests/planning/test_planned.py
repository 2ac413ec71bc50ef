"""What planning says of many products is what files say: each change of them is on purpose."""

import pytest

from tests.planning import planned
from tests.planning.drawn import DRAWN
from tests.planning.products import ASKED, CONSIDERED, PREDICTED
from tests.planning.swept import SWEPT, intervals

TEN = 10
"""Products of a test: with one each, to begin and end tests took longer than they do."""


@pytest.fixture
def said(request: pytest.FixtureRequest) -> dict[str, dict[str, list[str]]]:
    """What the files say of each product; written anew first, where asked to."""
    if request.config.getoption("write_plans"):
        planned.write_all()
    return {name: planned.sections(file) for name, file in planned.FILES.items()}


@pytest.mark.parametrize("name", CONSIDERED)
def test_the_same_configs_are_considered(name, said) -> None:
    assert planned.considered(CONSIDERED[name]) == said["considered"][name]


@pytest.mark.parametrize("name", PREDICTED)
def test_the_same_is_predicted(name, said) -> None:
    assert planned.predicted(PREDICTED[name]) == said["predicted"][name]


@pytest.mark.parametrize("name", ASKED)
def test_the_same_is_decided(name, said) -> None:
    assert planned.decided(ASKED[name]) == said["decided"][name]


@pytest.mark.parametrize("name", SWEPT)
def test_answers_change_at_the_same_sizes(name, said) -> None:
    assert intervals(SWEPT[name]) == said["swept"][name]


@pytest.mark.parametrize("first", range(0, len(DRAWN), TEN))
def test_the_same_is_decided_of_what_is_drawn(first, said) -> None:
    names = list(DRAWN)[first : first + TEN]
    found = {name: planned.in_short(DRAWN[name]) for name in names}
    assert found == {name: said["drawn"][name] for name in names}
