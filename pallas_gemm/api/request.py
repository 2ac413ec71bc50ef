"""What a call of a public function comes down to: checked, and in the terms of the product."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import dot, dot_general
from jax.numpy import matmul
from jax.sharding import AxisType, NamedSharding

from pallas_gemm.api import arguments, extras
from pallas_gemm.api.few_bits import weight_operands
from pallas_gemm.call import OF_RESULT, Call, Operands, Options, signature_of
from pallas_gemm.kernels import element_types
from pallas_gemm.kernels.functions import activations
from pallas_gemm.op import canonical, contraction, in_blocks, linear
from pallas_gemm.op.contraction import Contraction
from pallas_gemm.op.mesh import mesh_context, typed
from pallas_gemm.op.mesh.reduction import reduction_dtype
from pallas_gemm.op.rounding import is_rounded_once
from pallas_gemm.planning import numerics, scheme
from pallas_gemm.planning import precision as precisions
from pallas_gemm.planning.by_xla import xla
from pallas_gemm.planning.targeting import known_target
from pallas_gemm.problem import BLOCKS, SCALES, Epilogue, element_type


@dataclasses.dataclass(frozen=True)
class Request:
    """The request that a call of a public function makes.

    Attributes:
        call: The product.
        contraction: Its dimensions.
        operands: As they were given.
        by_xla: Computes the same from the operands that there are without the primitive.
        outside: Why no kernel is considered; None if one is.
        plain: JAX's product of two factors, split as the caller asked for it.
        is_scaled: Scales have a dimension along k. They have no say in how the result is split.
    """

    call: Call
    contraction: Contraction
    operands: Operands
    by_xla: Callable[..., jax.Array]
    outside: str | None
    plain: functools.partial[jax.Array]
    is_scaled: bool = False

    @property
    def merged(self) -> canonical.Merged:
        """The product of matrices that one device would compute alone."""
        types = [jax.ShapeDtypeStruct(*own) for own in signature_of(self.operands.present())]
        dims, own = in_blocks.ready(self.call, self.contraction, types)
        return canonical.merged(self.call, dims, signature_of(own))

    @property
    def result_sharding(self) -> NamedSharding | None:
        """How several devices split the result where types say so; None elsewhere."""
        return self.type_sharding if is_explicit(*self.operands.present()) else None

    @property
    def type_sharding(self) -> NamedSharding | None:
        """The sharding of the result's type on an explicit mesh, of one device too; else None."""
        operands = self.operands.present()
        if self.plain.keywords["out_sharding"] is None and not typed.are_split(*operands):
            return None
        return self.unscaled_sharding if self.is_scaled else self._sharding(self.by_xla, operands)

    @property
    def unscaled_sharding(self) -> NamedSharding:
        """The sharding of the result's type if nothing scales it, and no activation follows."""
        names = (*self.call.factors, *(x for x in OF_RESULT if x not in SCALES))
        given = {name: x for name in names if (x := getattr(self.operands, name)) is not None}

        def unscaled(*operands: jax.Array) -> Any:
            # Of a type in which any two arrays may be added and multiplied.
            wide = (x.astype(np.float32) for x in operands)
            own = Operands(**dict(zip(given, wide, strict=True)))
            own = self.contraction.aligned(own)
            sums = [self.plain(own.a, x) for x in (own.b, own.up) if x is not None]
            return linear.total([*sums, *own._replace(a=None, b=None, up=None)])

        return self._sharding(unscaled, given.values())

    def _sharding(self, compute: Callable[..., Any], operands: Iterable[Any]) -> NamedSharding:
        """Returns the sharding of the type of a function's result."""
        try:
            result: Any = jax.make_jaxpr(compute)(*operands).out_avals[0]
        except Exception as error:
            # JAX's own, which shows how each operand is split, but names no dimension.
            if found := _split_by_one_axis(self.contraction, *self.operands[:2]):
                error.args = (f"{error}; {found}",)
            raise
        return result.sharding


def _split_by_one_axis(dims: Contraction, a: jax.Array, b: jax.Array) -> str:
    """Says which axis of a mesh splits different dimensions of the factors; "" if none does."""
    names, split = dims.names(), collections.defaultdict(list)
    for letters, operand in ((dims.lhs, a), (dims.rhs, b)):
        for letter, axes in zip(letters, jax.typeof(operand).sharding.spec, strict=False):
            for axis in (axes,) if isinstance(axes, str) else axes or ():
                split[axis] += [letter] if letter not in split[axis] else []
    return "; ".join(
        f"{axis!r} splits {' and '.join(names.get(x, x) for x in found)}"
        for axis, found in split.items()
        if len(found) > 1
    )


def of_gemm(
    operands: Operands,
    epilogue: Epilogue,
    options: Options,
    transpose_a: bool = False,
    transpose_b: bool = False,
    **result: Any,
) -> Request:
    """Returns what `gemm` asks for.

    Args:
        operands: As they were given.
        epilogue: The epilogue of the sum, without the facts that the operands tell.
        options: How to compute it.
        transpose_a: As for `gemm`.
        transpose_b: As for `gemm`.
        **result: `preferred_element_type`, `precision` and `out_sharding`, as for `gemm`.
    """
    right = "b" if operands.up is None else "w_gate"
    operands = weight_operands.taken_apart(operands, (right, "w_up"), transpose_b)
    a, b = arguments.array("a", operands.a), arguments.array(right, operands.b)
    transpose_a = arguments.flag("transpose_a", transpose_a)
    transpose_b = arguments.flag("transpose_b", transpose_b)
    arguments.matmul_shapes(a, b, transpose_a, transpose_b, right)
    up = arguments.up(operands.up, b)
    shape = extras.Result.of(a, b, transpose_a, transpose_b)
    activation = activations.resolve(epilogue.activation)
    k = a.shape[-2 if transpose_a and a.ndim > 1 else -1]
    factors = shape.factors(a, b, k, right)
    names = extras.OF_ONE if operands.up is None else extras.OF_GATE
    epilogue, given = extras.checked(operands, epilogue, shape, factors, names)
    epilogue = dataclasses.replace(epilogue, activation=activation)
    dims = contraction.of_matmul(a.shape, b.shape, transpose_a, transpose_b)
    dims = dims.with_letters(**extras.letters(given, dims.out, shape))
    multiply = functools.partial(_matmul, transpose_a, transpose_b)
    if result.get("preferred_element_type") is not None:
        a = _strong(a)
    scales = (getattr(operands, name) for name in (*SCALES, *BLOCKS))
    asked = _request(given._replace(a=a, b=b, up=up), dims, epilogue, options, multiply, **result)
    return dataclasses.replace(asked, is_scaled=any(np.ndim(x) > 1 for x in scales))


def _strong(x: Any) -> Any:
    """Returns an operand that no weakly typed result can come from."""
    return lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def of_dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    options: Options,
    letters: tuple[str, str] | None = None,
    **result: Any,
) -> Request:
    """Returns what `dot_general` asks for.

    Args:
        lhs: The left operand.
        rhs: The right operand.
        dimension_numbers: As for `lax.dot_general`.
        options: How to compute it.
        letters: The caller's names of the dimensions of each operand, if any.
        **result: As for `of_gemm`.
    """
    lhs, rhs = weight_operands.arrays((lhs, rhs))
    lhs, rhs = arguments.array("lhs", lhs), arguments.array("rhs", rhs)
    numbers = arguments.dimension_numbers(lhs, rhs, dimension_numbers)
    dims = contraction.of_dot_general(lhs.ndim, rhs.ndim, numbers, letters)
    multiply = functools.partial(_dot_general, numbers)
    return _request(Operands(lhs, rhs), dims, Epilogue(), options, multiply, **result)


def _request(
    operands: Operands,
    dims: Contraction,
    epilogue: Epilogue,
    options: Options,
    multiply: functools.partial[jax.Array],
    *,
    preferred_element_type: Any = None,
    precision: Any = None,
    out_sharding: Any = None,
) -> Request:
    out_sharding = arguments.sharding(out_sharding)
    resolved = precisions.resolve(precision)
    rules = dot if multiply.func is _dot_general else matmul
    wanted = element_type(preferred_element_type)
    # Scaled weights of few bits have no say in it.
    narrow = has_scaled_weights(epilogue, operands.a, operands.b)
    right = operands.a if narrow else operands.b
    names = ("a", "b" if operands.up is None else "w_gate")
    dtype = arguments.result_type(operands.a, right, wanted, rules, resolved, names).dtype
    arguments.epilogue_dtype(epilogue, (operands.a.dtype, operands.b.dtype), dtype)
    options = dataclasses.replace(
        numerics.stated(options),
        target=known_target(*operands.present()),
        reduced=reduction_dtype(),
        once=is_rounded_once(),
    )
    call = Call(dtype, epilogue=epilogue, precision=resolved, options=options)
    outside = _outside(call, operands, out_sharding)
    if outside is not None and options.implementation not in (None, "xla"):
        raise ValueError(
            f"implementation={options.implementation!r} cannot compute this product: {outside};"
            " None or 'xla' can"
        )
    if options.numerics is not None:
        if outside is not None:
            raise ValueError(numerics.why_not_kept(options.numerics, outside))
        call = in_parts(call, dims, operands)
    plain = functools.partial(multiply, out_sharding=out_sharding)
    precise = functools.partial(plain, precision=resolved)
    by_xla = functools.partial(_by_xla, call, dims, precise, wanted)
    return Request(call, dims, operands, by_xla, outside, plain)


def has_scaled_weights(epilogue: Epilogue, a: Any, b: Any) -> bool:
    """Whether weights of few bits are scaled, and so multiplied in the type of what is wider."""
    scaled = epilogue.col_scale or epilogue.col_blocks
    return scaled and element_types.is_widened(a.dtype, b.dtype)


def in_parts(call: Call, dims: Contraction, operands: Operands, *, finished: bool = False) -> Call:
    """Returns a call with the parts of sums that are promised; see `numerics.resolved_call`."""
    sizes = dims.sizes(operands.a.shape, operands.b.shape)
    n, k = (math.prod(sizes[x] for x in own) for own in (dims.columns, dims.contracted))
    return numerics.resolved_call(call, n, k, operands.a.dtype, finished=finished)


def _outside(call: Call, operands: Operands, out_sharding: Any) -> str | None:
    """Returns why no kernel is considered, None if one is."""
    if call.options.implementation == "xla":
        return "implementation='xla'"
    dtypes = {np.dtype(x.dtype) for x in operands[:3] if x is not None}
    left = np.dtype(operands.a.dtype)
    if left in element_types.FLOATS_16 and has_scaled_weights(call.epilogue, *operands[:2]):
        dtypes = {left}
    dtypes = scheme.multiplied(call.precision, dtypes)
    if reason := element_types.why_no_kernel(dtypes, call.out_dtype):
        return reason
    return _outside_for_mesh(operands, out_sharding)


def _outside_for_mesh(operands: Operands, out_sharding: Any) -> str | None:
    types = (jax.typeof(x) for x in operands.present() if isinstance(x, jax.Array))
    if any(map(mesh_context.is_partial_sum, types)):
        return "the type of an operand says that it is reduced, or unreduced"
    explicit = [mesh for x in operands.present() if (mesh := _explicit_mesh(x)) is not None]
    if not explicit:
        return None if out_sharding is None else "out_sharding is given"
    if any(AxisType.Manual in mesh.axis_types for mesh in explicit):
        return "the mesh is manual along some axes only"
    spec = getattr(out_sharding, "spec", out_sharding)
    if getattr(spec, "unreduced", None):
        return "out_sharding asks for partial sums"
    return None


def _explicit_mesh(x: Any) -> Any:
    """Returns the mesh of several devices that the type of an operand says it is on, or None."""
    if not isinstance(x, jax.Array):
        return None
    mesh = jax.typeof(x).sharding.mesh
    return mesh if mesh.size > 1 and AxisType.Explicit in mesh.axis_types else None


def is_explicit(*operands: Any) -> bool:
    """Whether the type of an operand says how it is split over the devices of a mesh."""
    return any(_explicit_mesh(x) is not None for x in operands)


def _by_xla(
    call: Call,
    dims: Contraction,
    multiply: Callable[..., jax.Array],
    wanted: Any,
    *operands: jax.Array,
) -> jax.Array:
    """Computes a request by XLA's product, which JAX derives and partitions itself."""
    if call.epilogue.blocks:
        return in_blocks.by_xla(call, dims, *operands)
    given = call.unpack(operands)
    if call.epilogue.is_identity:
        # Without a preferred type it is JAX's to say that the result is weakly typed.
        return multiply(given.a, given.b, preferred_element_type=wanted)
    wide = xla.wide_dtype(given.a.dtype, given.b.dtype, call.out_dtype)
    given = xla.widened(given)
    rights = [b for b in (given.b, given.up) if b is not None]
    sums = [multiply(given.a, b, preferred_element_type=wide) for b in rights]
    return xla.finish(call.epilogue, sums, given).astype(call.out_dtype)


def _matmul(transpose_a: bool, transpose_b: bool, a: Any, b: Any, **how: Any) -> jax.Array:
    a = jnp.swapaxes(a, -1, -2) if transpose_a and a.ndim > 1 else a
    b = jnp.swapaxes(b, -1, -2) if transpose_b and b.ndim > 1 else b
    return matmul(a, b, **how)


def _dot_general(numbers: contraction.DimensionNumbers, a: Any, b: Any, **how: Any) -> jax.Array:
    return dot_general(a, b, numbers, **how)
