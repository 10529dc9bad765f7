"""Tables of images and of numbers, as people have."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from fedkeel.data import load, load_spec
from fedkeel.data.outline import Outline, changed
from fedkeel.errors import DataError, FedkeelError
from tests.data.made_up import image

Row = dict[str, Any]


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    """Two sites with 12 patients of three images each, healthy or ill."""
    made = []
    for s, site in enumerate(("north", "south")):
        for patient in range(12):
            for number in range(3):
                path = f"scans/{site}-{patient:02d}-{number}.png"
                image(tmp_path / path, (100 * s, patient, number))
                made.append(
                    {"path": path, "label": ("ill", "healthy")[patient % 2], "site": site, "group": f"p{patient}{site}"}
                )
    return made


def write(file: Path, rows: list[Row], delimiter: str = ",") -> Path:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return file


def write_parquet(file: Path, rows: list[Row]) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def test_a_table_gives_sites_labels_and_groups(tmp_path: Path, rows: list[Row]) -> None:
    federation = load("table", file=write(tmp_path / "t.csv", rows), size=4)
    assert federation.classes == ("healthy", "ill")
    assert [client.name for client in federation.clients] == ["north", "south"]
    for site, client in enumerate(federation.clients):
        patients = [set(federation.images[part, 1, 0, 0].tolist()) for part in client.splits]
        assert sum(map(len, patients)) == len(set.union(*patients)) == 12
        assert set(federation.images[client.train, 0, 0, 0].tolist()) == {100 * site}
        for part in client.splits:
            odd = federation.images[part, 1, 0, 0] % 2
            assert federation.labels[part].tolist() == (1 - odd.int()).tolist()  # odd patients are healthy


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_other_separators_and_names_of_columns(tmp_path: Path, rows: list[Row], delimiter: str) -> None:
    names = {"path": "file", "label": "diagnosis", "site": "hospital", "group": "patient"}
    renamed = [{names[column]: cell for column, cell in row.items()} for row in rows]
    one = load("table", file=write(tmp_path / "a.csv", rows), size=4)
    file = write(tmp_path / "b.csv", renamed, delimiter)
    other = load_spec(f"table(file={file}, size=4, path=file, label=diagnosis, site=hospital, group=patient)")
    assert changed(Outline.of(one), Outline.of(other)) == ""


def test_parquet_is_the_same_table(tmp_path: Path, rows: list[Row]) -> None:
    numbered = [{**row, "label": patient // 3 % 12} for patient, row in enumerate(rows)]
    federation = load("table", file=write_parquet(tmp_path / "t.parquet", numbered), size=4)
    assert federation.classes == tuple(map(str, range(12)))  # numbers by their size, not as text
    same = load("table", file=write(tmp_path / "t.csv", numbered), size=4)
    assert changed(Outline.of(same), Outline.of(federation)) == ""


def test_the_root_is_where_paths_begin_and_one_site_needs_no_column(tmp_path: Path, rows: list[Row]) -> None:
    own = [{"path": Path(row["path"]).name, "label": row["label"]} for row in rows]
    (tmp_path / "lists").mkdir()
    file = write(tmp_path / "lists" / "clinic.csv", own)
    with pytest.raises(DataError, match=r"72 of the 72 images in .* are not there, .* give root=DIR"):
        load("table", file=file)
    federation = load("table", file=file, root=tmp_path / "scans", size=4)
    assert [client.name for client in federation.clients] == ["clinic"]
    absolute = [{**row, "path": tmp_path / row["path"]} for row in rows]
    assert len(load("table", file=write(tmp_path / "lists" / "a.csv", absolute), size=4).images) == 72
    called = load("table", file=write(tmp_path / "t.csv", rows), called="all", size=4)
    assert [client.name for client in called.clients] == ["all"]


def test_a_column_says_what_each_image_is_for(tmp_path: Path, rows: list[Row]) -> None:
    uses = ["Train", "training", "val", "valid", "test", "testing"]
    listed = [{**row, "split": uses[number // 3 % 6]} for number, row in enumerate(rows)]
    federation = load("table", file=write(tmp_path / "t.csv", listed), size=4)
    assert [len(part) for part in federation["north"].splits] == [12, 12, 12]
    other = [{("use" if column == "split" else column): cell for column, cell in row.items()} for row in listed]
    same = load("table", file=write(tmp_path / "u.csv", other), part="use", size=4)
    assert changed(Outline.of(federation), Outline.of(same)) == ""
    divided = [{**row, "split": ("train", "test")[number % 2]} for number, row in enumerate(rows)]
    with pytest.raises(DataError, match="The group 'p0north' of 'north' is for train and for test"):
        load("table", file=write(tmp_path / "t.csv", divided))


PATIENTS = [
    {
        "age": 20 + n,
        "dose": n / 3,
        "label": ("ill", "well")[n % 2],
        "site": ("north", "south")[n // 30],
        "group": n // 2,
    }
    for n in range(60)
]


@pytest.mark.parametrize("writes", [write, write_parquet])
def test_without_paths_the_other_columns_are_vectors(tmp_path: Path, writes: Any) -> None:
    file = writes(tmp_path / ("t.csv" if writes is write else "t.parquet"), PATIENTS)
    federation = load("table", file=file, unseen="south")
    assert federation.columns == ("age", "dose")
    assert (federation.classes, federation.image_shape) == (("ill", "well"), (2,))
    assert federation.images[:, 0].tolist() == list(range(20, 80))
    (north,) = federation.clients
    groups = [set((part // 2).tolist()) for part in north.splits]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 15
    assert federation.labels[north.train].tolist() == (north.train % 2).tolist()
    assert federation["south"].test.tolist() == list(range(30, 60))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"path": "scans/none.png"}, {}, r"1 of the 72 images in '.*' are not there, '.*none.png': give root=DIR"),
        ({"path": "scans/north-00-1.png"}, {}, r"lists '.*north-00-1.png' twice: keep one"),
        ({"label": " "}, {}, r"'.*t.csv' has nothing in row 1 of the column 'label': fill them in"),
        ({"site": "", "group": ""}, {}, r"in row 1 of the column 'site' and row 1 of the column 'group': fill"),
        ({"split": "trian"}, {}, r"Row 1 of '.*' has the split 'trian': did you mean 'train'"),
        ({}, {"classes": ["healthy", "il"]}, r"Row 1 of '.*' has the label 'ill': did you mean 'il'"),
        ({}, {"group": "patient"}, r"has the columns path, label, site, group, .*and lacks 'patient': give group=NAME"),
        ({}, {"part": "use"}, r"lacks 'use': give part=NAME"),
        ({}, {"file": None}, "give file=PATH, CSV or parquet, not None"),
        ({}, {"file": "nowhere.csv"}, "give file=PATH, CSV or parquet, not nowhere.csv"),
        ({}, {"root": "nowhere"}, "The root 'nowhere' of the table is not a folder"),
        ({}, {"file": 3}, "'file' is 3|The 'file' of table is 3"),
    ],
)
def test_what_is_wrong_with_a_table_is_one_sentence(
    tmp_path: Path, rows: list[Row], change: Row, options: Row, message: str
) -> None:
    every = [{**row, "split": ("train", "test")[number // 3 % 2]} for number, row in enumerate(rows)]
    file = write(tmp_path / "t.csv", [{**every[0], **change}, *every[1:]])
    with pytest.raises(FedkeelError, match=message):
        load("table", **{"file": file, **options})


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"age": "", "dose": "inf"}, {}, "in row 1 of the column 'age' and row 1 of the column 'dose': fill them in"),
        ({"age": "old"}, {}, "The column 'age' does not hold numbers .*'old'"),
        ({}, {"size": 9}, "'root', 'size', 'bits' and 'tolerate' are for images, and the table has no column 'path'"),
        ({}, {"tolerate": 0.5}, "'bits' and 'tolerate' are for images"),
        ({}, {"train_transform": "flip"}, r"The transform Flip does not fit float samples of shape \(2,\)"),
    ],
)
def test_what_is_wrong_with_vectors_is_one_sentence(tmp_path: Path, change: Row, options: Row, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load("table", file=write(tmp_path / "t.csv", [{**PATIENTS[0], **change}, *PATIENTS[1:]]), **options)


def test_a_table_as_excel_writes_it_on_windows(
    tmp_path: Path, rows: list[Row], caplog: pytest.LogCaptureFixture
) -> None:
    german = [{**row, "label": "gutartig" if row["label"] == "ill" else "b\u00f6sartig \u2013 G2"} for row in rows]
    (tmp_path / "scans" / "north-00-0.png").rename(tmp_path / "scans" / "n\u00f6rd.png")
    german[0]["path"] = "scans/n\u00f6rd.png"
    plain = load("table", file=write(tmp_path / "t.csv", german), size=4)
    file = write(tmp_path / "w.csv", [{**row, "path": row["path"].replace("/", "\\")} for row in german], ";")
    file.write_bytes(file.read_text(encoding="utf-8").encode("cp1252"))
    caplog.clear()
    assert changed(Outline.of(plain), Outline.of(load("table", file=file, size=4))) == ""
    assert caplog.messages == [f"'{file}' is not in UTF-8, and is read as Windows's cp1252: save it as UTF-8."]


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("path,label\n")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00path")
    (tmp_path / "t.parquet").write_text("no parquet")
    for name, message in (
        ("empty.csv", "has no rows"),
        ("bytes.csv", "is not text in UTF-8 or cp1252"),
        ("t.parquet", "is not a whole parquet file|is read with pyarrow"),
    ):
        with pytest.raises(DataError, match=message):
            load("table", file=tmp_path / name)
