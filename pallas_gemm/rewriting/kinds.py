"""The kinds of equations: what calls a function, and what stands alone in a compiled program."""

import functools
from typing import Any

CALLS = frozenset(("jit", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call"))
CALLS_AGAIN = frozenset(("remat2",))
"""A call of such a function does what the function does."""
SHARDED = "shard_map"
KERNELS = frozenset(("pallas_call",))
"""Kernels: the operations inside are not XLA's."""
DOTS = frozenset(("dot_general", "ragged_dot_general"))
APART = DOTS | frozenset(
    (
        *("conv_general_dilated", "optimization_barrier"),
        *("sort", "top_k", "scatter", "scatter-add", "cumsum", "cumlogsumexp", "cummax", "cummin"),
        *("cumprod", "fft", "cholesky", "triangular_solve", "lu", "eigh", "ffi_call"),
        *("pure_callback", "io_callback", "rng_bit_generator", "all_gather", "all_to_all", "psum"),
        *("psum_invariant", "ppermute", "reduce_scatter", "while", "scan", "cond"),
    )
)
"""Operations that XLA fuses with no others: their operands and results are in memory."""

INNER = {
    "jit": ("jaxpr",),
    "eval_jaxpr": ("call_jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "remat2": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "shard_map": ("jaxpr",),
}
"""Operations of JAX's own that run functions, and the parameters that hold these."""


def is_apart(equation: Any) -> bool:
    """Whether its operands and results are in memory, whatever is before and after it."""
    return is_alone(equation.primitive.name)


@functools.cache
def is_alone(name: str) -> bool:
    """The same of an operation of a name."""
    return name in _ALONE or name.startswith("pallas_gemm")


_ALONE = APART | KERNELS | CALLS_AGAIN
