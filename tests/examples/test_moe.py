"""The example of experts: it learns the same with either product, and with experts on 8 devices."""

import dataclasses
import functools
import io
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from jax.sharding import AxisType, NamedSharding
from rich.console import Console

from examples import train_moe
from examples.mixture import AXIS, PRESETS, Mixtures, ParallelExperts
from pallas_gemm.flax import linen
from pallas_gemm.layers import routed
from tests import layers, reference

SMALL = dataclasses.replace(
    PRESETS["tiny"], blocks=1, width=16, hidden=16, vocabulary=16, sequence=4
)


@pytest.fixture(autouse=True)
def _types_as_users_have_them() -> Iterator[None]:
    """Flax's norms mix types, which the other tests do not allow."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def _options(*arguments: str) -> flags.FlagValues:
    options = flags.FlagValues()
    train_moe.define_flags(options)
    options(["train_moe", *arguments])
    return options


def test_it_learns_the_same_with_either_product() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    found = train_moe.run(Mixtures(SMALL), _options("--rounds=1", "--steps=1"), console)
    assert f"{found['pallas_gemm']['losses'][0]:.4f}" in console.export_text()
    ours, stock = (found[name]["losses"] for name in ("pallas_gemm", "stock"))
    assert ours[-1] < ours[0]
    # In float32, and with the rows of each group in one tile, nothing is rounded differently.
    assert ours == stock


def _choice(logits: jax.Array, top_k: int) -> routed.Choice:
    """Sends half of the tokens, and those of some devices, to the last device alone."""
    shape = (logits.shape[0], top_k)
    token, place = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    last = logits.shape[1] - 1 - place
    chosen = jnp.where((token % 2 == 0) | (token < 6), last, (5 * token + place) % 16)
    return routed.Choice(jnp.ones(shape), chosen)


def test_rows_find_their_experts_on_other_devices_and_nothing_else_is_sent() -> None:
    sizes: Any = {"num_experts": 16, "hidden_features": 8, "activation": None, "routing": _choice}
    x = reference.integers(np.random.default_rng(0), (8, 3, 4), jnp.float32)
    alone = linen.Experts(**sizes)
    shapes = jax.eval_shape(alone.init, jax.random.key(0), x)
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: reference.integers(rng, x.shape, x.dtype), shapes)
    mesh = jax.make_mesh((8,), (AXIS,), axis_types=(AxisType.Auto,))
    parallel = ParallelExperts(**sizes, mesh=mesh)

    def both(layer: Any, x: jax.Array) -> Any:
        result, pull = jax.vjp(layer.apply, params, x)
        return result, pull(x)

    split = jax.device_put(x, NamedSharding(mesh, jax.P(AXIS)))
    compiled = jax.jit(functools.partial(both, parallel)).lower(split).compile()
    layers.assert_same_tree(compiled(split), jax.jit(functools.partial(both, alone))(x))
    # Numbers of rows, rows, and results; the gradients of these two.
    text = compiled.as_text() or ""
    assert text.count(" all-to-all(") == 5
    assert text.count(" all-gather(") == 0


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="--parallel splits batch=2, which 8 devices cannot"):
        train_moe.training_of(_options("--preset=mixtral", "--parallel"))
    with pytest.raises(ValueError, match="leave out --layers=fp8_blocks"):
        train_moe.training_of(_options("--layers=fp8_blocks", "--parallel"))
    assert train_moe.training_of(_options("--parallel")).mesh is not None
    with pytest.raises(ValueError, match=r"cannot write /no/such/folder/x\.json: there is no"):
        train_moe.training_of(_options("--json=/no/such/folder/x.json"))


def test_the_preset_of_a_gpu_has_the_sizes_of_mixtral() -> None:
    settings = PRESETS["mixtral"]
    assert settings.sequence * settings.batch == 8192
    params = jax.eval_shape(Mixtures(settings).params)
    shapes = {name: kernel["kernel"].shape for name, kernel in params["experts_0"].items()}
    assert shapes["gate"] == shapes["up"] == (8, 4096, 14336)
    # Two of eight experts multiply each token.
    experts = sum(x.size for x in jax.tree.leaves(params["experts_0"]))
    assert 0.98 < settings.product_flops / (6 * experts * 2 / 8 * 8192) < 1.02


# Layers are held against a formula in every run; this trains some.
@pytest.mark.stress
def test_experts_in_blocks_of_8_bits_learn_too() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    options = _options("--rounds=1", "--steps=1", "--layers=fp8_blocks")
    found = train_moe.run(train_moe.training_of(options), options, console)
    ours, stock = (np.array(found[name]["losses"]) for name in ("pallas_gemm", "stock"))
    assert ours[-1] < ours[0] - 0.5
    np.testing.assert_allclose(ours, stock, rtol=0.03)
    assert (ours != stock).any()
