"""A figure in a notebook and as a file, and Vega as the page carries it."""

from __future__ import annotations

import gzip
import importlib.util
import json
import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fedkeel.drawing import show
from fedkeel.drawing.show import Drawing
from fedkeel.errors import FedkeelError

FIGURE = {"kind": "lines", "title": "</script>", "x_label": "round", "y_label": "loss"}
FIGURE |= {"series": [{"name": "日本 $x$ _a", "x": [1, 2], "y": [0.5, 0.25]}]}
ROOT = Path(__file__).parents[2]
needs_converter = pytest.mark.skipif(
    importlib.util.find_spec("vl_convert") is None, reason="vl-convert-python is not installed"
)


@pytest.mark.slow
@needs_converter
def test_vega_is_what_the_script_makes_of_the_converter() -> None:
    made = runpy.run_path(str(ROOT / ".ci" / "vega"))["made"]()
    assert gzip.decompress(made) == gzip.decompress(show.packed_vega()), "run .ci/vega"


def test_vega_has_its_licences_beside_it_and_cannot_end_its_script() -> None:
    licence = (ROOT / "src" / "fedkeel" / "drawing" / "vega.licence").read_text()
    for words in (f"vega-lite@{show.VERSION}.", "BSD licence", "University of Washington", "ISC", "MIT"):
        assert words in licence
    assert b"</script" not in gzip.decompress(show.packed_vega())


@pytest.mark.slow
@needs_converter
@pytest.mark.parametrize(("ending", "begins"), [("svg", b"<svg"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_it_is_saved_as_its_ending_says(tmp_path: Path, ending: str, begins: bytes) -> None:
    path = Drawing(FIGURE).save(tmp_path / "new" / f"figure.{ending}")
    assert path.read_bytes().startswith(begins)
    if ending == "svg":
        assert "&lt;/script&gt;" in path.read_text()


@pytest.mark.slow
@needs_converter
def test_letters_that_a_file_must_not_have_are_replaced_in_names(tmp_path: Path) -> None:
    series = [{"name": name, "x": [1], "y": [1.0]} for name in ("a\x1b[31m", "caf\udce9", "ok")]
    path = Drawing({**FIGURE, "series": series}).save(tmp_path / "figure.svg")
    texts = [node.text for node in ElementTree.fromstring(path.read_text()).iter() if node.text]
    assert "a\N{REPLACEMENT CHARACTER}[31m" in texts
    assert "caf\N{REPLACEMENT CHARACTER}" in texts
    assert "ok" in texts


@needs_converter
def test_what_the_converter_refuses_is_one_sentence() -> None:
    with pytest.raises(FedkeelError, match="cannot be drawn"):
        show.as_file({"description": "d", "mark": {"type": "nonsense"}, "encoding": 3}, "svg")


def test_its_description_is_saved_as_json(tmp_path: Path) -> None:
    saved = json.loads(Drawing(FIGURE).save(str(tmp_path / "figure.json")).read_text())
    assert saved["data"]["values"][0]["y"] == [0.5, 0.25]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("figure.pgn", "There is no format of a figure named 'pgn': did you mean 'png'?"),
        ("figure", "There is no format of a figure named '': choose from"),
        ("file/figure.json", "cannot be written"),
        (3, "3"),
    ],
)
def test_a_place_that_cannot_be_is_one_sentence(tmp_path: Path, path: Any, sentence: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FedkeelError, match=None) as error:
        Drawing(FIGURE).save(tmp_path / path if isinstance(path, str) else path)
    assert sentence in str(error.value)
    assert "--out" not in str(error.value), "there is no such option here"


@needs_converter
def test_a_notebook_gets_vega_lite_and_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "as_file", lambda *_: b"<svg></svg>")
    bundle = Drawing(FIGURE)._repr_mimebundle_(include=None, exclude=None)
    assert bundle["image/svg+xml"] == "<svg></svg>"
    (kind,) = (kind for kind in bundle if "vegalite" in kind)
    assert bundle[kind]["title"]["text"] == ["</script>"]
    assert "loss" in bundle["text/plain"]


def test_without_the_converter_a_notebook_still_gets_vega_lite(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vl_convert" else real(name))
    assert "image/svg+xml" not in Drawing(FIGURE)._repr_mimebundle_()
    with pytest.raises(FedkeelError, match=r"pip install 'fedkeel\[report\]'"):
        Drawing(FIGURE).save("never.svg")
    assert not Path("never.svg").exists()
