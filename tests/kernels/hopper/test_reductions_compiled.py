"""Compiled for an H200: kernels that reduce spill no registers, wherever the result ends."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_gemm import HopperConfig, explain, gemm, offline, target
from pallas_gemm.device import H200
from pallas_gemm.planning.candidates.draft import finished
from pallas_gemm.planning.candidates.hopper import drafts
from tests import summaries

pytestmark = pytest.mark.skipif(
    bool(offline.missing_packages()), reason="needs the extra aot, which brings the compiler"
)
TOKENS, WIDTH, WORDS = 4096, 2048, 24640
"""The last tile reaches beyond the last word in tiles of 128, 192 and 256 columns."""


def _left(s: Any, labels: Any) -> Any:
    hit = lax.broadcasted_iota(jnp.int32, s.shape, 1) == labels[:, None]
    return jax.nn.logsumexp(s, -1), jnp.sum(jnp.where(hit, s, 0), -1)


def _kept(s: Any, labels: Any) -> Any:
    rounded = s.astype(jnp.bfloat16)
    return *_left(rounded.astype(s.dtype), labels), rounded


def _run(function: Any, config: Any, a: Any, b: Any, labels: Any) -> Any:
    with target(H200):
        return gemm(a, b, epilogue=function, operands=(labels,), config=config)


BESIDE_ROWS = [
    jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16),
    jax.ShapeDtypeStruct((WIDTH, WORDS), jnp.bfloat16),
    jax.ShapeDtypeStruct((TOKENS,), jnp.float32),
]
"""Operands of a function that reads a number for each row."""


@pytest.mark.parametrize("function", [_left, _kept])
def test_no_tile_that_reaches_beyond_the_last_column_spills(function: Any) -> None:
    shapes = ((TOKENS, WIDTH), jnp.bfloat16), ((WIDTH, WORDS), jnp.bfloat16), ((TOKENS,), jnp.int32)
    operands = [jax.ShapeDtypeStruct(*x) for x in shapes]
    chosen = functools.partial(_run, function, None)
    (entry,) = explain(chosen, *operands).entries
    plan: Any = entry.decision.plan
    problem = plan.realigned.problem
    configs = [x for x in finished(drafts(problem, H200)) if not x.refusals(problem, H200)]
    configs = [x for x in configs if not x.split_last]
    assert any(x.late_store for x in configs) == (function is _kept)
    assert any(x.pingpong for x in configs) == (function is _left)
    for config in configs:
        run = functools.partial(_run, function, config)
        (found,) = summaries.KEPT.of(run, *operands, target="h200")
        assert (found.spill_bytes, found.serialized) == (0, ""), config


def _place(s: Any, labels: Any) -> Any:
    del labels
    return jnp.argmax(s, -1), jnp.max(s, -1)


def _places(s: Any, labels: Any) -> Any:
    return jnp.argmin(labels[:, None] - 2 * s, -1), *_place(s, labels)


@pytest.mark.parametrize(
    ("function", "tile", "others"),
    [
        (_place, (256, 192), {"stages": 4}),
        (_place, (128, 192), {"stages": 5, "store_columns": 32, "pingpong": True}),
        (_places, (128, 256), {"stages": 4}),
        (_places, (128, 128), {"stages": 5, "store_columns": 32, "pingpong": True}),
    ],
)
def test_places_spill_nothing(function: Any, tile: tuple[int, int], others: Any) -> None:
    config = HopperConfig(tile=tile, late_store=False, **others)
    (found,) = summaries.KEPT.of(
        functools.partial(_run, function, config), *BESIDE_ROWS, target="h200"
    )
    assert (found.spill_bytes, found.serialized) == (0, "")


def _sigmoids(s: Any, labels: Any) -> Any:
    return jnp.sum(jax.nn.log_sigmoid(s * labels[:, None]), -1)


def _wide_softplus(s: Any, labels: Any) -> Any:
    return jax.nn.softplus(s + labels[:, None])


def _softplus(s: Any, labels: Any) -> Any:
    return _wide_softplus(s, labels).astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("function", "late"), [(_sigmoids, False), (_softplus, False), (_softplus, True)]
)
def test_logarithms_without_branches_leave_room_for_large_tiles(function: Any, late: bool) -> None:
    # The result is rounded, or a sum. Elsewhere a logarithm branches, and this tile is refused.
    config = HopperConfig(tile=(128, 256), stages=3, late_store=late)
    (found,) = summaries.KEPT.of(
        functools.partial(_run, function, config), *BESIDE_ROWS, target="h200"
    )
    assert (found.spill_bytes, found.serialized) == (0, "")
    with pytest.raises(ValueError, match="registers per thread"):
        jax.eval_shape(functools.partial(_run, _wide_softplus, config), *BESIDE_ROWS)


def _largest(s: Any) -> Any:
    z = jax.nn.gelu(s)
    return z.astype(jnp.bfloat16), jnp.max(jnp.abs(z), -1)


def _columns(s: Any) -> Any:
    return jax.nn.gelu(s).astype(jnp.bfloat16), jnp.sum(s, 0)


def _both(s: Any) -> Any:
    z, largest = _largest(s)
    return z, largest, jnp.sum(jax.nn.gelu(s), 0)


def _two(s: Any) -> Any:
    return s.astype(jnp.bfloat16), *_largest(s)


def _two_columns(s: Any) -> Any:
    return s.astype(jnp.bfloat16), *_columns(s)


def _compiled(function: Any, config: HopperConfig, *shapes: tuple[int, int]) -> Any:
    """Compiles a kernel for an H200, and says what it spills and which WGMMAs wait."""

    def run(a: Any, b: Any) -> Any:
        with target(H200):
            return gemm(a, b, epilogue=function, config=config, transpose_b=True)

    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    (found,) = summaries.KEPT.of(run, *operands, target="h200")
    return found.spill_bytes, found.serialized


@pytest.mark.parametrize(("function", "stages"), [(_largest, 4), (_columns, 3), (_both, 3)])
@pytest.mark.parametrize(("rows", "columns"), [(4096, 4096), (4096, 4088), (4088, 4096)])
def test_no_tile_that_is_stored_late_spills(
    function: Any, stages: int, rows: int, columns: int
) -> None:
    """The last tiles reach beyond the last row, or the last column."""
    config = HopperConfig(tile=(128, 256), stages=stages, late_store=True)
    found = _compiled(function, config, (rows, 1024), (columns, 1024))
    assert found == (0, "")


@pytest.mark.parametrize("columns", [144, 160, 176, 208, 224])
def test_columns_are_reduced_in_tiles_of_any_width(columns: int) -> None:
    config = HopperConfig(tile=(128, columns), stages=3, late_store=True)
    found = _compiled(_columns, config, (4096, 1024), (4000, 1024))
    assert found == (0, "")


@pytest.mark.parametrize("pingpong", [False, True])
@pytest.mark.parametrize("function", [_two, _two_columns])
def test_two_results_spill_little_wherever_the_result_ends(function: Any, pingpong: bool) -> None:
    """A branch for tiles that reach beyond the result took up to 3,636 bytes."""
    tile = (128, 128) if pingpong else (128, 256)
    form: Any = {"pingpong": pingpong, "store_slots": 1, "late_store": False}
    config = HopperConfig(tile=tile, stages=3, store_columns=64, **form)
    spilled, waiting = _compiled(function, config, (4088, 1024), (2728, 1024))
    assert spilled <= 128
    assert not waiting
