"""What is legal on Blackwell: each refusal says which argument, what it was, and what it may be."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedules
from bench.blackwell_ladder import STEPS
from pallas_gemm import config as config_module
from pallas_gemm.device import B200, DEVICES, H200, Device
from pallas_gemm.kernels.blackwell import config as blackwell_config
from pallas_gemm.kernels.blackwell.config import BlackwellConfig
from pallas_gemm.planning.candidates.blackwell import MOST_STAGES, candidates
from pallas_gemm.problem import Epilogue, Problem
from tests import test_config

CONFIG = BlackwellConfig()
NT = Problem(4096, 4096, 4096, transpose_b=True)
NN = dataclasses.replace(NT, transpose_b=False)
FLOAT32 = dataclasses.replace(NT, out_dtype=jnp.float32)
GATED = dataclasses.replace(NT, epilogue=Epilogue(gated=True))
RESIDUAL = dataclasses.replace(NT, epilogue=Epilogue(residual=True))
GRAM = dataclasses.replace(NT, symmetric="gram")
B300 = DEVICES["b300"]
RTX = dataclasses.replace(B200, kind="NVIDIA RTX 5090", compute_capability=(12, 0))


def case(
    says: tuple[str, ...],
    problem: Problem = NT,
    device: Device = B200,
    among: int = 1,
    **changes: Any,
) -> test_config.Case:
    config = dataclasses.replace(CONFIG, **changes)
    return test_config.Case(says, config, problem, device, among)


def of_type(dtype: Any, out: Any = jnp.bfloat16, **changes: Any) -> Problem:
    return dataclasses.replace(NT, a_dtype=dtype, b_dtype=dtype, out_dtype=out, **changes)


CASES = {
    # Whatever the problem.
    "Hopper": case(("needs compute capability 10.x", "NVIDIA H200 has 9.0"), device=H200),
    "consumer": case(("needs compute capability 10.x", "NVIDIA RTX 5090 has 12.0"), device=RTX),
    "no such cluster": case(
        ("cluster: NVIDIA B200 runs no cluster of (2, 1)",),
        device=dataclasses.replace(B200, measured_clusters=((1, 148), (2, 0))),
    ),
    # The order of the tiles.
    "schedule's columns": case(
        ("schedule: ", "cols must be at most 65535, got 65537"),
        dataclasses.replace(NT, n=256 * 65536 + 8),
    ),
    "schedule's batch": case(
        ("schedule: rows must be at most 65535", "rows are those of a batch of 70000"),
        dataclasses.replace(NT, m=256, n=256, batch=70_000),
    ),
    "schedule's grid": case(
        ("schedule must be made for the grid (16, 16)", "got (32, 32)"),
        schedule=schedules.build("raster", 32, 32),
    ),
    "schedule of half": case(
        ("schedule must visit every tile", "got one of Triangle"),
        schedule=schedules.raster(16, 16).within(schedules.Triangle(16)),
    ),
    "other parts than are promised": case(
        ("numerics promises", "has to be that, and nothing else may cut it, got split_k=1"),
        dataclasses.replace(NT, parts=4),
    ),
    "computed order": case(
        ("persistence='dynamic' needs a schedule that is a table",),
        persistence="dynamic",
        schedule="online_raster",
    ),
    # Pieces of k.
    "more pieces than steps": case(
        ("split_k must be at most 4, the steps of 64 in k=256, got 5",),
        dataclasses.replace(NT, k=256),
        split_k=5,
    ),
    "half in pieces of k": case(
        ("split_k must be 1 for a symmetric result", "got 2"), GRAM, split_k=2
    ),
    "more tiles cut than there are": case(
        ("split_last must be below the 256 cluster tiles", "got 256; split_last=None cuts all"),
        split_k=2,
        split_last=256,
    ),
    "last tiles of a computed order": case(
        ("split_last needs a schedule that is a table, got 'online_raster'",),
        split_k=2,
        split_last=3,
        schedule="online_raster",
    ),
    "direct store of the last tiles": case(
        ("direct_store has no tiles of another kernel", "direct_store=False would fit"),
        direct_store=True,
        split_k=2,
        split_last=3,
    ),
    # The tile and its accumulators.
    "half an atom": case(("a multiple of 128 for", "layout NN", "192)"), NN, tile=(128, 192)),
    "half of a gate": case(
        ("a multiple of 64 for", "2 right operands", "tile=(128, 96)"),
        GATED,
        tile=(128, 96),
        store_columns=16,
    ),
    # How the result is stored.
    "whole chunks": case(
        ("store_columns must divide the 96 columns", "got 64"), tile=(128, 96), store_columns=64
    ),
    "wide chunks": case(
        ("store_columns must be from 8 to 32 for float32", "got 64"), FLOAT32, stages=2
    ),
    "narrow chunks": case(
        ("store_columns must be from 32 to 128 for float8_e5m2", "got 16"),
        dataclasses.replace(NT, out_dtype=jnp.float8_e5m2),
        store_columns=16,
    ),
    "direct residual": case(("direct_store has no residual",), RESIDUAL, direct_store=True),
    "squares": case(("store_columns must be 64, got 32",), GRAM, store_columns=32),
    "direct mirror": case(("direct_store has no mirrored half",), GRAM, direct_store=True),
    "half in float32": case(
        ("a symmetric result is one of 16 bits, got float32",),
        dataclasses.replace(GRAM, out_dtype=jnp.float32),
        among=2,
        stages=2,
    ),
    # What there is of it.
    "memory": case(("shared memory: needs ", "fewer stages than 7"), stages=7),
    # The problem.
    "transposed result": case(
        ("stores the result [m, n]", "got transpose_out=True"),
        dataclasses.replace(NT, transpose_out=True),
    ),
    "cut result": case(
        ("stores all rows and columns", "got kept=(4090, 4096)"),
        dataclasses.replace(NT, kept=(4090, 4096)),
    ),
    "pieces": case(
        ("takes no sum of products", "got (2048, 2048)"),
        dataclasses.replace(NT, terms=(2048, 2048)),
    ),
    "rows of a": case(
        ("the last dimension of a must be a multiple of 8", "got 4095", "the next is 4096"),
        dataclasses.replace(NT, k=4095),
        among=2,
    ),
    "rows of the result": case(
        ("the last dimension of the result must be a multiple of 8", "got 4100"),
        dataclasses.replace(NT, n=4100),
    ),
    "columns of a": case(
        ("a stored [k, m] needs m to be a multiple of 64", "got m=4104"),
        dataclasses.replace(NT, m=4104, transpose_a=True),
    ),
    "columns of b": case(
        ("b stored [k, n] needs n to be a multiple of 64", "got n=4104"),
        dataclasses.replace(NN, n=4104),
    ),
    "two types": case(
        ("operands must have one dtype", "got bfloat16 and float16"),
        dataclasses.replace(NT, b_dtype=jnp.float16),
    ),
    "float32": case(
        ("operands must be bfloat16, float16, float8 or int8, got float32",),
        of_type(jnp.float32),
    ),
    "layout": case(
        ("float8_e4m3fn operands must be stored with k last", "got layout NN"),
        of_type(jnp.float8_e4m3fn, transpose_b=False),
    ),
    "result": case(
        ("the result of int8 must be one of bfloat16, ", "float8_e5m2, int32, got int8"),
        of_type(jnp.int8, jnp.int8),
    ),
    "epilogue of integers": case(
        ("the result of int8 with an epilogue must be one of bfloat16, ", "got int32"),
        of_type(jnp.int8, jnp.int32, epilogue=Epilogue(alpha=2.0)),
        store_columns=32,
    ),
    "registers": case(
        ("with an activation and specialised=False, store_columns must be at most 32", "got 64"),
        dataclasses.replace(NT, epilogue=Epilogue(activation=jax.nn.gelu)),
        specialised=False,
        persistence="none",
    ),
    "integers": case(
        ("only compute capability 10.0 multiplies int8", "NVIDIA B300 SXM6 AC has 10.3"),
        of_type(jnp.int8, jnp.int32),
        device=B300,
        store_columns=32,
    ),
    "empty": test_config.Case(
        ("sizes must be positive", "k=0"), CONFIG, dataclasses.replace(NT, k=0), B200
    ),
    "empty result": test_config.Case(
        ("m, n and batch must be positive",), CONFIG, dataclasses.replace(NT, m=0), B200, among=2
    ),
}


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str, str]] = {
    "cluster": ({"cluster": (1, 2)}, "cluster must be (1, 1) or, for a pair", "got (1, 2)"),
    "tile": ({"tile": (512, 512)}, "tile must be from (1, 1) to (128, 512)", "(512, 512)"),
    "persistence": (
        {"persistence": "lazy"},
        "persistence must be 'none', 'static' or 'dynamic'",
        "'lazy'",
    ),
    "ctas": ({"ctas": 1}, "ctas must be at least one cluster (2)", "got 1"),
    "store_columns": ({"store_columns": 8}, "store_columns must be one of (64, 32, 16)", "got 8"),
    "store_slots": ({"store_slots": 0}, "store_slots must be at least 1", "got 0"),
    "schedule": ({"schedule": "zigzag"}, "there is no order", "'zigzag'"),
    "rows": ({"tile": (64, 256)}, "tile rows must be 128", "got tile=(64, 256)"),
    "columns": (
        {"tile": (128, 208)},
        "tile columns must be a multiple of 32",
        "tile=(128, 208); the nearest is (128, 192)",
    ),
    "columns of no default": (
        {"tile": (128, 100)},
        "BlackwellConfig: tile columns must be a multiple of 32",
        "tile=(128, 100); the nearest is (128, 96)",
    ),
    "room": ({"tile": (128, 512)}, "accumulators must be 1 for tile=(128, 512)", "got 2"),
    "accumulators": ({"accumulators": 3}, "accumulators must be 1 or 2", "got 3"),
    "one tile": (
        {"specialised": False},
        "specialised=False computes one tile per cluster: persistence must be 'none'",
        "'static'",
    ),
    "no pieces": ({"split_k": 0}, "split_k must be at least 1", "got 0"),
    "no tiles to cut": (
        {"split_k": 2, "split_last": 0},
        "split_last must be at least 1, or None for all tiles",
        "got 0",
    ),
    "one piece of the last tiles": (
        {"split_last": 3},
        "split_last needs split_k of at least 2",
        "got split_last=3",
    ),
    "pieces that are taken over": (
        {"split_k": 2, "persistence": "dynamic"},
        "split_k needs persistence='static'",
        "got split_k=2 and persistence='dynamic'",
    ),
    "pieces of one warp": (
        {"split_k": 2, "specialised": False, "persistence": "none"},
        "split_k needs specialised=True",
        "got split_k=2, specialised=False",
    ),
    "step_bytes": ({"step_bytes": 64}, "step_bytes must be 128 or 256", "got 64"),
    "no stages": ({"stages": 0}, "stages must be from 1 to 32", "got 0"),
    "barriers": ({"stages": 33}, "stages must be from 1 to 32", "got 33"),
    "barriers of the residual": (
        {"store_slots": 33},
        "store_slots must be at most 32",
        "got 33",
    ),
}


@pytest.mark.parametrize(("changes", "legal", "value"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_impossible_config_is_refused_where_it_is_made(
    changes: dict[str, Any], legal: str, value: str
) -> None:
    reason = test_config.why_impossible(CONFIG, changes)
    assert legal in reason
    assert value in reason
    assert len(reason) < 200


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1)])
def test_the_defaults_of_a_config_fit_its_tile(cluster: tuple[int, int]) -> None:
    for columns in range(16 * cluster[0], 257, 16 * cluster[0]):
        config = BlackwellConfig(tile=(128, columns), cluster=cluster)
        assert config.refusals(NT, B200) == ()
    assert (CONFIG.stages, CONFIG.store_columns) == (6, 64)
    assert BlackwellConfig(cluster=(1, 1)).stages == 4


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_refusal_says_which_argument_and_what_is_legal(case: test_config.Case) -> None:
    found = [reason for reason in case.reasons if all(part in reason for part in case.says)]
    assert (len(found), len(case.reasons)) == (1, case.among), case.reasons
    with pytest.raises(ValueError, match="config cannot compute this problem: ") as caught:
        case.config.check(case.problem, case.device)
    assert found[0] in str(caught.value)


@pytest.mark.parametrize(
    "text", sorted(test_config.written_reasons(config_module, blackwell_config))
)
def test_every_refusal_that_is_written_has_a_case(text: str) -> None:
    # Any other cluster is refused before it comes to the one of all architectures, and no piece
    # makes several parts.
    general = ("cluster must be one of ", ", of which a piece makes several only in an order")
    said = [reason for case in CASES.values() for reason in case.reasons]
    changed = [changes for changes, _, _ in IMPOSSIBLE.values()]
    said += [test_config.why_impossible(CONFIG, changes) for changes in changed]
    assert text.startswith(general) or any(text in reason for reason in said)


@given(
    tile=st.tuples(st.integers(-1, 320), st.integers(-1, 320)),
    cluster=st.tuples(st.integers(-1, 4), st.integers(-1, 4)),
    numbers=st.fixed_dictionaries(
        {
            name: st.integers(-1, 40)
            for name in (
                "stages",
                "accumulators",
                "ctas",
                "store_columns",
                "store_slots",
                "split_k",
            )
        }
    ),
    sizes=st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300)),
    epilogue=st.builds(Epilogue, gated=st.booleans(), residual=st.booleans()),
)
def test_nonsense_is_refused_and_never_an_error_of_another_kind(
    tile: Any, cluster: Any, numbers: Any, sizes: Any, epilogue: Epilogue
) -> None:
    reasons: tuple[str, ...]
    try:
        nonsense = dataclasses.replace(CONFIG, tile=tile, cluster=cluster, **numbers)
        reasons = nonsense.refusals(Problem(*sizes, epilogue=epilogue), B200)
    except ValueError as error:
        reasons = (str(error),)
    for reason in reasons:
        assert re.search(r"must|needs|at most|fewer|no residual", reason)


@pytest.mark.parametrize("device", [B200, B300], ids=["10.0", "10.3"])
@pytest.mark.parametrize("config", STEPS.values(), ids=STEPS)
def test_every_step_of_the_ladder_is_legal(config: BlackwellConfig, device: Device) -> None:
    for size in (2048, 4096, 8192, 16384):
        config.check(Problem(size, size, size, transpose_b=True), device)


@pytest.mark.parametrize("problem", [NT, NN, FLOAT32, RESIDUAL, GATED])
def test_candidates_fit_into_shared_memory_and_one_stage_more_does_not(problem: Problem) -> None:
    found = list(candidates(problem, B200))
    assert found
    for candidate in found:
        deeper = dataclasses.replace(candidate, stages=candidate.stages + 1)
        assert not [reason for reason in candidate.refusals(problem, B200) if "shared" in reason]
        assert candidate.stages == MOST_STAGES or any(
            "shared memory" in reason for reason in deeper.refusals(problem, B200)
        )


@pytest.mark.parametrize(
    ("size", "k", "kinds"),
    [
        (2048, 8192, ["static"]),  # 64 tiles of 256 x 256, and 74 pairs.
        (3072, 8192, ["static", "dynamic"]),  # Less than two for each.
        (4096, 8192, ["dynamic", "static"]),
        (4096, 512, ["static", "dynamic"]),  # Over before an answer is there.
    ],
)
def test_k_says_which_kind_of_persistence_is_tried_first(
    size: int, k: int, kinds: list[str]
) -> None:
    problem = Problem(size, size, k, transpose_b=True)
    widest = [config for config in candidates(problem, B200) if config.tile == CONFIG.tile]
    pairs = [c for c in widest if c.cluster == CONFIG.cluster and c.split_k == 1]
    assert [config.persistence for config in pairs] == kinds


@pytest.mark.parametrize("persistence", ["none", "static", "dynamic"])
@pytest.mark.parametrize("schedule", ["online_swizzle:4", "swizzle:4"])
def test_only_a_table_is_looked_up_by_who_takes_over_a_cluster(
    schedule: str, persistence: str
) -> None:
    config = BlackwellConfig(persistence=persistence).reordered(schedule)
    is_changed = (schedule, persistence) == ("online_swizzle:4", "dynamic")
    assert config.persistence == ("static" if is_changed else persistence)
    assert config.schedule == schedule
