"""What follows the sums of a product: a function, and its derivative, which JAX derives."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from pallas_gemm.kernels.functions import flat
from pallas_gemm.op import linear


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """What follows the sums: a function of them, and of operands.

    Attributes:
        run: Computes it, as a list.
        closed: The same, traced.
        sums: How many sums it takes first.
        rounds_to: The type that it rounds the sums to first where XLA computes it; None if none.
        otherwise: Computes the results of all operands on a GPU whose kernels do not compute the
            function; None for the sums, and the function by XLA.
    """

    run: Callable[..., list[Any]]
    closed: core.ClosedJaxpr
    sums: int = 1
    rounds_to: Any = None
    otherwise: Callable[..., list[Any]] | None = None

    def __call__(self, *args: Any) -> list[Any]:
        """Computes the function by XLA."""
        return self.run(*args)

    @functools.cached_property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the sums and of the operands."""
        taken: Any = self.closed.in_avals
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in taken]

    @functools.cache  # noqa: B019 - a function lives as long as the program that holds it
    def keeping_sums(self, dtype: Any) -> "Function":
        """Returns the function with the sums, rounded, as more results."""

        def keeping(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
            return lambda *args: [*run(*args), *(s.astype(dtype) for s in args[: self.sums])]

        return self._with(keeping, self.types)

    @functools.cached_property
    def as_derived(self) -> "Function":
        """The function where it is derived: a `jax.custom_vjp` in it runs its forward rule.

        JAX derives that rule for a second derivative, and not the user's gradient.
        """
        # XLA has a program of its own only where the kernel goes on in float32.
        program = self.closed if self.rounds_to is None else jax.make_jaxpr(self.run)(*self.types)
        if not _has_forward_rules(program.jaxpr):
            return self
        return self._with(lambda run: lambda *args: jax.vjp(run, *args)[0], self.types)

    @functools.cache  # noqa: B019
    def mapped(self, size: int, axes: tuple[int | None, ...]) -> "Function":
        """Returns the function of `size` sums and operands, the operands along these axes."""
        every = ((0,) * self.sums) + axes
        types = [
            x if axis is None else _with_axis(x, size, axis)
            for x, axis in zip(self.types, every, strict=True)
        ]
        return self._with(lambda run: jax.vmap(run, every), types)

    def _with(
        self, change: Callable[[Callable[..., Any]], Callable[..., Any]], types: Sequence[Any]
    ) -> "Function":
        """Returns the function that a change makes of it, for XLA and for kernels.

        A kernel may compute another program, which goes on in float32.
        """
        closed = jax.make_jaxpr(change(core.jaxpr_as_fun(self.closed)))(*types)
        return Function(change(self.run), closed, self.sums, self.rounds_to)

    @functools.cache  # noqa: B019
    def derivative_needs_sums(self, moved: tuple[bool, ...]) -> bool:
        """Whether the derivative along what moves, the sums first, depends on the sums."""
        moving = [x if is_moved else None for x, is_moved in zip(self.types, moved, strict=True)]
        change = functools.partial(linear.derived, self)
        whole = flat.flat(jax.make_jaxpr(lambda *args: change(*args)[1])(self.types, moving))
        needed = {x for x in whole.outputs if isinstance(x, int)}
        for equation in reversed(whole.equations):
            if needed & set(equation.outputs):
                needed |= {x for x in equation.inputs if isinstance(x, int)}
        return not needed.isdisjoint(whole.inputs[: self.sums])

    def derivative(
        self,
        compute: Callable[..., list[Any]],
        dtype: Any,
        changes: Sequence[Any],
        given: Any,
        finished: Callable[..., list[Any]] | None = None,
    ) -> tuple[list[Any], Any]:
        """Returns the results of a product, and how they change.

        Args:
            compute: Computes the results; given a type, also the sums in it.
            dtype: The type of the factors.
            changes: How each sum and each operand changes; None where it does not.
            given: The operands.
            finished: Computes the results from the sums and the operands in place of this function.
        """
        moved = tuple(change is not None for change in changes)
        if self.derivative_needs_sums(moved):
            # A program that has its sums in float32 derives them so.
            every = compute(linear.kept_sums_dtype(self.rounds_to or dtype))
            results, sums = every[: -self.sums], list(map(linear.named, every[-self.sums :]))
        else:
            results = compute()
            sums = [jnp.zeros(x.shape, x.dtype) for x in self.types[: self.sums]]

        # What the derivative computes of the sums again is not kept beside them.
        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
        def change(sums: Any, own: Any, changes: Any) -> Any:
            wide = [x.astype(self.types[0].dtype) for x in sums]
            return linear.derived(finished or self, (*wide, *own), changes)[1]

        return list(map(linear.named, results)), change(sums, given, changes)


def traced(function: Callable[..., Any], *types: Any, sums: int = 1) -> Function:
    """Traces a function of sums, and of operands."""

    def run(*args: Any) -> list[Any]:
        return jax.tree.leaves(function(*args))

    return Function(run, jax.make_jaxpr(run)(*types), sums)


def _has_forward_rules(jaxpr: Any) -> bool:
    return any(
        own.primitive.name == "custom_vjp_call"
        or any(map(_has_forward_rules, core.jaxprs_in_params(own.params)))
        for own in jaxpr.eqns
    )


def _with_axis(x: jax.ShapeDtypeStruct, size: int, axis: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*x.shape[:axis], size, *x.shape[axis:]), x.dtype)
