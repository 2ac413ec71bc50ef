"""What threads of a warp reach apart, of all that a whole warp has to execute together.

A kernel never ends whose threads wait on both sides of a branch, and LLVM copies a barrier to both
where it sees no reason against. No simulator shows that, so PTX is read instead:

    a value     is the same for all threads of a warp, or may be each thread's own
    a branch    parts a warp if its condition may be each thread's own
    a region    is what lies between a branch and the first block that is reached either way

What a thread assigns within such a region is its own, too.
"""

import enum
import itertools
import re
from collections.abc import Sequence

from tests.ptx_code import Instruction, Kernel, kernels

TOGETHER = re.compile(
    r"bar\.|barrier\.|shfl\.|vote\.|elect\.|redux\.|match\.|wgmma\.|ldmatrix|stmatrix|setmaxnreg|"
    r"tcgen05\.(ld|st|wait|alloc|dealloc)"
)
"""Instructions of a whole warp."""
_OWN_RESULT = re.compile(r"wgmma\.mma|ldmatrix|tcgen05\.ld|elect\.|atom\.")
_SAME_RESULT = re.compile(r"vote\.|redux\.|activemask")
_FIRST = {"lt": 0, "ge": 0, "gt": 1, "le": 1}
"""By how much numbers that compare otherwise begin after the one that they are compared with."""
LANES = 32


class Kind(enum.IntEnum):
    """What threads of a warp know of each other's value."""

    SAME = 0
    NUMBER = 1
    """The number of a thread. Those of a warp begin at a multiple of 32."""
    OWN = 2


Kinds = dict[str, Kind]
"""The kinds of values, by their names."""


def _kind_of_results(own: Instruction, kinds: Sequence[Kind]) -> Kind:
    """Returns the kind of what an instruction assigns, by those of what it reads."""
    operation, last = own.operation, _number(own.text.rpartition(",")[2].strip())
    if _OWN_RESULT.match(operation):
        return Kind.OWN
    if _SAME_RESULT.match(operation):
        return Kind.SAME
    if operation.startswith("shfl.sync.idx"):
        # All take what one thread has, if they name the same one.
        kinds = kinds[1:]
    if max(kinds, default=Kind.SAME) != Kind.NUMBER:
        return max(kinds, default=Kind.SAME)
    match operation.split("."), last:
        case ["mov" | "cvt", *_], _:
            return Kind.NUMBER
        case ["shr", *_], int() if last >= 5:
            return Kind.SAME
        case ["and", *_], int() if last % LANES in (0, LANES - 1):
            return Kind.NUMBER if last % LANES else Kind.SAME
        case ["setp", relation, *_], int() if relation in _FIRST:
            return Kind.OWN if (last + _FIRST[relation]) % LANES else Kind.SAME
    return Kind.OWN


def _number(operand: str) -> int | None:
    return int(operand, 0) if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", operand) else None


def apart(ptx: str) -> list[str]:
    """Returns what threads of a warp reach apart in the kernels of a module."""
    return [text for kernel in kernels(ptx) for text in _Graph(kernel).apart()]


class _Graph:
    """Which blocks of a kernel threads of a warp reach apart."""

    def __init__(self, kernel: Kernel) -> None:
        self._blocks, self._next = kernel.blocks, kernel.following
        self._after = self._reached_in_any_case()

    def _reached_in_any_case(self) -> list[set[int]]:
        """Returns, for each block, those that every way from it to the end takes, and itself."""
        every = set(range(len(self._blocks)))
        after = [set(every) for _ in every]
        changes = True
        while changes:
            changes = False
            for i in reversed(range(len(after))):
                ways = [after[j] for j in self._next[i]]
                new = {i} | (set.intersection(*ways) if ways else set())
                changes |= new != after[i]
                after[i] = new
        return after

    def _region(self, number: int) -> set[int]:
        """Returns the blocks between a branch and the first one that is reached either way."""
        found: set[int] = set()
        waiting = list(self._next[number])
        while waiting:
            i = waiting.pop()
            if i not in found and i not in self._after[number] - {number}:
                found.add(i)
                waiting += self._next[i]
        return found

    def apart(self) -> list[str]:
        """Returns the instructions of whole warps that are reached apart."""
        parted: set[int] = set()
        ends: list[Kinds] = [{} for _ in self._blocks]
        while True:
            before = [*map(dict, ends)], set(parted)
            for i, block in enumerate(self._blocks):
                ends[i] = _after(block, self._at_first(i, ends), i in parted)
            for i, block in enumerate(self._blocks):
                if block[-1].ends and _kind(block[-1].predicate, ends[i]) != Kind.SAME:
                    parted |= self._region(i)
            if before == (ends, parted):
                break
        code = itertools.chain.from_iterable(self._blocks[i] for i in sorted(parted))
        return [own.text for own in code if TOGETHER.match(own.operation)]

    def _at_first(self, number: int, ends: Sequence[Kinds]) -> Kinds:
        """Returns the kinds of values where a block begins: those that it is reached with."""
        found: Kinds = {}
        for i, following in enumerate(self._next):
            for name, kind in ends[i].items() if number in following else ():
                found[name] = kind if found.get(name, kind) == kind else Kind.OWN
        return found


def _kind(name: str, kinds: Kinds) -> Kind:
    usual = Kind.NUMBER if name == "%tid.x" else Kind.OWN if name == "%laneid" else Kind.SAME
    return kinds.get(name, usual)


def _after(block: Sequence[Instruction], kinds: Kinds, is_apart: bool) -> Kinds:
    """Returns the kinds of values after a block."""
    for own in block:
        results, read = own.split()
        kind = _kind_of_results(own, [_kind(x, kinds) for x in read])
        if own.predicate:
            # Where it is not executed, they are what they were.
            same = {_kind(x, kinds) for x in (own.predicate, *results)} == {Kind.SAME}
            kind = kind if same else Kind.OWN
        kinds |= dict.fromkeys(results, Kind.OWN if is_apart else kind)
    return kinds
