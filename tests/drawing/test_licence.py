"""The licence beside Vega's script names every package that is in it."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from fedkeel import drawing
from fedkeel.drawing.show import packed_vega

vl_convert = pytest.importorskip("vl_convert")
LICENCE = (Path(drawing.__file__).parent / "vega.licence").read_text()
PACKAGE = rb"/npm/([a-z0-9.-]+@[0-9][0-9.]*)/"


@pytest.mark.slow
def test_every_package_that_vega_embed_leads_to_is_named_with_its_version() -> None:
    """vl-convert's library has them as text, each after a line that says which one it is."""
    (library,) = Path(vl_convert.__file__).parent.glob("*.so")
    _, *parts = re.split(rb"Original file: (?=/npm/)", library.read_bytes())
    imports: dict[str, set[str]] = {}
    for part in parts:
        text = part.partition(b"sourceMappingURL")[0]
        name, *others = (found.decode() for found in re.findall(PACKAGE, text))
        imports[name] = set(others)
    lite = max((name for name in imports if name.startswith("vega-lite@6.")), key=lambda name: name.split("."))
    inside: set[str] = set()
    pending = {next(name for name in imports if name.startswith("vega-embed@"))}
    while pending:
        name = pending.pop()
        name = lite if name.startswith("vega-lite@") else name  # the one that is asked for takes its place
        pending |= imports[name] - inside if name not in inside else set()
        inside.add(name)
    named = set(re.findall(r"(?<![\w-])[a-z][a-z0-9.-]*@[0-9][0-9.]*[0-9]", LICENCE))
    assert len(inside) > 50
    assert named == inside


def test_it_travels_in_every_page() -> None:
    assert LICENCE in gzip.decompress(packed_vega()).decode()


def test_what_vega_embed_and_others_have_in_them_is_named_with_where() -> None:
    for part in ("semver, in vega-embed", "fast-json-patch, in vega-embed", "Esprima, in vega-expression"):
        assert part in LICENCE
    entries = re.findall(r"^(\S.*, in .*)\n(.*)", LICENCE, re.M)
    assert len(entries) > 10
    assert [name for name, below in entries if not below.startswith("  Copyright ")] == []
