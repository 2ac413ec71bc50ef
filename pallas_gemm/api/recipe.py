"""`Recipe`: products of 8 bits for training, as data: which operand, which block, which type.

    forward             inputs [m, k] along k        @  kernel [k, n] along k
    gradient of inputs  output gradient along n      @  kernel transposed, along n
    gradient of kernel  inputs along m, transposed   @  output gradient along m

Each operand is quantized along the axis that its product contracts. Each of the three arrays is
read once for both of its products.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.api import arguments, request
from pallas_gemm.api.blocks import SHORTEST
from pallas_gemm.api.gemm import gemm
from pallas_gemm.api.quantize import BOTH, Quantized, checked_block, quantize
from pallas_gemm.call import Options
from pallas_gemm.kernels.quantize import Block
from pallas_gemm.op.mesh import typed
from pallas_gemm.op.mesh.matrices import Rows, of_matrix
from pallas_gemm.op.product import equally_varying
from pallas_gemm.problem import SCALES

E4M3 = np.dtype(jnp.float8_e4m3fn)


class Cast(NamedTuple):
    """How an operand is quantized.

    >>> gradients = Cast(jnp.float8_e5m2, (1, 128))

    Attributes:
        dtype: As for `pallas_gemm.quantize`.
        block: As for `pallas_gemm.quantize`.
    """

    dtype: Any = E4M3
    block: tuple[int, int] = (1, 128)


OF_ROWS, OF_SQUARES = Cast(), Cast(block=(128, 128))
OPERANDS = ("inputs", "kernel", "output_grad")
QWIX: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "act_static_scale": (None, False),
        "act_calibration_method": (None, "absmax"),
        "weight_calibration_method": ("absmax",),
        "bwd_calibration_method": ("absmax",),
        "bwd_weight_grad_tile_size": (None,),
        "bwd_stochastic_rounding": (None,),
        "disable_channelwise_axes": (False,),
        "sparsity_rule": (None,),
        "additional_qt_config": (None,),
    }
)
"""Fields of a rule of Qwix, and what they may be; a size of blocks may be that of the rule."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How layers are trained in 8 bits: the type and the blocks of each operand.

    The default is named "blocks": e4m3, a scale for each 1 x 128 of inputs and of output gradients,
    and for each 128 x 128 of a kernel. In the product that makes the gradient of a kernel, output
    gradients have one for each 128 x 128, too. With `kernel_grad_block=(1, 128)` it is the recipe
    of DeepSeek-V3, which takes longer.

    >>> recipe = Recipe(output_grad=Cast(jnp.float8_e5m2))
    >>> y = recipe.dot_general(x, w, (((1,), (0,)), ((), ())))

    Attributes:
        inputs: How the inputs of a layer are quantized, for the result and for the gradient of the
            kernel.
        kernel: How its kernel is quantized, for the result and for the gradient of the inputs.
        output_grad: How the gradient of its result is quantized.
        kernel_grad_block: The blocks of that for the gradient of the kernel, whose type is the
            same.
        power_of_two: As for `pallas_gemm.quantize`.

    Raises:
        ValueError: A block is none, or blocks are not equally long along what a product contracts.
        TypeError: A type is none of 8 bits.
    """

    inputs: Cast = OF_ROWS
    kernel: Cast = OF_SQUARES
    output_grad: Cast = OF_ROWS
    kernel_grad_block: tuple[int, int] = OF_SQUARES.block
    power_of_two: bool = False

    def __post_init__(self) -> None:
        arguments.flag("power_of_two", self.power_of_two)
        for name in OPERANDS:
            given = getattr(self, name)
            try:
                dtype, block = given
            except (TypeError, ValueError):
                raise TypeError(f"{name} must be a Cast(dtype, block), got {given!r:.80}") from None
            own = Cast(arguments.number_type(f"{name}.dtype", dtype), Block(*checked_block(block)))
            if own.dtype.itemsize != 1:
                raise TypeError(f"{name}.dtype must be of 8 bits, got {own.dtype}")
            object.__setattr__(self, name, own)
            _check_readable(f"{name}.block", own.block)
        own = Block(*checked_block(self.kernel_grad_block, "kernel_grad_block"))
        _check_readable("kernel_grad_block", own)
        object.__setattr__(self, "kernel_grad_block", own)
        lengths = {name: getattr(self, name).block[1] for name in OPERANDS}
        lengths["kernel_grad_block"] = own.along
        if len(set(lengths.values())) > 1:
            raise ValueError(
                "blocks must be equally long along what a product contracts, the second number of"
                f" each, got {', '.join(f'{name} {x}' for name, x in lengths.items())}"
            )

    @classmethod
    def from_qwix(cls, rule: Any) -> "Recipe":
        """Returns the recipe of a rule of Qwix for training (`qwix.QtRule`).

        Qwix gives both operands of a product a scale for each `tile_size` contracted elements. It
        multiplies the gradient of a result by what the forward pass has quantized. This recipe
        quantizes that anew, along what the product contracts.

        >>> recipe = Recipe.from_qwix(rule)  # doctest: +SKIP

        Raises:
            ValueError: The rule asks for what no recipe has; the message says what.
        """
        names = {"inputs": "act_qtype", "kernel": "weight_qtype", "output_grad": "bwd_qtype"}
        types = {name: getattr(rule, field, None) for name, field in names.items()}
        for name, dtype in types.items():
            if dtype is None:
                raise ValueError(
                    f"{names[name]}=None leaves the {name} as they are, but a recipe quantizes all"
                    " three operands to 8 bits"
                )
        tile = rule.tile_size
        if not isinstance(tile, int):
            raise ValueError(
                f"tile_size must be how many contracted elements share a scale, got {tile!r}; a"
                " scale for each row and column is what QuantizedDense has, to serve"
            )
        for field, legal in QWIX.items():
            if (value := getattr(rule, field, legal[0])) not in (*legal, tile):
                raise ValueError(
                    f"{field} must be {' or '.join(map(repr, legal))}, got {value!r}: scales are of"
                    " the largest magnitude of each block, and values are rounded to the nearest"
                )
        inputs, kernel, output_grad = (Cast(dtype, (1, tile)) for dtype in types.values())
        return cls(inputs, kernel, output_grad, output_grad.block)

    def dot_general(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Multiplies as `jax.lax.dot_general`, in 8 bits. Its gradients are of 8 bits, too.

        A layer of others takes it: `flax.linen.Dense(4096, dot_general=Recipe().dot_general)`.

        Args:
            lhs: The inputs.
            rhs: The kernel.
            dimension_numbers: As for `jax.lax.dot_general`. There is no batch dimension.
            precision: Has no meaning, and is None.
            preferred_element_type: Type of the result.
            out_sharding: As for `gemm`.

        Raises:
            ValueError: There are batch dimensions, or a precision.
        """
        numbers = arguments.dimension_numbers(lhs, rhs, dimension_numbers)
        batch, _ = numbers[1]
        if batch:
            raise ValueError(
                "a recipe is for products of inputs and a kernel: dimension_numbers must name no"
                f" batch dimensions, got {dimension_numbers}"
            )
        if precision is not None:
            raise ValueError(f"precision has no meaning for products of 8 bits, got {precision!r}")
        dtype = jnp.result_type(lhs, rhs)
        wanted = dtype if preferred_element_type is None else preferred_element_type
        given = lhs.astype(dtype), rhs.astype(dtype)
        return _as_matrices(self, *given, numbers, wanted, out_sharding)


def _as_matrices(
    recipe: Recipe, lhs: jax.Array, rhs: jax.Array, numbers: Any, dtype: Any, out_sharding: Any
) -> jax.Array:
    """Multiplies arrays of any dimensions, without a batch, as matrices."""
    asked = request.of_dot_general(lhs, rhs, numbers, Options(), out_sharding=out_sharding)
    split, ((left, right), _) = asked.type_sharding, numbers
    lhs = jnp.moveaxis(lhs, left, range(-len(left), 0))
    rhs = jnp.moveaxis(rhs, right, range(len(right)))
    dims, columns = lhs.ndim - len(left), rhs.shape[len(right) :]
    rows = Rows.of(lhs, dims)
    found = product(
        recipe,
        rows.matrix(lhs),
        # Both have contracted dimensions in the order of the inputs.
        Rows(rhs.shape[: len(right)], (1,) * len(right)).matrix(rhs),
        preferred_element_type=dtype,
        out_sharding=of_matrix(split, dims),
    )
    return rows.whole(found, columns, split)


def _check_readable(name: str, block: tuple[int, int]) -> None:
    """Refuses a block that products could take for another, by the number of its scales.

    Raises:
        ValueError: It is one.
    """
    if block[1] < SHORTEST or any(size & (size - 1) for size in block):
        raise ValueError(
            f"{name} must have sizes that are powers of two, the second at least {SHORTEST}: a"
            f" product tells blocks by the number of their scales, got {tuple(block)}"
        )


def named(value: Any) -> Recipe:
    """Returns a recipe that a caller names.

    Raises:
        ValueError: There is none of that name.
    """
    if isinstance(value, Recipe):
        return value
    if value == "blocks":
        return Recipe()
    raise ValueError(f"recipe={value!r:.80} is unknown; legal: 'blocks', or a pallas_gemm.Recipe")


class Factors(NamedTuple):
    """What the products of a layer multiply: None where no derivative is asked for.

    Attributes:
        inputs: Along k.
        kernel: Along k, transposed.
        inputs_along_rows: Along m, transposed.
        kernel_along_columns: Along n.
    """

    inputs: Quantized
    kernel: Quantized
    inputs_along_rows: Any = None
    kernel_along_columns: Any = None


def factors(recipe: Recipe, inputs: jax.Array, kernel: jax.Array, *, derived: bool) -> Factors:
    """Quantizes matrices of inputs and a kernel, for their gradients too if these are asked for."""
    if not derived:
        return Factors(
            quantized(recipe, recipe.inputs, inputs, -1),
            quantized(recipe, recipe.kernel, kernel, -2),
        )
    x, x_along_rows = quantized(recipe, recipe.inputs, inputs, BOTH)
    k_along_columns, k = quantized(recipe, recipe.kernel, kernel, BOTH)
    return Factors(x, k, x_along_rows, k_along_columns)


def quantized(recipe: Recipe, cast: Cast, x: jax.Array, axis: Any, **options: Any) -> Any:
    """Quantizes an array as a recipe says; options are as for `quantize`."""
    own: dict[str, Any] = {"block": cast.block} | options
    power_of_two = recipe.power_of_two
    return quantize(x, dtype=cast.dtype, axis=axis, power_of_two=power_of_two, **own)


def quantized_grad(recipe: Recipe, g: jax.Array, **options: Any) -> Any:
    """Quantizes output gradients: for the gradient of inputs, and for that of the kernel."""
    own = recipe.output_grad
    return quantized(recipe, own, g, BOTH, block=(own.block, recipe.kernel_grad_block), **options)


def multiply(given: Factors, recipe: Recipe, **options: Any) -> jax.Array:
    """Returns the product of inputs and kernel; options are as for `gemm`."""
    return scaled(given.inputs, given.kernel, recipe, **options)


def gradients(
    given: Factors, recipe: Recipe, g: jax.Array, dtype: Any, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of inputs and kernel, in a type, from that of their product."""

    def multiplied(left: Quantized, right: Quantized, like: Quantized) -> jax.Array:
        # A sum over what may be split, and split as what it is the gradient of.
        own = {"out_sharding": typed.sharding_of(like.values), "preferred_element_type": dtype}
        return scaled(left, right, recipe, **options, **own)

    rows, columns = quantized_grad(recipe, g)
    kernel, inputs = turned(given.kernel_along_columns), turned(given.inputs_along_rows)
    of_inputs = multiplied(rows, kernel, given.inputs)
    return of_inputs, multiplied(inputs, columns, given.kernel_along_columns)


def turned(given: Quantized) -> Quantized:
    """Returns what was quantized as one operand for a product that takes it as the other."""
    return Quantized(given.values, jnp.swapaxes(given.scale, -1, -2))


def scaled(
    left: Quantized,
    right: Quantized,
    recipe: Recipe,
    *,
    multiply: Callable[..., Any] = gemm,
    **options: Any,
) -> Any:
    """Multiplies operands that are stored with the contracted dimension last.

    Blocks of zeros fill up the last one, where there are several.
    """
    along = recipe.inputs.block[1]
    k = right.values.shape[-1]
    rest = -k % along if k > along else 0
    a, b = (_longer(x, rest) if rest else x for x in (left.values, right.values))
    scales = dict(zip(SCALES, (left.scale, right.scale), strict=False))
    return multiply(a, b, transpose_b=True, **scales, **options)


def _longer(x: jax.Array, rest: int) -> jax.Array:
    """Returns an array with zeros at the end of its last dimension."""
    x = typed.split_into(x, x.ndim - 1, x.shape[-1] + rest)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rest)])


def product(recipe: Recipe, inputs: jax.Array, kernel: jax.Array, **options: Any) -> jax.Array:
    """Multiplies matrices in 8 bits; gradients are of the type of the operands."""
    if 0 in (*inputs.shape, *kernel.shape):
        # There is no block.
        return gemm(inputs, kernel, **options)

    @jax.custom_vjp
    def run(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
        return multiply(factors(recipe, inputs, kernel, derived=False), recipe, **options)

    def forward(inputs: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Factors]:
        found = factors(recipe, inputs, kernel, derived=True)
        return multiply(found, recipe, **options), found

    def backward(found: Factors, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        return gradients(found, recipe, g.astype(inputs.dtype), inputs.dtype)

    run.defvjp(forward, backward)
    # In a `shard_map`, what is shared by devices has a gradient that is a sum over them.
    return run(*equally_varying((inputs, kernel)))
