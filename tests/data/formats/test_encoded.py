"""Packs to take along: the data set's own folder, with images as they are encoded."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedkeel.cli import main
from fedkeel.data import DATASETS
from fedkeel.data.formats.npz import write_arrays
from fedkeel.data.formats.writing import shrink
from fedkeel.data.readers.pacs import PACS
from fedkeel.errors import DataError
from tests.data.made_up import tree
from tests.data.readers.test_npz import write_parquet


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path / "cache"))


def test_parquet_travels_as_it_is_encoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, out = tmp_path / "cifar10", tmp_path / "packs" / "cifar10"
    for use, count in (("train", 40), ("test", 10)):
        write_parquet(root / f"{use}.parquet", "img", count, 32)
    assert main(["data", "pack", "cifar10", "--root", str(root), "--encoded", "--out", str(out)]) == 0
    assert f"--data cifar10 --root {out}" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == ["test.images.npz", "train.images.npz"]
    before, after = DATASETS.build("cifar10", root=root), DATASETS.build("cifar10", root=out)
    assert torch.equal(before.images, after.images)
    assert torch.equal(before.labels, after.labels)


@pytest.mark.parametrize(("size", "kept"), [(None, (12, 9)), (6, (8, 6)), (20, (12, 9))])
def test_a_tree_travels_as_it_is_or_smaller(size: int | None, kept: tuple[int, int], tmp_path: Path) -> None:
    root, out = tree(tmp_path / "pacs", PACS.domains, PACS.class_names, 1), tmp_path / "out"
    first = next(root.rglob("*.png"))
    Image.new("RGB", (12, 9), (9, 9, 9)).save(first)
    (root / "splits").mkdir()
    (root / "splits" / "notes.txt").write_text("as it is")
    smaller = ["--size", str(size)] if size else []
    assert main(["data", "pack", "pacs", "--root", str(root), "--encoded", "--out", str(out), *smaller]) == 0
    with Image.open(out / first.relative_to(root)) as image:
        assert image.size == kept
    assert (out / "splits" / "notes.txt").read_text() == "as it is"
    files = {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
    assert {path.relative_to(out) for path in out.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(
    "arrays",
    [
        {"encoded": np.zeros(4, np.uint8), "ends": np.array([2, 3])},
        {"encoded": np.zeros(4, np.uint8), "ends": np.array([2, 3]), "labels": np.array([0, 1])},
        {"encoded": np.zeros(4, np.uint8), "ends": np.array([5, 4]), "labels": np.array([0, 1])},
        {"encoded": np.zeros(4, np.uint8), "ends": np.array([2, 4]), "labels": np.array([0])},
        {"encoded": np.zeros(4, np.float32), "ends": np.array([2, 4]), "labels": np.array([0, 1])},
    ],
)
def test_another_file_of_that_name_is_refused(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    for use in ("train", "test"):
        write_arrays(tmp_path / f"{use}.images.npz", arrays)
    with pytest.raises(DataError, match="is no file of encoded images"):
        DATASETS.build("cifar10", root=tmp_path)


def test_a_smaller_image_stands_as_its_exif_data_said(tmp_path: Path) -> None:
    lying = Image.new("RGB", (12, 8))
    lying.getexif()[0x0112] = 6  # a quarter turn
    lying.save(tmp_path / "a.jpg", exif=lying.getexif())
    assert shrink(tmp_path / "a.jpg", tmp_path / "b.jpg", 4)
    with Image.open(tmp_path / "b.jpg") as image:
        assert image.size == (4, 6)


def test_a_broken_image_travels_as_it_is(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    assert not shrink(tmp_path / "a.png", tmp_path / "b.png", 4)


def test_what_is_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path / "pacs", PACS.domains, PACS.class_names, 1)
    assert main(["data", "pack", "pacs", "--root", str(root), "--encoded", "--out", str(root)]) == 2
    assert "exists already" in capsys.readouterr().err
