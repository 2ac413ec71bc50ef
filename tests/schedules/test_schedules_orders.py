"""The builders: each tile once on any grid, the exact definitions, the drawings."""

import doctest
import functools
import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import (
    BUILDERS,
    Schedule,
    by_die,
    clipped_hilbert,
    hilbert,
    log_swizzle,
    nested_swizzle,
    raster,
    swizzle,
)
from tests import clock

Builder = Callable[[int, int], Schedule]

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)
sides = st.one_of(st.integers(1, 40), st.sampled_from(PRIMES), st.just(1))
# Often wider than the grid.
groups = st.integers(1, 60)
along = st.sampled_from(["rows", "cols"])

orders: st.SearchStrategy[Builder] = st.one_of(
    st.builds(functools.partial, st.just(raster), along=along),
    st.builds(
        functools.partial, st.just(swizzle), group=groups, along=along, serpentine=st.booleans()
    ),
    st.builds(
        functools.partial,
        st.just(nested_swizzle),
        factors=st.lists(groups, min_size=1, max_size=4),
        along=along,
    ),
    st.builds(functools.partial, st.just(log_swizzle), log=st.none() | st.integers(0, 16)),
    st.sampled_from([hilbert, clipped_hilbert]),
)


def steps(schedule: Schedule) -> np.ndarray:
    """Returns how many rows plus columns lie between consecutive tiles."""
    return np.abs(np.diff(schedule.order, axis=0)).sum(axis=1)


@given(order=orders, rows=sides, cols=sides)
def test_every_order_visits_each_tile_once(order: Builder, rows: int, cols: int) -> None:
    schedule = order(rows, cols)
    assert schedule.grid == (rows, cols)
    assert schedule.order.dtype == np.int32
    assert not schedule.order.flags.writeable
    tiles = [tuple(tile) for tile in schedule.order.tolist()]
    assert sorted(tiles) == [(row, col) for row in range(rows) for col in range(cols)]


@given(order=orders, rows=sides, cols=sides, dies=st.integers(1, 50))
def test_by_die_gives_each_die_one_run(order: Builder, rows: int, cols: int, dies: int) -> None:
    schedule = order(rows, cols)
    shared = by_die(schedule, dies)
    assert shared.grid == schedule.grid
    runs = [shared.order[die::dies] for die in range(min(dies, rows * cols))]
    assert np.array_equal(np.concatenate(runs), schedule.order)
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_by_die_follows_the_published_formula_where_the_dies_divide_the_tiles() -> None:
    schedule = hilbert(6, 8)
    share = 48 // 8
    assert by_die(schedule, 8).order.tolist() == [
        schedule.order[p % 8 * share + p // 8].tolist() for p in range(48)
    ]


@given(rows=sides, cols=sides)
def test_raster_is_row_major_or_column_major(rows: int, cols: int) -> None:
    assert raster(rows, cols).packed().tolist() == [
        r << 16 | c for r in range(rows) for c in range(cols)
    ]
    assert np.array_equal(
        raster(rows, cols, along="cols").positions(), raster(cols, rows).positions().T
    )


@given(rows=sides, cols=sides, group=groups)
def test_swizzle_is_its_definition(rows: int, cols: int, group: int) -> None:
    expected = []
    for i in range(rows * cols):
        mega = i // (cols * group)
        pos = i - mega * cols * group
        height = rows - (rows // group) * group if mega == rows // group else group
        expected.append([group * mega + pos % height, pos // height])
    straight = swizzle(rows, cols, group=group, serpentine=False)
    assert straight.order.tolist() == expected
    assert nested_swizzle(rows, cols, factors=[group]) == straight
    serpentine = [[r, c if r // group % 2 == 0 else cols - 1 - c] for r, c in expected]
    assert swizzle(rows, cols, group=group).order.tolist() == serpentine


@given(rows=sides, cols=sides, group=groups, serpentine=st.booleans())
def test_swizzle_along_columns_is_the_transpose(
    rows: int, cols: int, group: int, serpentine: bool
) -> None:
    upright = swizzle(rows, cols, group=group, along="cols", serpentine=serpentine)
    lying = swizzle(cols, rows, group=group, along="rows", serpentine=serpentine)
    assert np.array_equal(upright.positions(), lying.positions().T)


@given(rows=st.integers(1, 12), cols=st.integers(1, 12))
def test_swizzle_of_one_row_is_raster(rows: int, cols: int) -> None:
    assert swizzle(rows, cols, group=1, serpentine=False) == raster(rows, cols)
    assert swizzle(rows, cols, group=rows, along="rows") == raster(rows, cols, along="cols")


@given(
    rows=st.integers(1, 20),
    cols=st.integers(1, 20),
    outer=st.integers(1, 8),
    inner=st.integers(1, 8),
)
def test_the_second_factor_recurses_inside_the_megarow(
    rows: int, cols: int, outer: int, inner: int
) -> None:
    expected = []
    for top in range(0, rows, outer):
        for left in range(0, cols, inner):
            block = [
                (r, c)
                for r in range(top, min(top + outer, rows))
                for c in range(left, min(left + inner, cols))
            ]
            expected.extend(map(list, block))
    assert nested_swizzle(rows, cols, factors=[outer, inner]).order.tolist() == expected


@given(rows=st.integers(1, 20), cols=st.integers(1, 20), log=st.integers(0, 6))
def test_log_swizzle_is_its_definition(rows: int, cols: int, log: int) -> None:
    launched = [
        [x >> log, (y << log) + (x & (2**log - 1))]
        for y in range(-(-cols // 2**log))
        for x in range(rows << log)
    ]
    assert log_swizzle(rows, cols, log=log).order.tolist() == [t for t in launched if t[1] < cols]
    assert log_swizzle(rows, cols, log=log) == swizzle(
        rows, cols, group=2**log, along="cols", serpentine=False
    )


@pytest.mark.parametrize(
    ("cols", "log"),
    [(1, 0), (2, 0), (3, 1), (4, 1), (8, 1), (9, 2), (40, 2), (41, 3), (48, 3), (1000, 3)],
)
def test_log_swizzle_picks_its_width_by_the_rule(cols: int, log: int) -> None:
    assert log_swizzle(3, cols).name == f"log_swizzle:{log}"
    assert log_swizzle(3, cols) == log_swizzle(3, cols, log=log)


def lindenmayer_hilbert(level: int) -> list[list[int]]:
    """Returns the (row, col) of the curve from its rewriting rules, an independent construction."""
    word = "A"
    for _ in range(level):
        word = "".join(
            {"A": "+BF-AFA-FB+", "B": "-AF+BFB+FA-"}.get(letter, letter) for letter in word
        )
    tile, heading = complex(0, 0), complex(0, 1)
    visited = [tile]
    for letter in word:
        # Rows are the real axis, columns the imaginary one; the curve begins along the columns.
        heading *= {"+": -1j, "-": 1j}.get(letter, 1)
        if letter == "F":
            tile += heading
            visited.append(tile)
    return [[round(tile.real), round(tile.imag)] for tile in visited]


@pytest.mark.parametrize("level", range(6))
def test_on_powers_of_two_both_curves_are_the_usual_one(level: int) -> None:
    side = 2**level
    assert clipped_hilbert(side, side).order.tolist() == lindenmayer_hilbert(level)
    assert hilbert(side, side) == clipped_hilbert(side, side)
    assert np.all(steps(clipped_hilbert(side, side)) == 1)


@given(rows=st.integers(1, 33), cols=st.integers(1, 33))
def test_clipped_hilbert_skips_the_tiles_outside(rows: int, cols: int) -> None:
    level = (max(rows, cols) - 1).bit_length()
    inside = [tile for tile in lindenmayer_hilbert(level) if tile[0] < rows and tile[1] < cols]
    assert clipped_hilbert(rows, cols).order.tolist() == inside


@given(rows=st.integers(1, 120), cols=st.integers(1, 120))
def test_hilbert_never_jumps(rows: int, cols: int) -> None:
    curve = hilbert(rows, cols)
    assert curve.order[0].tolist() == [0, 0]
    assert np.all(steps(curve) == 1)


def test_hilbert_never_jumps_on_any_small_grid_nor_on_a_thin_one() -> None:
    for rows in range(1, 25):
        for cols in range(1, 25):
            assert np.all(steps(hilbert(rows, cols)) == 1), (rows, cols)
    for cols in (997, 1000, 1023):
        for rows in (1, 2, 3, 4, 7):
            assert np.all(steps(hilbert(rows, cols)) == 1), (rows, cols)


@pytest.mark.parametrize("grid", [(64, 64), (32, 64), (57, 63), (101, 40), (100, 77)])
def test_any_stretch_of_hilbert_is_compact(grid: tuple[int, int]) -> None:
    """A patch of n tiles touches at least 2 sqrt(n) rows and columns; a raster walk far more."""

    def touched(schedule: Schedule) -> float:
        waves = [schedule.order[i : i + 132] for i in range(0, len(schedule) - 132, 132)]
        return float(np.mean([len(set(w[:, 0])) + len(set(w[:, 1])) for w in waves]))

    best = 2 * np.sqrt(132)
    assert best < touched(hilbert(*grid)) < 1.35 * best
    assert touched(raster(*grid)) > 1.7 * best


@pytest.mark.parametrize("name", BUILDERS)
def test_large_tables_are_built_well_under_a_second(name: str) -> None:
    for grid in ((512, 512), (509, 503), (1, 65_535), (65_535, 1)):
        assert clock.takes_at_most(0.5, functools.partial(BUILDERS[name], *grid)), grid


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(
    ("rows", "cols", "message"),
    [
        (0, 4, "rows must be an integer of at least 1, got 0"),
        (4, -1, "cols must be an integer of at least 1, got -1"),
        (65_536, 4, "rows must be at most 65535, got 65536"),
        (4, 10**30, "cols must be at most 65535, got 10{30}"),
        (4.0, 4, r"rows must be an integer of at least 1, got 4\.0"),
        (4, "4", "cols must be an integer of at least 1, got '4'"),
        (4, None, "cols must be an integer of at least 1, got None"),
    ],
)
def test_builders_refuse_what_is_no_grid(name: str, rows: int, cols: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BUILDERS[name](rows, cols)


@pytest.mark.parametrize(
    ("builder", "options", "message"),
    [
        (raster, {"along": "row"}, "along must be 'rows' or 'cols', got 'row'"),
        (swizzle, {"along": 0}, "along must be 'rows' or 'cols', got 0"),
        (swizzle, {"group": 0}, "group must be an integer of at least 1, got 0"),
        (swizzle, {"group": 2.0}, r"group must be an integer of at least 1, got 2\.0"),
        (swizzle, {"group": True}, "group must be an integer of at least 1, got True"),
        (swizzle, {"serpentine": "no"}, "serpentine must be True or False, got 'no'"),
        (nested_swizzle, {"factors": []}, r"factors must be a list of 1 to 32 .*, got \[\]"),
        (nested_swizzle, {"factors": 3}, "factors must be a list of 1 to 32 .*, got 3"),
        (nested_swizzle, {"factors": "8"}, "factors must be a list of 1 to 32 .*, got '8'"),
        (nested_swizzle, {"factors": [2, 0]}, r"factors\[1\] must be .* at least 1, got 0"),
        (nested_swizzle, {"factors": [1] * 33}, "factors must be a list of 1 to 32"),
        (nested_swizzle, {"along": "x"}, "along must be 'rows' or 'cols', got 'x'"),
        (log_swizzle, {"log": -1}, "log must be an integer of at least 0, got -1"),
        (log_swizzle, {"log": 17}, "log must be at most 16, got 17"),
    ],
)
def test_builders_refuse_illegal_options(
    builder: Callable[..., Schedule], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        builder(4, 4, **options)


@pytest.mark.parametrize(
    ("schedule", "dies", "message"),
    [
        (raster(4, 4), 0, "dies must be an integer of at least 1, got 0"),
        (raster(4, 4), 1.5, r"dies must be an integer of at least 1, got 1\.5"),
        ("raster", 2, "schedule must be a Schedule, got 'raster'"),
    ],
)
def test_by_die_refuses_illegal_arguments(schedule: Any, dies: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        by_die(schedule, dies)


def test_sizes_beyond_any_machine_integer_are_only_wide() -> None:
    huge = 10**30
    column_major = raster(4, 5, along="cols")
    assert swizzle(4, 5, group=huge) == column_major
    assert nested_swizzle(4, 5, factors=[huge]) == column_major
    assert by_die(raster(4, 5), huge) == raster(4, 5)


@pytest.mark.parametrize(
    "module",
    [
        *("", ".raster", ".swizzle", ".hilbert", ".dies", ".online", ".spec", ".draw"),
        *(".table", ".triangle", ".pieces"),
    ],
)
def test_drawings_in_the_docstrings_are_true(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"schedules{module}"))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("builder", [*BUILDERS.values(), by_die])
def test_every_builder_draws_itself_on_8_by_8(builder: Builder) -> None:
    drawn = [line for line in (builder.__doc__ or "").splitlines() if len(line.split()) == 8]
    grid = [line.split() for line in drawn if line.split()[0].isdecimal()]
    assert sorted(int(when) for line in grid for when in line) == list(range(64))


def test_importing_schedules_imports_neither_jax_nor_matplotlib() -> None:
    code = "import schedules.__main__, schedules.draw, schedules.model, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    names = {name.partition(".")[0] for name in loaded.stdout.split()}
    assert "numpy" in names
    assert names.isdisjoint({"jax", "jaxlib", "matplotlib", "rich", "pallas_gemm"})
