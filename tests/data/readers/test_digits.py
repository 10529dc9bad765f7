"""Digits-Five and Digits-DG, in the files that each set of digits comes in."""

from __future__ import annotations

import bz2
import gzip
import logging
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image

from fedkeel.data import DATASETS, load
from fedkeel.errors import DataError
from tests.data.made_up import image, noise, parquet

LABELS = np.arange(40) % 10


def write_idx(file: Path, array: np.ndarray, packed: bool = False) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">i", size) for size in array.shape)
    file.parent.mkdir(parents=True, exist_ok=True)
    content = header + array.astype(np.uint8).tobytes()
    if packed:
        file = file.with_name(file.name + ".gz")
    file.write_bytes(gzip.compress(content) if packed else content)


def write_mnist(folder: Path, packed: bool = False) -> np.ndarray:
    images = noise(60, 28, 28)
    for use, start, end in (("train", 0, 40), ("t10k", 40, 60)):
        write_idx(folder / f"{use}-images-idx3-ubyte", images[start:end], packed)
        write_idx(folder / f"{use}-labels-idx1-ubyte", np.arange(start, end) % 10, packed)
    return images


def write_mats(folder: Path, prefix: str = "", zero: int = 10) -> np.ndarray:
    images = noise(60, 32, 32, 3)
    folder.mkdir(parents=True, exist_ok=True)
    for use, start, end in (("train", 0, 40), ("test", 40, 60)):
        labels = np.arange(start, end) % 10
        labels[labels == 0] = zero
        stored = {"X": images[start:end].transpose(1, 2, 3, 0), "y": labels[:, None].astype(np.uint8)}
        scipy.io.savemat(folder / f"{prefix}{use}_32x32.mat", stored)
    return images


def write_usps(folder: Path) -> np.ndarray:
    values = np.random.default_rng(0).uniform(-1, 1, (60, 256)).round(4)
    folder.mkdir(parents=True, exist_ok=True)
    for file, start, end in (("usps.bz2", 0, 40), ("usps.t.bz2", 40, 60)):
        lines = [
            f"{i % 10 + 1} " + " ".join(f"{place + 1}:{value}" for place, value in enumerate(values[i]))
            for i in range(start, end)
        ]
        (folder / file).write_bytes(bz2.compress("\n".join(lines).encode()))
    return values


def write_mnistm(folder: Path) -> None:
    for use, start, end in (("train", 0, 40), ("test", 40, 60)):
        lines = []
        for i in range(start, end):
            image(folder / f"mnist_m_{use}" / f"{i:08d}.png", (i, 0, 255), (32, 32))
            lines.append(f"{i:08d}.png {i % 10}")
        (folder / f"mnist_m_{use}_labels.txt").write_text("\n".join(reversed(lines)) + "\n")


def write_all(root: Path) -> Path:
    write_mnist(root / "mnist", packed=True)
    write_mats(root / "svhn")
    write_mats(root / "synth", "synth_", zero=0)
    write_usps(root / "usps")
    write_mnistm(root / "mnistm")
    return root


@pytest.mark.parametrize(("folder", "packed"), [("mnist", False), ("MNIST/raw", True)])
def test_mnist_is_read_from_idx_files(tmp_path: Path, folder: str, packed: bool) -> None:
    images = write_mnist(tmp_path / folder, packed)
    source = DATASETS.build("digits-five", root=tmp_path)
    split = source.domains["mnist"]
    assert source.images.shape == (60, 3, 28, 28)
    for channel in range(3):
        assert np.array_equal(source.images[split.train, channel].numpy(), images[:40])
    assert np.array_equal(source.images[split.test, 0].numpy(), images[40:])
    assert source.labels[split.train].tolist() == LABELS.tolist()


def test_svhn_is_read_from_matlab_files_and_its_ten_is_a_zero(tmp_path: Path) -> None:
    images = write_mats(tmp_path / "svhn")
    source = DATASETS.build("digits-five", root=tmp_path, size=32)
    assert np.array_equal(source.images.numpy(), images.transpose(0, 3, 1, 2))
    assert source.labels[:40].tolist() == LABELS.tolist()
    smaller = DATASETS.build("digits-five", root=tmp_path).images
    expected = Image.fromarray(images[7]).resize((28, 28), Image.Resampling.BILINEAR)
    assert np.array_equal(smaller[7].permute(1, 2, 0).numpy(), np.asarray(expected))


def test_usps_is_read_from_libsvm_files(tmp_path: Path) -> None:
    values = write_usps(tmp_path / "usps")
    source = DATASETS.build("digits-five", root=tmp_path, size=16)
    expected = ((values.astype(np.float32) + 1) / 2 * 255).astype(np.uint8).reshape(60, 16, 16)
    assert np.array_equal(source.images[:, 1].numpy(), expected)
    assert source.labels.tolist() == (np.arange(60) % 10).tolist()


def test_mnistm_is_read_from_images_and_files_of_labels(tmp_path: Path) -> None:
    write_mnistm(tmp_path / "mnist_m")
    source = DATASETS.build("digits-five", root=tmp_path)
    split = source.domains["mnistm"]
    assert source.images[split.train, 0, 0, 0].tolist() == list(range(39, -1, -1))
    assert source.labels[split.train].tolist() == LABELS[::-1].tolist()


def test_a_domain_may_be_a_tree_or_parquet_and_have_a_name_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for use in ("train", "test"):
        for digit in range(10):
            image(tmp_path / "synth" / use / str(digit) / "a.png", 10 * digit, (8, 8))
    parquet(tmp_path / "usps", 20, 10, column="image", size=16)
    parquet(tmp_path / "fonts", 20, 10, column="image", size=16)
    (tmp_path / "letters").mkdir()
    with caplog.at_level(logging.WARNING, "fedkeel"):
        source = DATASETS.build("digits-five", root=tmp_path)
    assert [(name, len(split.train), len(split.test)) for name, split in source.domains.items()] == [
        ("fonts", 20, 10), ("synth", 10, 10), ("usps", 20, 10),
    ]  # fmt: skip
    assert source.images[source.domains["synth"].train, 0, 0, 0].tolist() == [10 * digit for digit in range(10)]
    assert "The domain 'mnist' of digits-five is not in" in caplog.text
    assert "fonts' is no domain of digits-five and is read under its own name" in caplog.text
    assert "letters' is no domain of digits-five and is not used" in caplog.text
    with pytest.raises(DataError, match="There is no domain named 'svhn'"):
        DATASETS.build("digits-five", root=tmp_path, domains="svhn")
    with pytest.raises(DataError, match="There is no domain of digits-five"):
        DATASETS.build("digits-five", root=tmp_path / "letters")


def test_all_five_become_rgb_of_one_size(tmp_path: Path) -> None:
    federation = load("digits-five", root=write_all(tmp_path))
    assert federation.domains == ["mnist", "mnistm", "svhn", "synth", "usps"]
    assert federation.image_shape == (3, 28, 28)
    assert [(client.samples, len(client.test)) for client in federation.clients] == [(40, 20)] * 5
    some = load("digits-five", root=tmp_path, domains=["usps", "mnist"])
    assert (some.domains, len(some.images)) == (["usps", "mnist"], 120)


def test_the_papers_subsets_merge_and_draw_anew(tmp_path: Path) -> None:
    root = write_all(tmp_path)
    tenth, whole, drawn = (
        DATASETS.build("digits-five", root=root, subset=name) for name in ("fedbn", "fedwon", "fedcoda")
    )
    for domain, split in whole.domains.items():
        assert [len(part) for part in split] == [48, 0, 12]
        # The tenth is the beginning of the whole, and both are tested on the same.
        first = tenth.images[tenth.domains[domain].train]
        assert first.equal(whole.images[split.train[:4]])
        assert tenth.images[tenth.domains[domain].test].equal(whole.images[split.test])
    # There are six of each digit: one to test on, and all the others, which are fewer than 600, to train.
    assert {name: [len(part) for part in split] for name, split in drawn.domains.items()} == {
        name: [50, 0, 10] for name in ("mnist", "mnistm", "svhn", "synth")
    }


IDX = "train-images-idx3-ubyte"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (f"mnist/{IDX}", b"\x00\x00\x08\x01" + bytes(20), "is not a whole idx file of bytes in 3 dimensions"),
        (f"mnist/{IDX}", b"", "is not a whole idx file"),
        (f"mnist/{IDX}", bytes([0, 0, 8, 3]) + bytes(12), "is not of 40 images, as '.*labels-idx1-ubyte.gz' says"),
        ("mnist/t10k-images-idx3-ubyte.gz", b"no gzip", r"is not a whole file \(.*\): get it as the data set's"),
        (
            "mnist/t10k-labels-idx1-ubyte.gz",
            None,
            "t10k-labels-idx1-ubyte' is missing: 'fedkeel data list digits",
        ),
        ("svhn/train_32x32.mat", b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(400), "file of MATLAB v5"),
        ("svhn/train_32x32.mat", {"Z": np.zeros(3)}, "is not a file of MATLAB v5 with X"),
        ("svhn/train_32x32.mat", {"X": np.zeros((32, 32, 3, 2)), "y": [[1], [12]]}, "labels of 10 classes"),
        ("svhn/train_32x32.mat", {"X": np.zeros((32, 32, 3, 2)), "y": [[1], [2], [3]]}, "file of MATLAB v5"),
        ("synth/synth_test_32x32.mat", None, "synth_test_32x32.mat' is missing"),
        ("usps/usps.bz2", bz2.compress(b"2 1:0.1\n1 300:0.5\n"), "is not in libsvm's form"),
        ("usps/usps.t.bz2", None, "usps.t' is missing"),
        ("mnistm/mnist_m_test_labels.txt", None, "mnist_m_test_labels.txt' is missing"),
        ("mnistm/mnist_m_train/00000003.png", None, "'00000003.png 3', does not name an image"),
    ],
)
def test_a_file_that_is_missing_or_of_another_kind_is_named(
    tmp_path: Path, file: str, content: object, message: str
) -> None:
    root = write_all(tmp_path)
    (root / file).unlink(missing_ok=True)
    if isinstance(content, bytes):
        (root / file).write_bytes(content)
    elif content is not None:
        scipy.io.savemat(root / file, content)
    with pytest.raises(DataError, match=message):
        DATASETS.build("digits-five", root=root)


def test_digits_dg_keeps_the_split_of_its_folders(tmp_path: Path) -> None:
    for domain in ("mnist", "mnist_m", "svhn", "syn"):
        for use, count in (("train", 4), ("val", 1)):
            for digit in range(10):
                for n in range(count):
                    image(tmp_path / domain / use / str(digit) / f"{n}.jpg", 20 * digit, (32, 32))
    federation = load("digits-dg", root=tmp_path, unseen="syn")
    assert federation.domains == ["mnist", "mnist_m", "svhn", "syn"]
    assert (federation["svhn"].samples, len(federation["svhn"].test), len(federation["syn"].test)) == (40, 10, 50)
    (tmp_path / "svhn" / "val" / "7" / "0.jpg").unlink()
    with pytest.raises(DataError, match="The class '7' of digits-dg has no images in"):
        load("digits-dg", root=tmp_path)
    shutil.rmtree(tmp_path / "mnist" / "val")
    with pytest.raises(DataError, match="val' is missing"):
        load("digits-dg", root=tmp_path)
