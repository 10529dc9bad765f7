"""Pictures of federations whose names have any letters."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedkeel.data import contact_sheet, describe, lettering, load
from fedkeel.data.lettering import Lettering, has
from fedkeel.errors import DataError
from tests import vectors


def federation_of(tmp_path: Path, domains: list[str], classes: list[str]):  # type: ignore[no-untyped-def]
    y = np.arange(4 * len(classes)) % len(classes)
    arrays = {f"x_{domain}": np.zeros((len(y), 4, 4), np.uint8) for domain in domains}
    np.savez(tmp_path / "p.npz", classes=np.array(classes), **arrays, **{f"y_{domain}": y for domain in domains})
    return load("npz", root=tmp_path / "p.npz")


def test_names_with_umlauts_are_drawn_with_a_font_that_has_them() -> None:
    pytest.importorskip("matplotlib")  # it brings such a font
    found = Lettering(["Zürich", "Łódź", "Αθήνα", "Москва"], 14)
    assert found.text("Zürich") == "Zürich"
    assert found.text("Zu\N{COMBINING DIAERESIS}rich") == "Zürich"
    assert all(has(found.font, letter) for letter in "ürŁódźΑθήναМосква")


def test_letters_that_no_font_has_are_written_otherwise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lettering, "font_files", list)
    with caplog.at_level(logging.WARNING, "fedkeel"):
        found = Lettering(["Zürich", "日本", "\U0010ffff"], 14)
    assert found.text("Zürich") == "Zurich"
    assert found.text("日本") == "U+65E5U+672C"
    assert "No font here has the letters ü 日 本" in caplog.text
    caplog.clear()
    assert Lettering(["plain", "art_painting"], 14).text("plain") == "plain"
    assert not caplog.records


def test_a_file_that_is_no_font_and_a_font_without_letters_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sans.ttf").write_bytes(b"no font")
    monkeypatch.setattr(lettering, "folders", lambda: iter([tmp_path]))
    assert Lettering(["Zürich"], 14).text("Zürich") == "Zurich"


def test_a_picture_bears_any_name(tmp_path: Path) -> None:
    names = ["Zürich", "日本", "a\nb", "\x1b[31m", "x" * 5000, "/etc", "é" * 300]
    path = contact_sheet(federation_of(tmp_path, names, names), tmp_path / "sheet.png", cell=16)
    with Image.open(path) as picture:
        assert picture.width < 1000


def test_no_folder_is_made_for_a_picture(tmp_path: Path) -> None:
    federation = federation_of(tmp_path, ["a", "b"], ["x", "y"])
    with pytest.raises(DataError, match="cannot be written: its folder does not exist"):
        contact_sheet(federation, tmp_path / "nowhere" / "x.png")
    assert not (tmp_path / "nowhere").exists()


def test_of_floats_there_is_a_table_and_no_picture(tmp_path: Path) -> None:
    federation = vectors.federation()
    assert [(row.client, row.classes) for row in describe(federation)] == [("north", 3), ("south", 3), ("west", 3)]
    with pytest.raises(DataError, match="it has no picture"):
        contact_sheet(federation, tmp_path / "sheet.png")
