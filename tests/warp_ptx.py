"""Runs inline PTX as one warp does, in Python: 32 lanes that take every branch together.

What it knows is what PTX in this repository uses that no simulator of JAX runs. It refuses what it
does not know, registers that are not declared or not written, and lanes that would part.
"""

import re
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

LANES = 32
Lanes = np.ndarray
"""A value of each lane: 32 bits without a sign, in integers that are wide enough for addresses."""

_ALL = (1 << LANES) - 1
_BASE = 0x7F0000000000
"""Where an array begins that is all of memory."""
_LABEL = re.compile(r"\s*([A-Z]+):")
ORDERS = ("relaxed", "acquire", "release", "volatile")
"""Of accesses of memory; others are weak."""


class Memory(Protocol):
    """Words of 32 bits, and who else sees what becomes of them.

    Each access is made in some order, and of as many lanes as have it.
    """

    def load(self, address: int, order: str) -> int:
        """Returns a word."""
        ...

    def store(self, address: int, value: int, order: str) -> None:
        """Stores one."""
        ...

    def add(self, address: int, value: int, order: str) -> int:
        """Adds to one, and returns what it was."""
        ...


class Array:
    """An array is all of memory, and nobody else sees it."""

    def __init__(self, words: np.ndarray) -> None:
        self._words = words.view(np.uint32)

    def load(self, address: int, order: str) -> int:
        """See `Memory`."""
        del order
        offset = address - _BASE
        if offset % 4 or not 0 <= offset < 4 * len(self._words):
            raise IndexError("a load outside of memory")
        return int(self._words[offset // 4])

    def store(self, address: int, value: int, order: str) -> None:
        """See `Memory`."""
        self.load(address, order)
        self._words[(address - _BASE) // 4] = value

    def add(self, address: int, value: int, order: str) -> int:
        """See `Memory`."""
        found = self.load(address, order)
        self.store(address, (found + value) & _ALL, order)
        return found


def run(ptx: str, results: int, memory: np.ndarray, *given: int) -> list[int]:
    """Runs a block of PTX; returns what it leaves in `$0` and on, which must be alike in all lanes.

    Args:
        ptx: The block.
        results: How many of its operands are results.
        memory: Words of 32 bits: what the operand after the results points to.
        *given: The operands after that one.
    """
    return run_warp(ptx, results, Array(memory), (_BASE, *(value & _ALL for value in given)))


def run_warp(
    ptx: str, results: int, memory: Memory, given: Sequence[int], warp: int = 0
) -> list[int]:
    """Runs a block of PTX likewise, given the operands after its results.

    Args:
        ptx: The block.
        results: How many of its operands are results.
        memory: What addresses are those of.
        given: The other operands.
        warp: Which warp of its warpgroup it is.
    """
    lines, labels, declared = _parsed(ptx)
    left = [f"${number}" for number in range(results)]
    lanes = _Warp(memory, declared.union(left), warp)
    for number, value in enumerate(given, results):
        lanes.values[f"${number}"] = np.full(LANES, value)
    at = 0
    while at < len(lines):
        guard, name, operands = lines[at]
        where = lanes.values[guard].astype(bool) if guard else np.ones(LANES, bool)
        at += 1
        if name != "bra":
            lanes.do(name, operands, where)
        elif where.any() != where.all():
            raise ValueError("lanes part")
        elif where.any():
            at = labels[operands[0]]
    found = [lanes.values[name] for name in left]
    if any((value != value[0]).any() for value in found):
        raise ValueError("results differ between lanes")
    return [int(np.uint32(value[0]).view(np.int32)) for value in found]


class _Warp:
    """The registers of all lanes."""

    def __init__(self, memory: Memory, names: set[str], warp: int) -> None:
        lanes = np.arange(LANES)
        self.values: dict[str, Lanes] = {"%laneid": lanes, "%tid.x": lanes + warp * LANES}
        self._memory, self._names = memory, names

    def do(self, name: str, operands: Sequence[str], where: Lanes) -> None:
        """Does an instruction in some of the lanes."""
        if name.startswith(("ld.", "st.", "atom.", "red.")):
            results: Sequence[Lanes] = self._access(name, operands, where)
        elif name.startswith(("shfl", "vote")) and not where.all():
            raise ValueError(f"not all lanes are there for {name}")
        else:
            results = OPERATIONS[name](*map(self._read, operands[1:]))
        targets = operands[0].split("|") if results else ()
        for target, result in zip(targets, results, strict=True):
            if target not in self._names:
                raise ValueError(f"{target} is not declared")
            kept = result if where.all() else np.where(where, result, self.values[target])
            self.values[target] = kept

    def _read(self, name: str) -> Lanes:
        if re.fullmatch(r"-?\d+|0x[0-9a-f]+", name):
            return np.full(LANES, int(name, 0) & _ALL)
        return self.values[name]

    def _access(self, name: str, operands: Sequence[str], where: Lanes) -> list[Lanes]:
        kind, *words = name.split(".")
        if "global" not in words or (kind in ("atom", "red") and "add" not in words):
            raise ValueError(f"{name} is not known")
        order = next((word for word in words if word in ORDERS), "weak")
        place = operands[0 if kind in ("st", "red") else 1].strip("[]")
        addresses = self._read(place)
        if kind == "ld":
            # Lanes that load one word load it together.
            words_of = {
                int(at): self._memory.load(int(at), order) for at in np.unique(addresses[where])
            }
            return [np.array([words_of.get(int(at), 0) for at in addresses])]
        values, found = self._read(operands[-1]), np.zeros(LANES, np.int64)
        change = self._memory.store if kind == "st" else self._memory.add
        for lane in np.flatnonzero(where):
            found[lane] = change(int(addresses[lane]), int(values[lane]), order) or 0
        return [found] if kind == "atom" else []


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
    "and.b32": _of_32_bits(np.bitwise_and),
    "and.pred": lambda x, y: [x.astype(bool) & y.astype(bool)],
    "or.b32": _of_32_bits(np.bitwise_or),
    "shr.u32": _of_32_bits(np.right_shift),
    "sub.u32": _of_32_bits(np.subtract),
    "min.u32": _of_32_bits(np.minimum),
    "div.u32": _of_32_bits(np.floor_divide),
    "max.s32": _of_signed(np.maximum),
    "min.s32": _of_signed(np.minimum),
    "setp.lt.s32": _of_signed(np.less),
    "setp.gt.s32": _of_signed(np.greater),
    "setp.lt.u32": _of_32_bits(np.less),
    "setp.ne.u32": _of_32_bits(np.not_equal),
    "setp.eq.u32": _of_32_bits(np.equal),
    "setp.ne.and.u32": lambda x, y, also: [(x != y) & also.astype(bool)],
    "selp.u32": _of_32_bits(lambda x, y, which: np.where(which, x, y)),
    "mad.wide.u32": lambda x, y, z: [x * y + z],
    "shfl.sync.up.b32": _shuffle_up,
    "shfl.sync.idx.b32": _shuffle,
    "vote.sync.ballot.b32": _ballot,
    "brev.b32": _of_32_bits(_reversed_bits),
    "clz.b32": _of_32_bits(_leading_zeros),
}
