"""The glossary: its words are in use, in order, and nothing has a second name."""

import functools
import pathlib
import re

import pytest

from tests import prose

PAGE = pathlib.Path(prose.ROOT / "docs" / "glossary.md")

OURS, NOT_OURS = (
    [
        re.split(r", ", row.split("|")[1].strip())
        for row in table.splitlines()
        if row.startswith("|") and not row.startswith(("| word", "| not", "|---"))
    ]
    for table in PAGE.read_text().split("| not | but |")
)

ELSEWHERE = ("migrate.md",)
"""Pages that say what others call a thing."""


@functools.cache
def text() -> str:
    """Returns the pages but the glossary, and the sources."""
    paths = (*prose.pages(), *prose.sources())
    texts = (p.read_text() for p in paths if p != PAGE and p.name not in ELSEWHERE)
    return " ".join(" ".join(texts).lower().split())


def test_the_words_are_in_alphabetical_order() -> None:
    for table in (OURS, NOT_OURS):
        assert table == sorted(table, key=lambda words: words[0].lower())
        assert len({word for words in table for word in words}) == sum(map(len, table))


@pytest.mark.parametrize("word", sorted(word for words in OURS for word in words))
def test_a_word_is_in_use(word: str) -> None:
    assert re.search(rf"\b{re.escape(word.lower())}", text())


@pytest.mark.parametrize("word", sorted(word for words in NOT_OURS for word in words))
def test_a_second_name_is_not_in_use(word: str) -> None:
    found = re.search(rf"\b{re.escape(word.lower())}", text())
    assert found is None, text()[max(0, found.start() - 40) : found.end() + 40]
