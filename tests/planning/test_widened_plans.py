"""Which products with weights of few bits a kernel computes, and how it refuses others."""

import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import target
from pallas_gemm.device import DEVICES, H200
from pallas_gemm.kernels.hopper.widened import problems
from pallas_gemm.kernels.hopper.widened.config import DEPTHS, WidenedConfig
from pallas_gemm.planning import config_json, heuristics, prediction
from pallas_gemm.planning.architectures import ARCHITECTURES, WIDENED, of_problem
from pallas_gemm.planning.candidates import widened
from pallas_gemm.problem import Blocks, Epilogue, Problem
from tests.api import test_narrow_on_a_gpu as on_a_gpu

BLOCKS = Blocks(128, 0, 1)


def problem(m: int = 16, n: int = 4096, k: int = 4096, kind: Any = jnp.int4, **own: Any) -> Problem:
    return Problem(m, n, k, own.pop("a_dtype", jnp.bfloat16), kind, **own)


@pytest.mark.parametrize("m", [1, 16, 40, 64, 100, 256, 300, 4096])
@pytest.mark.parametrize("kind", [jnp.int4, jnp.int8])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(
    "blocks", [None, BLOCKS, Blocks(32, 0, 1), BLOCKS._replace(zeros=True), Blocks(4096, 0, 1)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_there_is_a_config_for_any_rows(
    m: int, kind: Any, transpose_b: bool, blocks: Any, gated: bool
) -> None:
    epilogue = Epilogue(gated=gated, residual=gated)
    asked = problem(m, kind=kind, transpose_b=transpose_b, blocks=blocks, epilogue=epilogue)
    assert of_problem(asked)[0] is WIDENED
    config = heuristics.best(asked, H200, WIDENED)
    assert isinstance(config, WidenedConfig)
    assert not config.refusals(asked, H200)
    assert config_json.read(config_json.written(config)) == config
    # The weights alone take so long to be read.
    least = asked.n * asked.k * (0.5 if kind == jnp.int4 else 1) / 4.8e12
    assert least < prediction.seconds(asked, config, H200, WIDENED) < 1e-3


@pytest.mark.parametrize("gated", [False, True])
def test_few_rows_have_a_config_for_any_k(gated: bool) -> None:
    for m, k in itertools.product((1, 16, 32), (16, 64, 128, 192, 256)):
        assert heuristics.best(problem(m, k=k, epilogue=Epilogue(gated=gated)), H200, WIDENED)


@pytest.mark.parametrize("kind", [jnp.int4, jnp.int8])
def test_no_table_limits_its_tiles(kind: Any) -> None:
    config = heuristics.best(problem(16, 2**16, 256, kind, batch=256), H200, WIDENED)
    assert config is not None
    assert math.prod(config.stacked_grid(problem(16, 2**16, 256, kind, batch=256))) >= 2**16


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (problem(k=4104, transpose_b=True), "the last dimension of b must be a multiple of 32"),
        (problem(n=4112), "the last dimension of b must be a multiple of 32 for int4, got 4112"),
        (problem(k=4100), "k must be a multiple of 8 for bfloat16, got 4100"),
        (problem(n=4100, transpose_b=True), "rows of a multiple of 16 bytes, got 4100 columns"),
        (problem(transpose_a=True), "the left operand must be stored with k last"),
        (problem(out_dtype=jnp.int8), "the result must be one of"),
        (problem(m=0), "sizes must be positive"),
        (problem(blocks=Blocks(16, 0, 1)), "scales are those of 32, 64, 128 or more weights"),
        (problem(blocks=Blocks(128, 1, 1)), "or of all, got blocks of 1 x 128 of a"),
        (
            problem(n=4112, transpose_b=True, blocks=Blocks(128, 0, 1, zeros=True)),
            "zero points of int4 need n of a multiple of 32, got n=4112",
        ),
        (problem(symmetric="gram"), "those of one product, of a batch, or of rows in groups"),
        (
            problem(epilogue=Epilogue(residual=True), residual_dtype=jnp.int8),
            "what has a value for each element must be one of bfloat16, float16, float32, got int8",
        ),
        (problem(parts=2), "it promises no order in which sums are made"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_the_kernel_does_not_take_is_said_in_words(asked: Problem, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        assert not problems.refusals(asked), "; ".join(problems.refusals(asked))


def test_a_function_of_the_product_reduces_nothing() -> None:
    x = jax.ShapeDtypeStruct((16, 512), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((512, 256), jnp.int8)

    def f(x: Any, w: Any) -> Any:
        return pallas_gemm.gemm(x, w, epilogue=lambda s: (s.astype(jnp.bfloat16), jnp.sum(s, -1)))

    with target("h200"):
        text = " ".join(str(pallas_gemm.explain(f, x, w)).split())
    assert "the rest of the epilogue by XLA" in text
    assert "a function of the product reduces nothing" in text


def words_of(m: int, *, n: int = 2048, k: int = 2048, groups: int = 16, **options: Any) -> str:
    """What `explain` says of a product of int4."""
    x, w = jax.ShapeDtypeStruct((m, k), jnp.bfloat16), jax.ShapeDtypeStruct((k, n), jnp.int4)
    scale = jax.ShapeDtypeStruct((groups, n) if groups > 1 else (n,), jnp.bfloat16)

    def f(x: Any, w: Any, scale: Any) -> Any:
        return pallas_gemm.gemm(x, w, col_scale=scale, **options)

    with target("h200"):
        return " ".join(str(pallas_gemm.explain(f, x, w, scale)).split())


def test_xla_multiplies_many_rows_by_weights_that_it_widens_in_memory() -> None:
    assert "XLA is predicted to take" not in words_of(64) + words_of(1024)
    words = words_of(16384)
    assert "no kernel is as fast" in words
    found = re.search(
        r"XLA is predicted to take (\d+) us, of which it widens weights in memory for (\d+) us, and"
        r" the kernel that widens them (\d+) us",
        words,
    )
    assert found is not None
    by_xla, widening, own = map(int, found.groups())
    assert widening < by_xla < own


@pytest.mark.parametrize("options", [{"implementation": "hopper"}, {"groups": 1}], ids=str)
def test_what_is_named_or_may_be_widened_by_xla_in_its_product_is_the_kernels(options: Any) -> None:
    assert "XLA is predicted to take" not in words_of(16384, **options)


def test_weights_on_the_left_are_xlas() -> None:
    asked = problem(a_dtype=jnp.int8, kind=jnp.bfloat16)
    assert of_problem(asked) == ARCHITECTURES
    assert "weights of few bits are the right operand" in problems.refusals(asked)[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"consumers": 4, "along_k": 2}, "must make from 1 to 6 warpgroups"),
        ({"ctas_along_k": 9}, "ctas_along_k must be from 1 to 8, got 9"),
        ({"step": 48}, "step must be one of"),
        ({"tile": (96, 16)}, "a multiple of 64 for each consumer"),
        ({"tile": (128, 12)}, "a multiple of 8, got"),
        ({"tile": (256, 64)}, "a warpgroup holds at most 60 registers of sums, got 128"),
        (
            {"tile": (128, 168), "along_k": 1},
            "a warpgroup holds at most 160 registers of sums, got 168",
        ),
        # A consumer frees a slot when it has its next one: with four all would wait for ever.
        ({"stages": 4}, "from twice as many to 32, got 4"),
        ({"persistence": "dynamic"}, "persistence must be 'none' or 'static', got 'dynamic'"),
        ({"split_k": 2}, "split_k"),
    ],
    ids=str,
)
def test_configs_that_no_product_could_be_computed_with(changes: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        WidenedConfig(**changes)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (WidenedConfig(schedule="hilbert"), "schedule must be 'raster' where weights go through"),
        (WidenedConfig(step=32), "step must be a multiple of 64 for bfloat16, got 32"),
        (WidenedConfig(ctas_along_k=8), "along_k and ctas_along_k share 8 steps"),
        (WidenedConfig(shares_all=True), "all CTAs share tiles of products without groups"),
        (WidenedConfig(stages=32, tile=(128, 32)), "shared memory: needs"),
    ],
    ids=["order", "step", "steps", "all", "memory"],
)
def test_configs_that_do_not_suit_a_product(config: WidenedConfig, reason: str) -> None:
    asked = problem(k=1024, blocks=BLOCKS)
    assert any(reason in why for why in config.refusals(asked, H200))


@pytest.mark.parametrize("kind", [jnp.int4, jnp.int8, jnp.float8_e4m3fn, jnp.float32])
def test_a_step_has_two_batches_at_least(kind: Any) -> None:
    """With one, registers would be written that the WGMMA of the step before may still read."""
    wide = jnp.float32 if kind == jnp.float32 else jnp.bfloat16
    asked = problem(kind=kind, a_dtype=wide)
    configs = [WidenedConfig(tile=(64, 16), step=step, along_k=1) for step in DEPTHS]
    legal = [config.form(asked) for config in configs if not config.refusals(asked, H200)]
    assert len(legal) > 1
    assert all(form.depth >= 2 * form.batch for form in legal)


def test_configs_of_float32_that_a_gpu_is_tested_with_are_legal() -> None:
    for m, n, config in on_a_gpu.SINGLES:
        asked = problem(
            m, n, 1020, jnp.float32, a_dtype=jnp.float32, out_dtype=jnp.float32,
            epilogue=Epilogue(residual=True),
        )  # fmt: skip
        assert not on_a_gpu.turned(config).refusals(asked, H200)


@pytest.mark.parametrize("last", [False, True])
def test_configs_that_a_gpu_is_tested_with_are_legal(last: bool) -> None:
    def why_not(m: int, tiles: int, kind: Any, config: WidenedConfig) -> list[Any]:
        asked = problem(
            m, 128 * tiles, 4096, kind, transpose_b=last, blocks=BLOCKS, out_dtype=jnp.float32,
            epilogue=Epilogue(residual=True),
        )  # fmt: skip
        # The tiles are so many that CTAs of 132 SMs share some. The GPUs differ in their clusters.
        own = [x for x in DEVICES.values() if (x.compute_capability, x.sms) == ((9, 0), 132)]
        assert len(own) > 1
        return [(config, why) for device in own for why in config.refusals(asked, device)]

    for m, tiles, named in on_a_gpu.IN_CLUSTERS:
        for kind in (jnp.int4, jnp.int8):
            assert why_not(m, tiles, kind, on_a_gpu.in_clusters(m, named)) == []
    for m, tiles, named in on_a_gpu.BY_ALL:
        assert why_not(m, tiles, jnp.int4, on_a_gpu.by_all(m, named)) == []
    in_groups = problem(200, 2816, 2048, groups=5, blocks=BLOCKS, out_dtype=jnp.float32)
    for named in on_a_gpu.IN_GROUPS:
        assert list(on_a_gpu.in_groups(named).refusals(in_groups, H200)) == []


@pytest.mark.parametrize(("groups", "m", "steps"), [(0, 32, {64, 128}), (8, 192, {64})])
def test_two_pairs_of_warpgroups_take_short_steps_in_groups(
    groups: int, m: int, steps: set[int]
) -> None:
    """With 128 they have too few registers there."""
    found = widened.candidates(problem(m, 14336, groups=groups, blocks=BLOCKS), H200)
    pairs = [x for x in found if x.tile == (256, 32) and (x.consumers, x.along_k) == (2, 2)]
    assert {x.step for x in pairs} == steps


def test_ctas_share_tiles_where_there_would_be_too_few_of_them() -> None:
    def ctas(m: int, n: int, k: int) -> int:
        config = heuristics.best(problem(m, n, k, blocks=BLOCKS), H200, WIDENED)
        assert isinstance(config, WidenedConfig)
        return config.ctas_along_k

    assert [ctas(1, 8192, 8192), ctas(8, 4096, 14336), ctas(16, 5120, 5120)] == [2, 3, 8]
    assert [ctas(16, 14336, 4096), ctas(64, 28672, 8192), ctas(256, 14336, 4096)] == [1, 1, 1]


@pytest.mark.parametrize("kind", [jnp.int4, jnp.int8])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(112, 4096, 4096), (128, 5120, 13824), (178, 128, 8192), (256, 1024, 4096)],
)
def test_few_tiles_of_many_rows_leave_few_sms_idle(m: int, n: int, k: int, kind: Any) -> None:
    asked = problem(m, n, k, kind, blocks=BLOCKS)
    config = heuristics.best(asked, H200, WIDENED)
    assert isinstance(config, WidenedConfig)
    # In tiles of 128 columns and 128 rows, at most 64 of 132 SMs have one.
    assert config.workers(asked, H200) * config.ctas_along_k > 95
    # With 128 registers of sums, what is handed over to other CTAs spills.
    assert config.ctas_along_k == 1 or config.sum_registers <= 96


@pytest.mark.parametrize(("m", "n", "k", "groups"), [(128, 14336, 4096, 8), (64, 5120, 8192, 16)])
def test_clusters_share_tiles_of_groups_that_are_more_than_they_are(
    m: int, n: int, k: int, groups: int
) -> None:
    asked = problem(m, n, k, groups=groups, blocks=BLOCKS)
    config = heuristics.best(asked, H200, WIDENED)
    assert isinstance(config, WidenedConfig)
    assert (config.ctas_along_k, config.persistence) == (2, "static")
    assert config.tiles(asked) > config.workers(asked, H200)


def test_clusters_share_tiles_that_are_more_than_they_are() -> None:
    config = heuristics.best(problem(1, 18944, 4096, blocks=BLOCKS), H200, WIDENED)
    assert isinstance(config, WidenedConfig)
    # 132 CTAs with a tile of 128 columns each would leave 16 tiles for a second time.
    assert config.ctas_along_k > 2
    assert config.persistence == "static"


@pytest.mark.parametrize("kind", [jnp.int4, jnp.int8])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_all_ctas_share_the_tiles_of_long_products_of_many_rows(
    kind: Any, transpose_b: bool
) -> None:
    def config(m: int, n: int, k: int) -> WidenedConfig:
        asked = problem(m, n, k, kind, blocks=BLOCKS, transpose_b=transpose_b)
        found = heuristics.best(asked, H200, WIDENED)
        assert isinstance(found, WidenedConfig)
        assert not found.refusals(asked, H200)
        if found.shares_all:
            # 40 tiles, or other few, are no whole number for each.
            assert found.workers(asked, H200) == H200.sms
        return found

    assert config(128, 5120, 13824).shares_all
    assert config(120, 4096, 14336).shares_all
    assert not any(config(*sizes).shares_all for sizes in [(1, 8192, 8192), (64, 8192, 8192)])
    assert not any(config(*sizes).shares_all for sizes in [(128, 4096, 4096), (256, 5120, 13824)])


def test_the_simulator_says_what_it_does_not_know() -> None:
    config = WidenedConfig(ctas_along_k=2)
    with pytest.raises(ValueError, match="ctas_along_k must be 1 to be simulated, got 2"):
        WIDENED.build(problem(), config, H200, True)


def test_a_line_of_weights_is_as_wide_as_a_swizzle_at_least() -> None:
    config = WidenedConfig(tile=(64, 16), step=64)
    assert config.line(problem()) == 32
    assert not config.refusals(problem(), H200)


@pytest.mark.parametrize("k", [512, 64])
def test_the_kernel_is_simulated_where_it_is_named(k: int) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-3, 4, (5, k)).astype(jnp.bfloat16))
    w = jnp.asarray(rng.integers(-8, 8, (k, 128)).astype(jnp.int8)).astype(jnp.int4)
    scales = jnp.asarray((2.0 ** rng.integers(-1, 2, (-(-k // 128), 128))).astype(jnp.bfloat16))

    def product(implementation: str) -> np.ndarray:
        found = pallas_gemm.gemm(x, w, col_scale=scales, implementation=implementation)
        return np.asarray(found, np.float64)

    np.testing.assert_array_equal(product("interpret"), product("xla"))


SHORT_RING = {"persistence": "static", "store_columns": 32, "consumers": 2, "along_k": 1}


@pytest.mark.parametrize(
    ("tile", "step", "stages", "us"),
    [
        ((128, 256), 64, 2, 625.4),
        ((256, 160), 32, 3, 424.3),
        ((128, 128), 64, 3, 452.4),
        ((128, 256), 32, 4, 316.7),
    ],
)
def test_a_ring_with_few_free_slots_takes_as_long_as_measured(
    tile: tuple[int, int], step: int, stages: int, us: float
) -> None:
    """Of 4096 cubed in float32, on an H200: WGMMAs in flight keep two slots."""
    asked = problem(4096, kind=jnp.float32, a_dtype=jnp.float32, out_dtype=jnp.float32)
    config = WidenedConfig(tile=tile, step=step, stages=stages, **SHORT_RING)
    assert widened.seconds(asked, config, H200) * 1e6 == pytest.approx(us, rel=0.06)


def test_rows_that_begin_within_a_line_or_a_sector_are_loaded_more_slowly() -> None:
    """312 x 2164 x 768 takes 11.3 us with this config."""
    own: Any = {"kind": jnp.float32, "a_dtype": jnp.float32, "out_dtype": jnp.float32}
    config = WidenedConfig(
        tile=(128, 48), step=32, stages=8, store_columns=32, consumers=2, along_k=1
    )
    each = [widened.seconds(problem(312, n, 768, **own), config, H200) for n in (2176, 2168, 2164)]
    assert each[0] * 1.05 < each[1] < each[2] / 1.2
    assert each[2] * 1e6 == pytest.approx(11.3, rel=0.1)
