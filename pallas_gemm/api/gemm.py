"""The public functions: products of matrices with JAX's semantics, and an epilogue."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_gemm.api import arguments, function, notes, request
from pallas_gemm.api.eager import compiled
from pallas_gemm.api.few_bits.weight_operands import as_operand
from pallas_gemm.api.request import Request
from pallas_gemm.call import Numerics, Operands, Order
from pallas_gemm.config import GemmConfig

# What JAX has to know of the product is registered when these are imported.
from pallas_gemm.op import autodiff as autodiff
from pallas_gemm.op import batching as batching
from pallas_gemm.op import in_blocks
from pallas_gemm.op import lowering as lowering
from pallas_gemm.op import taylor as taylor
from pallas_gemm.op.mesh import explicit, mesh_context
from pallas_gemm.planning import dispatch, ignored
from pallas_gemm.problem import Epilogue

Activation = str | Callable[[jax.Array], jax.Array] | None


@compiled("a", "b", "operands", "bias", "residual", "row_scale", "col_scale", "col_zero")
def gemm(  # noqa: PLR0913 - each is a keyword
    a: jax.Array,
    b: jax.Array,
    *,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[jax.Array] = (),
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    activation: Activation = None,
    alpha: float | jax.Array = 1,
    beta: float | jax.Array = 1,
    row_scale: jax.Array | None = None,
    col_scale: jax.Array | None = None,
    col_zero: jax.Array | None = None,
    preferred_element_type: Any = None,
    precision: Any = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    schedule: Order = None,
    config: GemmConfig | None = None,
    implementation: str | None = None,
    numerics: Numerics | None = None,
    out_sharding: Any = None,
) -> Any:
    """Computes `activation(scales * (a @ b) + bias) + beta * residual`, rounded once.

    The scales are `alpha * row_scale[:, None] * col_scale[None, :]`, as far as there are any: what
    quantized operands were divided by, for one. A scale with a dimension along k scales the blocks
    of an operand, and the sum of each block is scaled before it is added up.

    Shapes are as in `jnp.matmul`: operands may be vectors, and leading dimensions broadcast. The
    sum and everything after it is in float32; the sum of int8 is in int32. Where there are leading
    dimensions, scales and bias may have the same in front: then each product has its own.

    >>> y = gemm(x, w, bias=bias, activation="gelu")
    >>> y.shape, y.dtype
    ((64, 32), dtype(bfloat16))

    With `epilogue=f` it computes `f(s, *operands)`, where `s` is the whole product in float32, with
    its scales. The results are what the function returns, in the types that it gives them:

    >>> def biased(s, b):
    ...     z = s + b[None]
    ...     return z.astype(jnp.bfloat16), jnp.sum(z * z, axis=-1)
    >>> y, squares = gemm(x, w, epilogue=biased, operands=(bias,))
    >>> y.dtype, squares.shape
    (dtype(bfloat16), (64,))

    A kernel computes what the function does element by element, and sums, maxima and minima along
    rows or columns. XLA computes what comes after these, or all of a function that no kernel can
    compute.

    Args:
        a: The left operand.
        b: The right operand, or a `QuantizedWeight`.
        epilogue: A function of the float32 product and of `operands`, instead of the words that
            follow, but for `row_scale` and `col_scale`. Define it once, outside of a loop: each new
            function is compiled anew.
        operands: The arrays that `epilogue` takes after the product.
        bias: One value per column of the result, or one for all.
        residual: An array of the result's shape, or that broadcasts to it.
        activation: "relu", "gelu" (with tanh), "gelu_exact", "silu", "sigmoid", "tanh", or an
            elementwise function of a float32 array that captures no arrays.
        alpha: Scales the sum: a number, which is built into the kernel, or a floating-point array
            of no dimension, which is not.
        beta: Scales the residual, likewise.
        row_scale: Scales the rows of the sum: one floating-point value for each. Or the blocks of
            the left operand: `[m, k / g]` for g contracted elements of each row, `[m / r, k / g]`
            for those of r rows.
        col_scale: Scales the columns of the sum, likewise. Or the blocks of the right operand:
            `[k / g, n]`, or `[k / g, n / c]`.
        col_zero: The value of the right operand that stands for 0, for weights of few bits beside a
            wider left operand. Its shape is that of `col_scale`, its type theirs or one of floats.
        preferred_element_type: Type of the result, such as `jnp.bfloat16` or "bf16"; by default
            what JAX promotes the operands to.
        precision: As in `jnp.matmul`. Float32 operands are multiplied as TF32 on a GPU, as JAX
            documents it, unless more is asked for: then as several products, added up in one sum.
        transpose_a: Swaps the last two dimensions of the left operand, without a copy.
        transpose_b: Swaps the last two dimensions of the right operand, without a copy.
        schedule: The order of the output tiles: a name such as "hilbert" or "swizzle:8", or a
            `Schedule` made for the grid of tiles. Or `Pieces` of `split_k`, made for the grid and
            the steps of k: the order of pieces of tiles that are cut along k.
        config: The kernel's config, instead of what the heuristics choose.
        implementation: "hopper", "blackwell", "xla", or "interpret" (the kernel simulated on the
            CPU). None takes the best that can compute this, and always works.
        numerics: A promise about the bits of the result, such as
            `pallas_gemm.numerics(invariant="rows")`.
        out_sharding: The result's sharding under an explicit mesh.

    Returns:
        The result.

    Raises:
        ValueError: A shape, or a combination of arguments, is not legal, or what was named cannot
            compute this product; the message has every reason.
        TypeError: An argument is of the wrong type, or the contracted sizes differ.
    """
    options = arguments.options(implementation, config, schedule, numerics)
    how = {
        "transpose_a": transpose_a,
        "transpose_b": transpose_b,
        "precision": precision,
        "out_sharding": out_sharding,
    }
    extras = {
        "bias": bias,
        "residual": residual,
        "row_scale": row_scale,
        "col_scale": col_scale,
    }
    numbers = {"alpha": alpha, "beta": beta}
    if function.is_given(epilogue, operands):
        others = {"activation": activation, "preferred_element_type": preferred_element_type}
        scales = {name: extras.pop(name) for name in ("row_scale", "col_scale")}
        said = function.said(extras | {"col_zero": col_zero} | others | numbers)
        given = Operands(a, b, **scales)
        return function.answer(given, epilogue, operands, options, said, answer, **how)
    given = Operands(a, b, **extras, col_zeros=col_zero)
    words = Epilogue(activation=activation, **numbers)  # type: ignore[arg-type]
    result = {"preferred_element_type": preferred_element_type}
    return answer(request.of_gemm(given, words, options, **how, **result))


@compiled("a", "b")
def matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    numerics: Numerics | None = None,
) -> jax.Array:
    """Computes `jnp.matmul`, with the same arguments, shapes and types.

    `numerics` is as for `gemm`.

    >>> y = matmul(x, w)

    Raises:
        TypeError: The operands are no arrays, or their shapes have no product.
        ValueError: An operand has no dimension.
    """
    asked = request.of_gemm(
        Operands(a, b),
        Epilogue(),
        arguments.options(None, None, None, numerics),
        preferred_element_type=preferred_element_type,
        precision=precision,
        out_sharding=out_sharding,
    )
    return answer(asked)


@compiled("lhs", "rhs")
def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    numerics: Numerics | None = None,
) -> jax.Array:
    """Computes `lax.dot_general`, with the same arguments: for the hooks of neural network layers.

    `numerics` is as for `gemm`; the rows are those of the left operand.

    Dimensions that lie side by side are merged by reshapes; where they do not, an operand is
    transposed first, and `explain` says which.

    >>> y = dot_general(x, w, (((1,), (0,)), ((), ())))

    Raises:
        TypeError: The operands are no arrays, or have no such dimensions.
    """
    result = {"preferred_element_type": preferred_element_type, "precision": precision}
    asked = request.of_dot_general(
        lhs,
        rhs,
        dimension_numbers,
        arguments.options(None, None, None, numerics),
        out_sharding=out_sharding,
        **result,
    )
    return answer(asked)


@compiled(
    *("a", "w_gate", "w_up", "operands", "gate_bias", "up_bias", "residual"),
    *("row_scale", "gate_scale", "up_scale", "gate_zero", "up_zero"),
)
def gated_gemm(  # noqa: PLR0913 - each is a keyword
    a: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    epilogue: Callable[..., Any] | None = None,
    operands: Sequence[jax.Array] = (),
    activation: Activation = "silu",
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    alpha: float | jax.Array = 1,
    row_scale: jax.Array | None = None,
    gate_scale: jax.Array | None = None,
    up_scale: jax.Array | None = None,
    gate_zero: jax.Array | None = None,
    up_zero: jax.Array | None = None,
    residual: jax.Array | None = None,
    beta: float | jax.Array = 1,
    preferred_element_type: Any = None,
    precision: Any = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    schedule: Order = None,
    config: GemmConfig | None = None,
    implementation: str | None = None,
    numerics: Numerics | None = None,
    out_sharding: Any = None,
) -> Any:
    """Computes `activation(a @ w_gate) * (a @ w_up)`, rounded once: SwiGLU and its relatives.

    With everything that there is, `activation(gate) * up + beta * residual`, where `gate` is
    `alpha * row_scale[:, None] * gate_scale * (a @ w_gate) + gate_bias`, and `up` likewise.

    >>> y = gated_gemm(x, w, w)  # the matrices of gate and up

    With `epilogue=f` it computes `f(gate_sum, up_sum, *operands)` as `gemm` does.

    Args:
        a: The left operand.
        w_gate: The right operand whose product goes through the activation, or a
            `QuantizedWeight`.
        w_up: The other right operand, of the same shape and type.
        epilogue: A function of both float32 products and of `operands`, instead of the words that
            follow but for scales, as for `gemm`.
        operands: The arrays that `epilogue` takes after the products.
        activation: As for `gemm`; "silu" is SwiGLU, "gelu" GeGLU.
        gate_bias: One value per column, added to `a @ w_gate`.
        up_bias: The same for `a @ w_up`.
        alpha: As for `gemm`; it scales both sums.
        row_scale: As for `gemm`; it scales both sums.
        gate_scale: Scales the columns of `a @ w_gate`, or blocks of `w_gate`.
        up_scale: Scales the columns of `a @ w_up`, or blocks of `w_up`.
        gate_zero: The values of `w_gate` that stand for 0, as `col_zero` of `gemm`.
        up_zero: The same of `w_up`.
        residual: As for `gemm`.
        beta: As for `gemm`.
        preferred_element_type: As for `gemm`.
        precision: As for `gemm`.
        transpose_a: As for `gemm`.
        transpose_b: Both right operands are stored `[n, k]`.
        schedule: As for `gemm`.
        config: As for `gemm`.
        implementation: As for `gemm`.
        numerics: As for `gemm`.
        out_sharding: As for `gemm`.

    Returns:
        The result.

    Raises:
        ValueError: As for `gemm`.
        TypeError: As for `gemm`.
    """
    options = arguments.options(implementation, config, schedule, numerics)
    how = {
        "transpose_a": transpose_a,
        "transpose_b": transpose_b,
        "precision": precision,
        "out_sharding": out_sharding,
    }
    factors = (a, w_gate, as_operand("w_up", w_up))
    scales = {"row_scale": row_scale, "col_scale": gate_scale, "up_scale": up_scale}
    if function.is_given(epilogue, operands):
        words = {
            # The activation that is there where none is given says nothing.
            "activation": None if activation == "silu" else activation,
            "gate_bias": gate_bias,
            "up_bias": up_bias,
            "alpha": alpha,
            "gate_zero": gate_zero,
            "up_zero": up_zero,
            "residual": residual,
            "beta": beta,
            "preferred_element_type": preferred_element_type,
        }
        given = Operands(*factors, **scales)
        said = function.said(words)
        return function.answer(given, epilogue, operands, options, said, answer, **how)
    given = Operands(
        *factors,
        **scales,
        bias=gate_bias,
        residual=residual,
        up_bias=up_bias,
        col_zeros=gate_zero,
        up_zeros=up_zero,
    )
    words = Epilogue(alpha, beta, activation=activation)  # type: ignore[arg-type]
    result = {"preferred_element_type": preferred_element_type}
    return answer(request.of_gemm(given, words, options, **how, **result))


def answer(asked: Request) -> jax.Array:
    """Computes what was asked for; its derivative names the result for `jax.checkpoint`."""
    notes.note(asked)
    operands = asked.operands.present()
    given = asked.call, asked.contraction
    if asked.outside is not None:
        ignored.warn_of_options(asked.call.options, asked.outside)
        if asked.is_scaled and (sharding := asked.type_sharding) is not None:
            return explicit.by_xla(*given, sharding, *operands)
        return asked.by_xla(*operands)
    options = asked.call.options
    per_part = options.config is not None or options.schedule is not None
    if options.names_something and not (per_part and mesh_context.is_on_mesh(*operands)):
        # What is named and does not fit is refused here, before anything is traced.
        dispatch.check(asked.merged.call, asked.merged.signature)
    if (sharding := asked.result_sharding) is not None:
        return explicit.explicit_product(*given, sharding, *operands)
    # Not under a `jax.jit` of its own, where nobody would see what makes its operands.
    return in_blocks.multiplied(*given, *operands)
