"""The small mistakes that a program can have: what each line of a module may be changed into."""

import ast
import dataclasses
import difflib
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

_COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_COMPUTED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_JOINED: dict[type[ast.boolop], tuple[str, str]] = {ast.And: ("and", "or"), ast.Or: ("or", "and")}

_LEFT_ALONE = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.TypeAlias)
_IN_ANY_ORDER = {"min", "max", "gcd", "lcm"}
"""Functions of which it does not matter in which order they are given what."""
_SMALL = 32
"""A number below it counts something; a larger one is a size, which is doubled or halved."""

Change = tuple[ast.AST, str]
"""A part of a module, and the text that takes its place."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One mistake in a module.

    Attributes:
        path: Of the module, from the root of the repository.
        kind: Of the mistake.
        lines: The first and the last line of what changes.
        span: The first and the last byte of it.
        new: The text that takes its place.
        imported: It is in no function, but runs where the module is imported.
    """

    path: str
    kind: str
    lines: tuple[int, int]
    span: tuple[int, int]
    new: str
    imported: bool

    @property
    def name(self) -> str:
        """Tells it from all others of the same module."""
        digest = zlib.crc32(f"{self.span} {self.new}".encode())
        return f"{self.path}:{self.lines[0]} {self.kind} {digest:08x}"

    def changed(self, source: str) -> str:
        """Returns the module with the mistake."""
        text, (first, end) = source.encode(), self.span
        return (text[:first] + self.new.encode() + text[end:]).decode()

    def diff(self, source: str) -> str:
        """Returns the lines that go, and those that come, without their indentation."""
        old, new = source.splitlines(), self.changed(source).splitlines()
        lines = difflib.unified_diff(old, new, n=0, lineterm="")
        kept = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
        return "\n".join(f"{line[0]} {line[1:].strip()}" for line in kept)

    def is_program(self, source: str) -> bool:
        """Whether the module can be compiled, and is another one."""
        changed = self.changed(source)
        try:
            compile(changed, self.path, "exec")
        except (SyntaxError, ValueError):
            return False
        return ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


def of(path: str, source: str) -> list[Mutant]:
    """Returns all mutants of a module, each once; some of them are no programs."""
    text, found = _Text(source), dict[tuple[Any, str], Mutant]()
    for node, imported in _mutable(ast.parse(source)):
        for kind, changes in KINDS.items():
            for part, new in changes(node, text):
                lines = (part.lineno, part.end_lineno or part.lineno)  # type: ignore[attr-defined]
                # A function is found where it is defined, and returns where it runs.
                at_import = imported and kind != "variable"
                mutant = Mutant(path, kind, lines, text.span(part), new, at_import)
                found.setdefault((mutant.span, new), mutant)
    return list(found.values())


class _Text:
    """A module's text, of which a part can be told by its node."""

    def __init__(self, source: str) -> None:
        self._bytes = source.encode()
        lines = source.encode().splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node begins and ends."""
        first = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return first, end

    def of(self, node: ast.AST) -> str:
        """The text of a node."""
        return self.between(*self.span(node))

    def between(self, first: int, end: int) -> str:
        """The text between two places."""
        return self._bytes[first:end].decode()

    def with_gap(self, left: ast.AST, right: ast.AST, whole: ast.AST, old: str, new: str) -> str:
        """The text of a node with another word between two parts of it."""
        first, end = self.span(whole)
        gap_first, gap_end = self.span(left)[1], self.span(right)[0]
        gap = self.between(gap_first, gap_end).replace(old, new, 1)
        return self.between(first, gap_first) + gap + self.between(gap_end, end)


def _mutable(node: ast.AST, *, imported: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Yields what may be changed: not types, what only names something, or what an error says."""
    yield node, imported
    inside = imported and not isinstance(node, (ast.FunctionDef, ast.Lambda))
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        # Defaults are computed where a function is made.
        when = imported if name == "args" else inside
        for child in value if isinstance(value, list) else [value]:
            is_strict = isinstance(child, ast.keyword) and child.arg == "strict"
            if isinstance(child, ast.AST) and not isinstance(child, _LEFT_ALONE) and not is_strict:
                yield from _mutable(child, imported=when)


def _comparison(node: ast.AST, text: _Text) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            yield node, text.with_gap(left, right, node, *_COMPARED[type(operator)])
            left = right


def _operator(node: ast.AST, text: _Text) -> Iterator[Change]:
    if isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
        yield node, text.with_gap(node.left, node.right, node, *_COMPUTED[type(node.op)])
    if isinstance(node, ast.AugAssign) and type(node.op) in _COMPUTED:
        yield node, text.with_gap(node.target, node.value, node, *_COMPUTED[type(node.op)])


def _logic(node: ast.AST, text: _Text) -> Iterator[Change]:
    if isinstance(node, ast.BoolOp):
        for left, right in itertools.pairwise(node.values):
            yield node, text.with_gap(left, right, node, *_JOINED[type(node.op)])
    if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield node, text.of(node.operand)


def _constant(node: ast.AST, text: _Text) -> Iterator[Change]:
    del text
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield node, str(not value)
    elif isinstance(value, int):
        yield node, str(value + 1 if abs(value) < _SMALL else 2 * value)
        yield node, str(value - 1 if abs(value) < _SMALL else value // 2)
    elif isinstance(value, float):
        yield node, str(2 * value or 1.0)


def _condition(node: ast.AST, text: _Text) -> Iterator[Change]:
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield node.test, f"not ({text.of(node.test)})"
        if not isinstance(node, ast.While):
            yield node.test, "True"
            yield node.test, "False"
    if isinstance(node, ast.comprehension) and node.ifs:
        yield node.ifs[0], "True"


def _argument(node: ast.AST, text: _Text) -> Iterator[Change]:
    if not isinstance(node, ast.Call):
        return
    name = node.func.attr if isinstance(node.func, ast.Attribute) else text.of(node.func)
    given = [arg for arg in node.args if not isinstance(arg, ast.Starred)]
    for left, right in itertools.pairwise(given):
        if name in _IN_ANY_ORDER:
            break
        first, end = text.span(node)
        one, other = text.span(left), text.span(right)
        parts = (first, one[0]), other, (one[1], other[0]), one, (other[1], end)
        yield node, "".join(text.between(*part) for part in parts)
    for keyword in node.keywords:
        if name == "zip":
            # What is as long as it has to be is so without being asked.
            break
        left_over = [other for other in node.keywords if other is not keyword]
        yield node, ast.unparse(ast.Call(node.func, node.args, left_over))


def _statement(node: ast.AST, text: _Text) -> Iterator[Change]:
    del text
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "pass"
    if isinstance(node, (ast.Break, ast.Continue)):
        yield node, "pass"


def _variable(node: ast.AST, text: _Text) -> Iterator[Change]:
    """What a function returns, or hands on, is another one of what it is given."""
    if not isinstance(node, ast.FunctionDef):
        return
    names = [arg.arg for arg in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
    others = dict(zip(names, names[1:] + names[:1], strict=True))
    del text
    for statement in ast.walk(node):
        if isinstance(statement, ast.Return):
            for inner in ast.walk(statement):
                if isinstance(inner, ast.Name) and others.get(inner.id, inner.id) != inner.id:
                    yield inner, others[inner.id]


KINDS: dict[str, Callable[[ast.AST, _Text], Iterator[Change]]] = {
    "comparison": _comparison,
    "operator": _operator,
    "logic": _logic,
    "constant": _constant,
    "condition": _condition,
    "argument": _argument,
    "statement": _statement,
    "variable": _variable,
}
"""The kinds of mistakes."""
