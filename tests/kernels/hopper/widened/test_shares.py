"""Which steps of which tiles the CTAs of a cluster take: each once, and all equally many."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm.kernels.hopper.widened import shares

CLUSTERS = [(1, 2), (1, 4), (1, 8), (3, 4), (2, 4), (5, 4), (4, 4), (3, 8), (13, 8), (2, 5)]


@pytest.fixture(autouse=True)
def _without_jit() -> Any:
    with jax.disable_jit():
        yield


def pieces(tiles: int, ctas: int, steps: int) -> list[list[shares.Piece]]:
    """The pieces of each CTA of a cluster, as numbers."""
    found = []
    for rank in range(ctas):
        own = shares.Pieces(jnp.int32(tiles), ctas, steps, jnp.int32(rank))
        turns = range(int(own.count))
        found.append([shares.Piece(*map(int, own.piece(jnp.int32(turn)))) for turn in turns])
    return found


@pytest.mark.every_other
@pytest.mark.parametrize(("tiles", "ctas"), CLUSTERS)
@pytest.mark.parametrize("steps", [8, 29])
def test_each_step_is_taken_once(tiles: int, ctas: int, steps: int) -> None:
    taken, all_pieces = np.zeros((tiles, steps), int), pieces(tiles, ctas, steps)
    for own in all_pieces:
        for piece in own:
            taken[piece.tile, piece.first : piece.first + piece.steps] += 1
        assert min(piece.steps for piece in own) > 0
    assert (taken == 1).all()
    sums = [sum(piece.steps for piece in own) for own in all_pieces]
    assert max(sums) - min(sums) <= 1
    assert max(sums) == -(-tiles * steps // ctas)


@pytest.mark.parametrize(("tiles", "ctas"), CLUSTERS)
def test_what_is_sent_is_awaited(tiles: int, ctas: int) -> None:
    sent: dict[tuple[int, int], list[int]] = {}
    awaited: dict[tuple[int, int], int] = {}
    for rank, own in enumerate(pieces(tiles, ctas, 29)):
        # A barrier counts what is sent to a CTA, and is used once.
        assert sum(piece.awaited > 0 for piece in own) <= 1
        for piece in own:
            if piece.to != rank:
                sent.setdefault((piece.tile, piece.to), []).append(piece.place)
                continue
            awaited[piece.tile, rank] = piece.awaited
    assert sorted(tile for tile, _ in awaited) == list(range(tiles))
    for where, count in awaited.items():
        assert sorted(sent.pop(where, [])) == list(range(count))
    assert not sent
    assert max(awaited.values()) <= shares.most_awaited(tiles, 1, ctas)


@pytest.mark.parametrize(("tiles", "clusters"), [(30, 30), (86, 30), (148, 30), (7, 3)])
def test_clusters_have_tiles_side_by_side(tiles: int, clusters: int) -> None:
    own = [shares.of_cluster(tiles, clusters, jnp.int32(cluster)) for cluster in range(clusters)]
    ends = [(int(first), int(first + count)) for first, count in own]
    assert ends[0][0] == 0
    assert ends[-1][1] == tiles
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ends))
    assert {end - first for first, end in ends} <= {tiles // clusters, -(-tiles // clusters)}
