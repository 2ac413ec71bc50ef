"""The bytes that the collectives of a compiled program bring to each device, read from its text."""

import math
import re

_WIDTHS = {"pred": 1, "s8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}
_COLLECTIVE = re.compile(
    r"^ +(?:ROOT )?%?(\S+) = (.*?) "
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start|-done)?\((.*)",
    re.MULTILINE,
)


def received(text: str) -> float:
    """Returns the bytes that arrive at each device, at least."""
    total, started = 0.0, {}
    for own, result, name, step, rest in _COLLECTIVE.findall(text):
        if step == "-start":
            # Its result is that of the step that awaits it.
            started[own] = _group(rest)
            continue
        awaited = rest.partition(")")[0].lstrip("%")
        devices = started[awaited] if step == "-done" else _group(rest)
        total += _size(result) * _share(name, devices)
    return total


def _size(result: str) -> int:
    return sum(
        _WIDTHS.get(dtype, 1) * math.prod(int(size) for size in shape.split(",") if size)
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", result)
    )


def _share(name: str, devices: int) -> float:
    """Returns how much of the result, or how many times that, comes from other devices."""
    others = (devices - 1) / devices
    shares = {"all-reduce": 2 * others, "reduce-scatter": devices - 1, "collective-permute": 1}
    return shares.get(name, others)


def _group(rest: str) -> int:
    """Returns how many devices take part in a collective with each other."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", rest):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']*)'", match[2]))
    return 1
