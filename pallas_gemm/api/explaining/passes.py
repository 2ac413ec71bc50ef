"""The passes over memory that a program makes between its products, and how long they take.

A model of how XLA fuses. Elementwise operations, broadcasts, transpositions, slices and reductions
are computed where they are needed. A result is written where something else begins: a product, a
loop, another pass that needs a finished reduction, or the end of the program. A value that is
needed later again is computed again if that reads no more than twice the bytes. All reads of the
same arrays at one level of the program are one pass. Counted are bytes at the speed of memory:
caches are not, and what is neither a product nor such a pass (sorting, convolutions, kernels of
others) is not there.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from pallas_gemm.api.explaining.trace import Operation, Trace, Value

AGAIN = 2
"""How many times the bytes of a value may be read for it to be computed again."""
FEWEST = 1024
"""Bytes of a pass that counts: what is less are numbers, most of them known to XLA."""
_PARTS = frozenset(("slice", "dynamic_slice", "gather"))
"""They read no more of an array than they return."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass over memory.

    Attributes:
        bytes: Read and written by it.
        times: How often it is made.
    """

    bytes: int
    times: int


Reads = Mapping[Value, int]
"""How many bytes of each array that is in memory."""


class _Memory:
    """The values of a program that are in memory, and what it takes to make the rest."""

    def __init__(self) -> None:
        self._levels: dict[Value, int] = {}
        self._made_of: dict[Value, Reads] = {}
        self.stored: dict[Value, Operation] = {}

    def level(self, value: Value) -> int:
        """Returns how many products and the like come one after the other before a value."""
        return self._levels.get(value, 0)

    def reads(self, value: Value) -> Reads:
        """Returns what is read for a value that is made on the way to another."""
        return self._made_of.get(value, {value: value.bytes})

    def store(self, value: Value) -> None:
        """Lets a value be written, if it is not in memory."""
        if value in self._made_of and value.made_by is not None:
            self.stored[value] = value.made_by

    def add(self, own: Operation) -> None:
        """Notes an operation."""
        before = max(map(self.level, own.inputs), default=0)
        if own.is_apart:
            for value in own.inputs:
                self.store(value)
            self._levels.update(dict.fromkeys(own.outputs, before + 1))
            return
        found: dict[Value, int] = {}
        for value in own.inputs:
            for array, size in self._seen(value, before).items():
                found[array] = max(found.get(array, 0), size)
        if own.name in _PARTS:
            most = max(value.bytes for value in own.outputs)
            found = {array: min(size, most) for array, size in found.items()}
        ends = own.name.startswith("reduce_") and own.name != "reduce_precision"
        for value in own.outputs:
            self._made_of[value] = found
            self._levels[value] = before + ends
            if ends or own.name.startswith("arg"):
                self.store(value)

    def _seen(self, value: Value, level: int) -> Reads:
        """Returns what is read for a value by what comes at some level."""
        if value not in self._made_of:
            return self.reads(value)
        if self.level(value) == level and value not in self.stored:
            return self.reads(value)
        if value not in self.stored and sum(self.reads(value).values()) > AGAIN * value.bytes:
            self.store(value)
        return {value: value.bytes} if value in self.stored else self.reads(value)


def passes_of(program: Trace) -> tuple[Pass, ...]:
    """Returns the passes that a program makes between its products."""
    memory, live = _Memory(), program.live()
    for operation in program.operations:
        if operation in live:
            memory.add(operation)
    for value in program.results:
        memory.store(value)
    return tuple(one for one in _passes(memory) if one.bytes >= FEWEST)


def _passes(memory: _Memory) -> Iterator[Pass]:
    """Yields the passes: what is written of the same arrays at one level is written by one."""
    owners: dict[tuple[int, Value], int] = {}
    groups: dict[int, list[Value]] = {}
    for number, (value, own) in enumerate(memory.stored.items()):
        level = max(map(memory.level, own.inputs), default=0)
        keys = [(level, array) for array in memory.reads(value) if array.bytes > 0]
        joined = {owners[key] for key in keys if key in owners}
        groups[number] = [value, *(one for group in joined for one in groups.pop(group))]
        for key, group in owners.items():
            owners[key] = number if group in joined else group
        owners.update(dict.fromkeys(keys, number))
    for values in groups.values():
        read: dict[Value, int] = {}
        for value in values:
            for array, size in memory.reads(value).items():
                read[array] = max(read.get(array, 0), size)
        # What the pass itself writes is not read for the rest of it.
        inside = {value for value in values if value in read}
        moved = sum(size for array, size in read.items() if array not in inside)
        moved += sum(value.bytes for value in values)
        yield Pass(moved, max(memory.stored[value].times for value in values))
