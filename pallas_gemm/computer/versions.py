"""What the code is that something was made by, or tried with: JAX's versions, and our sources."""

import functools
import hashlib
import pathlib

import jax
import jaxlib

_ROOT = pathlib.Path(__file__).parents[2]


@functools.cache
def of_sources(*patterns: str) -> str:
    """Returns a text that another version of JAX, or a change of some of our files, changes.

    Args:
        *patterns: Which files, as `pathlib.Path.glob` has them, from the folder of our packages.
    """
    sources = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(_ROOT.glob(pattern)):
            sources.update(str(path.relative_to(_ROOT)).encode() + path.read_bytes())
    return f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, {sources.hexdigest()}"
