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
from collections.abc import Iterator, Sequence
from typing import NamedTuple

TOGETHER = re.compile(
    r"bar\.|barrier\.|shfl\.|vote\.|elect\.|redux\.|match\.|wgmma\.|ldmatrix|stmatrix|setmaxnreg|"
    r"tcgen05\.(ld|st|wait|alloc|dealloc)"
)
"""Instructions of a whole warp."""
_NO_RESULT = re.compile(
    r"st\.|bar\.|barrier\.|red\.|fence|membar|cp\.|prefetch|ret|exit|griddep|setmaxnreg|nanosleep|"
    r"stmatrix|trap|mbarrier\.(init|inval)|wgmma\.(fence|commit|wait)|"
    r"tcgen05\.(commit|wait|cp|fence|mma|dealloc|st)"
)
_OWN_RESULT = re.compile(r"wgmma\.mma|ldmatrix|tcgen05\.ld|elect\.|atom\.")
_SAME_RESULT = re.compile(r"vote\.|redux\.|activemask")
_NAME = re.compile(r"[%$A-Za-z_][\w$]*(?:\.[xyz])?")
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


class Instruction(NamedTuple):
    """A statement of PTX.

    Attributes:
        text: What it is without its predicate; a label ends with a colon.
        names: The names in it, as no other scope has them.
        predicate: What it depends on, if anything.
    """

    text: str
    names: Sequence[str]
    predicate: str = ""

    @property
    def operation(self) -> str:
        """Its first word."""
        return self.text.split(None, 1)[0]

    @property
    def ends(self) -> bool:
        """Whether another block follows."""
        return self.operation.startswith(("bra", "ret", "exit"))

    def split(self) -> tuple[Sequence[str], Sequence[str]]:
        """Returns the names of what it assigns, and of what it reads."""
        if _NO_RESULT.match(self.operation):
            return (), self.names
        operands = self.text[len(self.operation) :].lstrip()
        first = operands.partition("}" if operands.startswith("{") else ",")[0]
        count = len(_NAME.findall(first))
        return self.names[:count], self.names[count:]

    def kind(self, kinds: Sequence[Kind]) -> Kind:
        """Returns the kind of its results, by those of what it reads."""
        operation, last = self.operation, _number(self.text.rpartition(",")[2].strip())
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
    kernels = re.split(r"^\.visible \.entry ", ptx, flags=re.MULTILINE)[1:]
    return [text for kernel in kernels for text in _Graph(_instructions(kernel)).apart()]


def _statements(kernel: str) -> Iterator[str]:
    """Yields statements, labels and braces of a kernel."""
    lines = re.sub(r"//[^\n]*|^\s*\.(loc|file|section)[^\n]*", "", kernel, flags=re.MULTILINE)
    rest = lines[lines.index("{", lines.index(")")) :]
    depth = 0
    while found := re.match(r"\s*([{}]|[$\w]+:(?!:)|[^;{}]*(?:\{[^{}]*\}[^;{}]*)*;)", rest):
        (statement,), rest = found.groups(), rest[found.end() :]
        depth += (statement == "{") - (statement == "}")
        yield statement.rstrip(";")
        if not depth:
            return
    raise AssertionError(f"not known: {rest[:80]}")


def _instructions(kernel: str) -> list[Instruction]:
    """Returns the instructions of a kernel, whose names no two scopes share."""
    scopes, numbers = [set[str]()], itertools.count()
    parents: list[str] = [""]
    found: list[tuple[list[tuple[str, set[str]]], str]] = []
    for statement in _statements(kernel):
        if statement == "{":
            scopes.append(set())
            parents.append(f"@{next(numbers)}")
        elif statement == "}":
            scopes.pop()
            parents.pop()
        else:
            if statement.endswith(":"):
                scopes[-1].add(statement[:-1])
            elif statement.startswith(".reg"):
                scopes[-1].update(_NAME.findall(statement.split(None, 2)[2]))
            if not statement.startswith("."):
                found.append((list(zip(parents, scopes, strict=True)), statement))
    return [_instruction(statement, around) for around, statement in found]


def _instruction(statement: str, around: Sequence[tuple[str, set[str]]]) -> Instruction:
    def whole(name: str) -> str:
        inner = (parent for parent, names in reversed(around) if name in names)
        return name + next(inner, "")

    if statement.endswith(":"):
        return Instruction(statement, [whole(statement[:-1])])
    condition, text = "", statement
    if statement.startswith("@"):
        condition, text = statement.split(None, 1)
    _, *operands = text.split(None, 1)
    names = [whole(name) for name in _NAME.findall("".join(operands))]
    return Instruction(
        " ".join(text.split()), names, whole(condition.lstrip("@!")) if condition else ""
    )


class _Graph:
    """The blocks of a kernel."""

    def __init__(self, code: Sequence[Instruction]) -> None:
        starts = {0}
        for i, own in enumerate(code):
            starts |= {i} if own.text.endswith(":") else {i + 1} if own.ends else set()
        borders = [*sorted(i for i in starts if i < len(code)), len(code)]
        self._blocks = [code[i:end] for i, end in itertools.pairwise(borders)]
        labels = {
            own.names[0]: i
            for i, block in enumerate(self._blocks)
            for own in block[:1]
            if own.text.endswith(":")
        }
        self._next = [self._following(i, labels) for i in range(len(self._blocks))]
        self._after = self._reached_in_any_case()

    def _following(self, number: int, labels: dict[str, int]) -> list[int]:
        last = self._blocks[number][-1]
        found = [labels[last.names[0]]] if last.operation.startswith("bra") else []
        if not last.ends or last.predicate:
            found.append(number + 1)
        return [i for i in found if i < len(self._blocks)]

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
        kind = own.kind([_kind(x, kinds) for x in read])
        if own.predicate:
            # Where it is not executed, they are what they were.
            same = {_kind(x, kinds) for x in (own.predicate, *results)} == {Kind.SAME}
            kind = kind if same else Kind.OWN
        kinds |= dict.fromkeys(results, Kind.OWN if is_apart else kind)
    return kinds
