"""Which steps of which tiles the CTAs of clusters load, of rows in groups."""

import itertools
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.device import H200
from pallas_gemm.kernels import launch
from pallas_gemm.kernels.hopper.widened import kernel, walk
from pallas_gemm.kernels.hopper.widened.config import WidenedConfig
from pallas_gemm.kernels.hopper.widened.plan import WidenedPlan
from tests.kernels.hopper.widened.test_widened_simulated import SIMULATOR, problem


@pytest.mark.parametrize(("rows", "is_shared"), [(64, "row"), (2048, "col")])
def test_tiles_that_follow_each_other_share_the_larger_operand(rows: int, is_shared: str) -> None:
    asked = problem(jnp.float32, rows, 512, 128, to=jnp.float32, out_dtype=jnp.float32, batch=2)
    config = WidenedConfig(tile=(128, 16), along_k=1, stages=2, step=32, store_columns=16)
    plan = WidenedPlan(asked, config, H200, interpret=SIMULATOR)
    with jax.disable_jit():
        tiles = [walk._of_products(plan, jnp.int32(i)) for i in range(config.tiles(asked))]
    places = [tuple(map(int, (tile.product, tile.row, tile.col))) for tile in tiles]
    steps = range(0, 512, 128), range(0, rows, 16)
    assert sorted(places) == list(itertools.product(range(2), *steps))
    assert [int(tile.product) for tile in tiles] == sorted(int(tile.product) for tile in tiles)
    assert len({int(getattr(tile, is_shared)) for tile in tiles[:4]}) == 1


ROWS, COLUMNS = 40, 256
HEIGHT, WIDTH = 128, 8


@pytest.mark.parametrize("sizes", [(9, 0, 17), (0, 0, 0), (20, 12, 8), (25, 14, 40), (40, 40, 40)])
def test_the_tiles_of_a_group_follow_each_other(sizes: Sequence[int]) -> None:
    """Those that run at once have a few rows of its weights, and all columns of tiles."""
    asked = problem(jnp.int4, ROWS, COLUMNS, 640, groups=3, out_dtype=jnp.float32)
    config = WidenedConfig(tile=(HEIGHT, WIDTH), along_k=1, stages=2, store_columns=16)
    plan = WidenedPlan(asked, config, H200, interpret=SIMULATOR)
    with jax.disable_jit():
        count, of_number = walk._of_groups(plan, jnp.array(sizes, jnp.int32))
        tiles = [of_number(jnp.int32(number)) for number in range(int(count))]
    places = [tuple(map(int, (x.product, x.row, x.col, x.end))) for x in tiles]
    assert [group for group, *_ in places] == sorted(group for group, *_ in places)
    assert len(set(places)) == len(places)
    stored = np.zeros((COLUMNS // HEIGHT, ROWS), int)
    for _, row, col, end in places:
        stored[row // HEIGHT, col : min(col + WIDTH, end)] += 1
    assert (stored == 1).all()
    if sum(sizes) > ROWS:
        return
    # The rows of groups begin with another one each, and none has a second turn.
    own = [place for place, tile in zip(places, tiles, strict=True) if not tile.empty]
    for group, members in itertools.groupby(own, key=lambda place: place[0]):
        rows = [row // HEIGHT for row, _ in itertools.groupby(place[1] for place in members)]
        assert rows == [group % 2, (group + 1) % 2]


@pytest.mark.every_other
@pytest.mark.parametrize("sizes", [(9, 0, 17), (0, 0, 0), (20, 12, 8)])
@pytest.mark.parametrize(("persistence", "ctas"), [("none", 0), ("static", 6)])
def test_steps_of_groups_are_loaded_once_and_none_of_other_rows(
    sizes: Sequence[int], persistence: Any, ctas: int, monkeypatch: Any
) -> None:
    asked = problem(jnp.int4, ROWS, COLUMNS, 640, groups=3, out_dtype=jnp.float32)
    config = WidenedConfig(
        tile=(HEIGHT, WIDTH), along_k=1, stages=2, ctas_along_k=2, store_columns=16,
        persistence=persistence, **({"ctas": ctas} if ctas else {}),
    )  # fmt: skip
    plan = WidenedPlan(asked, config, H200, interpret=SIMULATOR)
    loaded = np.zeros((COLUMNS // HEIGHT, ROWS, plan.k_steps), int)
    stored = np.zeros((COLUMNS // HEIGHT, ROWS), int)
    place: dict[str, Any] = {}
    monkeypatch.setattr(walk.lax, "axis_index", place.__getitem__)
    gmem: Any = types.SimpleNamespace(order=jnp.array(sizes, jnp.int32))
    nothing: Any = None
    with jax.disable_jit():
        for place[launch.WORKER] in map(jnp.int32, range(plan.workers)):
            for place[walk.ALONG_K] in map(jnp.int32, range(2)):
                share = walk.share(plan, gmem)
                for turn in range(1 if share.count is None else int(share.count)):
                    at = share.tile(jnp.int32(turn))
                    rank = walk.rank(plan)
                    cta = kernel.Cta(plan, gmem, (), nothing, nothing, at, rank)
                    first, steps = map(int, kernel._span(cta))
                    rows = slice(int(at.col), min(int(at.col) + WIDTH, int(at.end)))
                    loaded[int(at.row) // HEIGHT, rows, first : first + steps] += 1
                    stored[int(at.row) // HEIGHT, rows] += int(at.piece.to == rank)
    assert (loaded[:, : sum(sizes)] == 1).all()
    assert (loaded[:, sum(sizes) :] == 0).all()
    assert (stored == 1).all()
