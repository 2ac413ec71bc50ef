"""The version of the distribution, and the newest JAX that it was tested with."""

__version__ = "0.2.0"

NEWEST_TESTED_JAX = (0, 12, 0, 1)
"""The newest release that `pyproject.toml` accepts, as JAX tells its own version."""
