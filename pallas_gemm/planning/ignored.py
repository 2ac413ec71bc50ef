"""Warns of what a caller may not know, once for each line of the program."""

import pathlib
import warnings

import jax

from pallas_gemm.call import Options

NOT_THE_CALLERS = (str(pathlib.Path(jax.__file__).parent), str(pathlib.Path(__file__).parents[1]))


class IgnoredWarning(UserWarning):
    """An argument has no effect."""


class PromotedWarning(UserWarning):
    """Operands of different types are promoted, and XLA computes the product."""


def warn(message: str, category: type[Warning] = IgnoredWarning) -> None:
    """Warns of the caller's line, which is outside of this package and of JAX."""
    warnings.warn(message, category, skip_file_prefixes=NOT_THE_CALLERS)


def warn_of_promotion(why: str) -> None:
    """Warns of a product whose operands are of different types.

    Args:
        why: Why no kernel computes it, and what the caller could cast.
    """
    warn(f"JAX promotes the operands, and XLA computes this product: {why}", PromotedWarning)


def warn_of_options(options: Options, why: str) -> None:
    """Warns of an order or a config that is named for a product which XLA computes."""
    named = [
        f"{name}={value!r}" if isinstance(value, str) else f"{name}={type(value).__name__}(...)"
        for name in ("schedule", "config")
        if (value := getattr(options, name)) is not None
    ]
    if named:
        warn(f"{' and '.join(named)} has no effect, because XLA computes this product: {why}")
