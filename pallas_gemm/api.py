"""The public functions: products of matrices with JAX's semantics, and an epilogue."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_gemm import activations, arguments, canonical, dispatch, precision
from pallas_gemm.call import Call, Operands, Options, signature_of
from pallas_gemm.canonical import Form
from pallas_gemm.config import GemmConfig
from pallas_gemm.kernels import xla
from pallas_gemm.problem import Epilogue
from pallas_gemm.product import product
from pallas_gemm.targeting import known_target
from schedules import OnlineSchedule, Schedule

OUT_NAME = "pallas_gemm_out"
"""The name of every result, for the policies of `jax.checkpoint`."""


def gemm(  # noqa: PLR0913 - each is a keyword, and `lax.dot_general` has half of them
    a: jax.Array,
    b: jax.Array,
    *,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    alpha: float = 1,
    beta: float = 1,
    preferred_element_type: Any = None,
    precision: Any = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    schedule: str | Schedule | OnlineSchedule | None = None,
    config: GemmConfig | None = None,
    implementation: str | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Computes `activation(alpha * (a @ b) + bias) + beta * residual`, rounded once.

    Shapes are as in `jnp.matmul`: operands may be vectors, and leading dimensions broadcast. The
    sum and everything after it is in float32 (the sum of integers in int32).

    Args:
        a: The left operand.
        b: The right operand.
        bias: One value per column of the result.
        residual: An array of the result's shape.
        activation: "relu", "gelu" (with tanh), "gelu_exact", "silu", "sigmoid", "tanh", or an
            elementwise function of a float32 array that captures no arrays.
        alpha: Scales the sum; a Python number.
        beta: Scales the residual; a Python number.
        preferred_element_type: Type of the result; by default what JAX promotes the operands to.
        precision: As in `jnp.matmul`. Float32 operands are multiplied as TF32 on a GPU unless more
            is asked for, which goes to XLA.
        transpose_a: Swaps the last two dimensions of the left operand, without a copy.
        transpose_b: Swaps the last two dimensions of the right operand, without a copy.
        schedule: The order of the output tiles: a name such as "hilbert" or "swizzle:8", or a
            `Schedule` made for the grid of tiles.
        config: The kernel's config instead of the one that the heuristics choose.
        implementation: "hopper", "blackwell", "xla", or "interpret" (the kernel simulated on the
            CPU); None takes the best that can compute this, and always works.
        out_sharding: The result's sharding under an explicit mesh.

    Returns:
        The product.

    Raises:
        ValueError: A shape, or a combination of arguments, is not legal, or the implementation
            that is named cannot compute this product; the message has every reason.
        TypeError: An argument is of the wrong type.
    """
    request = request_gemm(**locals())
    return _computed(request)


def matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`jnp.matmul` with the same arguments."""
    return gemm(
        a,
        b,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )


@dataclasses.dataclass(frozen=True)
class Request:
    """What a call of a public function comes down to.

    Attributes:
        call: The product.
        form: How its matrices are made of the operands, and the result's shape.
        operands: As they were given.
        direct: Computes the same without the primitive, with XLA.
        elsewhere: Why XLA computes it whatever the kernels can do; None if they may.
    """

    call: Call
    form: Form
    operands: Operands
    direct: Callable[..., jax.Array]
    elsewhere: str | None = None

    def signature(self) -> Any:
        """Shapes and types of the product's operands."""
        return signature_of(
            tuple(
                jax.ShapeDtypeStruct(shape, x.dtype)
                for x, shape in zip(self.operands, self._shapes(), strict=True)
                if x is not None
            )
        )

    def _shapes(self) -> tuple[Any, ...]:
        form = self.form
        return (form.a.shape, form.b.shape, form.b.shape, (form.columns,), form.product_shape)


def request_gemm(  # noqa: PLR0913 - the arguments of `gemm`
    a: Any,
    b: Any,
    *,
    bias: Any,
    residual: Any,
    activation: Any,
    alpha: Any,
    beta: Any,
    preferred_element_type: Any,
    precision: Any,
    transpose_a: bool,
    transpose_b: bool,
    schedule: Any,
    config: Any,
    implementation: Any,
    out_sharding: Any,
) -> Request:
    """Checks the arguments of `gemm` and returns what they ask for."""
    a, b = arguments.array("a", a), arguments.array("b", b)
    arguments.matmul_shapes(a, b, transpose_a, transpose_b)
    form = canonical.of_matmul(a.shape, b.shape, bool(transpose_a), bool(transpose_b))
    if bias is not None:
        bias = arguments.bias(bias, form.columns if b.ndim > 1 else None)
    if residual is not None:
        residual = arguments.residual(residual, form.shape)
    epilogue = Epilogue(
        alpha=arguments.scale("alpha", alpha),
        beta=arguments.scale("beta", beta),
        bias=bias is not None,
        residual=residual is not None,
        activation=activations.resolve(activation),
    )
    operands = Operands(a, b, bias=bias, residual=residual)
    options = _options(operands, implementation, config, schedule)
    call = Call(
        arguments.result_dtype(a, b, preferred_element_type),
        form.a.transposed,
        form.b.transposed,
        epilogue,
        _precision(precision),
        options,
    )
    direct = functools.partial(
        _matmul_by_xla, call, bool(transpose_a), bool(transpose_b), out_sharding
    )
    return Request(call, form, operands, direct, _elsewhere(operands, implementation, out_sharding))


def _precision(given: Any) -> Any:
    return precision.resolve(given)


def _options(operands: Operands, implementation: Any, config: Any, schedule: Any) -> Options:
    return Options(
        arguments.implementation(implementation, dispatch.IMPLEMENTATIONS),
        arguments.config(config),
        arguments.schedule(schedule),
        known_target(*operands.present()),
    )


def _elsewhere(operands: Operands, implementation: Any, out_sharding: Any) -> str | None:
    """Returns why XLA computes a product whatever the kernels can do, None if they may."""
    if implementation == "xla":
        return "implementation='xla'"
    return None


def _computed(request: Request) -> jax.Array:
    """Computes what was asked for, and names it for `jax.checkpoint`."""
    options = request.call.options
    given = request.operands.present()
    if request.elsewhere is not None:
        return checkpoint_name(request.direct(*given), OUT_NAME)
    if (options.implementation, options.config, options.schedule) != (None, None, None):
        # Whatever is named and does not fit is refused here, before anything is traced.
        dispatch.decide(request.call, request.signature())
    return _product(request.call, request.form, *given)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _product(call: Call, form: Form, *operands: jax.Array) -> jax.Array:
    given = call.unpack(operands)
    ready = given._replace(a=form.a.apply(given.a), b=form.b.apply(given.b))
    if given.up is not None:
        ready = ready._replace(up=form.b.apply(given.up))
    if given.residual is not None:
        ready = ready._replace(residual=given.residual.reshape(form.product_shape))
    result = product(call, *ready.present()).reshape(form.shape)
    return checkpoint_name(result, OUT_NAME)


def _matmul_by_xla(
    call: Call, transpose_a: bool, transpose_b: bool, out_sharding: Any, *operands: jax.Array
) -> jax.Array:
    """Computes a product by `jnp.matmul`, which JAX differentiates and partitions itself."""
    given = call.unpack(operands)
    a = jnp.swapaxes(given.a, -1, -2) if transpose_a and given.a.ndim > 1 else given.a
    rights = [b for b in (given.b, given.up) if b is not None]
    if transpose_b and given.b.ndim > 1:
        rights = [jnp.swapaxes(b, -1, -2) for b in rights]
    plain = call.epilogue.is_identity
    wide = call.out_dtype if plain else xla.wide_dtype(a.dtype, call.out_dtype)
    sums = [
        jnp.matmul(
            a,
            b,
            precision=call.precision,
            preferred_element_type=wide,
            out_sharding=out_sharding,
        )
        for b in rights
    ]
    return sums[0] if plain else xla.finish(call.epilogue, sums, given).astype(call.out_dtype)
