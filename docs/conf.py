"""How Sphinx builds the documentation: `make docs`."""

import os
import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT))

from pallas_gemm import __version__ as release  # noqa: E402 - it lies in the folder above

project = "pallas_gemm"
author = "the authors of pallas_gemm"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"{project} {release}"
# The explorer of orders, which `make docs` writes there.
html_extra_path = ["_build/extra"]

myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
# Attributes are listed by the class that has them; else those of a dataclass appear twice.
napoleon_use_ivar = True

OUTSIDE = {
    "ladder": ROOT / "bench" / "ladder.md",
    "results": ROOT / "bench" / "results" / "README.md",
    "changelog": ROOT / "CHANGELOG.md",
}
"""Pages that lie elsewhere in the repository: in `docs` there is a line that says where."""


def read_source(_: Any, name: str, source: list[str]) -> None:
    """Reads a page that lies elsewhere, and points links to such pages at the site's."""
    here = (DOCS / name).parent
    folder = OUTSIDE[name].parent if name in OUTSIDE else here
    text = OUTSIDE[name].read_text() if name in OUTSIDE else source[0]
    pages = {path: DOCS / f"{page}.md" for page, path in OUTSIDE.items()}

    def on_the_site(link: re.Match[str]) -> str:
        path = (folder / link[1]).resolve()
        return f"]({os.path.relpath(pages.get(path, path), here)}"

    source[0] = re.sub(r"\]\((?!\w+:|#)([^)#]+)", on_the_site, text)


def literal_code(*arguments: Any) -> None:
    """Makes the `code` of a docstring what reStructuredText calls a literal."""
    lines: list[str] = arguments[-1]
    text = re.sub(
        r"(?<!`)`([^`]+)`(?!`)(\w?)",
        # A letter may only follow after an empty escape, as in ``array``\ s.
        lambda code: f"``{code[1]}``" + (f"\\ {code[2]}" if code[2] else ""),
        "\n".join(lines),
    )
    # A name that ends in an underscore, as "online_" does, would be a link.
    lines[:] = re.sub(r'(\w)_"', r'\1\\_"', text).split("\n")


def setup(app: Any) -> None:
    """Connects both with Sphinx."""
    app.connect("source-read", read_source)
    # Before napoleon, which would escape the stars of `*args`.
    app.connect("autodoc-process-docstring", literal_code, priority=400)


html_show_copyright = False
