"""The caller's function as an epilogue: checked, and traced with the product's shape."""

import dataclasses
import functools
import numbers
import pathlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from pallas_gemm.api import arguments, request
from pallas_gemm.call import Numerics, Operands, Options, signature_of
from pallas_gemm.kernels.functions import lines
from pallas_gemm.op import fused, in_blocks
from pallas_gemm.op.function_of_sums import Function
from pallas_gemm.op.mesh import mesh_context
from pallas_gemm.op.mesh.explicit import explicit_fused
from pallas_gemm.planning import dispatch, numerics
from pallas_gemm.planning.by_xla import xla
from pallas_gemm.problem import SCALES, VALUES, Epilogue


def is_given(epilogue: Any, operands: Any) -> bool:
    """Whether a call gives a function, or operands of one."""
    is_empty = isinstance(operands, list | tuple) and not operands
    return epilogue is not None or not is_empty


FACTORS = ("alpha", "beta")
"""The words whose default is 1."""


def said(words: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the other arguments that say what happens to a product.

    Args:
        words: All of them, by their names: None says nothing, and a factor of 1 says nothing.
    """

    def says(name: str, x: Any) -> bool:
        is_number = name in FACTORS and isinstance(x, numbers.Real | np.number)
        return x is not None and not (is_number and x == 1)

    return {name: x for name, x in words.items() if says(name, x)}


def answer(
    given: Operands,
    epilogue: Any,
    operands: Sequence[Any],
    options: Options,
    words: Mapping[str, Any],
    compute: Callable[[request.Request], jax.Array],
    **how: Any,
) -> Any:
    """Computes `epilogue(a @ b, *operands)`, or `epilogue(a @ b, a @ up, *operands)`.

    Args:
        given: a and b, up if there are two right operands, and what scales them.
        epilogue: The function.
        operands: The arrays that it takes beside the float32 sums.
        options: How to compute it.
        words: The other arguments, as `said` returns them.
        compute: Computes a product without an epilogue.
        **how: As for `request.of_gemm`.
    """
    taken = checked(epilogue, operands, words, (given.a, given.b))

    def asked_of(own: Operands) -> request.Request:
        return request.of_gemm(own, Epilogue(), options, preferred_element_type=np.float32, **how)

    asked = asked_of(given)
    shape = asked.contraction.shape(*(x.shape for x in asked.operands[:2]))
    sums = [jax.ShapeDtypeStruct(shape, asked.call.out_dtype)] * (1 + (given.up is not None))
    if asked.outside is not None:
        every = [given.of_sum(SCALES[:2], up=up) for up in (False, True)[: len(sums)]]
        products = [compute(asked_of(own)) for own in every]
        function, tree = traced(epilogue, sums, taken)
        return jax.tree.unflatten(tree, function(*products, *taken))
    scaled = Scaled.of(epilogue, asked.operands, len(sums))
    call = dataclasses.replace(asked.call, epilogue=scaled.rest(asked.call.epilogue))
    dims = asked.contraction.with_letters(**dict.fromkeys(scaled.names, ""))
    factors = asked.operands._replace(**dict.fromkeys(scaled.names))
    taken = [*scaled.scales, *taken]
    function, tree = traced(scaled.function, sums, taken)
    everything = (*factors.present(), *taken)
    call = request.in_parts(call, asked.contraction, asked.operands, finished=True)
    if request.is_explicit(*everything):
        results = explicit_fused(call, dims, function, asked.unscaled_sharding, *everything)
        return jax.tree.unflatten(tree, results)
    dims, own = in_blocks.ready(call, dims, factors.present())
    if options.names_something and not mesh_context.is_on_mesh(*everything):
        check_named(options, fused.plan(call, dims, function, signature_of((*own, *taken))))
    return jax.tree.unflatten(tree, fused.fused(call, dims, function, *own, *taken))


class Scaled(NamedTuple):
    """A function of sums whose rows and columns are scaled, as one of the sums and these scales.

    Attributes:
        function: It takes the sums, the scales, then its other operands.
        names: The names of the scales.
        scales: The scales.
    """

    function: Callable[..., Any]
    names: tuple[str, ...]
    scales: tuple[Any, ...]

    @classmethod
    def of(cls, function: Callable[..., Any], given: Operands, sums: int) -> Self:
        """Returns a function of this number of scaled sums, with their scales."""
        names = tuple(name for name in SCALES if getattr(given, name) is not None)
        if not names:
            return cls(function, (), ())

        @functools.wraps(function)
        def scaled(*args: Any) -> Any:
            totals, scales, others = args[:sums], args[sums : sums + len(names)], args[sums:]
            of_name = dict(zip(names, scales, strict=True))
            pairs = zip(totals, VALUES, strict=False)
            return function(*(_times(x, own, of_name) for x, own in pairs), *others[len(names) :])

        return cls(scaled, names, tuple(getattr(given, name) for name in names))

    @property
    def of_names(self) -> list[tuple[str, Any]]:
        """The scales with their names."""
        return list(zip(self.names, self.scales, strict=True))

    def rest(self, epilogue: Epilogue) -> Epilogue:
        """Returns an epilogue without these scales."""
        none: dict[str, Any] = dict.fromkeys(self.names, False)
        return dataclasses.replace(epilogue, **none)


def _times(total: Any, names: Sequence[str], scales: Mapping[str, Any]) -> Any:
    """Multiplies a sum by those scales that there are of these names."""
    for name in names:
        if name in scales:
            total = total * xla.aligned(name, scales[name].astype(total.dtype), total.ndim)
    return total


def checked(
    epilogue: Any, operands: Any, words: Mapping[str, Any], factors: Sequence[Any]
) -> list[Any]:
    """Checks what a function is given with, and returns its operands as arrays.

    Raises:
        ValueError: There is no function, or words beside it.
        TypeError: It is none, an operand is no array, or a factor of the product is complex.
    """
    if epilogue is None:
        raise ValueError("operands has no meaning without epilogue, the function that takes them")
    if words:
        names = ", ".join(f"{name}=" for name in words)
        raise ValueError(
            f"{names} has no meaning beside epilogue: the function says everything that happens to"
            " the product"
        )
    if not callable(epilogue):
        raise TypeError(
            f"epilogue must be a function, got {type(epilogue).__name__}: {epilogue!r:.80}"
        )
    if not isinstance(operands, list | tuple):
        raise TypeError(
            "operands must be a tuple of the arrays that epilogue takes beside the product, got"
            f" {type(operands).__name__}"
        )
    for x in factors:
        if np.iscomplexobj(x):
            raise TypeError(
                "epilogue is a function of a float32 product, and complex operands have none, got"
                f" {jnp.result_type(x)}"
            )
    return [_typed(arguments.array(f"operands[{i}]", x)) for i, x in enumerate(operands)]


def _typed(x: Any) -> Any:
    """Returns an operand. A Python number takes the type of the sums, as in JAX."""
    is_number = getattr(x, "weak_type", False) and np.issubdtype(x.dtype, np.floating)
    return x.astype(np.float32) if is_number else x


BY_XLA = "XLA computes the function that is the epilogue"
"""Why nothing is promised of its results."""


def after(
    multiply: Callable[..., jax.Array],
    factors: Sequence[Any],
    epilogue: Any,
    operands: Sequence[Any],
    words: Mapping[str, Any],
    promised: Numerics | None = None,
) -> Any:
    """Computes a function of a product by XLA.

    Args:
        multiply: Computes the float32 product of the factors.
        factors: One or two arrays.
        epilogue: The function.
        operands: The arrays that it takes besides.
        words: As for `said`.
        promised: As `numerics` of the product, which nothing is to be.
    """
    numerics.refuse(BY_XLA, promised)
    given = checked(epilogue, operands, said(words), factors)
    product = multiply(*factors)
    function, tree = traced(epilogue, [product], given)
    return jax.tree.unflatten(tree, function(product, *given))


def traced(
    epilogue: Callable[..., Any], sums: Sequence[Any], given: Sequence[Any]
) -> tuple[Function, Any]:
    """Traces the function of sums, and of operands; returns it with the tree of its results.

    Raises:
        TypeError: It cannot be traced, returns no array, or uses a traced array that is no operand.
    """
    name = getattr(epilogue, "__name__", repr(epilogue))
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*sums, *given)]
    try:
        closed, out = jax.make_jaxpr(epilogue, return_shape=True)(*types)
    except Exception as error:
        shapes = ", ".join(map(str, types))
        error.add_note(
            f"epilogue={name} was called with {shapes}: the product, then operands{_raised(error)}"
        )
        raise
    jaxpr = closed.jaxpr
    pairs = zip(jaxpr.constvars, closed.consts, strict=True)
    captured = [variable for variable, x in pairs if isinstance(x, jax.core.Tracer)]
    if captured:
        avals: Any = [x.aval for x in captured]
        shapes = ", ".join(str(list(x.shape)) for x in avals)
        users = [x for x in jaxpr.eqns if any(v is captured[0] for v in x.invars)]
        raise TypeError(
            f"epilogue={name} uses traced arrays of shapes {shapes} from around it"
            f"{_of_operation(users)}: hand them over as operands=, and the function takes them"
            " after the product"
        )
    if closed.effects:
        loud = [x for x in jaxpr.eqns if x.effects]
        raise TypeError(
            f"epilogue={name} must be a pure function, but it has side effects{_of_operation(loud)}"
        )
    if not closed.out_avals:
        raise TypeError(f"epilogue={name} must return arrays, it returns nothing")
    run = Function(lambda *x: jax.tree.leaves(epilogue(*x)), closed, len(sums))
    return run, jax.tree.structure(out)


def _of_operation(equations: Sequence[Any]) -> str:
    """Returns the name of the first of some operations, and its line, as a part of a message."""
    if not equations:
        return ""
    line = lines.place(equations[0].source_info)
    return f", in {equations[0].primitive.name}" + (f" ({line})" if line else "")


def _raised(error: Exception) -> str:
    """Returns the innermost line of the caller's program that raised an error, for a message."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [x for x in frames if not lines.is_library(x.filename)]
    return f", at {pathlib.Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def check_named(options: Options, found: Any) -> None:
    """Refuses what is named and cannot compute the function.

    Args:
        options: The options with the names.
        found: How a kernel computes it, or why none does.

    Raises:
        ValueError: The message has the reason.
    """
    if not isinstance(found, str):
        dispatch.check(found.call, found.signature)
        return
    what = (
        f"implementation={options.implementation!r}" if options.implementation else "what is named"
    )
    raise ValueError(f"{what} cannot compute this epilogue: {found}; None computes it")
