"""Weights of few bits: the record of one, and how the weights of a model become such records.

params ──▶ quantize_weights ──▶ the same tree, with a record in place of each kernel
records ──▶ gemm, gated_gemm, projections, grouped_gemm: widened in the product
──▶ all else: `jnp.asarray` of a record is the array that it stands for
"""

import dataclasses
import functools
import json
import math
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import PartitionSpec

from pallas_gemm.api import arguments
from pallas_gemm.api.few_bits import checkpoints
from pallas_gemm.api.few_bits.narrowing import How, quantized
from pallas_gemm.op import widening


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
        dtype: The type of the array that it stands for; None for that of the scale.
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
        how = How.of(bits, group, dtype, zero_points, scale_dtype)
        w = arguments.array("w", w)
        how.check("w", w, axis)
        values, scale, zero = quantized(w, how, axis)
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
        own = self.scale.dtype if own is None else own
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

    def check(self, name: str, transposed: bool) -> None:
        """Checks that it can be multiplied by.

        >>> QuantizedWeight.of(w, bits=4, group=8).check("w", transposed=False)

        Args:
            name: The caller's name for it.
            transposed: The caller says that it is stored `[..., n, k]`.

        Raises:
            TypeError: An array is of another type.
            ValueError: An array is of another shape, or it is stored otherwise.
        """
        if transposed != (self.axis == -1):
            raise ValueError(
                f"transpose_b={transposed} needs a QuantizedWeight whose axis is"
                f" {-1 if transposed else -2}, got axis={self.axis} in {name}"
            )
        widening.check_type(f"values of {name}", self.values.dtype)
        *lead, k, n = self.shape if self.axis == -2 else (*self.shape[:-2], *self.shape[:-3:-1])
        arrays = {"scale": self.scale, "zero": self.zero}
        for own, x in arrays.items():
            if x is None:
                continue
            legal = (
                widening.OF_SCALES if own == "scale" else (*widening.OF_SCALES, self.values.dtype)
            )
            if x.dtype not in legal:
                names = ", ".join(map(str, legal))
                raise TypeError(f"{own} of {name} must be one of {names}, got {x.dtype}")
            *front, groups, columns = x.shape if x.ndim > 1 else (0, 0)
            if [*front, columns] != [*lead, n] or not groups or k % groups:
                raise ValueError(
                    f"{own} of {name} must be [{', '.join(map(str, (*lead, 'k / group', n)))}] for"
                    f" values with k={k}, got {list(x.shape)}"
                )
        if self.zero is not None and self.zero.shape != self.scale.shape:
            raise ValueError(
                f"zero of {name} must have the shape of scale, {list(self.scale.shape)}, got"
                f" {list(self.zero.shape)}"
            )

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
                of symmetric quantization, which are 8: the values are int4 then.
            g_idx: The group of each row. A checkpoint that sorts rows by their activations
                (`desc_act`) is refused.
            version: 1 if zero points are stored less one, as most checkpoints have it
                (`checkpoint_format` "gptq"); 2 if they are stored as they are ("gptq_v2").

        Raises:
            TypeError: An array is not of that type.
            ValueError: An array is not of that shape, or rows are sorted by their activations.
        """
        return cls(*checkpoints.of_gptq(qweight, scales, qzeros, g_idx, version))


def _written(fixed: tuple[int, Any]) -> bytes:
    axis, dtype = fixed
    name = None if dtype is None else np.dtype(dtype).name
    return json.dumps({"axis": axis, "dtype": name}).encode()


def _read(text: bytes | bytearray) -> tuple[int, Any]:
    fields = json.loads(bytes(text))
    name = fields["dtype"]
    return fields["axis"], None if name is None else np.dtype(name)


jax.export.register_pytree_node_serialization(
    QuantizedWeight,
    serialized_name="pallas_gemm.QuantizedWeight",
    serialize_auxdata=_written,
    deserialize_auxdata=_read,
)
