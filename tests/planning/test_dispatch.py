"""What computes a product, decided without a GPU: for GPUs that are planned for by name."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import BlackwellConfig, gemm
from pallas_gemm.api import arguments, request
from pallas_gemm.call import Operands
from pallas_gemm.device import H200, Device
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.planning import bands, dispatch, tables
from pallas_gemm.planning.by_xla import xla_faster
from pallas_gemm.planning.dispatch import Decision
from pallas_gemm.planning.scheme import HIGHEST
from pallas_gemm.problem import Epilogue
from schedules import build, split_k
from tests import reference

NAMED = ("implementation", "config", "schedule")


def _decided(
    m: int,
    n: int,
    k: int,
    *,
    target: Any = "h200",
    dtypes: Any = (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
    layout: str = "NN",
    extra: Operands | None = None,
    epilogue: Epilogue | None = None,
    **named: Any,
) -> Decision:
    """Decides on a product of operands that are shapes."""
    shapes = (
        (k, m) if layout[0] == "T" else (m, k),
        (n, k) if layout[1] == "T" else (k, n),
    )
    operands = (extra or Operands(None, None))._replace(
        a=jax.ShapeDtypeStruct(shapes[0], dtypes[0]), b=jax.ShapeDtypeStruct(shapes[1], dtypes[1])
    )
    with contextlib.nullcontext() if target is None else pallas_gemm.target(target):
        asked = request.of_gemm(
            operands,
            epilogue or Epilogue(),
            arguments.options(*(named.pop(name, None) for name in NAMED)),
            layout[0] == "T",
            layout[1] == "T",
            preferred_element_type=dtypes[2],
            **named,
        )
        assert asked.outside is None
        return dispatch.decide(asked.merged.call, asked.merged.signature)


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_large_products_go_to_the_kernel_of_the_gpu(layout: str) -> None:
    for target in ("h100", "h200"):
        decision = _decided(4096, 4096, 4096, layout=layout, target=target)
        assert decision.implementation == "hopper"
        assert decision.plan is not None
        assert decision.plan.realigned.steps == ()


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (None, "no GPU is planned for"),
        (dataclasses.replace(H200, kind="NVIDIA A100", compute_capability=(8, 0)), "has 8.0"),
        (dataclasses.replace(H200, kind="NVIDIA RTX 5090", compute_capability=(12, 0)), "has 12.0"),
        (dataclasses.replace(H200, kind="NVIDIA GH9", compute_capability=(9, 1)), "has 9.1"),
    ],
    ids=["none", "sm_80", "sm_120", "sm_91"],
)
def test_other_devices_are_for_xla(target: Device | None, reason: str) -> None:
    decision = _decided(4096, 4096, 4096, target=target)
    assert decision.implementation == "xla"
    assert reason in f"{decision.reason} {decision.refused}"
    if target is not None:
        with pallas_gemm.target(target):
            text = str(pallas_gemm.explain(gemm, *[jax.ShapeDtypeStruct((64, 64), "float32")] * 2))
        # No other line: no type would make a kernel of it, either.
        _, line = text.splitlines()
        number = reason.removeprefix("has ")
        why = f"no kernel is for compute capability {number} ({target.kind})"
        assert line.split(maxsplit=1) == ["why", why]


@pytest.mark.parametrize(
    ("size", "reason"),
    [((0, 64, 64), "empty"), ((64, 0, 64), "empty"), ((64, 64, 0), "empty")],
)
def test_empty_products_need_no_kernel(size: tuple[int, int, int], reason: str) -> None:
    for implementation in (None, "hopper", "interpret"):
        decision = _decided(*size, implementation=implementation)
        assert (decision.implementation, decision.plan) == ("xla", None)
        assert reason in decision.reason


@pytest.mark.parametrize("why", xla_faster.RULES, ids=lambda rule: rule.__name__)
def test_a_measured_rule_gives_its_reason(why: Any) -> None:
    assert why.__doc__
    assert any(unit in why.__doc__ for unit in ("H200", "B200"))


def test_what_xla_does_faster_is_left_to_it_unless_something_is_named() -> None:
    size = (4096, 4096, 512)
    decision = _decided(*size)
    assert decision.implementation == "xla"
    assert "XLA is faster" in dict(decision.refused)["hopper"][0]
    assert _decided(*size, implementation="hopper").implementation == "hopper"
    assert _decided(*size, schedule="hilbert").implementation == "hopper"
    assert _decided(*size, config=HopperConfig()).implementation == "hopper"


@pytest.mark.parametrize(
    ("name", "verb"), [("h200", "is"), ("h100", "is"), ("h20", "is expected to be")]
)
def test_a_reason_names_no_other_gpu_than_the_one_that_is_planned_for(name, verb):
    operands = (
        jax.ShapeDtypeStruct((1000, 1000), jnp.bfloat16),
        jax.ShapeDtypeStruct((1000, 1000), jnp.bfloat16),
    )
    with pallas_gemm.target(name):
        found = pallas_gemm.explain(pallas_gemm.matmul, *operands)
    assert f"XLA {verb} faster: rows of 1000" in found.reason + str(found.products[0].refused)
    assert {each for each in ("H100", "H200") if each in str(found)} <= {name.upper()}


def test_unaligned_rows_are_never_left_to_xla() -> None:
    for size in (8191, 4095):
        decision = _decided(size, size, size)
        assert decision.implementation == "hopper"
        assert decision.plan is not None
        assert len([s for s in decision.plan.realigned.steps if s.bytes]) == 2


def test_what_no_scheme_computes_goes_to_xla() -> None:
    single, full = (jnp.float32,) * 3, "F32_F32_F32"
    assert _decided(4096, 4096, 4096, dtypes=single, precision=full).implementation == "xla"
    named = _decided(4096, 4096, 4096, dtypes=single, implementation="hopper")
    assert named.implementation == "hopper"
    with pytest.raises(ValueError, match="F32_F32_F32 of float32 is not what"):
        _decided(4096, 4096, 4096, dtypes=single, precision=full, implementation="hopper")
    with jax.default_matmul_precision("highest"):
        plan = _decided(4096, 4096, 4096, dtypes=single).plan
        assert plan is not None
        assert plan.otherwise is not None
        assert plan.otherwise.realigned.scheme == HIGHEST
        assert _decided(4096, 4096, 4096).implementation == "hopper"


def test_a_config_is_used_as_it_is() -> None:
    config = HopperConfig(tile=(128, 128), stages=3, schedule="raster")
    plan = _decided(4096, 4096, 4096, config=config).plan
    assert plan is not None
    assert (plan.config, plan.source) == (config, "argument")
    changed = _decided(4096, 4096, 4096, config=config, schedule="hilbert").plan
    assert changed is not None
    assert changed.config == dataclasses.replace(config, schedule="hilbert")


def test_an_illegal_config_is_refused_everywhere_with_every_reason() -> None:
    config = HopperConfig(tile=(64, 160), stages=9, late_store=False)
    for target in (None, "h200", "b200"):
        with pytest.raises(ValueError, match=r"tile columns.*shared memory") as raised:
            _decided(4096, 4096, 4096, config=config, target=target)
        assert "config=HopperConfig" in str(raised.value)


@pytest.mark.parametrize(
    ("config", "gpu", "taken", "capability"),
    [
        (HopperConfig(), "b200", "BlackwellConfig", "9.0"),
        (BlackwellConfig(), "h200", "HopperConfig", "10.x"),
    ],
)
def test_a_config_for_another_gpu_leaves_the_product_to_xla(
    config: Any, gpu: str, taken: str, capability: str
) -> None:
    decision = _decided(4096, 4096, 4096, config=config, target=gpu)
    assert decision.implementation == "xla"
    assert f"needs compute capability {capability}" in str(decision.refused)
    kind, given = f"NVIDIA {gpu.upper()}", type(config).__name__
    assert decision.reason == f"config is a {given}, and the kernel for {kind} takes a {taken}"


def test_a_schedule_picks_a_tile_that_has_its_grid() -> None:
    schedule = build("hilbert", 32, 32)
    plan = _decided(4096, 4096, 4096, schedule=schedule).plan
    assert plan is not None
    assert plan.config.schedule == schedule
    assert plan.config.stacked_grid(plan.realigned.problem) == (32, 32)


@pytest.mark.parametrize(
    ("kernel", "grid", "steps", "split"),
    [
        ("hopper", (4, 3), 64, (8, None)),
        ("hopper", (8, 12), 64, (3, 5)),
        ("blackwell", (2, 3), 64, (4, None)),
        # Steps of 256 bytes.
        ("blackwell", (4, 12), 32, (4, 2)),
        ("hopper", (4, 3), 64, (1, None)),
    ],
    ids=str,
)
def test_pieces_pick_a_tile_that_has_their_grid_and_steps(
    kernel: str, grid: tuple[int, int], steps: int, split: tuple[int, int | None]
) -> None:
    size, order = (512, 768, 4096), build("hilbert", *grid)
    pieces = split_k(order, steps, *split)
    plan = _decided(*size, schedule=pieces, implementation=kernel, target=None).plan
    assert plan is not None
    problem, config = plan.realigned.problem, plan.config
    assert (config.stacked_grid(problem), config.steps(problem)) == (grid, steps)
    assert (config.schedule, config.split_k, config.split_last) == (order, *split)
    # As if a config had said so.
    asked = dataclasses.replace(config, schedule="raster")
    for how in ({"config": config}, {"config": asked, "schedule": pieces}):
        again = _decided(*size, **how, implementation=kernel, target=None).plan
        assert again is not None
        assert again.config == config


def test_no_other_order_is_thought_about_where_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*args: Any) -> str:
        raise AssertionError("an order was looked for")

    monkeypatch.setattr(bands, "order", forbidden)
    plan = _decided(4096, 4096, 4088, schedule="hilbert").plan
    assert plan is not None
    assert (plan.config.schedule, plan.config.tile) == ("hilbert", (128, 256))


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize(
    "named",
    [{}, {"implementation": "hopper"}, {"schedule": "hilbert"}, {"config": HopperConfig()}],
    ids=str,
)
def test_a_product_is_decided_on_once(named: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    decided = []

    def counted(call: Any, signature: Any) -> Decision:
        decided.append(call)
        return decide(call, signature)

    decide = dispatch.decide
    monkeypatch.setattr(dispatch, "decide", counted)
    a = jax.ShapeDtypeStruct((640, 640), jnp.bfloat16)
    with pallas_gemm.target("h200"):
        traced = jax.jit(lambda a, b: gemm(a, b, **named)).trace(a, a)
        assert decided == []
        traced.lower(lowering_platforms=("cuda",))
    assert len(decided) == 1


def test_a_config_is_not_refused_by_a_kernel_that_it_is_not_for() -> None:
    config = HopperConfig(store_columns=16, late_store=True)
    with pytest.raises(ValueError, match="hopper: late_store needs") as raised:
        _decided(4096, 4096, 4096, config=config)
    assert "blackwell" not in str(raised.value)
    with pytest.raises(ValueError, match="blackwell: it takes a BlackwellConfig, got a HopperC"):
        _decided(4096, 4096, 4096, config=config, implementation="blackwell", target=None)


def test_a_schedule_for_no_grid_is_refused_with_the_grids_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"made for the grid \(3, 5\); legal are .*\(32, 16\)"):
        _decided(4096, 4096, 4096, schedule=build("raster", 3, 5))


def test_a_named_kernel_on_another_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hopper.*needs compute capability 9\.0, NVIDIA B200 has"):
        _decided(4096, 4096, 4096, implementation="hopper", target="b200")


def test_what_no_config_can_compute_is_refused_for_what_they_all_lack() -> None:
    cut = split_k(build("raster", 4, 4), 64, 2)
    with pytest.raises(ValueError, match=r"hopper: a function that reduces needs split_k=1, got 2"):
        jax.eval_shape(
            lambda a, b: gemm(a, b, epilogue=lambda s: s.sum(-1), schedule=cut),
            jax.ShapeDtypeStruct((512, 4096), jnp.bfloat16),
            jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16),
        )


def test_a_tuned_config_comes_before_the_heuristics() -> None:
    plan = _decided(4096, 4096, 4096).plan
    assert plan is not None
    tuned = dataclasses.replace(HopperConfig(), tile=(128, 128), schedule="raster")
    table = tables.Table.of(
        H200.kind, {tables.Key.of(plan.realigned.problem): tables.Entry(tuned, 1e-3)}
    )
    with table:
        found = _decided(4096, 4096, 4096).plan
    assert found is not None
    assert (found.config, found.source) == (tuned, "tuned (context)")
    after = _decided(4096, 4096, 4096).plan
    assert after is not None
    assert after.config != tuned


def test_epilogues_that_a_kernel_lacks_are_applied_by_xla_to_its_sums() -> None:
    rng = np.random.default_rng(0)
    a, b = (reference.normal(rng, (64, 64), jnp.bfloat16) for _ in range(2))
    residual = reference.integers(rng, (64, 64), jnp.int32)
    for options in (
        {"activation": jnp.arctan},
        {"residual": residual, "beta": 0.5, "activation": "relu"},
    ):
        with pallas_gemm.target("h200"):
            explained = pallas_gemm.explain(gemm, a, b, implementation="hopper", **options)
        assert explained.plan is not None
        assert explained.plan.realigned.unfused is not None
        result = gemm(a, b, implementation="interpret", **options)
        xlas = gemm(a, b, implementation="xla", **options)
        np.testing.assert_array_equal(reference.wide(result), reference.wide(xlas))


def test_the_passes_around_a_kernel_are_in_its_predicted_time() -> None:
    shape, bandwidth = jax.ShapeDtypeStruct, H200.machine.dram_bytes_per_second
    size = 4096 * 4096

    def seconds(f: Any, *dtypes: Any, n: int = 4096) -> float:
        with pallas_gemm.target("h200"):
            plan = pallas_gemm.explain(f, *(shape((4096, n), dtype) for dtype in dtypes)).plan
        assert plan is not None
        return plan.seconds

    def activated(activation: Any, **options: Any) -> Any:
        return lambda a, b: gemm(
            a, b, transpose_b=True, activation=activation, implementation="hopper", **options
        )

    narrow = (jnp.bfloat16,) * 2
    # XLA reads sums in float32, and writes the result.
    sums = seconds(activated(None, preferred_element_type="f32"), *narrow)
    apart = seconds(activated(jnp.arctan), *narrow)
    moved = (4 + 2) * size / bandwidth
    assert sums + moved < apart < sums + 2 * moved
    # A gated product is two, and both sums are read.
    gated = seconds(
        lambda a, b: pallas_gemm.gated_gemm(
            a, b, b, transpose_b=True, activation=jnp.arctan, implementation="hopper"
        ),
        *narrow,
    )
    assert 2 * sums + moved < gated < 2 * sums + 4 * moved
    # Rows of 8190 bytes are copied to rows of whole lines.
    odd = activated(None)
    copied = 4 * 2 * size / bandwidth
    even = seconds(odd, *narrow)
    assert even + copied < seconds(odd, *narrow, n=4095) < even + 2 * copied


def test_each_product_of_a_batch_may_have_its_own_bias() -> None:
    rng = np.random.default_rng(0)
    a, b, bias = (
        reference.integers(rng, shape, jnp.bfloat16) for shape in ((2, 8, 16), (2, 16, 8), (2, 8))
    )

    def one(a: jax.Array, b: jax.Array, bias: jax.Array) -> jax.Array:
        return gemm(a, b, bias=bias, implementation="interpret")

    exact = np.stack([reference.Formula()(a[i], b[i], bias=bias[i]) for i in range(2)])
    reference.assert_exact(jax.vmap(one)(a, b, bias), exact)


@pytest.fixture
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every question for devices fail."""

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("asked for devices")

    for name in ("devices", "local_devices", "default_backend"):
        monkeypatch.setattr(jax, name, forbidden)


@pytest.mark.usefixtures("no_devices")
def test_nothing_asks_for_devices_while_tracing() -> None:
    a = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)

    def f(a: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: gemm(row, a, activation="gelu"))(a)

    for _ in range(2):
        jax.make_jaxpr(lambda a: jax.vjp(f, a)[1](a))(a)
        jax.jit(f).trace(a)
    with pallas_gemm.target("h200"):
        jax.jit(f).trace(a)


@pytest.mark.parametrize("implementation", [None, "hopper"])
def test_a_program_for_a_gpu_is_made_without_one(implementation: str | None) -> None:
    a = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        return gemm(a, b, activation="silu", implementation=implementation)

    def exported(*platforms: str) -> str:
        text = jax.export.export(jax.jit(f), platforms=platforms)(a, a).mlir_module()
        return "kernel" if "mosaic_gpu" in text else "xla"

    with pallas_gemm.target("h200"):
        assert exported("cuda") == "kernel"
    # Without a target, only who names the kernel gets it.
    assert exported("cuda") == ("xla" if implementation is None else "kernel")


def test_one_program_for_both_platforms_has_both_forms() -> None:
    a = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    with pallas_gemm.target("h200"):
        exported = jax.export.export(jax.jit(gemm), platforms=["cpu", "cuda"])(a, a)
    text = exported.mlir_module()
    assert "mosaic_gpu" in text
    assert "dot_general" in text
    ones = jnp.ones((256, 256), jnp.bfloat16)
    np.testing.assert_array_equal(exported.call(ones, ones), np.full((256, 256), 256))


def test_a_kernel_that_is_named_on_a_cpu_is_refused() -> None:
    ones = jnp.ones((256, 256), jnp.bfloat16)
    with pytest.raises(ValueError, match="implementation='hopper' needs an NVIDIA GPU"):
        gemm(ones, ones, implementation="hopper")


def test_a_target_has_no_influence_on_what_runs_here() -> None:
    ones = jnp.ones((64, 64), jnp.bfloat16)
    with pallas_gemm.target("h200"):
        np.testing.assert_array_equal(gemm(ones, ones), np.full((64, 64), 64))


@pytest.mark.parametrize("name", ["online_swizzle:8", "online_raster", "hilbert", "log_swizzle"])
def test_every_kind_of_order_can_be_asked_for_by_name(name: str) -> None:
    plan = _decided(4096, 4096, 4096, schedule=name).plan
    assert plan is not None
    assert plan.config.schedule == name


@pytest.mark.parametrize("target", ["h200", "b200"])
def test_the_kernel_of_the_planned_gpu_is_simulated(target: str) -> None:
    rng = np.random.default_rng(0)
    a, b = (reference.integers(rng, shape, jnp.bfloat16) for shape in ((70, 72), (72, 136)))
    with pallas_gemm.target(target) as device:
        plan = pallas_gemm.explain(gemm, a, b, implementation="interpret").plan
        result = gemm(a, b, activation="relu", implementation="interpret")
    assert plan is not None
    assert (plan.device, plan.architecture.fits(device)) == (device, True)
    reference.assert_exact(result, reference.Formula(activation="relu")(a, b))
