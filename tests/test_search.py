"""The site's search: a page answers each question that a newcomer asks, and each name of the field.

The pages are searched here as Sphinx searches them: a page is found if it has every word of the
query, words in headings count more. If `make docs` has built the site and there is a browser, the
site's own search is asked too.
"""

import pathlib
import re

import pytest

from tests import browser

DOCS = pathlib.Path(__file__).parent.parent / "docs"
SITE = DOCS / "_build" / "html"

QUESTIONS = {
    "how do I use it in a Flax model": "layers",
    "how do I train a mixture of experts": "experts",
    "how do I quantize a model to int8": "quantization",
    "how do I get deterministic results": "determinism",
    "how do I find the kernels in nsys": "profiling",
    "how do I find the fastest config": "tutorial",
    "how do I use several GPUs": "parallel",
    "how do I migrate from torch": "migrate",
    "how do I know why XLA computes a product": "troubleshooting",
    "how do I change the order of the tiles": "orders",
    "how do I fuse a bias and an activation": "fuse",
    "how do I choose the cache folder": "environment",
}

WORDS = {
    "MoE": "experts",
    "experts": "experts",
    "quantize": "quantization",
    "quantization": "quantization",
    "fp8": "quantization",
    "deterministic": "determinism",
    "reproducible": "determinism",
    "nsys": "profiling",
    "XProf": "profiling",
    "Perfetto": "profiling",
    "MaxText": "experts",
    "cutlass": "migrate",
    "Triton": "migrate",
    "split-K": "ideas/along-k",
    "Muon": "symmetric",
    "environment variables": "environment",
    "tokamax": "measured",
}

SHOWN = 5
"""A reader looks at so many results."""

IGNORED = {"how", "do", "i", "it", "in", "a", "an", "of", "to", "the", "and", "from", "why", "my"}
"""Words that Sphinx leaves out of a query."""

PAGES = {
    path.relative_to(DOCS).with_suffix("").as_posix(): path.read_text()
    for path in [*DOCS.glob("*.md"), *DOCS.glob("ideas/*.md")]
}


def _stem(word: str) -> str:
    return re.sub(r"(?<=\w{3})(ing|ed|es|s|e)$", "", word)


def _words(text: str) -> list[str]:
    return [_stem(word) for word in re.findall(r"\w+", text.lower())]


def _found(query: str) -> list[str]:
    """Returns the pages that have every word of a query, the best first."""
    asked = [word for word in _words(query) if word not in IGNORED]
    assert asked
    scores = {}
    for name, text in PAGES.items():
        body = set(_words(text))
        headings = set(_words(" ".join(re.findall(r"^#+ (.*)$", text, re.MULTILINE))))
        if all(word in body for word in asked):
            scores[name] = sum(15 if word in headings else 5 for word in asked)
    return sorted(scores, key=lambda name: -scores[name])


@pytest.mark.parametrize(("query", "page"), [*QUESTIONS.items(), *WORDS.items()])
def test_a_query_finds_its_page(query: str, page: str) -> None:
    assert page in _found(query)[:SHOWN], _found(query)


def test_there_are_ten_questions_and_none_finds_everything() -> None:
    assert len(QUESTIONS) >= 10
    for query in QUESTIONS:
        assert len(_found(query)) < len(PAGES) * 3 // 4
    assert not _found("words that nobody wrote: xyzzy")


@pytest.mark.skipif(not (SITE / "search.html").exists(), reason="`make docs` has not been run")
@pytest.mark.skipif(browser.found() is None, reason="this computer has no Chromium")
def test_the_sites_own_search_finds_them(tmp_path: pathlib.Path) -> None:
    missed = {}
    with browser.page(str(browser.found()), tmp_path) as tab:
        for query, page in {**QUESTIONS, **WORDS}.items():
            tab.open(SITE / "search.html", query=f"q={query.replace(' ', '+')}")
            tab.wait_for("/finished|did not match/.test(document.body.innerText)")
            links = "[...document.querySelectorAll('#search-results li > a')]"
            found = str(tab.value(f"{links}.map(link => link.getAttribute('href')).join(' ')"))
            pages = list(dict.fromkeys(re.findall(r"([\w/-]+)\.html", found)))
            if page not in pages[:SHOWN]:
                missed[query] = pages[:SHOWN]
    assert missed == {}
