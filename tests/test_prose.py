"""Plain English: no page and no docstring has a sentence that has to be read twice."""

import pathlib
from collections.abc import Callable

import pytest

from tests import prose

TWICE = """# A page

Of each operand, if all share it, one is kept. What is left is a sum. Nobody has as many as we do,
and so are the others.

| word | meaning |
|---|---|
| band | so many rows |

```text
Of which nobody reads that it is code.
```
"""


@pytest.mark.parametrize("files", [prose.pages, prose.sources])
def test_no_sentence_has_to_be_read_twice(files: Callable[[], list[pathlib.Path]]) -> None:
    assert not [finding for path in files() for finding in prose.findings(path)]


def test_what_has_to_be_read_twice_is_found(tmp_path: pathlib.Path) -> None:
    page, source = tmp_path / "page.md", tmp_path / "source.py"
    page.write_text(TWICE)
    kinds = [finding.kind for finding in prose.findings(page)]
    assert len(kinds) == 5
    assert len(set(kinds)) == 4
    source.write_text(f'def f():\n    """Returns one.\n\n    Who knows {"word " * 40}.\n    """\n')
    assert len(list(prose.findings(source))) == 2
    page.write_text("Each operand is kept once, for all products of a batch share it. It is short.")
    assert not list(prose.findings(page))
