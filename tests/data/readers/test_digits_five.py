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
from fedkeel.data.check import check
from fedkeel.errors import DataError
from tests.data.made_up import image, noise

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


@pytest.mark.parametrize(("folder", "packed"), [("mnist", False), ("mnist", True), ("MNIST/raw", True)])
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
    for _ in range(2):  # resized, then cached
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


def test_a_domain_may_be_a_tree(tmp_path: Path) -> None:
    for use in ("train", "test"):
        for digit in range(10):
            image(tmp_path / "synth" / use / str(digit) / "a.png", 10 * digit, (8, 8))
    source = DATASETS.build("digits-five", root=tmp_path)
    assert source.images[source.domains["synth"].train, 0, 0, 0].tolist() == [10 * digit for digit in range(10)]


def test_all_five_become_rgb_of_one_size(tmp_path: Path) -> None:
    federation = load("digits-five", root=write_all(tmp_path))
    assert federation.domains == ["mnist", "mnistm", "svhn", "synth", "usps"]
    assert federation.image_shape == (3, 28, 28)
    assert [(client.samples, len(client.test)) for client in federation.clients] == [(40, 20)] * 5
    some = load("digits-five", root=tmp_path, domains=["usps", "mnist"])
    assert some.domains == ["usps", "mnist"]
    assert len(some.images) == 120


def test_fedbn_and_fedwon_merge_and_take_the_first_of_a_new_split(tmp_path: Path) -> None:
    root = write_all(tmp_path)
    tenth = DATASETS.build("digits-five", root=root, subset="fedbn")
    whole = DATASETS.build("digits-five", root=root, subset="fedwon")
    for domain in whole.domains:
        split = whole.domains[domain]
        assert (len(split.train), len(split.validation), len(split.test)) == (48, 0, 12)
        assert len(tenth.domains[domain].train) == 4
        # The tenth is the beginning of the whole, and both are tested on the same.
        first = tenth.images[tenth.domains[domain].train]
        assert first.equal(whole.images[split.train[:4]])
        assert tenth.images[tenth.domains[domain].test].equal(whole.images[split.test])
    assert len(tenth.images) == 5 * (4 + 12)


def test_fedcoda_leaves_usps_out_and_takes_equally_many_of_each_digit(tmp_path: Path) -> None:
    root = write_all(tmp_path)
    source = DATASETS.build("digits-five", root=root, subset="fedcoda")
    assert list(source.domains) == ["mnist", "mnistm", "svhn", "synth"]
    # There are six of each digit: one to test on, and all the others, which are fewer than 600, to train.
    assert [(len(split.train), len(split.test)) for split in source.domains.values()] == [(50, 10)] * 4


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("train-images-idx3-ubyte", b"\x00\x00\x08\x01" + bytes(20), "not a whole idx file of bytes in 3 dimensions"),
        ("train-images-idx3-ubyte", b"", "not a whole idx file"),
        ("train-images-idx3-ubyte", bytes([0, 0, 8, 3]), "has 0 images, but .* 40 labels"),
        ("train-labels-idx1-ubyte", bytes([0, 0, 8, 1]) + struct.pack(">i", 1) + bytes([11]), "not one of 10 classes"),
        ("t10k-images-idx3-ubyte.gz", b"no gzip", "cannot be read"),
    ],
)
def test_an_idx_file_of_another_kind_is_refused(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    write_mnist(tmp_path / "mnist", packed=file.endswith(".gz"))
    (tmp_path / "mnist" / file).write_bytes(content)
    with pytest.raises(DataError, match=message):
        DATASETS.build("digits-five", root=tmp_path)


def test_matlab_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    write_mats(tmp_path / "svhn")
    file = tmp_path / "svhn" / "train_32x32.mat"
    for stored, message in (
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [2], [3]])}, "shape .* is expected"),
        ({"Z": np.zeros(3)}, "cannot be read as a file of MATLAB v5 with X and y"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1], [12]])}, "not one of 10 classes"),
    ):
        scipy.io.savemat(file, stored)
        with pytest.raises(DataError, match=message):
            DATASETS.build("digits-five", root=tmp_path)
    file.write_bytes(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(400))
    with pytest.raises(DataError, match="cannot be read as a file of MATLAB v5"):
        DATASETS.build("digits-five", root=tmp_path)


@pytest.mark.parametrize("line", ["1 300:0.5", "1 x", "one 1:0.5"])
def test_a_libsvm_file_of_another_kind_is_refused(tmp_path: Path, line: str) -> None:
    write_usps(tmp_path / "usps")
    (tmp_path / "usps" / "usps.bz2").write_bytes(bz2.compress(f"2 1:0.1\n{line}\n".encode()))
    with pytest.raises(DataError, match=r"'.*usps\.bz2' is not in libsvm's form"):
        DATASETS.build("digits-five", root=tmp_path)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("mnist/t10k-labels-idx1-ubyte.gz", "t10k-labels-idx1-ubyte' is missing: get the four idx files"),
        ("synth/synth_train_32x32.mat", "synth_train_32x32.mat' is missing"),
        ("usps/usps.t.bz2", "usps.t.bz2' is missing"),
        ("mnistm/mnist_m_test_labels.txt", "mnist_m_test_labels.txt' is missing"),
        ("mnistm/mnist_m_train/00000003.png", "'00000003.png 3', does not name an image"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, lost: str, message: str) -> None:
    root = write_all(tmp_path)
    (root / lost).unlink()
    with pytest.raises(DataError, match=message):
        check("digits-five", root)


def test_absent_and_strange_domains_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_mnist(tmp_path / "mnist")
    (tmp_path / "letters").mkdir()
    with caplog.at_level(logging.WARNING, "fedkeel"):
        assert list(DATASETS.build("digits-five", root=tmp_path).domains) == ["mnist"]
    assert "The domain 'usps' of digits-five is not in" in caplog.text
    assert "letters' is no domain of digits-five" in caplog.text
    (tmp_path / "empty" / "mnist").mkdir(parents=True)
    with pytest.raises(
        DataError, match=r"There is no data of 'mnist' .*pickles and HDF5 files are not read\): get the"
    ):
        DATASETS.build("digits-five", root=tmp_path / "empty")
    (tmp_path / "empty" / "mnist").rmdir()
    with pytest.raises(DataError, match="There is no domain of digits-five"):
        DATASETS.build("digits-five", root=tmp_path / "empty")
    with pytest.raises(DataError, match="There is no domain named 'svhn'"):
        DATASETS.build("digits-five", root=tmp_path, domains="svhn")


def test_digits_dg_keeps_the_split_of_its_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for domain in ("mnist", "mnist_m", "svhn", "syn"):
        for use, count in (("train", 4), ("val", 1)):
            for digit in range(10):
                for n in range(count):
                    image(tmp_path / domain / use / str(digit) / f"{n}.jpg", 20 * digit, (32, 32))
    (tmp_path / "usps").mkdir()
    (tmp_path / "svhn" / "extra").mkdir()
    federation = load("digits-dg", root=tmp_path, unseen="syn")
    assert federation.domains == ["mnist", "mnist_m", "svhn", "syn"]
    assert (federation["svhn"].samples, len(federation["svhn"].test), len(federation["syn"].test)) == (40, 10, 50)
    assert [message.partition("' is no ")[2] for message in caplog.messages] == [
        "domain of digits-dg and is not used.", "part of digits-dg and is not used.",
    ]  # fmt: skip
    assert "The domain 'syn' has 40 images to train, and 4,800 are published." in check("digits-dg", tmp_path).problems
    (tmp_path / "svhn" / "val" / "7" / "0.jpg").unlink()
    with pytest.raises(DataError, match="The class '7' of digits-dg has no images in"):
        check("digits-dg", tmp_path)
    shutil.rmtree(tmp_path / "mnist" / "val")
    with pytest.raises(DataError, match="mnist' lacks train or val"):
        check("digits-dg", tmp_path)
