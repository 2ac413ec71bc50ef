"""The sizes of the example's transformer, by name."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import jax.numpy as jnp

Attention = Literal["xla", "cudnn"]
"""Implementations of `jax.nn.dot_product_attention`."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """A decoder of blocks of causal attention and a gated feed-forward network.

    Attributes:
        blocks: How many there are.
        width: Size of what runs from block to block.
        heads: Heads of the attention; they share `width`.
        hidden: Size inside the feed-forward network.
        vocabulary: How many tokens there are.
        sequence: Tokens of an example.
        batch: Examples of a step.
        dtype: Type of parameters, activations and the optimiser's state.
        learning_rate: AdamW's.
    """

    blocks: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    sequence: int
    batch: int
    dtype: str = "bfloat16"
    learning_rate: float = 1e-3

    @property
    def head_size(self) -> int:
        """Size of a head."""
        return self.width // self.heads

    @property
    def product_flops(self) -> int:
        """Multiplications plus additions of a step's products with parameters, both ways."""
        block = 4 * self.width**2 + 3 * self.width * self.hidden
        parameters = self.blocks * block + self.width * self.vocabulary
        return 6 * parameters * self.sequence * self.batch

    def type(self) -> jnp.dtype:
        """Returns the type of the parameters."""
        return jnp.dtype(self.dtype)


PRESETS: Mapping[str, Settings] = MappingProxyType(
    {
        # Seconds on a CPU.
        "tiny": Settings(2, 64, 4, 128, 32, 32, 8, "float32", 3e-3),
        # Seconds on a GPU.
        "small": Settings(4, 1024, 8, 4096, 256, 1024, 8),
        # A billion parameters in four blocks of the sizes of an 8B model.
        "1b": Settings(4, 4096, 32, 14336, 256, 4096, 4, learning_rate=1e-4),
    }
)
