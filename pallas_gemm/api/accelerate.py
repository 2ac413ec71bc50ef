"""`accelerate`: a program of others with our products, without a change to it."""

import functools
import operator
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.extend.core.primitives import closed_call_p

from pallas_gemm.api import arguments, notes
from pallas_gemm.api.eager import is_hashable
from pallas_gemm.computer import garbage
from pallas_gemm.device import Device
from pallas_gemm.planning import targeting
from pallas_gemm.planning.ignored import NOT_THE_CALLERS
from pallas_gemm.planning.numerics import refuse
from pallas_gemm.rewriting.products import How
from pallas_gemm.rewriting.walk import Found, Rewriter

OFF = "PALLAS_GEMM_ACCELERATE"
"""The environment variable that turns every `accelerate` off where it is "0"."""


class AccelerateWarning(UserWarning):
    """A program stays as it is, because it could not be rewritten."""


def accelerate[**P, R](
    f: Callable[P, R],
    *,
    numerics: str | None = None,
    only: str | Sequence[str] | None = None,
    report: bool | Callable[[str], Any] | None = None,
    enabled: bool = True,
) -> Callable[P, R]:
    """Returns a function that computes the same, with our kernels wherever they are faster.

    It traces `f`, as `jax.jit` does, and puts our products in the place of JAX's own, in whatever
    `f` calls: under `jit`, `scan`, `while`, `cond`, `checkpoint`, derivatives and `shard_map`, too.
    A kernel also computes the operations around its product, where that is predicted to save time.
    Sums are rounded no earlier than before; see `numerics`.

    It is best around a whole training step, in which gradients are products already:

    >>> step = jax.jit(accelerate(train_step))  # doctest: +SKIP
    >>> print(explain(accelerate(train_step), params, batch))  # doctest: +SKIP

    A program stays as it is where no GPU is planned for, where XLA is faster, and wherever a
    rewriting fails, of which a warning says so.

    Args:
        f: The function. It takes and returns arrays, and trees of them, as for `jax.jit`. Other
            arguments are passed as they are.
        numerics: None, or "exact": only operations whose results are rounded exactly are folded, so
            that nothing but the products themselves changes a bit.
        only: A part of the name of a line, such as "attention.py" or "model.py:41", or several:
            products of other lines stay JAX's.
        report: True prints one line the first time, of what was found; a function is called with
            it.
        enabled: Whether anything is done. The environment variable `PALLAS_GEMM_ACCELERATE=0` turns
            it off, too.

    Returns:
        The function.

    Raises:
        TypeError: `f` is no function, `only` no name, or `report` neither.
        ValueError: `numerics` is neither.
    """
    if not callable(f):
        raise TypeError(f"f must be a function, got {type(f).__name__}: {f!r:.80}")
    if numerics not in (None, "exact"):
        raise ValueError(f"numerics must be None or 'exact', got {numerics!r}")
    names = (only,) if isinstance(only, str) else only
    is_several = isinstance(names, list | tuple) and all(isinstance(own, str) for own in names)
    if names is not None and not is_several:
        raise TypeError(f"only must be a name of a line or several, such as 'model.py', got {only}")
    if not (isinstance(report, bool | None) or callable(report)):
        raise TypeError(f"report must be True, False or a function of a line, got {report!r:.80}")
    if not enabled or os.environ.get(OFF) == "0":
        return f
    names = None if names is None else tuple(names)
    own = _Accelerated(f, {"exact": numerics == "exact", "only": names}, report)

    @functools.wraps(f)
    def accelerated(*args: P.args, **kwargs: P.kwargs) -> R:
        return own(args, kwargs)

    return accelerated


class _Static(NamedTuple):
    """The facts, beside its arrays, that a program depends on.

    Attributes:
        tree: The tree of the arguments.
        leaves: The arguments that are no arrays; `_ARRAY` in the place of each array.
        device: The GPU that is planned for.
        named: The context or an operand says so.
    """

    tree: Any
    leaves: tuple[Any, ...]
    device: Device
    named: bool

    def filled(self, arrays: Sequence[Any]) -> Any:
        """Returns the arguments and keyword arguments with these arrays."""
        left = iter(arrays)
        leaves = [next(left) if x is _ARRAY else x.value for x in self.leaves]
        return jax.tree.unflatten(self.tree, leaves)


class _Leaf:
    """An argument that is no array; equal to another if both do the same in a program."""

    def __init__(self, value: Any) -> None:
        self.value = value
        # Zeros of both signs are equal, and do not do the same.
        self._key = repr(value) if isinstance(value, float | complex) else value

    def __hash__(self) -> int:
        return hash((type(self.value), self._key))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Leaf) or type(other.value) is not type(self.value):
            return False
        return bool(self._key == other._key)


_ARRAY = object()
"""Stands for an array among the arguments."""


class _NotTracedError(Exception):
    """A function cannot be traced; it may still run."""


class _Accelerated:
    """A function, and what is known of it."""

    def __init__(self, f: Callable[..., Any], how: Mapping[str, Any], report: Any) -> None:
        self._f, self._how, self._report = f, how, report
        self._is_reported = self._is_warned = False
        # Outside of a trace the whole is one program, which is compiled once.
        self._compiled = jax.jit(self._named(self._traced), static_argnums=0)

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """Computes the function.

        Raises:
            ValueError: A block promises something of products, whose rows a program does not tell.
        """
        refuse("accelerate replaces products, and nobody knows what their rows are")
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [leaf for leaf in leaves if arguments.is_array(leaf)]
        device = targeting.known_target(*arrays)
        named = device is not None
        if device is None and jax.default_backend() == "gpu":
            device = targeting.first_gpu()
        if device is None or jax.config.jax_disable_jit:
            return self._f(*args, **kwargs)
        own = tuple(_ARRAY if arguments.is_array(x) else _Leaf(x) for x in leaves)
        static = _Static(tree, own, device, named)
        try:
            if _is_eager(arrays) and is_hashable(static):
                return self._compiled(static, *arrays)
            return self._traced(static, *arrays)
        except _NotTracedError as error:
            why = str(error)
        # An error of the function itself is raised here again, by the function.
        result = self._f(*args, **kwargs)
        self._warn(why)
        return result

    def _traced(self, static: _Static, *arrays: Any) -> Any:
        """Traces the function, rewrites it and computes the result."""

        def run(*arrays: Any) -> Any:
            args, kwargs = given = static.filled(arrays)
            result = self._f(*args, **kwargs)
            after = [x for x in jax.tree.leaves(given) if arguments.is_array(x)]
            if len(after) != len(arrays) or any(map(operator.is_not, after, arrays)):
                raise _NotTracedError("it changes its arguments in place")
            return result

        with garbage.uncollected():
            try:
                traced = jax.jit(run).trace(*arrays)
            except _NotTracedError:
                raise
            except Exception as error:
                words = str(error).strip().partition("\n")[0]
                raise _NotTracedError(f"it cannot be traced: {words}") from error
            program = traced.jaxpr
            new = self._rewritten(program, static)
        # Constants come first, and values of traces around this one, which the function reads.
        captured, _ = traced.closure_convert()
        given = (*captured, *arrays)
        if new is program:
            # It is as it would be without a call around it.
            results = core.jaxpr_as_fun(program)(*given[len(program.consts) :])
        elif _is_eager(arrays):
            results = jax.jit(functools.partial(_call, new))(*given)
        else:
            results = _call(new, *given)
        return jax.tree.unflatten(traced.out_tree, results)

    def _rewritten(self, program: core.Jaxpr, static: _Static) -> core.Jaxpr:
        """Returns a program with our products; as it is if it cannot be rewritten."""
        how = How(static.device, static.named, **self._how)
        try:
            new, found = Rewriter(how).rewritten(program)
        except Exception as error:
            self._warn(f"{type(error).__name__}: {error}")
            new, found = program, ()
        notes.note_found(found)
        if self._report and not self._is_reported:
            self._is_reported = True
            tell = print if self._report is True else self._report
            tell(f"accelerate {_name(self._f)}: {summary(found)}")
        return new

    def _warn(self, why: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            message = f"accelerate leaves {_name(self._f)} as it is: {why}"
            warnings.warn(message, AccelerateWarning, skip_file_prefixes=NOT_THE_CALLERS)

    def _named(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Gives a function the name of the user's, for programs and traces to show."""

        @functools.wraps(run)
        def named(*args: Any) -> Any:
            return run(*args)

        named.__name__ = named.__qualname__ = _name(self._f)
        return named


def summary(found: Sequence[Found]) -> str:
    """Says in one line what became of the products of a program."""
    ours = sum(one.times for one in found if one.why is None)
    left: dict[str, int] = {}
    for one in found:
        if one.why is not None:
            left[one.why] = left.get(one.why, 0) + one.times
    most = sorted(left.items(), key=lambda item: -item[1])
    reasons = "; ".join(f"{count} because {why}" for why, count in most[:REASONS])
    more = f"; and {len(most) - REASONS} other reasons" if len(most) > REASONS else ""
    others = f", {sum(left.values())} left to XLA ({reasons}{more})" if left else ""
    return f"{ours} of {ours + sum(left.values())} products by our kernels{others}"


REASONS = 3
"""How many reasons a line names for which products are left to XLA."""


def _name(f: Any) -> str:
    while isinstance(f, functools.partial):
        f = f.func
    return getattr(f, "__name__", type(f).__name__)


def _call(program: core.Jaxpr, *given: Any) -> Sequence[Any]:
    """Calls a program as one equation, so that none of its own is traced again."""
    return closed_call_p.bind(*given, call_jaxpr=program.replace(consts=None))


def _is_eager(arrays: Sequence[Any]) -> bool:
    """Whether nothing is being traced, around a call or among its arguments."""
    return type(core.find_top_trace(arrays)).__name__ == "EvalTrace"
