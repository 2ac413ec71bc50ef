"""Configs as JSON: what tables of tuned configs are made of, and what a command line takes."""

import dataclasses
from typing import Any

from pallas_gemm.config import GemmConfig
from pallas_gemm.planning.architectures import ARCHITECTURES, WIDENED

KINDS = {**{known.name: known.config for known in ARCHITECTURES}, "widened": WIDENED.config}
"""The configs of each kernel."""


def written(config: GemmConfig) -> dict[str, Any]:
    """Returns a config as what `json` can write.

    Raises:
        ValueError: Its schedule is an object, or no kernel has such configs.
    """
    if not isinstance(config.schedule, str):
        raise ValueError(
            "only a config whose schedule is a name such as 'swizzle:8' can be written, got"
            f" {config.schedule!r}"
        )
    for kernel, kind in KINDS.items():
        if type(config) is kind:
            return {"kernel": kernel, **dataclasses.asdict(config)}
    raise ValueError(f"config must be that of a kernel, got {config!r}")


def read(fields: Any) -> GemmConfig:
    """Returns the config that `written` described; what is left out has its default.

    Raises:
        ValueError: There is no such kernel, or its configs have no such field or value.
        TypeError: The value of a field is of another type.
    """
    if not isinstance(fields, dict):
        raise ValueError(
            f"a config must be an object such as {{'tile': [128, 256]}}, got {fields!r}"
        )
    kernel = fields.get("kernel", next(iter(KINDS)))
    if kernel not in KINDS:
        raise ValueError(f"kernel must be one of {', '.join(KINDS)}, got {kernel!r}")
    legal = [field.name for field in dataclasses.fields(KINDS[kernel])]
    values = {name: value for name, value in fields.items() if name != "kernel"}
    for name in values:
        if name not in legal:
            raise ValueError(f"a {kernel} config has no {name!r}; it has {', '.join(legal)}")
    return KINDS[kernel](**values)
