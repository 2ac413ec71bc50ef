"""Which names of a module are public, for `dir` to show these and no other."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any


def names(found: Mapping[str, Any], *others: str) -> list[str]:
    """Returns the public names of a module, in the order of the alphabet.

    A package shows what it re-exports, without the modules that this comes from. Another module
    shows the functions and classes that it defines.

    Args:
        found: The module's `globals()`.
        *others: Names that are public, too.
    """
    is_package = "__path__" in found
    return sorted(
        name
        for name, value in found.items()
        if name in others
        or (
            not (name.startswith("_") or isinstance(value, ModuleType))
            and (is_package or getattr(value, "__module__", None) == found["__name__"])
        )
    )
