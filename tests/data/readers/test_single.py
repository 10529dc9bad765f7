"""CIFAR-10 and CIFAR-100, STL-10 and Tiny-ImageNet, in the authors' own files, in parquet and in folders."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from fedkeel.data import DATASETS, load
from fedkeel.data.readers.single import CIFAR10
from fedkeel.errors import DataError
from tests.data.made_up import image, noise, parquet


# -- CIFAR ----------------------------------------------------------------------------------------------------
def write_ten(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Records of one label byte, then 1,024 red, 1,024 green and 1,024 blue bytes, row after row."""
    images, labels = noise(60, 32, 32, 3), np.arange(60) % 10
    folder.mkdir(parents=True, exist_ok=True)
    for b in range(6):
        records = b""
        for i in range(10 * b, 10 * b + 10):
            records += bytes([labels[i]]) + b"".join(images[i, :, :, channel].tobytes() for channel in range(3))
        (folder / (f"data_batch_{b + 1}.bin" if b < 5 else "test_batch.bin")).write_bytes(records)
    return images, labels


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin"])
def test_cifar10_is_read_from_the_binary_version(tmp_path: Path, folder: str) -> None:
    images, labels = write_ten(tmp_path / folder)
    source = DATASETS.build("cifar10", root=tmp_path, validation=0.2)
    assert np.array_equal(source.images.numpy(), images.transpose(0, 3, 1, 2))
    assert source.labels.tolist() == labels.tolist()
    split = source.domains["cifar10"]
    assert split.test.tolist() == list(range(50, 60))
    assert (len(split.train), len(split.validation)) == (40, 10)


def test_cifar100_has_the_fine_label_second(tmp_path: Path) -> None:
    images = noise(120, 32, 32, 3)
    records = [bytes([i % 20, i % 100]) + images[i].transpose(2, 0, 1).tobytes() for i in range(120)]
    (tmp_path / "train.bin").write_bytes(b"".join(records[:100]))
    (tmp_path / "test.bin").write_bytes(b"".join(records[100:]))
    source = DATASETS.build("cifar100", root=tmp_path)
    assert source.labels.tolist() == [i % 100 for i in range(120)]
    assert np.array_equal(source.images.numpy(), images.transpose(0, 3, 1, 2))
    assert (source.classes[0], source.classes[19], source.classes[99]) == ("apple", "cattle", "worm")


def test_folders_of_images_are_read(tmp_path: Path) -> None:
    for use in ("train", "test"):
        for c, label in enumerate(CIFAR10.class_names):
            image(tmp_path / use / label / "0.png", (c, 0, use == "test"), (32, 32))
    source = DATASETS.build("cifar10", root=tmp_path)
    split = source.domains["cifar10"]
    assert source.images[split.train, 0, 0, 0].tolist() == list(range(10))
    assert source.images[split.test, 2, 0, 0].tolist() == [1] * 10


def test_parquet_may_be_in_pieces_have_fine_labels_and_plain_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = parquet(tmp_path / "cifar100", 200, 10, labels_in="fine_label", coarse_label=[0] * 200)
    for use in ("train", "test"):
        (folder / f"{use}.parquet").rename(folder / f"{use}-00000-of-00001.parquet")
    source = DATASETS.build("cifar100", root=tmp_path)
    assert source.images[:, 0, 0, 0].tolist() == [*range(200), *range(10)]
    assert source.labels[:12].tolist() == [*range(10), 0, 1]
    assert source.domains["cifar100"].test.tolist() == list(range(200, 210))
    rows = pytest.importorskip("pyarrow.parquet").read_table(folder / "train-00000-of-00001.parquet")["img"].to_pylist()
    parquet(tmp_path / "plain", 200, 10, img=[None, *(row["bytes"] for row in rows[1:])])
    with caplog.at_level(logging.WARNING, "fedkeel"):
        federation = load("cifar10", root=tmp_path / "plain")
    assert federation.images[federation.clients[0].train, 0, 0, 0].tolist() == list(range(1, 200))
    assert "1 of the 210 images of 'cifar10' cannot be decoded and are left out: '" in caplog.text
    assert "train.parquet row 0" in caplog.text


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"column": "picture"}, "has the columns picture, label: expected 'img' or 'image', and 'label'"),
        ({"img": ["a.png"] * 4}, "is not a file whose images are {bytes, path} or bytes"),
        ({"label": ["cat"] * 4}, "is not a file whose labels are whole numbers"),
        ({"label": [None, 1, 2, 3]}, "is not a file whose labels are whole numbers"),
        ({"label": [10, 1, 2, 3]}, "is not a file with labels of 10 classes"),
        ({}, "is not a whole parquet file"),
    ],
)
def test_parquet_of_another_kind_is_refused(tmp_path: Path, columns: dict[str, object], message: str) -> None:
    parquet(tmp_path, 4, 4, **columns)  # type: ignore[arg-type]
    if not columns:
        (tmp_path / "train.parquet").write_text("hello")
    with pytest.raises(DataError, match=message) as told:
        load("cifar10", root=tmp_path)
    assert "\n" not in str(told.value)


def test_what_is_wrong_with_the_binary_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(b"pickle")
    with pytest.raises(DataError, match=r"data_batch_1.bin' is missing: 'fedkeel data list cifar10'"):
        load("cifar10", root=tmp_path)
    write_ten(tmp_path)
    file = tmp_path / "data_batch_2.bin"
    whole = file.read_bytes()
    for content, message in (
        (whole[:-1], r"data_batch_2\.bin' is not of whole records of 3073 bytes"),
        (b"", "is not a file with labels of 10 classes"),
        (bytes([200]) + whole[1:], "is not a file with labels of 10 classes"),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=message):
            load("cifar10", root=tmp_path)
    file.write_bytes(whole)
    with pytest.raises(DataError, match="has its images in larger files: leave out tolerate and bits"):
        load("cifar10", root=tmp_path, bits=12)
    parquet(tmp_path / "half", 4, 4)
    (tmp_path / "half" / "test.parquet").unlink()
    with pytest.raises(DataError, match=r"needs both train.parquet and test.parquet, and has one"):
        load("cifar10", root=tmp_path / "half")


# -- STL-10 ---------------------------------------------------------------------------------------------------
def write_stl(folder: Path) -> np.ndarray:
    """Each image is its three channels, each channel its columns from left to right, each column from the top."""
    images = noise(30, 96, 96, 3)
    folder.mkdir(parents=True)
    for use, start, end in (("train", 0, 20), ("test", 20, 30)):
        content = bytearray()
        for picture in images[start:end]:
            for channel in range(3):
                for column in range(96):
                    content += picture[:, column, channel].tobytes()
        (folder / f"{use}_X.bin").write_bytes(content)
        (folder / f"{use}_y.bin").write_bytes(bytes(i % 10 + 1 for i in range(start, end)))
    return images


def test_stl10_is_read_upright(tmp_path: Path) -> None:
    images = write_stl(tmp_path / "stl10_binary")
    source = DATASETS.build("stl10", root=tmp_path)
    assert np.array_equal(source.images.numpy(), images.transpose(0, 3, 1, 2))
    assert source.labels.tolist() == [i % 10 for i in range(30)]
    assert source.classes[2:4] == ("car", "cat")
    assert source.domains["stl10"].test.tolist() == list(range(20, 30))
    file = tmp_path / "stl10_binary" / "test_X.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"test_X.bin' is not of 10 images of 3 x 96 x 96 bytes"):
        DATASETS.build("stl10", root=tmp_path)
    file.unlink()
    with pytest.raises(DataError, match=r"test_X.bin' is missing"):
        DATASETS.build("stl10", root=tmp_path)


# -- Tiny-ImageNet --------------------------------------------------------------------------------------------
WNIDS = ("n01443537", "n01629819", "n02124075")


def write_tiny(root: Path) -> Path:
    root.mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(reversed(WNIDS)) + "\n")
    for c, wnid in enumerate(WNIDS):
        for n in range(4):
            image(root / "train" / wnid / "images" / f"{wnid}_{n}.JPEG", 50 * c + n, (64, 64))
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("box")
    lines = []
    for n in range(6):
        image(root / "val" / "images" / f"val_{n}.JPEG", 40 * n, (64, 64))
        lines.append(f"val_{n}.JPEG\t{WNIDS[n % 3]}\t0\t32\t44\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return root


def test_tiny_imagenet_is_tested_on_its_annotated_images(tmp_path: Path) -> None:
    root = write_tiny(tmp_path / "tiny-imagenet-200")
    source = DATASETS.build("tiny-imagenet", root=tmp_path)
    split = source.domains["tiny-imagenet"]
    assert source.classes == WNIDS
    assert source.labels[split.train].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert source.labels[split.test].tolist() == [0, 1, 2, 0, 1, 2]
    assert [round(v / 40) for v in source.images[split.test, 0, 0, 0].tolist()] == list(range(6))
    lists = root / "val" / "val_annotations.txt"
    for lines in ("val_9.JPEG\tn01443537\n", "val_0.JPEG\tn00000000\n"):
        lists.write_text(lines)
        with pytest.raises(DataError, match=r"Line 1 of .* does not name an image of .* and a class"):
            DATASETS.build("tiny-imagenet", root=root)
    lists.unlink()
    with pytest.raises(DataError, match=r"val_annotations.txt' is missing"):
        DATASETS.build("tiny-imagenet", root=root)
