"""Pictures of federations, and data sets as trees of images, whatever letters their names have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedkeel.core.naming import file_name
from fedkeel.data import DATASETS, Dataset, contact_sheet, describe, load
from fedkeel.data.show import write_tree
from fedkeel.errors import DataError
from tests import vectors
from tests.data.made_up import tree


def pack(tmp_path: Path, domains: tuple[str, ...], classes: tuple[str, ...]) -> Dataset:
    x = np.arange(4 * len(classes) * 4, dtype=np.uint8).reshape(-1, 2, 2)
    y = np.arange(len(x)) % len(classes)
    arrays = {f"x_{domain}": x for domain in domains} | {f"y_{domain}": y for domain in domains}
    np.savez(tmp_path / "p.npz", classes=np.array(classes), **arrays)
    return DATASETS.build("npz", root=tmp_path / "p.npz")


def test_a_picture_bears_any_name(tmp_path: Path) -> None:
    names = ("Zürich", "日本", "a\nb", "\x1b[31m", "x" * 5000, "/etc", "é" * 300)
    pack(tmp_path, names, names)
    path = contact_sheet(load("npz", root=tmp_path / "p.npz"), tmp_path / "sheet.png", cell=16)
    with Image.open(path) as picture:
        assert picture.width < 1000


def test_a_picture_that_cannot_be_is_refused(tmp_path: Path) -> None:
    federation = load("digits-shift")
    for path, message in (("nowhere/x.png", "cannot be written to"), ("x.jpg", "call it 'x.png'")):
        with pytest.raises(DataError, match=message):
            contact_sheet(federation, tmp_path / path)
    assert not (tmp_path / "nowhere").exists()
    floats = vectors.federation()
    assert [(row.client, row.classes) for row in describe(floats)] == [("north", 3), ("south", 3), ("west", 3)]
    with pytest.raises(DataError, match="it has no picture"):
        contact_sheet(floats, tmp_path / "sheet.png")


def test_the_table_counts_what_clients_have() -> None:
    federation = load("digits-shift", partition="shards(clients=5)", unseen="scan")
    rows = describe(federation)
    assert [row.client for row in rows] == [client.name for client in federation]
    assert all(row.classes <= 2 for row in rows if not row.unseen)
    assert (rows[-1].client, rows[-1].train, rows[-1].test, rows[-1].unseen) == ("scan", 0, 360, True)


# -- trees ----------------------------------------------------------------------------------------------------
def splits(source: Dataset, name: Callable[[str], str] = str) -> dict[tuple[str, str], list[tuple[str, bytes]]]:
    """The classes and pixels of every split of every domain, in a fixed order."""
    return {
        (name(domain), use): sorted(
            (name(source.classes[source.labels[i]]), source.images[i].expand(3, -1, -1).numpy().tobytes())
            for i in positions.tolist()
        )
        for domain, split in source.domains.items()
        for use, positions in split._asdict().items()
    }


def test_a_tree_is_read_as_what_it_was_made_from(tmp_path: Path) -> None:
    tree(tmp_path / "given", ("north", "south"), ("cat", "dog"), 10)
    source = DATASETS.build("folder", root=tmp_path / "given", size=5, split_seed=3)
    assert write_tree(source, tmp_path / "out") == tmp_path / "out"
    again = DATASETS.build("folder", root=tmp_path / "out", size=5)
    assert (again.classes, splits(again)) == (source.classes, splits(source))


def test_whatever_names_a_data_set_has_it_is_written_where_it_should_be(tmp_path: Path) -> None:
    hostile = ("/tmp/evil", "../..", "..", "a/b", "a\nb", " lead", ".hidden", "Zürich", "x" * 300, "%2F")
    source = pack(tmp_path, hostile, hostile)
    write_tree(source, tmp_path / "deep" / "out")
    written = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
    assert written == {"p.npz", "deep"}
    assert splits(DATASETS.build("folder", root=tmp_path / "deep" / "out", size=2)) == splits(source, file_name)


def test_a_tree_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    source = DATASETS.build("digits-shift")
    (tmp_path / "file").write_text("")
    for out, message in ((tmp_path / "file", "exists already"), (tmp_path / "file" / "x", "cannot be written")):
        with pytest.raises(DataError, match=message):
            write_tree(source, out)
    with pytest.raises(DataError, match="has a domain 'splits'"):
        write_tree(pack(tmp_path, ("splits",), ("a",)), tmp_path / "out")
