"""Orders by name: the grammar, its round trip with the names, and its errors."""

import pytest

from schedules import (
    BUILDERS,
    build,
    by_die,
    hilbert,
    log_swizzle,
    nested_swizzle,
    online_swizzle,
    parse,
    raster,
    resolve,
    swizzle,
)
from schedules.spec import is_table_of_all

GRID = (7, 10)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("raster", raster(*GRID)),
        ("raster:rows", raster(*GRID)),
        ("raster:cols", raster(*GRID, along="cols")),
        ("swizzle", swizzle(*GRID)),
        ("swizzle:3", swizzle(*GRID, group=3)),
        ("swizzle:3:serpentine", swizzle(*GRID, group=3)),
        ("swizzle:3:straight", swizzle(*GRID, group=3, serpentine=False)),
        ("swizzle:straight:cols:3", swizzle(*GRID, group=3, along="cols", serpentine=False)),
        ("nested_swizzle:4", nested_swizzle(*GRID, factors=[4])),
        ("nested_swizzle:4x3x2:cols", nested_swizzle(*GRID, factors=[4, 3, 2], along="cols")),
        ("log_swizzle", log_swizzle(*GRID)),
        ("log_swizzle:1", log_swizzle(*GRID, log=1)),
        ("hilbert", hilbert(*GRID)),
        ("by_die:8:hilbert", by_die(hilbert(*GRID), 8)),
        ("by_die:3:swizzle:2:cols", by_die(swizzle(*GRID, group=2, along="cols"), 3)),
    ],
)
def test_a_spec_names_an_order_and_the_name_of_that_order_is_a_spec(
    spec: str, expected: object
) -> None:
    schedule = parse(spec)(*GRID)
    assert schedule == expected
    assert build(spec, *GRID) == expected
    assert parse(schedule.name)(*GRID) == expected
    assert parse(schedule.name)(*GRID).name == schedule.name


def test_every_builder_is_known_by_its_own_name() -> None:
    for name, builder in BUILDERS.items():
        assert builder.__name__ == name
        assert parse(name)(*GRID) == builder(*GRID)


def test_the_arithmetic_twin_has_the_same_name() -> None:
    arithmetic = online_swizzle(*GRID, group=3, along="cols")
    assert resolve("online_swizzle:3:cols", *GRID) == arithmetic
    assert build("online_swizzle:3:cols", *GRID) == arithmetic.table()
    assert [parse(name).is_online for name in ("online_raster", "raster")] == [True, False]
    assert [resolve(name, *GRID).is_online for name in ("online_raster", "raster")] == [True, False]
    with pytest.raises(ValueError, match="no on-line order 'hilbert'; legal: raster, swizzle"):
        parse("online_hilbert")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "there is no order ''; legal: raster, swizzle, .* by_die:DIES:ORDER"),
        ("swizle:8", "there is no order 'swizle'; did you mean 'swizzle'"),
        ("Hilbert", "there is no order 'Hilbert'; did you mean 'hilbert'"),
        ("hilbert:3", "'3' is no option; legal: none"),
        ("raster:", "'' is no option; legal: rows, cols"),
        ("swizzle:0", "group must be an integer of at least 1, got 0"),
        (
            "swizzle:-3",
            "'-3' is no option; legal: GROUP, rows, cols, serpentine, straight",
        ),
        ("swizzle:2x3", "'2x3' is no option"),
        ("swizzle:\u0663", "is no option"),
        ("swizzle:" + "9" * 10, "is no option"),
        ("swizzle:3:4", "'4' sets group a second time"),
        ("swizzle:rows:cols", "'cols' sets along a second time"),
        ("nested_swizzle:4x", "'4x' is no option; legal: FACTORS, rows, cols"),
        ("nested_swizzle:4x0", r"factors\[1\] must be an integer of at least 1, got 0"),
        ("log_swizzle:17", "log must be at most 16, got 17"),
        ("by_die:8", "must be by_die:DIES:ORDER"),
        ("by_die:hilbert", "must be by_die:DIES:ORDER"),
        ("by_die:0:hilbert", "dies must be an integer of at least 1, got 0"),
        ("by_die:2:hilbrt", "there is no order 'hilbrt'; did you mean 'hilbert'"),
        ("by_die:2:" * 40 + "raster", "schedule must be a short text"),
        (8, "schedule must be a short text such as 'swizzle:8', got 8"),
    ],
)
def test_errors_name_the_spec_and_what_is_legal(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(spec)


@pytest.mark.parametrize("spec", [*BUILDERS, "swizzle:3:cols", "nested_swizzle:4x3:rows"])
@pytest.mark.parametrize("grid", [(1, 1), GRID, (64, 1), (3, 129)])
def test_a_table_of_all_tiles_is_known_before_it_is_made(spec: str, grid: tuple[int, int]) -> None:
    assert is_table_of_all(spec, *grid)
    made = build(spec, *grid)
    assert (made.grid, made.triangle, made.is_online) == (grid, None, False)


@pytest.mark.parametrize("spec", ["online_swizzle:2", "by_die:2:raster", "triangle:raster"])
def test_other_orders_have_to_be_made(spec: str) -> None:
    assert not is_table_of_all(spec, *GRID)


@pytest.mark.parametrize(("spec", "grid"), [("swizzle:2", (65_536, 1)), ("swizle", GRID)])
def test_errors_are_those_of_making_it(spec: str, grid: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"must be at most|did you mean") as made:
        build(spec, *grid)
    with pytest.raises(ValueError, match=r"must be at most|did you mean") as found:
        is_table_of_all(spec, *grid)
    assert str(found.value) == str(made.value)
