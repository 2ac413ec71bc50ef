"""Training in 8-bit floats, one scale for each tensor, as `flax.linen.fp8_ops` has it.

    forward     inputs (e4m3) @ kernel (e4m3), scaled, with what follows in the kernel
    backward    output gradient (e5m2) @ kernel (e4m3), inputs (e4m3) @ output gradient (e5m2)

A scale is the largest magnitude of its tensor over the largest number of its type: of the tensor
itself (current), or of what was seen in earlier steps (delayed). The latter are states, whose
"gradients" are their values for the next step, as in Flax.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

from pallas_gemm.api.gemm import dot_general, gemm
from pallas_gemm.api.recipe import Recipe, named
from pallas_gemm.layers import per_channel
from pallas_gemm.op.mesh.typed import sharding_of

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SCALINGS = ("current", "delayed")


class State(NamedTuple):
    """The state of delayed scaling for a tensor: Flax's variables, under its names.

    Attributes:
        scale: The scale of the last step.
        amax_history: The largest magnitudes of the last steps.
    """

    scale: Any
    amax_history: Any


class States(NamedTuple):
    """The states of a layer; all None for current scaling."""

    input: State | None = None
    kernel: State | None = None
    output_grad: State | None = None


def check_scaling(value: Any) -> bool:
    """Returns whether a layer has states.

    Raises:
        ValueError: There is no such scaling.
    """
    if value not in SCALINGS:
        raise ValueError(f"scaling={value!r} is unknown; legal: {', '.join(map(repr, SCALINGS))}")
    return value == "delayed"


def recipe_of(recipe: Any, scaling: str) -> Recipe | None:
    """Returns the recipe of a layer; None where a scale is of a tensor.

    Raises:
        ValueError: There is none of that name, or there is delayed scaling, too.
    """
    if recipe is None:
        return None
    if scaling != "current":
        raise ValueError(
            f"scaling={scaling!r} has no meaning with a recipe, whose scales are of blocks of the"
            " tensor itself"
        )
    return named(recipe)


def quantize(x: jax.Array, dtype: Any, state: State | None) -> tuple[Any, Any, State | None]:
    """Returns a tensor in 8 bits, its scale, and the state for the next step."""
    if state is None:
        amax = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
        scale = jnp.maximum(amax / float(jnp.finfo(dtype).max), per_channel.SMALLEST)
        scale, new = jnp.where(amax == 0, 1, scale), None
    else:
        new = State(*fp8_ops.update_fp8_meta(x, dtype, *state))
        # In programs that accumulate gradients, of the type of Flax's that adds up as a maximum.
        scale = jax.lax.convert_element_type(new.scale, jnp.float32).reshape(())
    # In float32, where Flax divides in the type of the layer.
    return fp8_ops.quantize(x.astype(jnp.float32), dtype, scale, jnp.float32), scale, new


def states(value: Callable[[str], Any]) -> States:
    """Returns the states of a layer, each of which is the value of a variable of Flax's name."""

    def state(tensor: str) -> State:
        return State(*(value(f"{tensor}_{name}") for name in State._fields))

    return States(*map(state, States._fields))


def first_states(length: int) -> dict[str, jax.Array]:
    """Returns the states before the first step, by Flax's names."""
    found = {}
    for tensor in States._fields:
        found |= {
            f"{tensor}_scale": jnp.ones(1),
            f"{tensor}_amax_history": jnp.zeros(length),
        }
    return found


class _Factors(NamedTuple):
    """Inputs and kernel in 8 bits, and their scales."""

    inputs: Any
    kernel: Any
    scales: tuple[Any, Any]


class PerTensor:
    """A scale for each tensor: see `eight_bits.Scheme`."""

    def quantized(
        self, operands: Sequence[Any], states: States, *, derived: bool
    ) -> tuple[_Factors, States]:
        """Quantizes the factors; the states are those of the next step but for the gradient's."""
        del derived
        inputs, kernel = operands
        x8, x_scale, x_state = quantize(inputs, E4M3, states.input)
        k8, k_scale, k_state = quantize(kernel, E4M3, states.kernel)
        new = States(x_state, k_state, states.output_grad)
        return _Factors(x8, k8, (x_scale, k_scale)), new

    def multiply(self, factors: _Factors, **options: Any) -> jax.Array:
        """Returns the product of the factors."""
        alpha = factors.scales[0] * factors.scales[1]
        return gemm(factors.inputs, factors.kernel, alpha=alpha, **options)

    def gradients(
        self, factors: _Factors, g: jax.Array, states: States, *, dtype: Any, **options: Any
    ) -> tuple[Any, Any, States]:
        """Returns the gradients of inputs and kernel, and the states."""
        # Both gradients are sums over what may be split.
        g8, scale, new = quantize(g, E5M2, states.output_grad)
        of_inputs = gemm(
            g8,
            factors.kernel,
            alpha=scale * factors.scales[1],
            transpose_b=True,
            preferred_element_type=dtype,
            out_sharding=sharding_of(factors.inputs),
            **options,
        )
        rows = tuple(range(g.ndim - 1))
        of_kernel = dot_general(
            factors.inputs,
            g8,
            ((rows, rows), ((), ())),
            preferred_element_type=jnp.float32,
            out_sharding=sharding_of(factors.kernel),
        )
        of_kernel = (of_kernel * (scale * factors.scales[0])).astype(dtype)
        return of_inputs, of_kernel, states._replace(output_grad=new)
