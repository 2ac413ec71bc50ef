"""Orders of the tiles on and below a diagonal: complete, named, drawn and priced."""

import pickle

import numpy as np
import pytest

from schedules import Schedule, Triangle, build, by_die, hilbert, parse, raster, swizzle
from schedules.draw import numbers, path, waves
from schedules.model import H200, predict, predict_tiles


@pytest.mark.parametrize("tile", [(1, 1), (1, 2), (2, 1), (8, 9), (3, 2), (128, 144)])
@pytest.mark.parametrize("size", [1, 5, 37])
def test_it_has_every_tile_with_something_on_or_below_the_diagonal(tile, size):
    matrices = 2
    triangle = Triangle(-(-size // tile[0]), tile)
    grid = matrices * triangle.rows, -(-size // tile[1])
    # Element by element, and beyond the edge as if the matrix went on.
    wanted = np.zeros(grid, bool)
    for row in range(triangle.rows * tile[0]):
        for col in range(min(row + 1, grid[1] * tile[1])):
            wanted[row // tile[0] :: triangle.rows, col // tile[1]] = True
    np.testing.assert_array_equal(triangle.mask(grid), wanted)
    assert triangle.tiles(grid) == wanted.sum()


@pytest.mark.parametrize("spec", ["raster:cols", "swizzle:3", "hilbert", "by_die:4:raster"])
def test_any_order_keeps_its_sequence_within_it(spec):
    whole, triangle = build(spec, 10, 5), Triangle(10, (1, 2))
    inside = whole.within(triangle)
    kept = [tile for tile in whole.order.tolist() if 2 * tile[1] <= tile[0]]
    assert inside.order.tolist() == kept
    assert len(inside) == triangle.tiles((10, 5))
    assert inside.within(triangle) is inside
    assert np.sort(inside.deal(4)[inside.deal(4) >= 0]).tolist() == sorted(inside.packed())


def test_it_is_a_part_of_what_a_schedule_is():
    whole, inside = raster(4, 4), raster(4, 4).within(Triangle(4))
    again = pickle.loads(pickle.dumps(inside))
    assert inside == again
    assert hash(inside) == hash(again)
    assert inside != whole
    assert by_die(inside, 3).triangle == Triangle(4)
    # All tiles of a grid that is all below the diagonal are not the order of those of any grid.
    low = raster(3, 1).within(Triangle(3))
    assert np.array_equal(low.order, raster(3, 1).order)
    assert low != raster(3, 1)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([(0, 0), (1, 0)], r"shape \(3, 2\) for grid=\(2, 2\) in Triangle"),
        ([(0, 0), (1, 0), (1, 0)], r"tile \(1, 0\) 2 times"),
        ([(0, 0), (1, 0), (0, 1)], r"tile \(0, 1\) 1 times"),
        ([(0, 0), (1, 0), (2, 2)], r"inside grid=\(2, 2\)"),
    ],
)
def test_an_order_of_other_tiles_is_refused(order, words):
    with pytest.raises(ValueError, match=words):
        Schedule((2, 2), np.array(order), triangle=Triangle(2))


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_sizes_are_positive_integers(value):
    with pytest.raises(ValueError, match=f"rows must be an integer.*{value}"):
        Triangle(value)
    with pytest.raises(ValueError, match=r"tile\[1\]"):
        Triangle(1, (1, value))
    with pytest.raises(ValueError, match="pair"):
        Triangle(1, value)


def test_it_has_a_name():
    square, wide = build("triangle:swizzle:3", 6, 6), build("triangle:swizzle:3", 6, 3)
    assert square == swizzle(6, 6, group=3).within(Triangle(6))
    # Without sizes of tiles, the grid is taken for that of a square.
    assert wide == swizzle(6, 3, group=3).within(Triangle(6, (1, 2)))
    named = build("triangle:128x144:hilbert", 9, 8)
    assert named == hilbert(9, 8).within(Triangle(9, (8, 9)))
    assert parse(named.name)(9, 8) == named
    # Sizes count, whatever the grid is taken for without them.
    assert build("triangle:64x128:hilbert", 4, 4) == hilbert(4, 4).within(Triangle(4, (1, 2)))
    for spec in ("triangle", "triangle:", "triangle:8x9:"):
        with pytest.raises(ValueError, match="must be triangle:ORDER"):
            parse(spec)
    with pytest.raises(ValueError, match=r"no order 'hilberd'.*legal: .*triangle:ORDER"):
        parse("triangle:hilberd")


def test_pictures_leave_out_what_is_not_visited():
    order = build("triangle:swizzle:2", 4, 4)
    assert numbers(order) == "0\n1 2\n8 6 4\n9 7 5 3"
    assert waves(order, 5) == "0\n00\n110\n1110"
    assert path(order).splitlines()[0] == "○"


def test_reads_are_those_of_one_array_and_writes_those_of_all():
    problem = {"machine": H200, "tile": (128, 256, 64), "k": 4096}
    half, whole = (
        predict(build(spec, 32, 16), **problem) for spec in ("triangle:swizzle:8", "swizzle:8")
    )
    assert half.compulsory_read_bytes == 4096 * 4096 * 2
    assert whole.compulsory_read_bytes == 2 * half.compulsory_read_bytes
    assert half.compulsory_read_bytes <= half.dram_read_bytes < 0.6 * whole.dram_read_bytes
    assert half.requested_bytes / whole.requested_bytes == pytest.approx(272 / 512)
    assert half.dram_write_bytes == pytest.approx(whole.dram_write_bytes, rel=0.01)
    assert (half.waves, whole.waves) == (3, 4)
    # What stays in the cache is read once, whichever operand a tile reads it as.
    small = predict(build("triangle:raster", 4, 4), machine=H200, tile=(128, 128, 64), k=4096)
    assert small.dram_read_bytes == small.compulsory_read_bytes == 4 * 128 * 4096 * 2


def test_a_batch_and_clusters_are_priced_alike():
    # Two matrices stacked read what two launches one after the other do.
    problem = {"machine": H200, "tile": (128, 128, 64), "k": 1024}
    stacked = predict(raster(16, 8).within(Triangle(8)), **problem)
    apart = predict(raster(8, 8).within(Triangle(8)), batch=2, **problem)
    assert stacked.compulsory_read_bytes == apart.compulsory_read_bytes
    assert stacked.requested_bytes == apart.requested_bytes
    alone = predict(raster(8, 8).within(Triangle(8)), cluster=(2, 1), multicast=False, **problem)
    assert alone.compulsory_read_bytes == 16 * 128 * 1024 * 2


def test_tiles_that_are_not_visited_have_no_wave():
    tiles = predict_tiles(
        raster(4, 4).within(Triangle(4)), machine=H200, tile=(128, 128, 64), k=512
    )
    assert (tiles.wave >= 0).tolist() == np.tri(4, dtype=bool).tolist()
    assert np.isfinite(tiles.l2_share).tolist() == np.tri(4, dtype=bool).tolist()
