"""Names are data: files, terminals and tables bear any of them."""

from __future__ import annotations

import doctest
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkeel.core import naming
from fedkeel.core.naming import csv_text, file_name, markdown_text, name_of, slug, visible

HOSTILE = [
    "", ".", "..", "...", "/", "/etc/passwd", "../../etc", "a/b", "a\\b", "a\0b", "a\nb", " ", "-", "%", "%2F", "a%2Fb",
    "~", "a~b", "\x1b[31m", "[/b]", "\udcff", "ü", "u\u0308", "日本", "con:", "=1+1", "<b>", "a|b",
    "x" * 300, "x" * 299,
    "ü" * 200, "ü" * 199, "/" * 200, "/" * 199, ".x", "%2Ex", "a-b", "a(b)", "a[b]", "a b", "*", "?", "'", '"',
]  # fmt: skip


@pytest.mark.parametrize("make", [file_name, slug])
@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_any_name_is_one_visible_file_inside_of_its_folder(tmp_path: Path, make, name: str) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "inside"
    folder.mkdir()
    made = make(name)
    (folder / f"{made}.safetensors").write_text("content")
    (folder / made).mkdir()
    assert sorted(path.name for path in folder.iterdir()) == sorted([made, f"{made}.safetensors"])
    assert list(tmp_path.iterdir()) == [folder]
    assert not made.startswith(".")
    assert len(made.encode()) <= naming.LONGEST


def test_names_that_differ_have_files_that_differ() -> None:
    for one, other in itertools.combinations(HOSTILE, 2):
        assert file_name(one) != file_name(other), (one, other)


@given(st.text(st.characters()), st.text(st.characters()))
def test_file_names_tell_names_apart_and_go_back(one: str, other: str) -> None:
    assert (file_name(one) == file_name(other)) == (one == other)
    if "~" not in file_name(one):
        assert name_of(file_name(one)) == one


def test_ordinary_names_stay_as_they_are() -> None:
    for name in ("photo", "art_painting", "Zürich", "site 1", "scan-00017", "日本", "a+b=c@d"):
        assert file_name(name) == name
    assert slug("fedprox(mu=0.1)+gn@batch_size=8") == "fedprox-mu=0.1-+gn@batch_size=8"
    assert slug("fedcoda(clip='none')") == "fedcoda-clip=-none"


def test_nothing_that_a_terminal_obeys_is_visible() -> None:
    for name in HOSTILE:
        assert visible(name).isprintable()
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in visible("a\N{RIGHT-TO-LEFT OVERRIDE}b")
    assert visible("Zürich 日本") == "Zürich 日本"


def test_a_spreadsheet_finds_no_formula() -> None:
    for name in ("=1+1", "+1", "-1", "@a", " =1", "\t=1", "\r=1", "＝1", "\n=1"):
        assert csv_text(name)[0] in "'\N{REPLACEMENT CHARACTER}"
    assert csv_text("photo") == "photo"
    assert csv_text("a=b") == "a=b"


def test_markdown_shows_a_name_and_nothing_else() -> None:
    assert markdown_text("<img src=x onerror=alert(1)>").startswith("&lt;img")
    assert markdown_text("[a](javascript:x)") == r"\[a\](javascript:x)"
    assert markdown_text("a|b") == r"a\|b"
    assert markdown_text("a\nb") == "a\N{REPLACEMENT CHARACTER}b"
    assert markdown_text("**a** `b` _c_ ~~d~~") == r"\*\*a\*\* \`b\` \_c\_ \~\~d\~\~"
    assert markdown_text("&lt;") == "&amp;lt;"
    assert markdown_text("art_painting fedprox(mu=0.1)@batch_size=8") == "art_painting fedprox(mu=0.1)@batch_size=8"


def test_the_examples_hold() -> None:
    assert doctest.testmod(naming).failed == 0
