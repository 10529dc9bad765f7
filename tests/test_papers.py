"""The map of the papers: nothing of them is missing, no reference leads nowhere, and the page is up to date."""

from __future__ import annotations

import doctest
import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "papers"
loader = SourceFileLoader("papers", str(SCRIPT))
spec = importlib.util.spec_from_loader("papers", loader)
assert spec is not None
papers = importlib.util.module_from_spec(spec)
loader.exec_module(papers)


@pytest.mark.slow
def test_everything_that_the_papers_number_is_in_the_code_or_says_why_not() -> None:
    assert papers.problems() == []


@pytest.mark.slow
def test_the_page_is_what_the_references_say() -> None:
    assert papers.PAGE.read_text() == papers.page(), "run .ci/papers"


def test_a_reference_is_understood() -> None:
    assert doctest.testmod(papers).failed == 0
    found = list(
        papers.items('FedCoda (Eq. 10), of "The Title", arXiv:2506.1, Figures 3 and 7. Table 5 is no more of it.')
    )
    assert found == [("fedcoda", "Eq", "10"), ("fedcoda", "Figure", "3"), ("fedcoda", "Figure", "7")]
    assert list(papers.items("as in Table 9, which is nobody's")) == []


def test_a_reference_to_what_no_paper_has_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(papers, "references", lambda: iter([(("hbn", "Eq", "99"), "`somewhere`")]))
    assert "`somewhere` refers to hbn Eq 99, which docs/papers.toml does not have" in papers.problems()
