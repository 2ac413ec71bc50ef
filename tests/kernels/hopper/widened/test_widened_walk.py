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
