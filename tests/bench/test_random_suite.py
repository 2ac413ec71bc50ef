"""Products drawn at random: different ones, of the kinds that are promised, the same for a seed."""

import collections

import pytest

from bench import random_suite, suites


def test_a_seed_draws_the_same_products_and_another_seed_others() -> None:
    first, again, other = (random_suite.drawn(seed) for seed in (1, 1, 2))
    assert first == again
    assert len({case.name for case in first}) == len(first) == random_suite.COUNT
    assert len({case.name for case in (*first, *other)}) > 1.9 * random_suite.COUNT


def test_types_and_layouts_are_drawn_in_the_shares_that_are_promised() -> None:
    cases = [case for seed in range(10) for case in random_suite.drawn(seed)]
    dtypes = collections.Counter(case.dtype for case in cases)
    assert dtypes["bf16"] / len(cases) == pytest.approx(0.8, abs=0.05)
    assert {case.layout for case in cases if case.dtype == "e4m3"} == {"NT"}
    layouts = collections.Counter(case.layout for case in cases if case.dtype == "bf16")
    assert set(layouts) == {"NN", "NT", "TN"}
    assert min(layouts.values()) > 0.27 * sum(layouts.values())
    rows = sorted(case.m for case in cases)
    assert rows[0] < 4
    assert 100 < rows[len(rows) // 2] < 330
    assert 16384 < rows[-1] <= random_suite.MOST_ROWS


def test_rows_in_memory_are_a_multiple_of_16_bytes() -> None:
    for case in random_suite.drawn(3):
        problem = case.problem
        for shape, dtype in (
            (problem.a_shape, problem.a_dtype),
            (problem.b_shape, problem.b_dtype),
        ):
            assert shape[-1] * dtype.itemsize % 16 == 0


def test_it_is_a_suite_like_the_others() -> None:
    assert random_suite.suite("random", 5) == random_suite.drawn(5)
    assert random_suite.suite("short", 5) == suites.SUITES["short"]
