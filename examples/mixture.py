"""The example's mixture of experts: with our layer, written with `lax.ragged_dot`, or in parallel.

In parallel, each device has some of the experts, and some of the tokens:

    rows of a device, by expert ──▶ to the experts' devices ──▶ by expert ──▶ products ──▶ and back
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh

from examples.training import Training, mean_loss
from pallas_gemm.flax import linen as ours
from pallas_gemm.layers import routed

AXIS = "expert"
"""The axis of a mesh over which experts and tokens are split."""

BALANCE = 0.01
"""The weight of the loss that balances experts."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Blocks of experts: each token's next one is a matter of the token alone.

    Attributes:
        blocks: How many there are.
        width: Size of what runs from block to block.
        experts: How many a block has.
        top_k: How many of them a token has.
        hidden: Size inside of each.
        vocabulary: How many tokens there are.
        sequence: Tokens of an example.
        batch: Examples of a step.
        dtype: Type of parameters, but the router's, and of activations.
        learning_rate: AdamW's.
    """

    blocks: int
    width: int
    experts: int
    top_k: int
    hidden: int
    vocabulary: int
    sequence: int
    batch: int
    dtype: str = "bfloat16"
    learning_rate: float = 1e-4

    @property
    def product_flops(self) -> int:
        """Multiplications plus additions of a step's products with parameters, both ways."""
        block = self.width * (3 * self.top_k * self.hidden + self.experts)
        return 6 * (self.blocks * block + self.width * self.vocabulary) * self.sequence * self.batch


PRESETS: Mapping[str, Settings] = MappingProxyType(
    {
        # Seconds on a CPU.
        "tiny": Settings(2, 32, 8, 2, 64, 32, 32, 8, "float32", 3e-3),
        # A block of the sizes of Mixtral 8x7B, on one GPU.
        "mixtral": Settings(1, 4096, 8, 2, 14336, 256, 4096, 2),
        # A block of the sizes of Qwen3-30B-A3B, on one GPU.
        "qwen3": Settings(1, 2048, 128, 8, 768, 256, 4096, 1),
    }
)


class StockExperts(ours.Experts):
    """`Experts` on `lax.ragged_dot`."""

    def mix(self, inputs: jax.Array, choice: routed.Choice, kernels: Sequence[Any]) -> jax.Array:
        """Returns the weighted sums of what experts make of tokens."""
        return routed.apply(inputs, choice, self.num_experts, functools.partial(_stock, kernels))


def _stock(kernels: Sequence[Any], rows: jax.Array, sizes: jax.Array) -> jax.Array:
    gate, up, down = kernels
    opened = jax.nn.silu(lax.ragged_dot(rows, gate, sizes))
    return lax.ragged_dot(opened * lax.ragged_dot(rows, up, sizes), down, sizes)


class ParallelExperts(ours.Experts):
    """`Experts` of which each device has some, and some of the tokens."""

    mesh: Mesh | None = None

    def mix(self, inputs: jax.Array, choice: routed.Choice, kernels: Sequence[Any]) -> jax.Array:
        """Returns the weighted sums of what experts make of tokens, wherever they are."""

        @functools.partial(
            jax.shard_map, mesh=self.mesh, in_specs=jax.P(AXIS), out_specs=jax.P(AXIS)
        )
        def mixed(inputs: jax.Array, choice: routed.Choice, kernels: Sequence[Any]) -> jax.Array:
            here = routed.gated(kernels, self.activation, self.precision)
            return routed.apply(inputs, choice, self.num_experts, functools.partial(across, here))

        return mixed(inputs, choice, kernels)


def across(compute: routed.Compute, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Has each row computed on the device of its expert.

    Any device may send all of its rows to any other, so there is room for all rows of each. The
    room that is not used is in no group: it is sent, but not multiplied.

    Args:
        compute: The function that a device's experts apply to rows.
        rows: The rows of this device, sorted by expert.
        sizes: How many each of all experts has.
    """
    devices, count = lax.axis_size(AXIS), rows.shape[0]
    to_each = sizes.reshape(devices, -1)
    from_each = lax.all_to_all(to_each, AXIS, 0, 0)
    ends = jnp.cumsum(to_each.sum(1))
    row = jnp.arange(count)
    device = (ends[None] <= row[:, None]).sum(1)
    place = row - (ends - to_each.sum(1))[device]
    sent = (
        jnp.zeros((devices, *rows.shape), rows.dtype)
        .at[device, place]
        .set(rows, unique_indices=True)
    )
    received = lax.all_to_all(sent, AXIS, 0, 0)
    # Rows of a device come by expert: those of the first end where those of the next begin.
    experts = (jnp.cumsum(from_each, 1)[:, None] <= row[None, :, None]).sum(2)
    results = routed.in_groups(
        received.reshape(-1, rows.shape[1]), experts.reshape(-1), to_each.shape[1], compute
    )
    back = lax.all_to_all(results.reshape(devices, count, -1), AXIS, 0, 0)
    return back.at[device, place].get(unique_indices=True)


KINDS: Mapping[str, type[ours.Experts]] = MappingProxyType(
    {
        "stock": StockExperts,
        "pallas_gemm": ours.Experts,
        "fp8_blocks": ours.Fp8Experts,
        "parallel": ParallelExperts,
    }
)
"""Layers of experts by name."""


class Mixture(nn.Module):
    """Tokens to the logits of the tokens that follow.

    Attributes:
        settings: The sizes.
        layers: One of `KINDS`.
        mesh: The mesh of parallel ones.
    """

    settings: Settings
    layers: str
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns logits `[batch, sequence, vocabulary]`, and the loss that balances experts."""
        settings = self.settings
        types: dict[str, Any] = {"dtype": settings.dtype, "param_dtype": settings.dtype}
        own = {"mesh": self.mesh} if self.layers == "parallel" else {}
        experts = functools.partial(
            KINDS[self.layers], settings.experts, settings.hidden, settings.top_k, **types, **own
        )
        x = nn.Embed(settings.vocabulary, settings.width, name="tokens", **types)(tokens)
        unevenness = jnp.zeros((), x.dtype)
        for i in range(settings.blocks):
            inputs = nn.RMSNorm(name=f"norm_{i}", **types)(x)
            result, logits = experts(name=f"experts_{i}")(inputs, with_logits=True)
            x = x + result
            unevenness += uneven(logits, settings.top_k).astype(x.dtype)
        x = nn.RMSNorm(name="norm", **types)(x)
        return nn.Dense(settings.vocabulary, use_bias=False, name="logits", **types)(x), unevenness


def uneven(logits: jax.Array, top_k: int) -> jax.Array:
    """Returns how unevenly experts are chosen: 1 if all have the same tokens, more otherwise.

    As in "Switch Transformers", equation 4: a sum over experts of how often one is chosen and how
    likely it is.
    """
    experts = logits.shape[-1]
    likely = jax.nn.softmax(logits)
    chosen = jax.nn.one_hot(lax.top_k(logits, top_k)[1], experts).sum(-2)
    axes = tuple(range(logits.ndim - 1))
    return (chosen.mean(axes) * likely.mean(axes)).sum() * (experts / top_k)


@dataclasses.dataclass(frozen=True)
class Mixtures(Training):
    """Trains mixtures of experts.

    Attributes:
        settings: The sizes.
        mesh: The mesh with the axis "expert"; None for one device.
    """

    settings: Settings

    def params(self) -> Any:
        """Returns the parameters of any kind of layers."""
        tokens = jnp.zeros((1, self.settings.sequence), jnp.int32)
        return Mixture(self.settings, "stock").init(jax.random.key(0), tokens)["params"]

    def loss(self, layers: str, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns the mean loss of a token, and what uneven experts cost."""
        model = Mixture(self.settings, layers, self.mesh)
        result: Any = model.apply({"params": params}, tokens[:, :-1])
        logits, unevenness = result
        return mean_loss(logits, tokens[:, 1:]) + BALANCE * unevenness.astype(jnp.float32)

    def placement(self, names: Sequence[str]) -> jax.P:
        """Returns how a parameter is split: what experts have is by expert."""
        return jax.P(AXIS) if {"gate", "up", "down"}.intersection(names) else jax.P()
