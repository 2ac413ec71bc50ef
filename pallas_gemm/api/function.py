"""The caller's function as an epilogue: checked, and traced with the product's shape."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pallas_gemm.api import arguments, request
from pallas_gemm.api.extras import Result
from pallas_gemm.call import Operands, Options
from pallas_gemm.op import fused, mesh_context
from pallas_gemm.op.fused import Function, Fused
from pallas_gemm.planning import dispatch
from pallas_gemm.problem import Epilogue


def said(words: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the other arguments that say what happens to a product.

    Args:
        words: All of them, by their names: None, or 1, says nothing.
    """

    def says(x: Any) -> bool:
        return x is not None and not (isinstance(x, int | float) and x == 1)

    return {name: x for name, x in words.items() if says(x)}


def answer(
    factors: Sequence[Any],
    epilogue: Any,
    operands: Sequence[Any],
    options: Options,
    words: Mapping[str, Any],
    compute: Callable[[request.Request], jax.Array],
    **how: Any,
) -> Any:
    """Computes `epilogue(a @ b, *operands)`, or `epilogue(a @ b, a @ up, *operands)`.

    Args:
        factors: a and b, and up if there are two right operands.
        epilogue: The function.
        operands: What it takes beside the float32 sums.
        options: How to compute it.
        words: The other arguments that say what happens to the product, by their names, which are
            none of their defaults.
        compute: Computes a product without an epilogue.
        **how: As for `request.of_gemm`.
    """
    given = _checked(epilogue, operands, words)

    def asked_of(*factors: Any) -> request.Request:
        return request.of_gemm(
            Operands(*factors), Epilogue(), options, preferred_element_type=np.float32, **how
        )

    asked = asked_of(*factors)
    flags = (how.get("transpose_a", False), how.get("transpose_b", False))
    shape = Result.of(asked.operands.a, asked.operands.b, *flags).whole
    sums = [jax.ShapeDtypeStruct(shape, asked.call.out_dtype)] * (len(factors) - 1)
    function, tree = traced(epilogue, sums, given)
    everything = (*asked.operands.present(), *given)
    on_mesh = request.is_explicit(*everything) or mesh_context.is_on_mesh(*everything)
    if asked.outside is not None or on_mesh:
        a, *rights = factors
        products = [compute(asked_of(a, b)) for b in rights]
        return jax.tree.unflatten(tree, function(*products, *given))
    dims, own = fused.squeezed(asked.call, asked.contraction, asked.operands.present())
    if options.names_something:
        _check(asked, function, (*own, *given), dims)
    return jax.tree.unflatten(tree, fused.fused(asked.call, dims, function, *own, *given))


def _checked(epilogue: Any, operands: Any, words: Mapping[str, Any]) -> list[Any]:
    """Checks what a function is given with, and returns its operands as arrays.

    Raises:
        ValueError: There is no function, or words beside it.
        TypeError: It is none, or an operand is no array.
    """
    if epilogue is None:
        raise ValueError("operands are what epilogue takes, and there is no epilogue")
    if words:
        names = ", ".join(f"{name}=" for name in words)
        raise ValueError(
            f"epilogue says all that happens to the product: leave out {names}, and say it in the"
            " function"
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
    return [arguments.array(f"operands[{i}]", x) for i, x in enumerate(operands)]


def traced(
    epilogue: Callable[..., Any], sums: Sequence[Any], given: Sequence[Any]
) -> tuple[Function, Any]:
    """Traces the function of sums, and of operands; returns it with the tree of its results.

    Raises:
        TypeError: It cannot be traced, returns no array, or uses a traced array that is no operand.
    """
    name = getattr(epilogue, "__name__", repr(epilogue))
    types = [*sums, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given)]
    try:
        closed, out = jax.make_jaxpr(epilogue, return_shape=True)(*types)
    except Exception as error:
        shapes = ", ".join(map(str, types))
        error.add_note(f"epilogue={name} was called with {shapes}: the product, then operands")
        raise
    captured = [x for x in closed.consts if isinstance(x, jax.core.Tracer)]
    if captured:
        shapes = ", ".join(str(list(x.shape)) for x in captured)
        raise TypeError(
            f"epilogue={name} uses traced arrays of shapes {shapes} from around it: hand them over"
            " as operands=, and the function takes them after the product"
        )
    if closed.effects:
        raise TypeError(f"epilogue={name} must be a pure function, but it has side effects")
    if not closed.out_avals:
        raise TypeError(f"epilogue={name} must return arrays, it returns nothing")
    run = Function(lambda *x: jax.tree.leaves(epilogue(*x)), closed, len(sums))
    return run, jax.tree.structure(out)


def _check(asked: request.Request, function: Function, operands: Any, dims: Any) -> None:
    """Refuses what is named and cannot compute the function.

    Raises:
        ValueError: The message has the reason.
    """
    found = fused.plan(asked.call, dims, function, fused.signature_of(operands))
    if isinstance(found, Fused):
        dispatch.check(found.call, found.signature)
        return
    named = asked.call.options
    what = f"implementation={named.implementation!r}" if named.implementation else "what is named"
    raise ValueError(f"{what} cannot compute this epilogue: {found}; None computes it")
