"""Operands that a program transposes just before a product are read as they are stored."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_gemm import HopperConfig, einsum, explain, gated_gemm, gemm, matmul, numerics, target
from tests import reference

pytestmark = pytest.mark.usefixtures("empty_kernels")

Step = Callable[..., jax.Array]


def _shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def _transposed_for_kernels(f: Step, *operands: Any) -> int:
    """Returns how many operands of kernels are results of a transposition."""
    with target("h200"):
        text = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    turned = set(re.findall(r"(%\w+) = stablehlo\.transpose", text))
    given = re.findall(r"call @pallas_gemm\w*\(([^)]*)\)", text)
    assert given
    return sum(name in turned for each in given for name in each.split(", "))


FOLDED: dict[str, tuple[Step, tuple[Any, ...], str]] = {
    "right": (lambda a, b: matmul(a, b.T), (_shape(256, 128), _shape(512, 128)), "NT"),
    "left": (lambda a, b: matmul(a.T, b), (_shape(128, 256), _shape(128, 512)), "TN"),
    "both": (lambda a, b: matmul(a.T, b.T), (_shape(128, 256), _shape(512, 128)), "TT"),
    "back again": (
        lambda a, b: gemm(a, b.T, transpose_b=True),
        (_shape(256, 128), _shape(128, 512)),
        "NN",
    ),
    "itself, made before": (lambda a: matmul(a * 2, (a * 2).T), (_shape(256, 512),), "NT"),
    "of a batch": (
        lambda a, b: einsum("bmk,bkn->bmn", a, b.mT),
        (_shape(4, 256, 128), _shape(4, 512, 128)),
        "NT",
    ),
    "with an epilogue": (
        lambda a, b, c: gemm(a, b.T, bias=c, activation="relu"),
        (_shape(256, 128), _shape(512, 128), _shape(512)),
        "NT",
    ),
    "left of a gated pair": (
        lambda a, b, c: gated_gemm(a.T, b, c),
        (_shape(128, 256), _shape(128, 512), _shape(128, 512)),
        "TN",
    ),
    "in a loop": (
        lambda a, b: jax.lax.scan(lambda x, w: (gemm(x, w.T), None), a, b)[0],
        (_shape(128, 128), _shape(3, 128, 128)),
        "NT",
    ),
}


@pytest.mark.parametrize(("f", "operands", "layout"), FOLDED.values(), ids=FOLDED)
def test_a_kernel_reads_what_is_stored(f: Step, operands: tuple[Any, ...], layout: str) -> None:
    assert _transposed_for_kernels(f, *operands) == 0
    with target("h200"):
        found = explain(f, *operands)
    assert {each.problem.layout for each in found.products} == {layout}
    assert found.turned == ()
    # Nothing passes over memory to turn what nobody reads.
    made = 2 * 256 * 512 * 2
    assert sum(own.bytes for own in found.passes) in (0, made)


PLAIN = (_shape(256, 128), _shape(512, 128))
AS_IT_IS: dict[str, tuple[Step, tuple[Any, ...]]] = {
    "a config is named": (lambda a, b: gemm(a, b.T, config=HopperConfig()), PLAIN),
    "an order is named": (lambda a, b: gemm(a, b.T, schedule="hilbert"), PLAIN),
    "something is promised": (
        lambda a, b: gemm(a, b.T, numerics=numerics(invariant="rows")),
        PLAIN,
    ),
    "8 bits are read along k": (
        lambda a, b: gemm(a, b.T, transpose_b=True),
        (_shape(512, 512, dtype=jnp.int8), _shape(512, 512, dtype=jnp.int8)),
    ),
    "one of a pair": (
        lambda a, b, c: gated_gemm(a, b.T, c),
        (_shape(256, 128), _shape(512, 128), _shape(128, 512)),
    ),
    "another function turns it": (lambda a, b: jax.jit(gemm)(a, b.T), PLAIN),
}


@pytest.mark.parametrize(("f", "operands"), AS_IT_IS.values(), ids=AS_IT_IS)
def test_a_product_is_left_as_it_is(f: Step, operands: tuple[Any, ...]) -> None:
    with target("h200"):
        (product,) = explain(f, *operands).products
        text = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert product.problem.layout == ("NT" if operands[0].dtype == jnp.int8 else "NN")
    assert product.implementation == "hopper"
    turned = re.findall(r"(%\w+) = stablehlo\.transpose", text)
    assert len(turned) == 1
    assert re.search(rf"call @\w+\(.*{turned[0]}\b", text)


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
def test_results_and_gradients_are_exact(transform: str, rng: np.random.Generator) -> None:
    a, b = (reference.integers(rng, shape, jnp.bfloat16) for shape in ((3, 24, 16), (32, 16)))

    def product(a: jax.Array, b: jax.Array, multiply: Any) -> jax.Array:
        return multiply((2 * a), b.T)

    def ours(a: jax.Array, b: jax.Array) -> jax.Array:
        return gemm(a, b, implementation="interpret", preferred_element_type=jnp.float32)

    def stock(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b, preferred_element_type=jnp.float32)

    def run(multiply: Any) -> Any:
        def f(a: jax.Array, b: jax.Array) -> jax.Array:
            return product(a, b, multiply)

        if transform == "vmap":
            return jax.jit(jax.vmap(f, (0, None)))(a, b)
        if transform == "grad":
            return jax.jit(jax.grad(lambda a, b: f(a, b).sum(), (0, 1)))(a[0], b)
        return jax.jit(f)(a[0], b)

    jax.tree.map(np.testing.assert_array_equal, run(ours), run(stock))


def test_a_program_for_two_platforms_is_lowered() -> None:
    exported = jax.export.export(jax.jit(lambda a, b: matmul(a, b.T)), platforms=("cpu", "cuda"))(
        *PLAIN
    )
    a, b = jnp.ones(PLAIN[0].shape, jnp.bfloat16), jnp.ones(PLAIN[1].shape, jnp.bfloat16)
    np.testing.assert_array_equal(exported.call(a, b), jnp.full((256, 512), 128, jnp.bfloat16))
