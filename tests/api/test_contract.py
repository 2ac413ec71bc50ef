"""What every implementation has to compute: shapes, layouts, types, epilogues and transformations.

The cases are drawn by Hypothesis. Operands are small integers wherever that makes the result exact,
which is then compared bit for bit; where an activation is not exact, the rule of `reference.py`
applies.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import pallas_gemm
from tests import reference
from tests.reference import Formula

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
TYPES: tuple[tuple[Any, Any, Any], ...] = (
    (jnp.bfloat16, jnp.bfloat16, jnp.bfloat16),
    (jnp.bfloat16, jnp.bfloat16, jnp.float32),
    (jnp.float16, jnp.float16, jnp.float16),
    (jnp.float32, jnp.float32, jnp.float32),
    (jnp.float32, jnp.float32, jnp.bfloat16),
    (E4M3, E4M3, jnp.bfloat16),
    (E4M3, E5M2, jnp.float32),
    (E5M2, E4M3, jnp.float16),
    (jnp.int8, jnp.int8, jnp.int32),
)

IMPLEMENTATIONS = (
    # On the CPU, None computes by XLA, behind the rules for derivatives and `vmap`.
    pytest.param(None, 25, id="default"),
    pytest.param("interpret", 6, id="interpret"),
    pytest.param("hopper", 60, id="hopper", marks=pytest.mark.gpu("hopper")),
)
KERNELS = IMPLEMENTATIONS[1:]
"""What `test_pairs.py` does not look at."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One product."""

    m: int
    n: int
    k: int
    types: tuple[Any, Any, Any]
    formula: Formula
    bias: bool
    residual: bool
    seed: int

    def operands(self, draw: Any) -> dict[str, Any]:
        """Draws the operands."""
        rng = np.random.default_rng(self.seed)
        a_type, b_type, out_type = self.types
        flip = self.formula
        operands = {
            "a": draw(rng, (self.k, self.m) if flip.transpose_a else (self.m, self.k), a_type),
            "b": draw(rng, (self.n, self.k) if flip.transpose_b else (self.k, self.n), b_type),
        }
        if self.bias:
            operands["bias"] = draw(rng, (self.n,), jnp.float32)
        if self.residual:
            operands["residual"] = draw(rng, (self.m, self.n), out_type)
        return operands

    def gemm(self, implementation: str | None, a: Any, b: Any, **extra: Any) -> jax.Array:
        """Computes it."""
        return pallas_gemm.gemm(
            a,
            b,
            **extra,
            **dataclasses.asdict(self.formula),
            preferred_element_type=self.types[2],
            implementation=implementation,
        )


@st.composite
def cases(draw: Any, activations: tuple[str | None, ...]) -> Case:
    """Draws a product; integers have no epilogue."""
    sizes = st.one_of(st.integers(1, 70), st.sampled_from([64, 72, 128, 130]))
    types = draw(st.sampled_from(TYPES))
    plain = types[0] == jnp.int8
    bias, residual = (not plain and draw(st.booleans()) for _ in range(2))
    formula = Formula(
        transpose_a=draw(st.booleans()),
        transpose_b=draw(st.booleans()),
        activation=None if plain else draw(st.sampled_from(activations)),
        alpha=1 if plain else draw(st.sampled_from([1, 2, -0.5])),
        beta=draw(st.sampled_from([1, 0.5])) if residual else 1,
    )
    return Case(
        draw(sizes),
        draw(sizes),
        draw(sizes),
        types,
        formula,
        bias,
        residual,
        draw(st.integers(0, 2**32 - 1)),
    )


@pytest.mark.parametrize(("implementation", "examples"), IMPLEMENTATIONS)
def test_products_of_integers_are_exact(implementation: str | None, examples: int) -> None:
    @settings(max_examples=examples)
    @given(cases((None, "relu")))
    def check(case: Case) -> None:
        operands = case.operands(reference.integers)
        result = case.gemm(implementation, **operands)
        assert result.dtype == case.types[2]
        reference.assert_exact(result, case.formula(**operands))

    check()


@pytest.mark.parametrize(("implementation", "examples"), IMPLEMENTATIONS)
def test_an_activation_is_as_good_as_xlas(implementation: str | None, examples: int) -> None:
    @settings(max_examples=examples)
    @given(cases(("gelu", "gelu_exact", "silu", "sigmoid", "tanh")))
    def check(case: Case) -> None:
        operands = case.operands(reference.integers)
        result = case.gemm(implementation, **operands)
        xlas = case.gemm("xla", **operands)
        reference.assert_as_good_as_xla(result, xlas, case.formula(**operands))

    check()


@pytest.mark.parametrize(("implementation", "examples"), IMPLEMENTATIONS)
@pytest.mark.parametrize("types", TYPES[:5], ids=lambda types: "-".join(t.__name__ for t in types))
def test_products_of_normal_numbers_are_as_good_as_xlas(
    implementation: str | None, examples: int, types: tuple[Any, Any, Any]
) -> None:
    sizes, precision = (70, 136, 72), None
    on_gpu = jax.default_backend() == "gpu"
    if types[0] == jnp.float32 and on_gpu:
        # XLA multiplies small matrices without tensor cores, which add up with fewer bits, even
        # where TF32 is asked for.
        sizes, precision = (1030, 1096, 1032), lax.DotAlgorithmPreset.TF32_TF32_F32
    case = Case(*sizes, types, Formula(transpose_b=True), True, False, seed=3)
    operands = case.operands(reference.normal)
    if types[0] == jnp.float32 and not on_gpu:
        # What tf32 holds of them, so that kernels and a CPU multiply the same numbers.
        operands["a"] = lax.reduce_precision(operands["a"], 8, 10)
        operands["b"] = lax.reduce_precision(operands["b"], 8, 10)
    result = case.gemm(implementation, **operands)
    xlas = case.gemm("xla", **operands, precision=precision)
    reference.assert_as_good_as_xla(result, xlas, case.formula(**operands))


@pytest.mark.parametrize(("implementation", "examples"), IMPLEMENTATIONS)
def test_gradients_of_integers_are_exact(implementation: str | None, examples: int) -> None:
    @settings(max_examples=max(4, examples // 4))
    @given(cases((None, "relu")))
    def check(case: Case) -> None:
        operands = case.operands(reference.integers)
        if case.types[0] in (jnp.int8, E4M3, E5M2):
            return
        rng = np.random.default_rng(case.seed + 1)
        cotangent = reference.integers(rng, (case.m, case.n), case.types[2])

        def product(operands: dict[str, Any]) -> jax.Array:
            return case.gemm(implementation, **operands)

        _, pull = jax.vjp(product, operands)
        (gradients,) = pull(cotangent)
        for name, exact in case.formula.gradients(operands, reference.wide(cotangent)).items():
            reference.assert_exact(gradients[name], exact)
            assert gradients[name].dtype == operands[name].dtype

    check()


@pytest.mark.parametrize(("implementation", "examples"), KERNELS)
@pytest.mark.parametrize("mapped", ["a", "b", "ab", "bias", "a-bias", "residual"])
def test_vmap_is_exact(implementation: str | None, examples: int, mapped: str) -> None:
    names = {"ab": ("a", "b"), "a-bias": ("a", "bias")}.get(mapped, (mapped,))
    layouts = [(False, False), (True, True)] if implementation != "interpret" else [(False, True)]
    for transpose_a, transpose_b in layouts:
        formula = Formula(transpose_a, transpose_b, alpha=2)
        case = Case(9, 16, 24, TYPES[0], formula, True, True, seed=1)
        drawn = [dataclasses.replace(case, seed=i).operands(reference.integers) for i in range(3)]
        operands = {
            name: jnp.stack([each[name] for each in drawn]) if name in names else drawn[0][name]
            for name in drawn[0]
        }
        axes = {name: 0 if name in names else None for name in operands}
        result = jax.vmap(lambda o, c=case: c.gemm(implementation, **o), in_axes=(axes,))(operands)
        exact = [
            formula(**{name: x[i] if name in names else x for name, x in operands.items()})
            for i in range(3)
        ]
        reference.assert_exact(result, np.stack(exact))


@pytest.mark.parametrize("columns", [136, 24, 1])
@pytest.mark.parametrize(("implementation", "examples"), IMPLEMENTATIONS)
def test_a_gated_product_is_as_good_as_xlas(
    implementation: str | None, examples: int, columns: int
) -> None:
    rng = np.random.default_rng(5)
    a = reference.normal(rng, (72, 40), jnp.bfloat16)
    gate, up = (reference.normal(rng, (40, columns), jnp.bfloat16) for _ in range(2))
    exact = Formula(activation="silu")(a, gate, up=up)
    result = pallas_gemm.gated_gemm(a, gate, up, implementation=implementation)
    xlas = pallas_gemm.gated_gemm(a, gate, up, implementation="xla")
    reference.assert_as_good_as_xla(result, xlas, exact)


# The simulator multiplies with NumPy, which warns.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("implementation", "examples"), IMPLEMENTATIONS)
def test_nan_and_infinity_go_where_xla_lets_them(implementation: str | None, examples: int) -> None:
    rng = np.random.default_rng(0)
    a = reference.normal(rng, (70, 40), jnp.bfloat16).at[3, 5].set(jnp.nan).at[66, 39].set(jnp.inf)
    b = reference.normal(rng, (40, 72), jnp.bfloat16).at[39, 4].set(0)
    result = pallas_gemm.gemm(a, b, implementation=implementation)
    xlas = pallas_gemm.gemm(a, b, implementation="xla")
    np.testing.assert_array_equal(np.isnan(result), np.isnan(xlas))
    np.testing.assert_array_equal(np.isposinf(result), np.isposinf(xlas))
    np.testing.assert_array_equal(np.isneginf(result), np.isneginf(xlas))
