"""CIFAR-10 and CIFAR-100 in their binary version, in parquet and in folders; their pickles are not read."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from fedkeel.data import DATASETS, load
from fedkeel.data.readers.cifar import CIFAR10, CIFAR100
from fedkeel.errors import DataError
from tests.data.made_up import image, noise


def write_ten(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Records of one label byte, then 1,024 red, 1,024 green and 1,024 blue bytes, row after row."""
    images, labels = noise(60, 32, 32, 3), np.arange(60) % 10
    folder.mkdir(parents=True)
    for b in range(6):
        records = b""
        for i in range(10 * b, 10 * b + 10):
            records += bytes([labels[i]]) + b"".join(images[i, :, :, channel].tobytes() for channel in range(3))
        (folder / (f"data_batch_{b + 1}.bin" if b < 5 else "test_batch.bin")).write_bytes(records)
    return images, labels


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin"])
def test_cifar10_is_read_from_the_binary_version(tmp_path: Path, folder: str) -> None:
    images, labels = write_ten(tmp_path / "here" / folder if folder != "." else tmp_path / "here")
    source = DATASETS.build("cifar10", root=tmp_path / "here", validation=0.2)
    assert np.array_equal(source.images.numpy(), images.transpose(0, 3, 1, 2))
    assert source.labels.tolist() == labels.tolist()
    split = source.domains["cifar10"]
    assert split.test.tolist() == list(range(50, 60))
    assert (len(split.train), len(split.validation)) == (40, 10)


def test_cifar100_has_the_fine_label_second(tmp_path: Path) -> None:
    images = noise(120, 32, 32, 3)
    for file, rows in (("train.bin", range(100)), ("test.bin", range(100, 120))):
        records = [bytes([i % 20, i % 100]) + images[i].transpose(2, 0, 1).tobytes() for i in rows]
        (tmp_path / file).write_bytes(b"".join(records))
    source = DATASETS.build("cifar100", root=tmp_path)
    assert source.labels.tolist() == [i % 100 for i in range(120)]
    assert np.array_equal(source.images.numpy(), images.transpose(0, 3, 1, 2))
    assert len(source.classes) == 100
    assert (source.classes[0], source.classes[19], source.classes[99]) == ("apple", "cattle", "worm")


@pytest.mark.parametrize(("name", "classes"), [("cifar10", CIFAR10.class_names), ("cifar100", CIFAR100.class_names)])
def test_folders_of_images_are_read(tmp_path: Path, name: str, classes: tuple[str, ...]) -> None:
    for use in ("train", "test"):
        for c, label in enumerate(classes):
            image(tmp_path / use / label / "0.png", (c, 0, use == "test"), (32, 32))
    source = DATASETS.build(name, root=tmp_path)
    split = source.domains[name]
    assert source.images[split.train, 0, 0, 0].tolist() == list(range(len(classes)))
    assert source.images[split.test, 2, 0, 0].tolist() == [1] * len(classes)


def test_cifar100_in_parquet_has_fine_labels(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    content = image(tmp_path / "one.png", (9, 9, 9), (32, 32)).read_bytes()
    (tmp_path / "here" / "cifar100").mkdir(parents=True)
    for use, count in (("train", 6), ("test", 4)):
        for piece in range(2):
            rows = [{"bytes": content, "path": None}] * (count // 2)
            labels = [50 + piece] * (count // 2)
            table = pyarrow.table({"img": rows, "fine_label": labels, "coarse_label": [0] * (count // 2)})
            parquet.write_table(table, tmp_path / "here" / "cifar100" / f"{use}-0000{piece}-of-00002.parquet")
    source = DATASETS.build("cifar100", root=tmp_path / "here")
    assert source.labels.tolist() == [50] * 3 + [51] * 3 + [50] * 2 + [51] * 2
    assert source.domains["cifar100"].test.tolist() == [6, 7, 8, 9]


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(b"pickle")
    with pytest.raises(DataError, match=r"There is no cifar10 in .* of the binary version, since pickles are not read"):
        DATASETS.build("cifar10", root=tmp_path)


def test_a_binary_file_that_is_missing_or_of_another_length_is_named(tmp_path: Path) -> None:
    write_ten(tmp_path / "bin")
    file = tmp_path / "bin" / "data_batch_2.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"data_batch_2\.bin' has 30729 bytes, which is no number of 3073-byte records"):
        DATASETS.build("cifar10", root=tmp_path / "bin")
    file.write_bytes(b"")
    with pytest.raises(DataError, match="has 0 bytes"):
        DATASETS.build("cifar10", root=tmp_path / "bin")
    file.write_bytes(bytes([200]) + whole[1:])
    with pytest.raises(DataError, match="not one of 10 classes"):
        DATASETS.build("cifar10", root=tmp_path / "bin")
    file.unlink()
    with pytest.raises(DataError, match=r"data_batch_2\.bin' is missing"):
        DATASETS.build("cifar10", root=tmp_path / "bin")


def test_classes_without_an_image_are_told_in_one_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for file in [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]:
        (tmp_path / file).write_bytes(b"".join(bytes([label]) + bytes(3072) for label in (0, 1, 2, 3, 4, 8)))
    with caplog.at_level(logging.WARNING, "fedkeel"):
        load("cifar10", root=tmp_path)
    told = "'cifar10' has classes without a sample: 'dog', 'frog', 'horse', 'truck'."
    assert [record.getMessage() for record in caplog.records] == [told]
