"""What the op makes of the Blackwell kernel: taken or refused with a reason, and the right numbers.

Whether it is taken is asked for GPUs by name; the numbers are those of the simulator as it is,
which knows single CTAs only (pairs are in `test_blackwell_simulated.py`); and whole programs, with
their gradients, are compiled for a B200 that is not here.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_gemm
from pallas_gemm import Explanation, explain, gated_gemm, gemm
from pallas_gemm.device import B200, DEVICES, Device
from pallas_gemm.kernels.blackwell import kernel as blackwell
from pallas_gemm.kernels.blackwell.config import PAIR, BlackwellConfig
from pallas_gemm.kernels.blackwell.plan import BlackwellPlan
from pallas_gemm.kernels.hopper.config import HopperConfig
from pallas_gemm.problem import Problem
from tests import blackwell_simulator, reference, summaries
from tests.reference import Formula

B300 = DEVICES["b300"]
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2

SMALL = BlackwellConfig(
    tile=(128, 64), stages=2, cluster=(1, 1), persistence="dynamic", store_columns=32
)
"""Tiles are taken over by cluster launch control, so that the table has to hold the whole batch."""

# What it does where it is taken.
pytestmark = pytest.mark.usefixtures("proven")


def of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def decided(*args: Any, target: Device = B200, **options: Any) -> Explanation:
    with pallas_gemm.target(target):
        return explain(*args, **options)


def stored(layout: str) -> dict[str, Any]:
    return {"transpose_a": layout[0] == "T", "transpose_b": layout[1] == "T"}


def turned(layout: str, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((k, m) if layout[0] == "T" else (m, k)), ((n, k) if layout[1] == "T" else (k, n))


@pytest.fixture
def taught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teaches the simulator pairs of CTAs."""
    blackwell_simulator.install(monkeypatch)


SQUARE = of(4096, 4096)
LARGE: dict[str, tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]] = {
    "float16": (gemm, (of(4096, 4096, dtype=jnp.float16),) * 2),
    "float32 result": (functools.partial(gemm, preferred_element_type=jnp.float32), (SQUARE,) * 2),
    "float8": (
        functools.partial(gemm, preferred_element_type=jnp.bfloat16, transpose_b=True),
        (of(4096, 4096, dtype=E4M3), of(4096, 4096, dtype=E5M2)),
    ),
    "int8": (
        functools.partial(gemm, preferred_element_type=jnp.int32, transpose_b=True),
        (of(4096, 4096, dtype=jnp.int8),) * 2,
    ),
    "epilogue": (
        lambda a, b, bias, c: gemm(
            a, b, bias=bias, residual=c, alpha=0.5, beta=2.0, activation="gelu_exact"
        ),
        (SQUARE, SQUARE, of(4096, dtype=jnp.float32), SQUARE),
    ),
    "gated": (functools.partial(gated_gemm, activation="silu"), (SQUARE,) * 3),
    "batch": (gemm, (of(8, 1024, 1024), of(8, 1024, 1024))),
    "mapped": (jax.vmap(gemm), (of(8, 1024, 1024), of(8, 1024, 1024))),
    "gradient": (
        jax.grad(lambda a, b: jnp.sum(gemm(a, b).astype(jnp.float32)), argnums=(0, 1)),
        (SQUARE, SQUARE),
    ),
}


@pytest.mark.parametrize("device", [B200, B300], ids=["10.0", "10.3"])
@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_large_products_go_to_the_kernel_in_every_layout(layout: str, device: Device) -> None:
    a, b = turned(layout, 4096, 4096, 8192)
    decision = decided(gemm, of(*a), of(*b), target=device, **stored(layout))
    assert (decision.implementation, decision.reason) == ("blackwell", "the kernel for this GPU")
    assert decision.plan is not None
    assert decision.plan.realigned.steps == ()
    assert isinstance(decision.plan.config, BlackwellConfig)
    assert (decision.plan.config.cluster, decision.plan.config.persistence) == (PAIR, "dynamic")


@pytest.mark.parametrize("name", LARGE)
def test_whatever_the_hopper_kernel_takes_is_taken_as_it_is(name: str) -> None:
    f, operands = LARGE[name]
    products = decided(f, *operands).products
    assert len(products) == (3 if name == "gradient" else 1)
    for decision in products:
        assert decision.implementation == "blackwell"
        assert decision.plan is not None
        assert (decision.plan.realigned.unfused, decision.plan.realigned.bytes) == (None, 0)


@pytest.mark.parametrize(
    ("device", "dtype", "out", "reason"),
    [
        (B200, jnp.float32, jnp.float32, "must be bfloat16, float16, float8 or int8, got float32"),
        (B300, jnp.int8, jnp.int32, "only compute capability 10.0 multiplies int8 .* has 10.3"),
        *(
            (
                dataclasses.replace(B200, kind="another", compute_capability=capability),
                jnp.bfloat16,
                jnp.bfloat16,
                r"compute capability 10\.x, another has \d+\.\d",
            )
            for capability in ((8, 0), (11, 0), (12, 0), (12, 1))
        ),
    ],
    ids=["float32", "int8 on 10.3", "8.0", "11.0", "12.0", "12.1"],
)
def test_the_rest_is_for_xla_and_says_why(
    device: Device, dtype: Any, out: Any, reason: str
) -> None:
    a, b = of(4096, 4096, dtype=dtype), of(4096, 4096, dtype=dtype)
    options = {"preferred_element_type": out, "transpose_b": True}
    (decision,) = decided(gemm, a, b, target=device, **options).products
    assert decision.implementation == "xla"
    assert decision.reason.startswith(("no kernel takes it", "no kernel is for compute capability"))
    with pytest.raises(ValueError, match=rf"implementation='blackwell' cannot .*{reason}") as error:
        decided(gemm, a, b, target=device, implementation="blackwell", **options)
    assert all(why in str(error.value) for why in dict(decision.refused)["blackwell"])


def test_an_order_that_is_computed_is_dealt() -> None:
    plan = decided(gemm, SQUARE, SQUARE, schedule="online_swizzle:8").plan
    assert plan is not None
    assert (plan.config.schedule, plan.config.persistence) == ("online_swizzle:8", "static")


def test_the_kernel_that_is_simulated_is_that_of_the_config() -> None:
    for config in (SMALL, HopperConfig()):
        plan = explain(gemm, of(64, 64), of(64, 64), implementation="interpret", config=config).plan
        assert plan is not None
        assert isinstance(plan.config, type(config))
    with pytest.raises(ValueError, match=r"simulator knows no pairs.* got \(2, 1\)"):
        decided(gemm, SQUARE, SQUARE, implementation="interpret", config=BlackwellConfig())


@pytest.mark.usefixtures("taught")
@pytest.mark.parametrize("layout", ["NN", "TT"])
def test_unaligned_rows_and_an_epilogue(layout: str, rng: np.random.Generator) -> None:
    a, b, residual = (
        reference.integers(rng, shape, jnp.bfloat16)
        for shape in (*turned(layout, 133, 67, 77), (133, 67))
    )
    bias = reference.integers(rng, (67,), jnp.float32)
    options: dict[str, Any] = {"activation": "relu", "alpha": 0.5, "beta": 2.0, **stored(layout)}
    with pallas_gemm.target("b200"):
        result = gemm(a, b, bias=bias, residual=residual, implementation="interpret", **options)
    reference.assert_exact(result, Formula(**options)(a, b, bias=bias, residual=residual))


@pytest.mark.usefixtures("taught")
@pytest.mark.parametrize("mapped", ["ab", "a", "b-bias"])
def test_vmap_of_clusters_that_are_taken_over(mapped: str, rng: np.random.Generator) -> None:
    """The kernel itself refuses to be mapped, so that it would not come this far."""
    shapes = {"a": (130, 72), "b": (72, 128), "bias": (128,)}
    drawn = {
        name: reference.integers(rng, (3, *shape) if name in mapped else shape, jnp.bfloat16)
        for name, shape in shapes.items()
    }

    def product(a: Any, b: Any, bias: Any) -> jax.Array:
        return gemm(a, b, bias=bias, implementation="interpret", config=config)

    config = None if "bias" in mapped else SMALL
    axes = [0 if name in mapped else None for name in shapes]
    with pallas_gemm.target("b200"):
        result = jax.vmap(product, axes)(*drawn.values())
    left, right = reference.wide(drawn["a"]), reference.wide(drawn["b"])
    bias = reference.wide(drawn["bias"])
    exact = left @ right + (bias[:, None] if bias.ndim == 2 else bias)
    reference.assert_exact(result, exact)


def test_a_kernel_whose_clusters_are_taken_over_cannot_be_mapped() -> None:
    """As JAX maps a kernel, each product would take over the clusters of all."""
    problem = Problem(256, 128, 64)
    operands = of(3, *problem.a_shape), of(3, *problem.b_shape)
    dealt = dataclasses.replace(SMALL, persistence="static")
    kernels = [blackwell.build(BlackwellPlan(problem, config, B200)) for config in (SMALL, dealt)]
    with pytest.raises(NotImplementedError, match="batch is part of its problem"):
        jax.eval_shape(jax.vmap(kernels[0]), *operands)
    assert jax.eval_shape(jax.vmap(kernels[1]), *operands).shape == (3, 256, 128)


@pytest.mark.usefixtures("taught")
def test_gradients_of_first_and_second_order(rng: np.random.Generator) -> None:
    a, v = (reference.integers(rng, (24, 16), jnp.bfloat16) for _ in range(2))
    b = reference.integers(rng, (40, 16), jnp.bfloat16)

    def loss(a: jax.Array) -> jax.Array:
        options = {"preferred_element_type": jnp.float32, "transpose_b": True}
        return 0.5 * jnp.sum(jnp.square(gemm(a, b, implementation="interpret", **options)))

    def along(a: jax.Array) -> jax.Array:
        return jnp.vdot(jax.grad(loss)(a).astype(jnp.float32), v.astype(jnp.float32))

    with pallas_gemm.target("b200"):
        first, second = jax.jit(jax.value_and_grad(along))(a)
    square = reference.wide(b).T @ reference.wide(b)
    once = reference.rounded(reference.wide(a) @ square, jnp.bfloat16)
    assert first == np.vdot(once, reference.wide(v))
    reference.assert_exact(second, reference.wide(v) @ square)


def test_programs_compile_to_kernels_without_spills() -> None:
    """Forward and backward of a layer, a gated product, an odd one, and one under `vmap`."""

    def loss(a: jax.Array, b: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.sum(gemm(a, b, bias=bias, activation="gelu_exact").astype(jnp.float32))

    def penalty(a: jax.Array, b: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(jax.grad(loss)(a, b, bias).astype(jnp.float32)))

    def programs(a: Any, b: Any, bias: Any, odd: Any, batch: Any, eight: Any) -> Any:
        return (
            jax.grad(loss, argnums=(0, 1, 2))(a, b, bias),
            jax.grad(penalty, argnums=(0, 1))(a, b, bias),
            jax.grad(lambda a: jnp.sum(gated_gemm(a, b, b).astype(jnp.float32)))(a),
            gemm(odd, odd, residual=odd),
            jax.vmap(gemm)(batch, batch),
            gemm(eight, eight, preferred_element_type=jnp.float32),
        )

    operands = (
        of(2048, 1024),
        of(1024, 4096),
        of(4096, dtype=jnp.float32),
        of(1001, 1001),
        of(16, 512, 512),
        of(2048, 2048, dtype=E4M3),
    )
    # So it computes what is derived in any case; here `explain` lists those products.
    with pallas_gemm.target("b200"), pallas_gemm.round_once(False):
        compiled = summaries.KEPT.of(programs, *operands, target="b200")
        products = explain(programs, *operands).products
    plans = [decision.plan for decision in products]
    assert len(products) == 16
    assert {plan.architecture.name if plan else "xla" for plan in plans} == {"blackwell"}
    kernels = {(plan.realigned.problem, plan.config) for plan in plans if plan}
    assert len(compiled) == len(kernels)
    for kernel in compiled:
        assert (kernel.kernel, kernel.spill_bytes) == ("pallas_gemm_blackwell", 0)
