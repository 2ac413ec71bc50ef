"""Muon beside Optax's own: the same state, and updates that err as little."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from pallas_gemm import explain, target
from pallas_gemm.optax import muon, orthogonalized, scale_by_muon
from tests import layers, reference

RATE = 0.1
OF_HEADS = contrib.MuonDimensionNumbers(0, (1, 2))
TURNED = contrib.MuonDimensionNumbers(2, 0)
ONLY_HEADS = {"wide": None, "tall": None, "same": None, "layers": None}
OF_BATCH = contrib.MuonDimensionNumbers(-2, -1)


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """As Optax needs it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _drawn(seed: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    normal = functools.partial(layers.normal, dtype=dtype)
    return {
        "wide": normal(64, 192, seed=seed),
        "tall": {"kernel": normal(192, 64, seed=seed + 1), "bias": normal(64, seed=seed + 2)},
        "same": normal(64, 192, seed=seed + 3),
        "heads": normal(64, 8, 16, seed=seed + 4),
        "layers": normal(3, 64, 128, seed=seed + 5),
    }


def _dimensions(params: Any) -> Any:
    known = {2: contrib.MuonDimensionNumbers()}
    chosen = jax.tree.map(lambda x: known.get(x.ndim), params)
    return {**chosen, "heads": OF_HEADS, "layers": OF_BATCH}


def _is_wide(params: Any) -> Any:
    return jax.tree.map(lambda x: x.shape[0] < x.shape[-1], params)


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "two steps": {"ns_steps": 2, "beta": 0.8, "eps": 1e-6, "nesterov": False},
    "coefficients": {"ns_coeffs": "dion"},
    "coefficients of each": {"ns_coeffs": ((3.0, -3.0, 1.0), (2.0, -1.5, 0.5)), "ns_steps": 2},
    "aol": {"preconditioning": "aol"},
    "schatten": {"preconditioning": "schatten"},
    "spectral": {"preconditioning": "spectral"},
    "adaptive": {"adaptive": True, "ns_steps": 1},
    "decay": {"weight_decay": 0.3, "weight_decay_mask": _is_wide},
    "rms": {"consistent_rms": 0.2, "adam_learning_rate": 0.01, "adam_b1": 0.7},
    "dimensions": {"muon_weight_dimension_numbers": _dimensions},
    "a tree": {"muon_weight_dimension_numbers": {**ONLY_HEADS, "heads": TURNED}},
    "type": {"mu_dtype": jnp.bfloat16},
}


def _assert_near(ours: Any, stock: Any) -> None:
    """Compares updates whose roundings differ, which an iteration makes larger."""
    np.testing.assert_allclose(ours, stock, rtol=0, atol=1e-3 * RATE)


def _three_steps(optimizer: Any, params: Any, gradients: Any) -> Any:
    @jax.jit
    def step(params: Any, state: Any, g: Any) -> Any:
        updates, state = optimizer.update(g, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for g in gradients:
        params, state = step(params, state, g)
    return params, state


@pytest.mark.every_other
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_three_steps_are_as_good_as_those_of_optax(options: dict[str, Any]) -> None:
    given = _drawn(0), [_drawn(seed) for seed in (10, 20, 30)]
    (ours, state), (stock, of_stock) = (
        _three_steps(make(RATE, **options), *given) for make in (muon, contrib.muon)
    )
    layers.assert_same_structure(state, of_stock)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), given)
        exact, _ = _three_steps(contrib.muon(RATE, **options), *wide)
    for our, own, right in zip(*map(jax.tree.leaves, (ours, stock, exact)), strict=True):
        # Tiles of which none has few elements.
        tiled = [x.reshape(64, -1) for x in (our, own, np.asarray(right))]
        reference.assert_as_good_as_xla(*tiled)


def test_a_checkpoint_of_the_one_goes_on_in_the_other() -> None:
    params, gradients = _drawn(0), [_drawn(10)]
    _, state = _three_steps(contrib.muon(RATE), params, gradients)
    updates, after = muon(RATE).update(_drawn(20), state, params)
    expected, of_stock = contrib.muon(RATE).update(_drawn(20), state, params)
    layers.assert_same_structure((updates, after), (expected, of_stock))
    jax.tree.map(_assert_near, updates, expected)


@pytest.mark.parametrize("dimensions", [None, _dimensions, OF_BATCH])
def test_a_tree_without_some_parameters_has_the_state_of_optax(dimensions: Any) -> None:
    """As Equinox's, of layers without a bias."""
    params = {**_drawn(0), "none": None}
    if dimensions is OF_BATCH:
        params = {"wide": params["wide"], "none": None}
    elif dimensions is not None:
        dimensions = {**_dimensions(_drawn(0)), "none": None}
    options = {"muon_weight_dimension_numbers": dimensions}
    ours, stock = (
        _three_steps(make(RATE, **options), params, [params]) for make in (muon, contrib.muon)
    )
    layers.assert_same_structure(ours, stock)


def test_matrices_of_one_size_are_one_batch() -> None:
    params = _drawn(0, jnp.bfloat16)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    params = {"kernel": params["tall"]["kernel"], "same": params["same"], "wide": params["wide"]}
    optimizer = scale_by_muon(ns_steps=2)
    with target("h200"):
        found = explain(optimizer.update, params, jax.eval_shape(optimizer.init, params))
    assert [each.problem.batch for each in found.products] == [3] * 6


def test_half_of_what_is_symmetric_is_computed() -> None:
    with target("h200"):
        found = explain(orthogonalized, jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16))
    kinds = [each.problem.symmetric for each in found.products]
    assert kinds[:3] * 5 == kinds
    assert kinds[:2] == ["gram", "product"]
    assert not kinds[2]


@pytest.mark.parametrize("shape", [(24, 8), (2, 8, 24)])
def test_what_is_orthogonalized_has_singular_values_near_one(shape: tuple[int, ...]) -> None:
    x = layers.normal(*shape)
    run = jax.jit(orthogonalized)
    values = np.linalg.svd(np.asarray(run(x)), compute_uv=False)
    assert np.all((values > 0.6) & (values < 1.3))
    # In other units, it is the same.
    np.testing.assert_allclose(run(7 * x), run(x), atol=1e-5)


def test_several_models_are_changed_at_once() -> None:
    optimizer = muon(RATE)
    models = jax.tree.map(lambda *x: jnp.stack(x), _drawn(0), _drawn(50))
    gradients = jax.tree.map(lambda *x: jnp.stack(x), _drawn(10), _drawn(60))
    states = jax.vmap(optimizer.init)(models)
    updates, _ = jax.jit(jax.vmap(optimizer.update))(gradients, states, models)
    for i, seed in enumerate((0, 50)):
        params = _drawn(seed)
        alone, _ = optimizer.update(_drawn(seed + 10), optimizer.init(params), params)
        own = jax.tree.map(lambda x, i=i: x[i], updates)
        jax.tree.map(_assert_near, own, alone)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: muon(RATE, preconditioning="l2"), ValueError, "must be one of .* got 'l2'"),
        (lambda: muon(RATE, ns_coeffs="best"), ValueError, "'best' is unknown; legal: 'standard'"),
        (lambda: muon(RATE, ns_coeffs=(1, 2)), ValueError, r"must be \[3\] or \[n, 3\], got \[2\]"),
        (lambda: muon(RATE, ns_coeffs="dion", ns_steps=2), ValueError, "at least 5, .* got 2"),
        (lambda: orthogonalized(jnp.ones((2, 2), jnp.complex64)), TypeError, "must be real"),
        (
            lambda: scale_by_muon().update(jnp.ones(3), scale_by_muon().init(jnp.ones(3))),
            ValueError,
            r"shape \[3\] is no matrix; weight_dimension_numbers says",
        ),
        (
            lambda: scale_by_muon(
                weight_dimension_numbers=contrib.MuonDimensionNumbers(0, (0, 1))
            ).update(jnp.ones((3, 3)), scale_by_muon().init(jnp.ones((3, 3)))),
            ValueError,
            "must not be both a row and a column",
        ),
    ],
)
def test_errors_say_what_would_be_legal(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
