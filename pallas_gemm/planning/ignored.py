"""Warns of arguments that have no effect, once for each line of the program."""

import pathlib
import warnings

import jax

from pallas_gemm.call import Options

NOT_THE_CALLERS = (str(pathlib.Path(jax.__file__).parent), str(pathlib.Path(__file__).parents[1]))


class IgnoredWarning(UserWarning):
    """An argument has no effect."""


def warn(message: str) -> None:
    """Warns of the caller's line, which is outside of this package and of JAX."""
    warnings.warn(message, IgnoredWarning, skip_file_prefixes=NOT_THE_CALLERS)


def warn_of_options(options: Options, why: str) -> None:
    """Warns of an order or a config that is named for a product which XLA computes."""
    named = [
        f"{name}={value!r}" if isinstance(value, str) else f"{name}={type(value).__name__}(...)"
        for name in ("schedule", "config")
        if (value := getattr(options, name)) is not None
    ]
    if named:
        warn(f"{' and '.join(named)} has no effect, because XLA computes this product: {why}")
