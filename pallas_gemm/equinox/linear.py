"""Linear layers for Equinox.

A layer is written for one example. Under `jax.vmap` the examples become the rows of one product,
forward and backward. A weight is stored `[outputs, inputs]`, and the kernels read it as it is.
"""

from typing import Any

import equinox as eqx
import jax

from pallas_gemm.api.gemm import Activation, Order
from pallas_gemm.config import GemmConfig
from pallas_gemm.layers import fused

TAKES_SCALAR = "; equinox.nn.Linear takes 'scalar'"


class Linear(eqx.nn.Linear):
    """`equinox.nn.Linear` with its bias, an activation and a residual computed in the kernel.

    It has the arrays of the stock layer, `weight` and `bias`.

    >>> Linear(4096, 14336, activation="gelu", key=key)  # doctest: +SKIP

    Attributes:
        activation: As for `pallas_gemm.gemm`.
        schedule: As for `pallas_gemm.gemm`.
        config: As for `pallas_gemm.gemm`.
        implementation: As for `pallas_gemm.gemm`.
    """

    activation: Activation = eqx.field(static=True, default=None)
    schedule: Order = eqx.field(static=True, default=None)
    config: GemmConfig | None = eqx.field(static=True, default=None)
    implementation: str | None = eqx.field(static=True, default=None)

    def __init__(  # noqa: PLR0913 - each is a keyword
        self,
        in_features: int,
        out_features: int,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        activation: Activation = None,
        schedule: Order = None,
        config: GemmConfig | None = None,
        implementation: str | None = None,
        key: jax.Array,
    ) -> None:
        """Makes the arrays.

        Args:
            in_features: As for `equinox.nn.Linear`, a number.
            out_features: As for `equinox.nn.Linear`, a number.
            use_bias: As for `equinox.nn.Linear`.
            dtype: As for `equinox.nn.Linear`.
            activation: As for `pallas_gemm.gemm`.
            schedule: As for `pallas_gemm.gemm`.
            config: As for `pallas_gemm.gemm`.
            implementation: As for `pallas_gemm.gemm`.
            key: As for `equinox.nn.Linear`.

        Raises:
            ValueError: A size is no number, or there is no activation of that name.
        """
        fused.check_sizes(TAKES_SCALAR, in_features=in_features, out_features=out_features)
        super().__init__(in_features, out_features, use_bias, dtype, key=key)
        self.activation, self.schedule = fused.checked_activation(activation), schedule
        self.config, self.implementation = config, implementation

    def __call__(
        self, x: jax.Array, *, residual: jax.Array | None = None, key: jax.Array | None = None
    ) -> jax.Array:
        """Computes `activation(weight @ x + bias) + residual`, rounded once.

        Args:
            x: One example, `[inputs]`; leading dimensions are those of several.
            residual: An array of the result's shape.
            key: Ignored, as by `equinox.nn.Linear`.

        Returns:
            The result; its type is that of `residual + equinox.nn.Linear(...)(x)`.
        """
        del key
        operands = x, self.weight, self.bias
        return fused.dense(operands, residual, transpose_b=True, **fused.options(self))


class GatedLinear(eqx.Module):
    """`activation(gate(x)) * up(x)`, rounded once: SwiGLU and its relatives.

    The arrays lie in two stock layers, `gate` and `up`.

    >>> GatedLinear(4096, 14336, key=key)  # doctest: +SKIP

    Attributes:
        gate: The layer whose product goes through the activation.
        up: The other layer.
        activation: As for `pallas_gemm.gated_gemm`; "silu" is SwiGLU, "gelu" GeGLU.
        schedule: As for `pallas_gemm.gemm`.
        config: As for `pallas_gemm.gemm`.
        implementation: As for `pallas_gemm.gemm`.
    """

    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    activation: Activation = eqx.field(static=True)
    schedule: Order = eqx.field(static=True)
    config: GemmConfig | None = eqx.field(static=True)
    implementation: str | None = eqx.field(static=True)

    def __init__(  # noqa: PLR0913 - each is a keyword
        self,
        in_features: int,
        out_features: int,
        use_bias: bool = False,
        dtype: Any = None,
        *,
        activation: Activation = "silu",
        schedule: Order = None,
        config: GemmConfig | None = None,
        implementation: str | None = None,
        key: jax.Array,
    ) -> None:
        """Makes both layers.

        Args:
            in_features: As for `equinox.nn.Linear`, a number; of both layers.
            out_features: As for `equinox.nn.Linear`, a number.
            use_bias: As for `equinox.nn.Linear`.
            dtype: As for `equinox.nn.Linear`.
            activation: As for `pallas_gemm.gated_gemm`.
            schedule: As for `pallas_gemm.gemm`.
            config: As for `pallas_gemm.gemm`.
            implementation: As for `pallas_gemm.gemm`.
            key: As for `equinox.nn.Linear`; it is split in two.

        Raises:
            ValueError: A size is no number, or there is no activation of that name.
        """
        fused.check_sizes(TAKES_SCALAR, in_features=in_features, out_features=out_features)
        self.gate, self.up = (
            eqx.nn.Linear(in_features, out_features, use_bias, dtype, key=own)
            for own in jax.random.split(key)
        )
        self.activation, self.schedule = fused.checked_activation(activation), schedule
        self.config, self.implementation = config, implementation

    def __call__(
        self, x: jax.Array, *, residual: jax.Array | None = None, key: jax.Array | None = None
    ) -> jax.Array:
        """Computes the gated product.

        Args:
            x: As for `Linear`.
            residual: As for `Linear`.
            key: As for `Linear`.

        Returns:
            The result.
        """
        del key
        gate, up = self.gate, self.up
        operands = x, gate.weight, up.weight, gate.bias, up.bias
        return fused.gated(operands, residual, transpose_b=True, **fused.options(self))


def replaced(model: Any, **options: Any) -> Any:
    """Returns a model with a `Linear` for every `equinox.nn.Linear`, with the same arrays.

    Layers of other types stay, and layers with a size of "scalar" stay too.

    >>> model = replaced(eqx.nn.MLP(64, 32, 128, depth=2, key=key))  # doctest: +SKIP

    Args:
        model: A module, or a tree of them.
        **options: `schedule`, `config` and `implementation` of each layer.
    """

    def ours(layer: Any) -> Any:
        if type(layer) is not eqx.nn.Linear or "scalar" in (layer.in_features, layer.out_features):
            return layer
        sizes = layer.in_features, layer.out_features, layer.use_bias
        new = eqx.filter_eval_shape(Linear, *sizes, key=jax.random.key(0), **options)
        arrays = (layer.weight, layer.bias)
        return eqx.tree_at(lambda x: (x.weight, x.bias), new, arrays, is_leaf=lambda x: x is None)

    return jax.tree.map(ours, model, is_leaf=lambda x: isinstance(x, eqx.nn.Linear))
