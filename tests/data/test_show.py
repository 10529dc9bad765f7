"""Pictures of federations whose names have any letters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedkeel.data import contact_sheet, describe, load
from fedkeel.errors import DataError
from tests import vectors


def federation_of(tmp_path: Path, domains: list[str], classes: list[str]):  # type: ignore[no-untyped-def]
    y = np.arange(4 * len(classes)) % len(classes)
    arrays = {f"x_{domain}": np.zeros((len(y), 4, 4), np.uint8) for domain in domains}
    np.savez(tmp_path / "p.npz", classes=np.array(classes), **arrays, **{f"y_{domain}": y for domain in domains})
    return load("npz", root=tmp_path / "p.npz")


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
