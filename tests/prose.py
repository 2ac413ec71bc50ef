"""Finds sentences that have to be read twice, on pages and in docstrings.

`python -m tests.prose` lists them; `python -m tests.prose docs/layers.md` those of a file.
"""

import ast
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent

LONGEST = 30
"""A sentence with more words is too long."""

KINDS = {
    "begins with Of, With or By what is left out": re.compile(
        r"^(Of|With which|By which|To whom)\b"
    ),
    "has 'what', 'who' or 'that' as its subject": re.compile(
        r"^(What|Who|Whoever|Whatever|Whose|That|Those)\b(?!.*\?$)"
    ),
    "has an inversion": re.compile(
        r"\b(and|nor|neither|so) (do|does|did|is|are|was|were|has|have|can|may)"
        r" (the|a|an|those|its|our|theirs)\b"
    ),
    "has 'be it' or 'whoever'": re.compile(r"\b(be it|be they|whoever|whomever|whosoever)\b", re.I),
    "has 'as many' or 'so many'": re.compile(r"\b(as many|so many|so much)\b", re.I),
}
"""What is found, besides long sentences."""

CODE = re.compile(r"^\s*(>>>|\||\.\. |python \S+\.py)|[─▶│]| {4,}\S.* {2,}\S", flags=re.MULTILINE)
"""Blocks of a docstring that hold no sentences: code, tables, commands, pictures."""


class Finding(NamedTuple):
    """A sentence that should be written anew.

    Attributes:
        path: The file that it is in.
        kind: What is wrong with it.
        sentence: All of it.
    """

    path: pathlib.Path
    kind: str
    sentence: str


def pages() -> list[pathlib.Path]:
    """Returns the pages that people read first."""
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def sources() -> list[pathlib.Path]:
    """Returns the files whose docstrings are read."""
    folders = ("pallas_gemm", "schedules", "bench", "examples")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def findings(path: pathlib.Path) -> Iterator[Finding]:
    """Yields the sentences of a file that should be written anew."""
    texts = _of_page(path) if path.suffix == ".md" else _of_source(path)
    for sentence in (sentence for text in texts for sentence in _sentences(text)):
        plain = re.sub(r"`[^`]*`", "code", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence))
        for kind, pattern in KINDS.items():
            if pattern.search(plain):
                yield Finding(path, kind, sentence)
        words = len(plain.split())
        if words > LONGEST:
            yield Finding(path, f"has more than {LONGEST} words", sentence)


def _of_page(path: pathlib.Path) -> Iterator[str]:
    """Yields the paragraphs, the entries of lists, and the cells of tables."""
    text = re.sub(r"^ *```.*?^ *```", "\n", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|<[^>]+>", " ", text, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n", text):
        if block.lstrip().startswith("|"):
            yield from re.split(r"[|\n]+", block)
        elif not block.startswith("#"):
            yield from re.split(r"^\s*(?:[-*]|\d+\.)\s+", block, flags=re.MULTILINE)


def _of_source(path: pathlib.Path) -> Iterator[str]:
    """Yields the paragraphs and entries of the docstrings, those of constants and fields too."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield from _of_docstring(text)


def _of_docstring(text: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", text):
        if CODE.search(block):
            continue
        # An argument or a field begins an entry of its own: `name: what it is`.
        yield from re.split(r"^\s*(?:[\w*, ]+:(?=\s|$)|[-*]\s)", block, flags=re.MULTILINE)


def _sentences(text: str) -> Iterator[str]:
    yield from (part for part in re.split(r"(?<=[.!?])\s+", " ".join(text.split())) if part)


def main(names: list[str]) -> None:
    """Prints every finding, and how many there are."""
    chosen = [pathlib.Path(name).resolve() for name in names] or [*pages(), *sources()]
    found = [finding for path in chosen for finding in findings(path)]
    for path, kind, sentence in found:
        print(f"{path.relative_to(ROOT)}: {kind}: {sentence}")
    print(len(found))


if __name__ == "__main__":
    main(sys.argv[1:])
