"""Runs one random product and compares it: what may be wrong with it is found here."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests import reference
from tests.stress.cases import Case, Scale, wide

BAND = 8
"""Rows before and after an operand that is a slice."""

ON_HOST = 1 << 26
"""Multiplications that NumPy does; more are done on the GPU."""
BUCKETS = (512, 1536, 4096)
"""Sizes to which factors are padded there, so that XLA compiles few programs for them."""


class WrongResultError(AssertionError):
    """A product is not what it should be; the message says in what way."""


@dataclasses.dataclass
class Outcome:
    """What was done to one case.

    Attributes:
        by: What computed it: the name of an implementation, or "none" for an empty result.
        guarded: The result lay between two guard bands that were looked at afterwards.
    """

    by: str
    guarded: bool = False


def check(case: Case, scale: Scale) -> Outcome:
    """Computes a case and compares it with float64; raises `WrongResultError` where they differ."""
    host = case.operands()
    by, f = _chosen(case, scale)
    on_gpu = scale.implementation != "interpret"
    run = _sliced(f, case.shapes) if case.banded else f
    device = {
        name: jax.device_put(_in_bands(name, value) if case.banded else value)
        for name, value in host.items()
    }
    if case.kind == "gradient":
        _check_gradients(case, f, host)
        return Outcome(by)
    compiled = jax.jit(lambda operands: run(**operands)).lower(device).compile()
    shape, dtype = _result(case)
    with _between_guards(shape, dtype, on_gpu=on_gpu) as guard:
        result = compiled(device).block_until_ready()
        guarded = guard(result)
    if result.shape != shape or result.dtype != dtype:
        raise WrongResultError(f"{result.dtype}{result.shape} instead of {dtype}{shape}")
    _compare(case, result, host)
    if on_gpu:
        again = compiled(device)
        if np.asarray(again).tobytes() != np.asarray(result).tobytes():
            raise WrongResultError("a second run gave other bits")
    for name, value in device.items():
        before = _in_bands(name, host[name]) if case.banded else host[name]
        if np.asarray(value).tobytes() != before.tobytes():
            raise WrongResultError(f"the operand {name} was changed")
    return Outcome(by, guarded)


def _chosen(case: Case, scale: Scale) -> tuple[str, Any]:
    """Returns the implementation that takes a case, and its function."""
    shapes = {
        name: jax.ShapeDtypeStruct(shape, case.dtypes[name]) for name, shape in case.shapes.items()
    }
    if 0 in (case.batch if case.kind == "mapped" else 1, *case.sizes):
        return "none", case.product(None)
    named = case.product(scale.implementation)
    try:
        jax.eval_shape(named, **shapes)
    except ValueError:
        # Refused, with every reason: the default always works, without what was named.
        plain = dataclasses.replace(case, order=None, config=None)
        return "default", plain.product(None)
    return scale.implementation, named


def _result(case: Case) -> tuple[tuple[int, ...], Any]:
    m, n, _ = case.sizes
    return (*((case.batch,) if case.batch else ()), m, n), jnp.dtype(case.types[2])


def _compare(case: Case, result: jax.Array, host: dict[str, np.ndarray]) -> None:
    exact = case.formula(**wide(host), multiply=_multiply)
    try:
        if case.kind != "real":
            reference.assert_exact(result, exact)
            return
        # On a GPU, XLA multiplies float32 as precisely as the kernel only where it is told to.
        on_gpu = jax.default_backend() == "gpu" and case.types[0] == jnp.float32
        tf32 = lax.DotAlgorithmPreset.TF32_TF32_F32
        theirs = case.product("xla", **({"precision": tf32} if on_gpu else {}))
        reference.assert_as_good_as_xla(result, jax.jit(theirs)(**host), exact)
    except AssertionError as error:
        raise WrongResultError(_first_lines(error)) from None


def _check_gradients(case: Case, f: Any, host: dict[str, np.ndarray]) -> None:
    cotangent = np.random.default_rng((*case.seed, 2)).integers(-2, 3, _result(case)[0])
    cotangent = cotangent.astype(case.types[2])

    @jax.jit
    def gradients(operands: dict[str, jax.Array], g: jax.Array) -> Any:
        _, pull = jax.vjp(lambda given: f(**given), operands)
        return pull(g)[0]

    found = gradients(host, cotangent)
    exact = case.formula.gradients(wide(host), reference.wide(cotangent), multiply=_multiply)
    for name, value in exact.items():
        try:
            reference.assert_exact(found[name], value)
        except AssertionError as error:
            raise WrongResultError(f"gradient of {name}: {_first_lines(error)}") from None


def _first_lines(error: AssertionError) -> str:
    return " ".join(str(error).split())[:200]


def _multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiplies in float64, on the GPU where there is one and much to do."""
    (*_, m, k), n = a.shape, b.shape[-1]
    if jax.default_backend() != "gpu" or m * n * k <= ON_HOST:
        return np.matmul(a, b)
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    lefts = np.broadcast_to(a, (*lead, m, k)).reshape(-1, m, k)
    rights = np.broadcast_to(b, (*lead, k, n)).reshape(-1, k, n)
    products = [_multiply_on_gpu(*pair) for pair in zip(lefts, rights, strict=True)]
    return np.stack(products).reshape(*lead, m, n)


def _multiply_on_gpu(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    (m, k), n = a.shape, b.shape[1]
    rows, depth, columns = (next(b for b in BUCKETS if b >= size) for size in (m, k, n))
    with jax.enable_x64(True):
        left = np.pad(a, ((0, rows - m), (0, depth - k)))
        right = np.pad(b, ((0, depth - k), (0, columns - n)))
        return np.asarray(_dot(left, right))[:m, :n]


@functools.partial(jax.jit)
def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, precision="highest")


def _poison(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns what no result holds: NaN, or a large integer."""
    value = np.nan if jnp.issubdtype(dtype, jnp.floating) else 77
    return np.full(shape, value, dtype)


def _in_bands(name: str, value: np.ndarray) -> np.ndarray:
    """Returns an operand between rows of poison."""
    if name == "bias":
        band = _poison((BAND,), value.dtype)
        return np.concatenate([band, value, band])
    band = _poison((*value.shape[:-2], BAND, value.shape[-1]), value.dtype)
    return np.concatenate([band, value, band], axis=-2)


def _sliced(f: Any, shapes: dict[str, tuple[int, ...]]) -> Any:
    """Returns the function of operands in bands, which it cuts off."""

    def cut(**operands: jax.Array) -> jax.Array:
        inner = {
            name: lax.slice_in_dim(
                value, BAND, value.shape[_banded(name)] - BAND, axis=_banded(name)
            )
            for name, value in operands.items()
        }
        assert {name: value.shape for name, value in inner.items()} == shapes
        return f(**inner)

    return cut


def _banded(name: str) -> int:
    return -1 if name == "bias" else -2


@contextlib.contextmanager
def _between_guards(shape: tuple[int, ...], dtype: Any, *, on_gpu: bool) -> Iterator[Any]:
    """Poisons the memory that a result will probably get, and that on both sides of it.

    Yields a function of the result that says whether it lies between the two guards.
    """
    if not on_gpu or 0 in shape:
        yield lambda _: False
        return
    poison = _poison(shape, dtype)
    before, middle, after = (jax.device_put(poison).block_until_ready() for _ in range(3))
    place = middle.unsafe_buffer_pointer()
    sides = sorted((before.unsafe_buffer_pointer(), after.unsafe_buffer_pointer()))
    # The allocator rounds up to 256 bytes.
    size = -(-poison.nbytes // 256) * 256
    del middle
    yield (
        lambda result: (
            result.unsafe_buffer_pointer() == place and sides == [place - size, place + size]
        )
    )
    for guard in (before, after):
        if np.asarray(guard).tobytes() != poison.tobytes():
            raise WrongResultError("memory beside the result was changed")
