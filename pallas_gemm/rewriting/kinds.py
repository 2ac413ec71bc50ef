"""The kinds of equations: what calls a function, and what stands alone in a compiled program."""

import functools
from typing import Any

CALLS = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "eval_jaxpr"),
        *("custom_jvp_call", "custom_vjp_call"),
    )
)
CALLS_AGAIN = frozenset(("remat", "remat2", "checkpoint"))
"""A call of such a function does what the function does."""
SHARDED = "shard_map"
KERNELS = frozenset(("pallas_call", "core_map"))
"""Kernels: the operations inside are not XLA's."""
DOTS = frozenset(("dot_general", "ragged_dot_general"))
APART = DOTS | frozenset(
    (
        *("conv_general_dilated", "optimization_barrier"),
        *("sort", "top_k", "scatter", "scatter-add", "scatter_add", "cumsum", "cumlogsumexp"),
        *("cummax", "cummin", "cumprod", "fft", "cholesky", "triangular_solve", "lu", "eigh"),
        *("custom_call", "ffi_call", "pure_callback", "io_callback", "rng_bit_generator"),
        *("all_gather", "all_to_all", "psum", "psum2", "psum_invariant", "ppermute"),
        *("psum_scatter", "reduce_scatter", "while", "scan", "cond", "remat", "remat2"),
    )
)
"""Operations that XLA fuses with no others: their operands and results are in memory."""

INNER = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_call": ("call_jaxpr",),
    "eval_jaxpr": ("call_jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "remat": ("jaxpr",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "shard_map": ("jaxpr",),
}
"""Operations of JAX's own that run functions, and the parameters that hold these."""


def is_apart(equation: Any) -> bool:
    """Whether its operands and results are in memory, whatever is before and after it."""
    return _is_alone(equation.primitive.name)


@functools.cache
def _is_alone(name: str) -> bool:
    return name in _ALONE or name.startswith("pallas_gemm")


_ALONE = APART | KERNELS | CALLS_AGAIN
