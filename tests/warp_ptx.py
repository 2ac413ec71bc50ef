"""Runs inline PTX as one warp does, in Python: 32 lanes that take every branch together.

What it knows is what PTX in this repository uses that no simulator of JAX runs. It refuses what it
does not know, registers that are not declared or not written, and lanes that would part.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

LANES = 32
Lanes = np.ndarray
"""A value of each lane: 32 bits without a sign, in integers that are wide enough for addresses."""

_ALL = (1 << LANES) - 1
_BASE = 0x7F0000000000
"""Where memory begins."""
_LABEL = re.compile(r"\s*([A-Z]+):")


def run(ptx: str, results: int, memory: np.ndarray, *given: int) -> list[int]:
    """Runs a block of PTX; returns what it leaves in `$0` and on, which must be alike in all lanes.

    Args:
        ptx: The block.
        results: How many of its operands are results.
        memory: Words of 32 bits: what the operand after the results points to.
        *given: The operands after that one.
    """
    lines, labels, declared = _parsed(ptx)
    left = [f"${number}" for number in range(results)]
    warp = _Warp(memory.view(np.uint32), declared.union(left))
    for number, value in enumerate((_BASE, *(value & _ALL for value in given)), results):
        warp.values[f"${number}"] = np.full(LANES, value)
    at = 0
    while at < len(lines):
        guard, name, operands = lines[at]
        where = warp.values[guard].astype(bool) if guard else np.ones(LANES, bool)
        at += 1
        if name != "bra":
            warp.do(name, operands, where)
        elif where.any() != where.all():
            raise ValueError("lanes part")
        elif where.any():
            at = labels[operands[0]]
    found = [warp.values[name] for name in left]
    if any((value != value[0]).any() for value in found):
        raise ValueError("results differ between lanes")
    return [int(np.uint32(value[0]).view(np.int32)) for value in found]


class _Warp:
    """The registers of all lanes, and what their addresses point to."""

    def __init__(self, memory: np.ndarray, names: set[str]) -> None:
        self.values: dict[str, Lanes] = {"%laneid": np.arange(LANES)}
        self._memory, self._names = memory, names

    def do(self, name: str, operands: Sequence[str], where: Lanes) -> None:
        """Does an instruction in some of the lanes."""
        if name == "ld.global.b32":
            results: Sequence[Lanes] = [self._load(operands[1].strip("[]"), where)]
        elif name.startswith(("shfl", "vote")) and not where.all():
            raise ValueError(f"not all lanes are there for {name}")
        else:
            results = OPERATIONS[name](*map(self._read, operands[1:]))
        for target, result in zip(operands[0].split("|"), results, strict=True):
            if target not in self._names:
                raise ValueError(f"{target} is not declared")
            kept = result if where.all() else np.where(where, result, self.values[target])
            self.values[target] = kept

    def _read(self, name: str) -> Lanes:
        if re.fullmatch(r"-?\d+|0x[0-9a-f]+", name):
            return np.full(LANES, int(name, 0) & _ALL)
        return self.values[name]

    def _load(self, pointer: str, where: Lanes) -> Lanes:
        offset = (self._read(pointer) - _BASE)[where]
        if (offset % 4).any() or (offset < 0).any() or (offset >= 4 * len(self._memory)).any():
            raise IndexError("a load outside of memory")
        found = np.zeros(LANES, np.int64)
        found[where] = self._memory[offset // 4]
        return found


def _parsed(ptx: str) -> tuple[list[tuple[str, str, list[str]]], dict[str, int], set[str]]:
    """Returns instructions (guard, name, operands), which one follows each label, and registers."""
    lines, labels, declared = [], {}, set[str]()
    for statement in ptx.strip().removeprefix("{").removesuffix("}").split(";"):
        text = statement
        while label := _LABEL.match(text):
            labels[label[1]] = len(lines)
            text = text[label.end() :]
        guard, rest = re.fullmatch(r"(?:@(\w+)\s)?\s*(.*)", text.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
        name, _, operands = rest.partition(" ")
        if name == ".reg":
            _, _, operands = operands.partition(" ")
            declared |= set(operands.replace(" ", "").split(","))
        elif name:
            lines.append((guard or "", name, operands.replace(" ", "").split(",")))
    return lines, labels, declared


def _signed(value: Lanes) -> Lanes:
    return value.astype(np.uint32).view(np.int32).astype(np.int64)


def _of_32_bits(function: Callable[..., Lanes]) -> Callable[..., list[Lanes]]:
    return lambda *values: [function(*values).astype(np.int64) & _ALL]


def _of_signed(function: Callable[..., Lanes]) -> Callable[..., list[Lanes]]:
    return _of_32_bits(lambda *values: function(*map(_signed, values)))


def _shuffle_up(value: Lanes, distance: Lanes, first: Lanes, members: Lanes) -> list[Lanes]:
    """A lane with none so far before it keeps its own value."""
    if (first != 0).any() or (members != _ALL).any():
        raise ValueError("of all lanes alone")
    source = np.arange(LANES) - distance
    has = source >= 0
    return [value[np.where(has, source, np.arange(LANES))], has]


def _shuffle(value: Lanes, source: Lanes, last: Lanes, members: Lanes) -> list[Lanes]:
    if (last != LANES - 1).any() or (members != _ALL).any():
        raise ValueError("of all lanes alone")
    return [value[source % LANES]]


def _ballot(votes: Lanes, members: Lanes) -> list[Lanes]:
    if (members != _ALL).any():
        raise ValueError("of all lanes alone")
    return [np.full(LANES, sum(1 << lane for lane in np.flatnonzero(votes)))]


def _reversed_bits(value: Lanes) -> Lanes:
    return np.array([int(f"{word:032b}"[::-1], 2) for word in value.tolist()])


def _leading_zeros(value: Lanes) -> Lanes:
    return np.array([32 - word.bit_length() for word in value.tolist()])


OPERATIONS: dict[str, Callable[..., Sequence[Lanes]]] = {
    "mov.u32": _of_32_bits(lambda x: x),
    "add.u32": _of_32_bits(np.add),
    "sub.u32": _of_32_bits(np.subtract),
    "min.u32": _of_32_bits(np.minimum),
    "div.u32": _of_32_bits(np.floor_divide),
    "max.s32": _of_signed(np.maximum),
    "min.s32": _of_signed(np.minimum),
    "setp.lt.s32": _of_signed(np.less),
    "setp.gt.s32": _of_signed(np.greater),
    "setp.lt.u32": _of_32_bits(np.less),
    "setp.ne.u32": _of_32_bits(np.not_equal),
    "selp.u32": _of_32_bits(lambda x, y, which: np.where(which, x, y)),
    "mad.wide.u32": lambda x, y, z: [x * y + z],
    "shfl.sync.up.b32": _shuffle_up,
    "shfl.sync.idx.b32": _shuffle,
    "vote.sync.ballot.b32": _ballot,
    "brev.b32": _of_32_bits(_reversed_bits),
    "clz.b32": _of_32_bits(_leading_zeros),
}
