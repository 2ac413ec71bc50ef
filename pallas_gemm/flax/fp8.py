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
from jax.sharding import AxisType

from pallas_gemm.api.gemm import dot_general, gemm
from pallas_gemm.kernels import activations
from pallas_gemm.op.product import equally_varying

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


class _Saved(NamedTuple):
    """The values of the forward pass that the backward pass needs."""

    inputs: Any
    kernel: Any
    scales: tuple[Any, Any]
    bias: Any
    before: Any
    residual: Any
    states: States


def check_scaling(value: Any) -> bool:
    """Returns whether a layer has states.

    Raises:
        ValueError: There is no such scaling.
    """
    if value not in SCALINGS:
        raise ValueError(f"scaling={value!r} is unknown; legal: {', '.join(map(repr, SCALINGS))}")
    return value == "delayed"


def quantise(x: jax.Array, dtype: Any, state: State | None) -> tuple[Any, Any, State | None]:
    """Returns a tensor in 8 bits, its scale, and the state for the next step."""
    if state is None:
        amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
        scale, new = jnp.where(amax == 0, 1, amax / float(jnp.finfo(dtype).max)), None
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


def dense(
    operands: Sequence[Any], states: States, *, residual: Any, activation: Any, **options: Any
) -> jax.Array:
    """Computes `activation(inputs @ kernel + bias) + residual` in 8-bit floats.

    Args:
        operands: Inputs, kernel, and bias or None, of the type of the computation.
        states: The states of delayed scaling.
        residual: As for `gemm`.
        activation: As for `gemm`.
        **options: As for `gemm`.
    """
    result = options.pop("preferred_element_type")
    layer = _Dense(activation, operands[0].dtype, result, options)
    quantised = jax.custom_vjp(layer.run)
    quantised.defvjp(layer.forward, layer.backward)
    # In a `shard_map`, what is shared by devices has a gradient that is a sum over them.
    given, tree = jax.tree.flatten((tuple(operands), residual))
    return quantised(*jax.tree.unflatten(tree, equally_varying(tuple(given))), states)


class _Dense(NamedTuple):
    """The rules of `dense`.

    Attributes:
        activation: As for `gemm`.
        dtype: Type of the computation, and of the gradients.
        result: Type of the result.
        options: As for `gemm`.
    """

    activation: Any
    dtype: Any
    result: Any
    options: dict[str, Any]

    def run(self, operands: Sequence[Any], residual: Any, states: States) -> jax.Array:
        """What no derivative is asked of: one kernel."""
        return self._multiply(_saved(operands, residual, states), residual, self.activation)

    def forward(
        self, operands: Sequence[Any], residual: Any, states: States
    ) -> tuple[jax.Array, _Saved]:
        """Keeps what is before an activation, which its derivative needs."""
        saved = _saved(operands, residual, states)
        if self.activation is None:
            return self._multiply(saved, residual, None), saved
        before = self._multiply(saved, None, None)
        return self._follow(before, residual), saved._replace(before=before)

    def backward(self, saved: _Saved, g: jax.Array) -> tuple[Any, Any, States]:
        """Returns the gradients of the operands and the residual, and the states."""
        # Without an activation, nothing depends on what was before.
        before = g if saved.before is None else saved.before
        g, of_residual = jax.vjp(self._follow, before.astype(self.result), saved.residual)[1](g)
        g8, scale, new = quantise(g, E5M2, saved.states.output_grad)
        of_inputs = gemm(
            g8,
            saved.kernel,
            alpha=scale * saved.scales[1],
            transpose_b=True,
            preferred_element_type=self.dtype,
            implementation=self.options.get("implementation"),
            out_sharding=_split_as(saved.inputs),
        )
        rows = tuple(range(g.ndim - 1))
        of_kernel = dot_general(
            saved.inputs,
            g8,
            ((rows, rows), ((), ())),
            preferred_element_type=jnp.float32,
            out_sharding=_split_as(saved.kernel),
        )
        of_kernel = (of_kernel * (scale * saved.scales[0])).astype(self.dtype)
        of_bias = None if saved.bias is None else _summed(g, rows, saved.bias)
        return (of_inputs, of_kernel, of_bias), of_residual, saved.states._replace(output_grad=new)

    def _multiply(self, saved: _Saved, residual: Any, activation: Any) -> jax.Array:
        return gemm(
            saved.inputs,
            saved.kernel,
            alpha=saved.scales[0] * saved.scales[1],
            bias=saved.bias,
            residual=residual,
            activation=activation,
            preferred_element_type=self.result,
            **self.options,
        )

    def _follow(self, before: jax.Array, residual: Any) -> jax.Array:
        function = activations.resolve(self.activation)
        wide = before.astype(jnp.float32)
        wide = wide if function is None else function(wide)
        wide = wide if residual is None else wide + residual.astype(jnp.float32)
        return wide.astype(self.result)


def _summed(g: jax.Array, rows: tuple[int, ...], bias: jax.Array) -> jax.Array:
    """Returns the gradient of a bias, split as the bias."""
    summed = jnp.sum(g, axis=rows, dtype=jnp.float32).astype(bias.dtype)
    spec = _split_as(bias)
    return summed if spec is None else jax.sharding.reshard(summed, spec)


def _split_as(x: jax.Array) -> Any:
    """Returns how an array is split on an explicit mesh, as its gradient is to be; None elsewhere.

    Both gradients are sums over what may be split.
    """
    sharding = jax.typeof(x).sharding
    return sharding.spec if AxisType.Explicit in sharding.mesh.axis_types else None


def _saved(operands: Sequence[Any], residual: Any, states: States) -> _Saved:
    """Quantises the factors; the states are those of the next step but for the gradient's."""
    inputs, kernel, bias = operands
    x8, x_scale, x_state = quantise(inputs, E4M3, states.input)
    k8, k_scale, k_state = quantise(kernel, E4M3, states.kernel)
    new = States(x_state, k_state, states.output_grad)
    return _Saved(x8, k8, (x_scale, k_scale), bias, None, residual, new)
