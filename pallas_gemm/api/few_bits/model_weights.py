"""`quantize_weights`: a model's parameters with records of few bits in place of kernels."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.api import arguments
from pallas_gemm.api.few_bits import checkpoints
from pallas_gemm.api.few_bits.narrowing import How, quantized
from pallas_gemm.api.few_bits.weights import QuantizedWeight

Where = Callable[[str, Any], bool]
"""Takes the path of a leaf, such as "params/up/kernel", and the leaf."""


def quantize_weights(
    params: Any,
    *,
    bits: int = 8,
    group: int | None = None,
    dtype: Any = None,
    zero_points: bool = False,
    scale_dtype: Any = None,
    where: Where | None = None,
) -> Any:
    """Returns a model's parameters with a `QuantizedWeight` in place of each kernel.

    The tree may be of `flax.linen` variables, an `flax.nnx` state, an Equinox model, or any other.
    Our layers multiply by the records; stock layers make the array that a record stands for first,
    unless `accelerate` finds that in the program. A `QArray` of qwix becomes a record, too.

    >>> params = {"up": {"kernel": w, "bias": bias}}
    >>> type(quantize_weights(params, bits=4, group=8)["up"]["kernel"]).__name__
    'QuantizedWeight'

    Args:
        params: The tree.
        bits: As for `QuantizedWeight.of`, as what follows.
        group: Elements along k that share a scale; None for all.
        dtype: Another type of the values.
        zero_points: The values are uint4, and each group has a zero point.
        scale_dtype: By default bfloat16 with groups, float32 without.
        where: Takes the path of a leaf, such as "params/up/kernel", and the leaf, and says whether
            it becomes a record. By default these do: matrices of floats that are named "kernel",
            and the weights of Equinox's linear layers, unless "router" is in the path. Name the
            kernels of experts, `[experts, k, n]`, here.

    Raises:
        ValueError: k is no multiple of the group, or an argument has no such value.
        TypeError: `where` names a leaf that is no array of floats, or is no function.
    """
    how = How.of(bits, group, dtype, zero_points, scale_dtype)
    if where is not None and not callable(where):
        raise TypeError(f"where must be a function of path and leaf, or None, got {where!r:.80}")

    def made(path: tuple[Any, ...], leaf: Any) -> Any:
        if checkpoints.is_qwix(leaf):
            return QuantizedWeight.from_qwix(leaf)
        axis, name = _axis(params, path), _path(path)
        chosen = _is_kernel(name, leaf, axis) if where is None else where(name, leaf)
        if not chosen:
            return leaf
        leaf = arguments.array(name, leaf)
        how.check(name, leaf, axis)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            values, scale, zero = jax.eval_shape(lambda w: quantized(w, how, axis), leaf)
        else:
            values, scale, zero = quantized(leaf, how, axis)
        return QuantizedWeight(values, scale, zero, axis, np.dtype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(made, params, is_leaf=_is_made)


def _is_made(x: Any) -> bool:
    return isinstance(x, QuantizedWeight) or checkpoints.is_qwix(x)


def _is_kernel(name: str, leaf: Any, axis: int) -> bool:
    """Whether a leaf is quantized where the caller does not say which are."""
    own = [part for part in name.split("/") if part != "value"]
    named = axis == -1 or own[-1:] == ["kernel"]
    is_array = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    return named and is_array and leaf.ndim == 2 and "router" not in name


def _path(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _axis(tree: Any, path: tuple[Any, ...]) -> int:
    """Returns the contracted dimension of a leaf: the last of a linear layer's `weight`."""
    if not path or getattr(path[-1], "name", None) != "weight":
        return -2
    owner = tree
    for key in path[:-1]:
        name = getattr(key, "name", None)
        owner = getattr(owner, name) if name is not None else owner[_place(key)]
    return -1 if hasattr(owner, "in_features") and hasattr(owner, "out_features") else -2


def _place(key: Any) -> Any:
    return key.key if hasattr(key, "key") else key.idx
