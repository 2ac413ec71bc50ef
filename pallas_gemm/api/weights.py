"""Weights of few bits: the record of one, and how the weights of a model become such records.

params ──▶ quantize_weights ──▶ the same tree, with a record in place of each kernel
records ──▶ gemm, gated_gemm, projections, grouped_gemm: widened in the product
──▶ all else: `jnp.asarray` of a record is the array that it stands for
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pallas_gemm.api import arguments, checkpoints
from pallas_gemm.op import widening

TYPE_OF_BITS = {8: jnp.int8, 4: jnp.int4}
Where = Callable[[str, Any], bool]
"""Takes the path of a leaf, such as "params/up/kernel", and the leaf."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scale", "zero"),
    meta_fields=("axis", "dtype"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix in few bits, or one for each expert; it stands for `(values - zero) * scale`.

    The products of this package take a record in place of the array. To all other functions of JAX
    it is the array that it stands for, which they make in memory. A record is a pytree.

    >>> w8 = QuantizedWeight.of(w, bits=8)
    >>> y = gemm(x, w8, bias=bias)
    >>> w8.shape, w8.values.dtype, w8.dtype
    ((16, 32), dtype('int8'), dtype(bfloat16))

    Attributes:
        values: `[..., k, n]`; of int8, int4, uint4, or a float of 8 or 4 bits.
        scale: `[..., k / group, n]`, or `[..., 1, n]` with one group.
        zero: The value that stands for 0: None for 0, or like the scale, of the type of the values
            or of floats.
        axis: The contracted dimension of the values: -2, or -1 where they are stored `[..., n, k]`.
        dtype: The type of the array that it stands for.
    """

    values: Any
    scale: Any
    zero: Any = None
    axis: int = -2
    dtype: Any = None

    @classmethod
    def of(
        cls,
        w: jax.Array,
        *,
        bits: int = 8,
        group: int | None = None,
        dtype: Any = None,
        zero_points: bool = False,
        scale_dtype: Any = None,
        axis: int = -2,
    ) -> Self:
        """Returns an array in few bits, each group of it scaled to the range of the type.

        >>> QuantizedWeight.of(w, bits=4, group=8).scale.shape
        (2, 32)

        Args:
            w: One matrix, or several.
            bits: 8 for int8, 4 for int4.
            group: Elements along k that share a scale; None for all.
            dtype: Another type of the values, such as "e4m3" or `jnp.float4_e2m1fn`.
            zero_points: The values are uint4, and each group has a zero point.
            scale_dtype: By default bfloat16 with groups, float32 without.
            axis: The contracted dimension: -2, or -1 for `[..., n, k]`.

        Raises:
            ValueError: k is no multiple of the group, or an argument has no such value.
            TypeError: `w` is no array of floats.
        """
        how = _How.of(bits, group, dtype, zero_points, scale_dtype)
        w = arguments.array("w", w)
        how.check("w", w, axis)
        values, scale, zero = _quantized(w, how, axis)
        return cls(values, scale, zero, axis, np.dtype(w.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that it stands for."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return len(self.shape)

    @property
    def group(self) -> int:
        """How many elements along k share a scale."""
        return self.shape[self.axis] // max(1, self.scale.shape[-2])

    @property
    def nbytes(self) -> int:
        """Bytes in the memory of a GPU, where two values of 4 bits are one byte."""
        leaves = jax.tree.leaves(self)
        return sum(-(-math.prod(x.shape) * widening.bits(x.dtype) // 8) for x in leaves)

    def widened(self, dtype: Any = None) -> jax.Array:
        """Returns the array that it stands for.

        Args:
            dtype: Another type than its own.
        """
        own = self.dtype if dtype is None else arguments.number_type("dtype", dtype)
        return widening.widened(self.values, self.scale, self.zero, self.axis, own)

    def __jax_array__(self) -> jax.Array:
        """Returns what it stands for, for functions that take arrays."""
        return self.widened()

    def __getitem__(self, index: Any) -> Self:
        """Returns some of its matrices, or all of it for `...`, as `flax.nnx` asks for it."""
        if index is Ellipsis:
            return self
        if isinstance(index, tuple) or self.ndim < 3:
            raise IndexError(
                f"a record of shape {list(self.shape)} may be indexed by its first dimension, if it"
                f" has more than two, or by ..., got {index!r}"
            )
        return jax.tree.map(lambda x: x[index], self)

    def specs(self, spec: PartitionSpec) -> Self:
        """Returns a record of how its arrays are split where the values are split so.

        Scales and zero points are split along n as the values are. Along k they are split where
        there are several groups: every device then has the scales of its own rows.

        >>> QuantizedWeight.of(w, bits=4, group=8).specs(jax.P("x", "y")).scale
        P('x', 'y')

        Args:
            spec: The axes of a mesh that split the values.
        """
        entries = (*spec, *(None,) * (self.ndim - len(spec)))
        *front, k, n = entries if self.axis == -2 else (*entries[:-2], *entries[:-3:-1])
        own = PartitionSpec(*front, k if self.scale.shape[-2] > 1 else None, n)
        zero = None if self.zero is None else own
        return dataclasses.replace(self, values=spec, scale=own, zero=zero)

    @classmethod
    def from_qwix(cls, array: Any) -> Self:
        """Returns a record with the arrays of a `qwix.QArray`, which is not imported.

        >>> QuantizedWeight.from_qwix(params["kernel"])  # doctest: +SKIP

        Args:
            array: A `QArray` with a scale for the tensor, each channel, or each group of the first
                of the last two dimensions; or what holds one as `array`.

        Raises:
            TypeError: It is none.
            ValueError: Its scales are of other blocks.
        """
        return cls(*checkpoints.of_qwix(array))

    @classmethod
    def from_awq(cls, qweight: Any, scales: Any, qzeros: Any) -> Self:
        """Returns a record of a layer of an AWQ checkpoint ("GEMM", 4 bits), as it is stored there.

        >>> QuantizedWeight.from_awq(*(layer[x] for x in names))  # doctest: +SKIP

        Args:
            qweight: int32 `[k, n / 8]`. In each number, columns 0, 2, 4, 6, 1, 3, 5, 7 lie from the
                lowest four bits on.
            scales: `[k / group, n]`.
            qzeros: int32 `[k / group, n / 8]`, packed likewise.

        Raises:
            TypeError: An array is not of that type.
            ValueError: An array is not of that shape.
        """
        return cls(*checkpoints.of_awq(qweight, scales, qzeros))

    @classmethod
    def from_gptq(
        cls, qweight: Any, scales: Any, qzeros: Any = None, *, g_idx: Any = None, version: int = 1
    ) -> Self:
        """Returns a record of a layer of a GPTQ checkpoint of 4 bits, as it is stored there.

        >>> QuantizedWeight.from_gptq(*(layer[x] for x in names))  # doctest: +SKIP

        Args:
            qweight: int32 `[k / 8, n]`: eight rows in a number, from the lowest four bits on.
            scales: `[k / group, n]`.
            qzeros: int32 `[k / group, n / 8]`: eight columns in a number. None for the zero points
                of symmetric quantisation, which are 8: the values are int4 then.
            g_idx: The group of each row. A checkpoint that sorts rows by their activations
                (`desc_act`) is refused.
            version: 1 if zero points are stored less one, as most checkpoints have it
                (`checkpoint_format` "gptq"); 2 if they are stored as they are ("gptq_v2").

        Raises:
            TypeError: An array is not of that type.
            ValueError: An array is not of that shape, or rows are sorted by their activations.
        """
        return cls(*checkpoints.of_gptq(qweight, scales, qzeros, g_idx, version))


@dataclasses.dataclass(frozen=True)
class _How:
    """How arrays are quantised.

    Attributes:
        dtype: The type of the values.
        group: As for `QuantizedWeight.of`.
        zero_points: As for `QuantizedWeight.of`.
        scale_dtype: The type of the scales.
    """

    dtype: Any
    group: int | None
    zero_points: bool
    scale_dtype: Any

    @classmethod
    def of(cls, bits: Any, group: Any, dtype: Any, zero_points: Any, scale_dtype: Any) -> Self:
        """Returns what arguments say."""
        if bits not in TYPE_OF_BITS:
            raise ValueError(f"bits must be 8 or 4, got {bits!r}")
        if group is not None and (isinstance(group, bool) or not isinstance(group, int)):
            raise ValueError(f"group must be a number of elements or None, got {group!r}")
        if group is not None and group < 1:
            raise ValueError(f"group must be at least 1, got {group}")
        if arguments.flag("zero_points", zero_points):
            if dtype is not None or bits != 4:
                raise ValueError(
                    "zero_points=True is for bits=4, whose values are uint4 then, got"
                    f" bits={bits}, dtype={dtype!r}"
                )
            dtype = jnp.uint4
        dtype = TYPE_OF_BITS[bits] if dtype is None else arguments.number_type("dtype", dtype)
        widening.check_type("dtype", dtype)
        if scale_dtype is None:
            scale_dtype = jnp.float32 if group is None else jnp.bfloat16
        scale_dtype = arguments.number_type("scale_dtype", scale_dtype)
        if scale_dtype not in widening.OF_SCALES:
            raise ValueError(f"scale_dtype must be bfloat16, float16 or float32, got {scale_dtype}")
        return cls(np.dtype(dtype), group, zero_points, scale_dtype)

    def check(self, name: str, w: Any, axis: int) -> None:
        """Checks that an array can be quantised.

        Raises:
            TypeError: It is no array of floats.
            ValueError: It is no matrix, or its groups do not come out even.
        """
        if not jnp.issubdtype(w.dtype, jnp.floating):
            raise TypeError(f"{name} must be of a floating-point type, got dtype {w.dtype}")
        if axis not in (-2, -1):
            raise ValueError(f"axis must be -2 or -1, got {axis!r}")
        if w.ndim < 2:
            raise ValueError(f"{name} must be a matrix or several, got shape {list(w.shape)}")
        k = w.shape[axis]
        if self.group is not None and k % self.group:
            largest = math.gcd(k, self.group)
            raise ValueError(
                f"{name} must have a contracted size that is a multiple of group={self.group}, got"
                f" {k} in {list(w.shape)} (dimension {axis}); group={largest} would fit"
            )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantized(w: jax.Array, how: _How, axis: int) -> tuple[Any, Any, Any]:
    """Returns values, scales and zero points."""
    wide = w.astype(jnp.float32)
    wide = wide if axis == -2 else jnp.swapaxes(wide, -1, -2)
    *front, k, n = wide.shape
    group = k if how.group is None else how.group
    wide = wide.reshape(*front, k // max(1, group), group, n)
    least, most = (float(x) for x in widening.limits(how.dtype))
    zero = None
    if how.zero_points:
        # Zero is one of the values, whatever the group is.
        low, high = (jnp.minimum(wide.min(-2), 0), jnp.maximum(wide.max(-2), 0))
        scale = _of_type(high - low, most, how.scale_dtype)
        zero = jnp.clip(jnp.round(-low / scale.astype(jnp.float32)), least, most)
    else:
        scale = _of_type(jnp.max(jnp.abs(wide), axis=-2), most, how.scale_dtype)
    values = wide / scale.astype(jnp.float32)[..., None, :]
    if zero is not None:
        values = values + zero[..., None, :]
    if jnp.issubdtype(how.dtype, jnp.integer):
        values = jnp.round(values)
    least = max(least, -most)
    values = jnp.clip(values, least, most).astype(how.dtype).reshape(*front, k, n)
    values = values if axis == -2 else jnp.swapaxes(values, -1, -2)
    return values, scale, None if zero is None else zero.astype(how.dtype)


def _of_type(span: jax.Array, most: float, dtype: Any) -> jax.Array:
    """Returns scales that make a number the largest of a type; groups of zeros stay what they are.

    A NaN makes NaNs of its group.
    """
    scale = (span / most).astype(dtype)
    return jnp.where(scale == 0, jnp.ones_like(scale), scale)


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
        TypeError: `where` names a leaf that is no array of floats.
    """
    how = _How.of(bits, group, dtype, zero_points, scale_dtype)

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
            values, scale, zero = jax.eval_shape(lambda w: _quantized(w, how, axis), leaf)
        else:
            values, scale, zero = _quantized(leaf, how, axis)
        return QuantizedWeight(values, scale, zero, axis, np.dtype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(made, params, is_leaf=_is_made)


def _is_made(x: Any) -> bool:
    return isinstance(x, QuantizedWeight) or checkpoints.is_qwix(x)


def _is_kernel(name: str, leaf: Any, axis: int) -> bool:
    """Whether a leaf is quantised where the caller does not say which are."""
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
