"""Evaluates jaxprs with NumPy, one equation after the other, in the thread that asks.

A thread's program of the GPU simulator is thousands of small integers and calls back into Python.
To compile it takes longer than to run it, and to call back out of XLA longer than ten equations
here. What has no rule here is left to JAX, equation by equation.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

Values = Sequence[Any]
Rule = Callable[..., Values]
"""What an equation does with the values of its operands."""


class Program:
    """A jaxpr whose equations have become calls of functions of NumPy arrays."""

    def __init__(self, jaxpr: Any) -> None:
        self._slots: dict[Any, int] = {}
        self._values: list[Any] = []
        self._inputs = [self._slot(var) for var in (*jaxpr.constvars, *jaxpr.invars)]
        self._steps = [
            (
                _rule(eqn),
                [self._slot(var) for var in eqn.invars],
                [self._slot(var) for var in eqn.outvars],
            )
            for eqn in jaxpr.eqns
        ]
        self._outputs = [self._slot(var) for var in jaxpr.outvars]

    def __call__(self, *inputs: Any) -> list[Any]:
        """Evaluates it, with the values of its constants and then of its variables."""
        values = self._values.copy()
        for slot, value in zip(self._inputs, inputs, strict=True):
            values[slot] = value
        for rule, sources, targets in self._steps:
            results = rule(*[values[slot] for slot in sources])
            for slot, value in zip(targets, results, strict=True):
                values[slot] = value
        return [values[slot] for slot in self._outputs]

    def _slot(self, var: Any) -> int:
        """Where the value of a variable is kept; that of a literal is there from the start."""
        aval: Any = var.aval
        if isinstance(var, core.Literal):
            self._values.append(np.asarray(var.val, aval.dtype))
            return len(self._values) - 1
        if var not in self._slots:
            self._slots[var] = len(self._values)
            self._values.append(None)
        return self._slots[var]


def plain(value: Any) -> Any:
    """A value as an array of NumPy, or a number if it is one: places are made of those alone."""
    if type(value) is np.int32:
        return int(value)
    array = np.asarray(value)
    if array.ndim:
        # As those of JAX.
        array.flags.writeable = False
        return array
    return int(array) if array.dtype.kind == "i" else array[()]


def _closed(jaxpr: Any) -> Callable[..., list[Any]]:
    return functools.partial(Program(jaxpr.jaxpr), *map(np.asarray, jaxpr.consts))


def _rule(eqn: Any) -> Rule:
    """How to compute an equation; with JAX, for want of anything else."""
    name, rule = eqn.primitive.name, None
    if name in FUNCTIONS:
        rule = _one_result(FUNCTIONS[name])
    elif name in MAKERS:
        rule = MAKERS[name](eqn, **eqn.params)
    if rule is None:
        return functools.partial(_of_jax, eqn)
    if any(jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in eqn.invars) and name in QUIET:
        return np.errstate(all="ignore")(rule)
    return rule


def _of_jax(eqn: Any, *values: Any) -> Values:
    results = eqn.primitive.bind(*map(jnp.asarray, values), **eqn.params)
    return list(map(np.asarray, results if eqn.primitive.multiple_results else [results]))


def _one_result(function: Callable[..., Any]) -> Rule:
    return lambda *values: (function(*values),)


def _callback(eqn: Any, *, callback: Any, result_avals: Any, **_: Any) -> Rule:
    dtypes = [aval.dtype for aval in result_avals]

    def run(*values: Any) -> Values:
        results = callback(*map(plain, values))
        # Of memory that others write, a copy.
        return [np.array(x, dtype) for x, dtype in zip(results, dtypes, strict=True)]

    return run


def _call(eqn: Any, **params: Any) -> Rule:
    return _closed(params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"])


def _cond(eqn: Any, *, branches: Any, **_: Any) -> Rule:
    functions = list(map(_closed, branches))
    last = len(functions) - 1
    return lambda which, *values: functions[min(max(int(which), 0), last)](*values)


def _while(
    eqn: Any, *, cond_jaxpr: Any, cond_nconsts: int, body_jaxpr: Any, body_nconsts: int
) -> Rule:
    goes_on, body = _closed(cond_jaxpr), _closed(body_jaxpr)

    def run(*values: Any) -> Values:
        of_cond, rest = values[:cond_nconsts], values[cond_nconsts:]
        of_body, carry = rest[:body_nconsts], rest[body_nconsts:]
        while goes_on(*of_cond, *carry)[0]:
            carry = body(*of_body, *carry)
        return carry

    return run


def _scan(eqn: Any, *, jaxpr: Any, length: int, reverse: bool, ft_in: Any, **_: Any) -> Rule:
    body = _closed(jaxpr)
    consts, carry, _read = [len(list(x)) for x in ft_in.update(eqn.invars).unpack()]
    made = [var.aval for var in eqn.outvars[carry:]]

    def run(*values: Any) -> Values:
        same, carried, read = values[:consts], values[consts:][:carry], values[consts + carry :]
        stacked = [np.empty(aval.shape, aval.dtype) for aval in made]
        for step in reversed(range(length)) if reverse else range(length):
            results = body(*same, *carried, *(x[step] for x in read))
            carried = results[:carry]
            for whole, part in zip(stacked, results[carry:], strict=True):
                whole[step] = part
        return [*carried, *stacked]

    return run


def _convert(eqn: Any, *, new_dtype: Any, **_: Any) -> Rule | None:
    old = eqn.invars[0].aval.dtype
    if not (old.kind in "bui" or (_rounds_alike(old) and _rounds_alike(new_dtype))):
        return None
    return lambda value: (np.asarray(value).astype(new_dtype),)


def _rounds_alike(dtype: Any) -> bool:
    return dtype in (jnp.float32, jnp.bfloat16, jnp.float16)


def _divide(eqn: Any) -> Rule:
    if eqn.outvars[0].aval.dtype.kind not in "ui":
        return _one_result(np.true_divide)
    # Towards zero.
    return lambda a, b: (np.floor_divide(a - np.fmod(a, b), b),)


def _shift(function: Callable[..., Any]) -> Callable[..., Rule]:
    def maker(eqn: Any) -> Rule:
        dtype = eqn.outvars[0].aval.dtype
        bits, unsigned = 8 * dtype.itemsize, np.dtype(f"u{dtype.itemsize}")

        def run(value: Any, by: Any) -> Values:
            value, by = np.asarray(value).view(unsigned), np.asarray(by).astype(unsigned)
            # Of a number of bits that a word lacks, C says nothing.
            moved = np.where(by < bits, function(value, np.minimum(by, bits - 1)), 0)
            return (moved.astype(unsigned).view(dtype),)

        return run

    return maker


def _select(eqn: Any) -> Rule:
    if eqn.invars[0].aval.ndim == 0:
        return lambda which, *cases: (cases[int(which)],)
    if len(eqn.invars) == 3:
        return lambda which, no, yes: (np.where(which, yes, no),)
    return lambda which, *cases: (np.choose(which, cases),)


def _broadcast(eqn: Any, *, shape: Any, broadcast_dimensions: Any, **_: Any) -> Rule:
    sizes = [1] * len(shape)
    for axis, of in enumerate(broadcast_dimensions):
        sizes[of] = eqn.invars[0].aval.shape[axis]
    return lambda value, *_: (np.broadcast_to(np.reshape(value, sizes), shape),)


def _reshape(eqn: Any, **_: Any) -> Rule:
    shape = eqn.outvars[0].aval.shape
    return lambda value: (np.reshape(value, shape),)


def _slice(eqn: Any, *, start_indices: Any, limit_indices: Any, strides: Any) -> Rule:
    steps = strides or (1,) * len(start_indices)
    window = tuple(map(slice, start_indices, limit_indices, steps))
    return lambda value: (value[window],)


def _iota(eqn: Any, *, dtype: Any, shape: Any, dimension: int, **_: Any) -> Rule:
    sizes = [1] * len(shape)
    sizes[dimension] = shape[dimension]
    made = np.broadcast_to(np.arange(shape[dimension]).astype(dtype).reshape(sizes), shape)
    return lambda *_: (made,)


def _concatenate(eqn: Any, *, dimension: int) -> Rule:
    return lambda *values: (np.concatenate(values, dimension),)


def _extreme(function: Callable[..., Any]) -> Callable[..., Rule]:
    return lambda _, *, axes, **__: lambda value: (function(value, axis=axes),)


def _gather(
    eqn: Any, *, dimension_numbers: Any, slice_sizes: Any, mode: Any, **_: Any
) -> Rule | None:
    """Elements of a vector, with NaN for what it lacks."""
    vector = eqn.invars[0].aval
    filled = mode == lax.GatherScatterMode.FILL_OR_DROP and vector.dtype.kind == "f"
    if vector.ndim != 1 or dimension_numbers.offset_dims or not filled:
        return None
    (size,), nan = vector.shape, np.asarray(np.nan, vector.dtype)

    def run(value: Any, places: Any) -> Values:
        places = places[..., 0]
        inside = (places >= 0) & (places < size)
        return (np.where(inside, value[np.clip(places, 0, size - 1)], nan),)

    return run


def _dynamic_slice(eqn: Any, *, slice_sizes: Any) -> Rule:
    last = [of - size for of, size in zip(eqn.invars[0].aval.shape, slice_sizes, strict=True)]

    def run(value: Any, *starts: Any) -> Values:
        firsts = [min(max(int(start), 0), most) for start, most in zip(starts, last, strict=True)]
        return (value[tuple(slice(i, i + n) for i, n in zip(firsts, slice_sizes, strict=True))],)

    return run


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "square": np.square,
    "sign": np.sign,
    "abs": np.abs,
    "rem": np.fmod,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "clamp": lambda least, value, most: np.minimum(np.maximum(value, least), most),
}
MAKERS: dict[str, Callable[..., Rule | None]] = {
    "io_callback": _callback,
    "jit": _call,
    "custom_jvp_call": _call,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "convert_element_type": _convert,
    "div": _divide,
    "shift_right_logical": _shift(np.right_shift),
    "shift_left": _shift(np.left_shift),
    "select_n": _select,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "slice": _slice,
    "iota": _iota,
    "concatenate": _concatenate,
    "reduce_max": _extreme(np.max),
    "reduce_min": _extreme(np.min),
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
}
QUIET = {*FUNCTIONS, "convert_element_type", "div", "reduce_max", "reduce_min"}
"""Of these with floating-point numbers, NumPy would warn of what JAX says nothing about."""
