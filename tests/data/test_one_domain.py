"""STL-10 and Tiny-ImageNet, in the authors' own files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedkeel.data import DATASETS
from fedkeel.errors import DataError
from tests.data.made_up import image, noise


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
    assert DATASETS.build("stl10", root=tmp_path, size=32).images.shape == (30, 3, 32, 32)


def test_stl10_of_another_length_or_without_a_file_is_named(tmp_path: Path) -> None:
    write_stl(tmp_path / "stl")
    images, labels = tmp_path / "stl" / "test_X.bin", tmp_path / "stl" / "test_y.bin"
    images.write_bytes(images.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"test_X.bin' has 276479 bytes, but 10 images have 276480"):
        DATASETS.build("stl10", root=tmp_path / "stl")
    labels.write_bytes(bytes(10))
    with pytest.raises(DataError, match="not one of 10 classes"):
        DATASETS.build("stl10", root=tmp_path / "stl")
    labels.unlink()
    with pytest.raises(DataError, match=r"test_y.bin' is missing"):
        DATASETS.build("stl10", root=tmp_path / "stl")


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
    image(root / "test" / "images" / "test_0.JPEG")
    return root


def test_tiny_imagenet_is_tested_on_its_annotated_images(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny-imagenet-200")
    source = DATASETS.build("tiny-imagenet", root=tmp_path)
    split = source.domains["tiny-imagenet"]
    assert source.classes == WNIDS
    assert source.labels[split.train].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert source.labels[split.test].tolist() == [0, 1, 2, 0, 1, 2]
    assert [round(v / 40) for v in source.images[split.test, 0, 0, 0].tolist()] == list(range(6))


def test_what_is_missing_in_tiny_imagenet_is_named(tmp_path: Path) -> None:
    root = write_tiny(tmp_path / "tiny")
    lists = root / "val" / "val_annotations.txt"
    (root / "val" / "images" / "val_2.JPEG").unlink()
    with pytest.raises(DataError, match=r"Line 3 of .*, 'val_2.JPEG\t.*', does not name an image of .* and a class"):
        DATASETS.build("tiny-imagenet", root=root)
    lists.write_text("val_0.JPEG\tn00000000\n")
    with pytest.raises(DataError, match=r"Line 1 of .* does not name an image of .* and a class of the training"):
        DATASETS.build("tiny-imagenet", root=root)
    lists.unlink()
    with pytest.raises(DataError, match=r"val_annotations.txt' is missing"):
        DATASETS.build("tiny-imagenet", root=root)
    for file in (root / "train" / WNIDS[1] / "images").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=f"The class '{WNIDS[1]}' of tiny-imagenet has no images"):
        DATASETS.build("tiny-imagenet", root=root)
