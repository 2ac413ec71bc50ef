"""What is left to XLA: each measured rule on both sides of each of its thresholds."""

import csv
import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import accelerate, explain, gemm, projections, target
from pallas_gemm.device import H200
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.planning import tables
from pallas_gemm.planning.by_xla import xla_faster
from pallas_gemm.problem import Epilogue, Problem

FUSED = Epilogue(activation=jax.nn.relu)
RESULTS = pathlib.Path(__file__).parents[2] / "bench" / "results"


def _narrow(n: int, k: int, m: int = 4096, **others: Any) -> Problem:
    return Problem(m, n, k, transpose_b=True, **others)


# A problem that the kernel gets, one that XLA gets, and the rule that says so.
EDGES = {
    "rows": (
        Problem(128, 4096, 1024, transpose_a=True),
        Problem(120, 4096, 1024, transpose_a=True),
        "120 rows of a transposed left operand",
    ),
    "rows in half lines": (
        Problem(96, 4096, 1024, transpose_a=True),
        Problem(80, 4096, 1024, transpose_a=True),
        "80 rows of a transposed left operand",
    ),
    "rows in a line": (
        Problem(64, 4096, 1024, transpose_a=True),
        Problem(32, 4096, 1024, transpose_a=True),
        "32 rows of a transposed left operand",
    ),
    "rows as stored": (
        Problem(48, 4096, 1024),
        Problem(48, 4096, 1024, transpose_a=True),
        "48 rows of a transposed left operand",
    ),
    "rows of few columns": (
        Problem(72, 2048, 1024, transpose_a=True),
        Problem(72, 2176, 1024, transpose_a=True),
        "72 rows of a transposed left operand",
    ),
    "few rows of few columns": (
        Problem(48, 1024, 1024, transpose_a=True),
        Problem(40, 1024, 1024, transpose_a=True),
        "40 rows of a transposed left operand",
    ),
    "rows in lines": (
        Problem(960, 4096, 1024, transpose_a=True),
        Problem(992, 4096, 1024, transpose_a=True),
        "992 rows of a transposed left operand",
    ),
    "long rows": (
        Problem(1040, 4096, 1024, transpose_a=True),
        Problem(1008, 4096, 1024, transpose_a=True),
        "1008 rows of a transposed left operand",
    ),
    "short from below": (Problem(4096, 4096, 256), Problem(4096, 4096, 320), "K=320 is short"),
    "short from above": (Problem(4096, 4096, 1024), Problem(4096, 4096, 960), "K=960 is short"),
    "large from below": (Problem(5000, 4992, 128), Problem(5056, 4992, 128), "short for so large"),
    "large, of longer sums": (
        Problem(8192, 8192, 192),
        Problem(8192, 8192, 128),
        "K=128 is short for so large a result",
    ),
    "large, of few columns": (
        Problem(131072, 272, 256),
        Problem(131072, 256, 256),
        "K=256 is short for so large a result",
    ),
    "large, of few columns and transposed": (
        Problem(131072, 256, 256, transpose_a=True),
        Problem(131072, 256, 256),
        "K=256 is short for so large a result",
    ),
    "large, and sums of few columns": (
        Problem(100001, 256, 320),
        Problem(100001, 256, 256),
        "K=256 is short for so large a result",
    ),
    "large of longer sums": (
        Problem(1024, 1024, 144, batch=173),
        Problem(1024, 1024, 128, batch=173),
        "K=128 is short for so large a result",
    ),
    "large of 8 bits": (
        Problem(8192, 8192, 128, a_dtype="float8_e4m3fn", b_dtype="float8_e4m3fn"),
        Problem(8192, 8192, 128),
        "K=128 is short for so large a result",
    ),
    "large of 32 bits": (
        Problem(8192, 8192, 128, out_dtype=jnp.float32),
        Problem(8192, 8192, 128),
        "K=128 is short for so large a result",
    ),
    "large and fused": (
        Problem(8192, 8192, 128, epilogue=FUSED),
        Problem(8192, 8192, 128),
        "K=128 is short for so large a result",
    ),
    "short, of other rows": (
        Problem(4128, 4096, 512),
        Problem(4160, 4096, 512),
        "K=512 is short",
    ),
    "short, of other rows and transposed": (
        Problem(4128, 4096, 512),
        Problem(4128, 4096, 512, transpose_a=True),
        "K=512 is short",
    ),
    "short, of other rows in 32 bits": (
        Problem(4128, 4096, 512),
        Problem(4128, 4096, 512, out_dtype=jnp.float32),
        "K=512 is short",
    ),
    "short of many": (Problem(4096, 4032, 768), Problem(4096, 4096, 768), "K=768 is short"),
    "shortest of many": (Problem(4096, 2880, 512), Problem(4096, 2944, 512), "K=512 is short"),
    "shortest from above": (Problem(4096, 2944, 576), Problem(4096, 2944, 512), "K=512 is short"),
    "shortest of bytes": (
        Problem(4096, 2944, 512, a_dtype=jnp.int8, b_dtype=jnp.int8, transpose_b=True),
        Problem(4096, 2944, 512, transpose_b=True),
        "K=512 is short",
    ),
    "shortest of a batch": (
        Problem(2048, 2944, 512, batch=2),
        Problem(4096, 2944, 512),
        "K=512 is short",
    ),
    "lines of a wide result": (
        Problem(8192, 30000, 2048, out_dtype=jnp.float32),
        Problem(8192, 30000, 2048),
        "rows of 30000 elements are no whole number of lines",
    ),
    "lines of a smaller one": (
        Problem(8192, 2064, 1024, out_dtype=jnp.float32),
        Problem(8192, 2000, 1024, out_dtype=jnp.float32),
        "rows of 2000 elements are no whole number of lines",
    ),
    "sectors of a wide result": (
        Problem(8192, 30000, 2048, out_dtype=jnp.float32),
        Problem(8192, 30008, 2048, out_dtype=jnp.float32),
        "rows of 30008 elements are no whole number of sectors",
    ),
    "short of lines": (
        Problem(8192, 30000, 512, out_dtype=jnp.float32),
        Problem(8192, 30016, 512, out_dtype=jnp.float32),
        "K=512 is short",
    ),
    "small matrices": (
        Problem(128, 128, 128, batch=531),
        Problem(128, 128, 128, batch=532),
        "K=128 is short for so large a result",
    ),
    "a little larger": (
        Problem(136, 128, 128, batch=532),
        Problem(128, 128, 128, batch=532),
        "K=128 is short for so large a result",
    ),
    "small matrices with more to do": (
        Problem(128, 128, 128, batch=532, epilogue=FUSED),
        Problem(128, 128, 128, batch=532),
        "K=128 is short for so large a result",
    ),
    "short as it is read": (
        Problem(4096, 2112, 768, transpose_b=True),
        Problem(4096, 2176, 768, transpose_b=True),
        "K=768 is short",
    ),
    "short as it is not read": (
        Problem(4096, 2176, 768, transpose_a=True, transpose_b=True),
        Problem(4096, 2176, 768, transpose_b=True),
        "K=768 is short",
    ),
    "shortest as it is read": (
        Problem(4096, 2176, 512, transpose_b=True),
        Problem(4096, 2176, 576, transpose_b=True),
        "K=576 is short",
    ),
    "short of a batch": (
        Problem(2048, 2048, 768, batch=3),
        Problem(2048, 2048, 768, batch=4),
        "K=768 is short",
    ),
    "short and fused": (
        Problem(4096, 4096, 512, epilogue=FUSED),
        Problem(4096, 4096, 512),
        "K=512 is short",
    ),
    "few columns": (_narrow(17, 512), _narrow(15, 512), "n=15 is narrow"),
    "few columns, fused": (
        _narrow(4, 640, epilogue=FUSED),
        _narrow(4, 512, epilogue=FUSED),
        "n=4 is narrow",
    ),
    "few columns of whole steps": (_narrow(4, 1664), _narrow(4, 1536), "n=4 is narrow"),
    "few columns of parts of steps": (_narrow(4, 1504), _narrow(4, 1408), "n=4 is narrow"),
    "few columns of more rows": (_narrow(1, 4096, m=8192), _narrow(1, 4096), "n=1 is narrow"),
    "few columns of longer sums": (_narrow(1, 5120), _narrow(1, 3072), "n=1 is narrow"),
    "few columns of a batch": (_narrow(4, 512, batch=2), _narrow(4, 512), "n=4 is narrow"),
    "few columns, transposed": (
        _narrow(4, 512, transpose_a=True),
        _narrow(4, 512),
        "n=4 is narrow",
    ),
    "few columns of float32": (
        _narrow(4, 512, a_dtype=jnp.float32, b_dtype=jnp.float32),
        _narrow(4, 512),
        "n=4 is narrow",
    ),
    "rows of a left operand": (
        Problem(4104, 4096, 4096, transpose_a=True),
        Problem(4096, 4096, 4104),
        "rows of 4104 elements",
    ),
    "rows of a result of one tile": (
        Problem(64, 64, 1032, transpose_b=True),
        Problem(72, 64, 1032, transpose_b=True),
        "rows of 1032 elements",
    ),
    "columns of a result of one tile": (
        Problem(64, 64, 1032, transpose_b=True),
        Problem(64, 72, 1032, transpose_b=True),
        "rows of 1032 elements",
    ),
    "a result of one tile of 32 bits": (
        Problem(64, 64, 1032, transpose_b=True),
        Problem(64, 64, 1028, *[jnp.float32] * 3, transpose_b=True),
        "rows of 1028 elements",
    ),
    "results of one tile": (
        Problem(64, 64, 1032, transpose_b=True),
        Problem(64, 64, 1032, transpose_b=True, batch=2),
        "rows of 1032 elements",
    ),
    "left sectors": (Problem(4096, 4096, 4112), Problem(4096, 4096, 4104), "rows of 4104 elements"),
    "right sectors": (
        Problem(4096, 4096, 4112, transpose_b=True),
        Problem(4096, 4096, 4104, transpose_b=True),
        "rows of 4104 elements",
    ),
    "right lines": (
        Problem(4096, 4160, 4096),
        Problem(4096, 4112, 4096),
        "rows of 4112 elements are no whole number of lines",
    ),
    "right lines of short sums": (
        Problem(4096, 1008, 256),
        Problem(4096, 1008, 272),
        "rows of 1008 elements",
    ),
    "right lines of short sums in 8 bits": (
        Problem(4096, 1008, 256),
        Problem(4096, 1008, 256, a_dtype="float8_e4m3fn", b_dtype="float8_e4m3fn"),
        "rows of 1008 elements",
    ),
    "right lines of short sums and more columns": (
        Problem(4096, 1008, 256),
        Problem(4096, 1040, 256),
        "rows of 1040 elements",
    ),
    "right lines of few rows": (
        Problem(128, 4112, 4096),
        Problem(129, 4112, 4096),
        "rows of 4112 elements",
    ),
    "rows of few columns and steps": (
        Problem(72, 2048, 4096, transpose_a=True),
        Problem(72, 2048, 4160, transpose_a=True),
        "72 rows of a transposed left operand",
    ),
    "vector, bytes": (
        Problem(1, 4096, 2496, transpose_b=True),
        Problem(1, 4096, 2432, transpose_b=True),
        "one row of a small matrix",
    ),
    "vector, rows": (
        Problem(2, 3072, 3072, transpose_b=True),
        Problem(1, 3072, 3072, transpose_b=True),
        "one row of a small matrix",
    ),
    "vector, bytes of an element": (
        Problem(1, 3072, 3072, a_dtype="float8_e4m3fn", b_dtype="float8_e4m3fn", transpose_b=True),
        Problem(1, 3072, 3072, transpose_b=True),
        "one row of a small matrix",
    ),
    "vector, layout": (
        Problem(1, 3072, 3072),
        Problem(1, 3072, 3072, transpose_b=True),
        "one row of a small matrix",
    ),
    "tiny, rows": (Problem(17, 512, 512), Problem(16, 512, 512), "it is over before"),
    "tiny, columns": (Problem(8, 704, 512), Problem(8, 640, 512), "it is over before"),
    "tiny, steps": (Problem(8, 512, 1344), Problem(8, 512, 1280), "it is over before"),
    "tiny, of a batch": (
        Problem(8, 512, 512, batch=2),
        Problem(8, 512, 512),
        "it is over before",
    ),
    "tiny and fused": (
        Problem(8, 512, 512, epilogue=FUSED),
        Problem(8, 512, 512),
        "it is over before",
    ),
    "aligned rows": (
        Problem(1001, 1001, 1001),
        Problem(1000, 1000, 1000),
        "rows of 1000 elements",
    ),
    "unaligned and large": (
        Problem(1023, 1023, 512),
        Problem(1023, 1023, 511),
        "rows of 511 elements",
    ),
}


@pytest.mark.parametrize("name", EDGES)
def test_a_rule_ends_where_it_was_measured_to_end(name: str) -> None:
    for_the_kernel, for_xla, why = EDGES[name]
    assert xla_faster.why_xla(for_the_kernel) is None
    assert why in (xla_faster.why_xla(for_xla) or "")


ACTIVATIONS: dict[str, Any] = {"relu": jax.nn.relu, "gelu": jax.nn.gelu}


def _taken(row: dict[str, str]) -> bool:
    """Returns whether a kernel computes a product that was measured, with all that follows.

    What follows is written as in stock JAX, which was measured, too.
    """
    m, n, k = (int(row[name]) for name in "mnk")
    left, right = (letter == "T" for letter in row["layout"])
    shapes = [(k, m) if left else (m, k), (n, k) if right else (k, n), (n,)]
    activation = ACTIVATIONS.get(row.get("epilogue", "bare"))

    def product(a: Any, b: Any, bias: Any) -> Any:
        if activation is None:
            return gemm(a, b, transpose_a=left, transpose_b=right)
        return activation((a.T if left else a) @ (b.T if right else b) + bias[None])

    with target("h200"):
        given = [jax.ShapeDtypeStruct(own, jnp.bfloat16) for own in shapes]
        found = explain(product if activation is None else accelerate(product), *given)
    follows = activation is not None
    return any(
        own.plan is not None and (own.problem.epilogue.program is not None) == follows
        for own in found.products
    )


def _rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_what_follows_makes_up_for_rows_that_begin_within_a_line() -> None:
    taken, judged = set(), []
    for row in _rows("h200_within_sectors"):
        if _taken(row):
            faster = float(row["xla_us"]) / float(row["kernel_us"])
            judged += [faster] * (row["half"] == "judged")
            assert faster > 1 or row["half"] == "judged"
            taken.add(("x".join(row[name] for name in "mnk"), row["epilogue"], row["half"]))
    odd = "2048x10000x2500"
    by_kernels = {"8192x4304x1152", "4096x1000x2048", "16384x1400x400"}
    # XLA pads the second one.
    expected = {(size, "gelu") for size in by_kernels} | {
        (size, name) for size in (odd, "256x1928x3080") for name in ("bare", *ACTIVATIONS)
    }
    assert {(size, name) for size, name, half in taken if half == "fitted"} == expected
    assert len(judged) == 5
    assert np.exp(np.mean(np.log(judged))) > 1.15


def test_short_sums_of_odd_sizes_are_left_to_xla() -> None:
    rows = _rows("h200_short_sums")
    assert len(rows) == 30
    assert not any(map(_taken, rows))


def _of_large_results(epilogue: str) -> dict[bool, np.ndarray[Any, Any]]:
    """Returns how much faster than XLA kernels are at two seeds, by whether one is taken."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for row in _rows("h200_large_results"):
        if row["drawn"] != "seed77" and row["epilogue"] == epilogue:
            found[_taken(row)].append(float(row["xla_us"]) / float(row["kernel_us"]))
    return {taken: np.array(faster) for taken, faster in found.items()}


def test_large_results_of_short_sums_are_xlas_where_it_is_faster() -> None:
    faster = _of_large_results("bare")
    assert len(faster[False]) + len(faster[True]) == 69
    left, taken = (np.exp(np.mean(np.log(faster[own]))) for own in (False, True))
    assert left < 0.99
    assert taken > 1.03


def test_what_follows_large_results_stays_with_kernels() -> None:
    faster = _of_large_results("relu")
    assert np.exp(np.mean(np.log(faster[True]))) > 1.04


def test_what_was_tuned_on_this_gpu_comes_before_a_rule() -> None:
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 512), (512, 4096)))
    with target("h200"):
        assert explain(gemm, a, b).implementation == "xla"
        tuned = HopperConfig(tile=(128, 128), schedule="raster")
        entries = {tables.Key.of(Problem(4096, 4096, 512)): tables.Entry(tuned, 1e-4)}
        with tables.Table.of(H200.kind, entries):
            found = explain(gemm, a, b)
    assert found.implementation == "hopper"
    assert found.plan is not None
    assert found.plan.config == tuned


@pytest.mark.parametrize(
    ("over_xla", "implementation"), [(0.97, "xla"), (1.0, "hopper"), (1.02, "hopper")]
)
def test_xla_computes_what_it_was_measured_to_compute_sooner(
    over_xla: float, implementation: str
) -> None:
    a = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    entry = tables.Entry(HopperConfig(tile=(128, 128)), 1e-4, over_xla)
    table = tables.Table.of(H200.kind, {tables.Key.of(Problem(4096, 4096, 4096)): entry})
    with target("h200"), tables.Table.loads(table.dumps()):
        found = explain(gemm, a, a)
        named = explain(functools.partial(gemm, implementation="hopper"), a, a)
        ordered = explain(functools.partial(gemm, schedule="hilbert"), a, a)
    assert found.implementation == implementation
    assert (named.implementation, ordered.implementation) == ("hopper", "hopper")
    said = [reasons for _, reasons in found.products[0].refused]
    slower = ("XLA was 1.031 times as fast as what is tuned (context)",)
    assert (slower in said) == (over_xla < 1)


def _odd(a: jax.Array, b: jax.Array) -> jax.Array:
    return gemm(a[:, :-1], b[:-1])


def _unfused(a: jax.Array, b: jax.Array) -> jax.Array:
    return gemm(a, b, activation=jax.lax.lgamma)


def _summed(a: jax.Array, b: jax.Array) -> Any:
    """What is last is the gradient of the left operand: a sum of two products."""
    _, pull = jax.vjp(lambda a: projections(a, (b, b)), a)
    return pull((a, a))


@pytest.mark.parametrize(
    ("f", "implementation"),
    [(gemm, "xla"), (_odd, "hopper"), (_unfused, "hopper"), (_summed, "hopper")],
)
def test_kernels_keep_what_xla_was_not_timed_with(f: Any, implementation: str) -> None:
    a = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    with target("h200"):
        plan = explain(f, a, a).products[-1].plan
        assert plan is not None
        whole = dataclasses.replace(plan.realigned.problem, terms=())
        entries = {tables.Key.of(whole): tables.Entry(plan.config, 1e-4, 0.97)}
        with tables.Table.of(H200.kind, entries):
            found = explain(f, a, a).products[-1]
    assert found.implementation == implementation
    if found.plan is not None:
        assert found.plan.source == "tuned (context)"
        assert found.plan.realigned.steps or f is not _odd
        assert found.plan.realigned.problem.terms or f is not _summed
        assert found.plan.realigned.unfused or f is not _unfused


@pytest.mark.parametrize("name", ["hilbert", "swizzle:3", "online_swizzle:4"])
def test_an_order_that_is_named_is_taken_where_a_tuned_config_has_another(name: str) -> None:
    a = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    tuned = HopperConfig(tile=(128, 128), schedule="raster")
    entries = {tables.Key.of(Problem(4096, 4096, 4096)): tables.Entry(tuned, 1e-4)}
    with target("h200"), tables.Table.of(H200.kind, entries):
        without = explain(gemm, a, a).plan
        plan = explain(lambda a, b: gemm(a, b, schedule=name), a, a).plan
        config = dataclasses.replace(tuned, tile=(128, 192), late_store=False)
        both = explain(lambda a, b: gemm(a, b, schedule=name, config=config), a, a).plan
    assert without is not None
    assert plan is not None
    assert both is not None
    assert without.config.schedule == "raster"
    assert plan.config.schedule == name
    assert both.config == dataclasses.replace(config, schedule=name)


def test_wide_results_are_xlas_only_of_one_product_and_nothing_else() -> None:
    alone = Problem(8192, 30000, 2048, out_dtype=jnp.float32)
    assert xla_faster._is_wide(alone)
    for change in ({"batch": 2}, {"epilogue": FUSED}, {"transpose_b": True}):
        assert not xla_faster._is_wide(dataclasses.replace(alone, **change))
