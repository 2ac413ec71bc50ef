"""PTX as tests read it: instructions, the names in them, and the blocks of a kernel."""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_NO_RESULT = re.compile(
    r"st\.|bar\.|barrier\.|red\.|fence|membar|cp\.|prefetch|ret|exit|griddep|setmaxnreg|nanosleep|"
    r"stmatrix|trap|mbarrier\.(init|inval)|wgmma\.(fence|commit|wait)|"
    r"tcgen05\.(commit|wait|cp|fence|mma|dealloc|st)"
)
_NAME = re.compile(r"[%$A-Za-z_][\w$]*(?:\.[xyz])?")


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


class Kernel:
    """The blocks of a kernel.

    Attributes:
        blocks: The instructions of each.
        following: The numbers of the blocks that may follow each.
    """

    def __init__(self, code: Sequence[Instruction]) -> None:
        starts = {0}
        for i, own in enumerate(code):
            starts |= {i} if own.text.endswith(":") else {i + 1} if own.ends else set()
        borders = [*sorted(i for i in starts if i < len(code)), len(code)]
        self.blocks = [code[i:end] for i, end in itertools.pairwise(borders)]
        labels = {
            own.names[0]: i
            for i, block in enumerate(self.blocks)
            for own in block[:1]
            if own.text.endswith(":")
        }
        self.following = [self._following(i, labels) for i in range(len(self.blocks))]

    def _following(self, number: int, labels: dict[str, int]) -> list[int]:
        last = self.blocks[number][-1]
        found = [labels[last.names[0]]] if last.operation.startswith("bra") else []
        if not last.ends or last.predicate:
            found.append(number + 1)
        return [i for i in found if i < len(self.blocks)]


def kernels(ptx: str) -> list[Kernel]:
    """Returns the kernels of a module."""
    texts = re.split(r"^\.visible \.entry ", ptx, flags=re.MULTILINE)[1:]
    return [Kernel(_instructions(text)) for text in texts]


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
