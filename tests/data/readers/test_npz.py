"""npz packs and parquet files, made up here."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedkeel.data import load
from fedkeel.errors import DataError


def images(n: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (n, *shape), dtype=np.uint8)


def save(path: Path, **arrays: object) -> Path:
    np.savez(path, **{key: np.asarray(value) for key, value in arrays.items()})
    return path


def test_a_pack_is_read_with_its_test_arrays(tmp_path: Path) -> None:
    x, x_test, y = images(20, 8, 6, 3), images(4, 8, 6, 3), np.arange(20) % 2
    file = save(
        tmp_path / "pack.npz", x_a=x, y_a=y, x_a_test=x_test, y_a_test=[0, 1, 0, 1], x_b=x[:10], y_b=y[:10],
        classes=["cat", "dog"],
    )  # fmt: skip
    federation = load("npz", root=file)
    assert federation.classes == ("cat", "dog")
    assert federation.domains == ["a", "b"]
    assert federation.image_shape == (3, 8, 6)
    a, b = federation.clients
    assert federation.images[a.test].permute(0, 2, 3, 1).equal(torch.from_numpy(x_test))
    assert (a.samples + len(a.validation), len(a.test)) == (20, 4)
    assert a.samples == 16
    assert (b.samples, len(b.validation), len(b.test)) == (6, 2, 2)
    assert federation.labels[a.test].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("kind", ["numbers", "text"])
def test_users_of_a_pack_become_clients(tmp_path: Path, kind: str) -> None:
    y = np.zeros(30, np.int64)
    ids = np.array([907, 12, 3])[np.arange(30) % 3]
    users = ids if kind == "numbers" else np.array([f"u{i}" for i in ids])
    x = np.arange(30, dtype=np.uint8)[:, None, None].repeat(4, 1).repeat(4, 2)  # an image is known by its pixels
    file = save(
        tmp_path / "p.npz", x_a=x, y_a=y, users_a=users, x_a_test=x[:5], y_a_test=y[:5],
        x_b=x, y_b=y, users_b=users,
    )  # fmt: skip
    federation = load("npz", root=file, partition="by-user", validation=0, test=0.5)
    order = ["3", "12", "907"] if kind == "numbers" else ["u12", "u3", "u907"]
    assert [client.name for client in federation.clients] == [f"{d}-{u}" for d in "ab" for u in order]
    for client in federation.clients:
        number = int(client.name.rpartition("-")[2].removeprefix("u"))
        own = federation.images[client.train][:, 0, 0, 0].tolist()
        assert all(ids[pixel] == number for pixel in own)
        assert federation[client.name].train.equal(client.train)
    assert [client.samples for client in federation.clients][:3] == [10, 10, 10]  # all of a: its test set is apart
    assert sum(client.samples for client in federation.clients if client.domain == "b") == 15
    assert federation.clients[0].test is federation.clients[2].test


@pytest.mark.parametrize(
    "arrays",
    [
        {"users_a": [1, 2, 3], "users_b": [1] * 8},
        {"users_a": np.linspace(0, 1, 8), "users_b": [1] * 8},
        {"users_b": [1] * 8},
        {"users_a": [1] * 8, "users_b": ["x"] * 8},
    ],
)
def test_users_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, object]) -> None:
    y = np.arange(8) % 2
    file = save(tmp_path / "p.npz", x_a=images(8, 5, 5), y_a=y, x_b=images(8, 5, 5), y_b=y, **arrays)
    with pytest.raises(DataError, match="store users_<domain> for all of its domains or none, one for each sample"):
        load("npz", root=file)


def test_a_pack_may_hold_vectors_and_patients(tmp_path: Path) -> None:
    x, y, patients = np.arange(90).reshape(30, 3) / 7, np.arange(30) % 2, np.arange(30) // 3
    federation = load("npz", root=save(tmp_path / "p.npz", x_a=x, y_a=y, groups_a=patients))
    assert torch.equal(federation.images, torch.from_numpy(x).float())
    owners = [set(patients[part.numpy()]) for part in federation["a"].splits]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 10


def test_grey_images_keep_one_channel(tmp_path: Path) -> None:
    federation = load("npz", root=save(tmp_path / "p.npz", x_a=images(8, 5, 5), y_a=np.arange(8) % 2))
    assert federation.image_shape == (1, 5, 5)
    assert federation.classes == ("0", "1")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"x_a": images(4, 8, 8, 3), "y_a": [0] * 4, "x_b": images(4, 8, 8), "y_b": [0] * 4},
            "x_a has samples of shape .3, 8, 8. and x_b of .1, 8, 8.: store all",
        ),
        (
            {"x_a": images(4, 8, 8), "y_a": [0] * 4, "x_a_test": images(4, 6, 6), "y_a_test": [0] * 4},
            "x_a has samples of shape .1, 8, 8. and x_a_test of .1, 6, 6.: store all",
        ),
        ({"x_a": images(4, 8, 8)}, "y_a must be stored with x_a: one whole number from 0 for each of its 4 samples"),
        ({"x_a": images(4, 8, 8), "y_a": [0, 1]}, "y_a must be stored with x_a"),
        ({"x_a": images(4, 8, 8), "y_a": [0, 1, 2, -1]}, "The label of sample 3 is -1: give whole numbers from 0"),
        ({"x_a": ["a"] * 4, "y_a": [0] * 4}, "and not numbers"),
        ({"y_a": [0] * 4}, "no array named x_<domain>"),
        (
            {"x_a": images(4, 8, 8), "y_a": [0, 1, 2, 3], "classes": ["one"]},
            "The label of sample 3 is 3, and 1 classes are named",
        ),
        (
            {"x_train": images(4, 8, 8), "y_train": [0] * 4, "x_test": images(4, 8, 8), "y_test": [0] * 4},
            "has x_test but no x_<domain>: store a domain's images as",
        ),
        (
            {"x_a": images(4, 8, 8), "y_a": [0] * 4, "x_b_test": images(4, 8, 8), "y_b_test": [0] * 4},
            "has x_b_test but no x_b",
        ),
    ],
)
def test_a_pack_that_contradicts_itself_is_refused(tmp_path: Path, arrays: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load("npz", root=save(tmp_path / "p.npz", **arrays))


def test_pickled_arrays_are_never_loaded(tmp_path: Path) -> None:
    file = tmp_path / "p.npz"
    np.savez(file, x_a=np.array([{"a": 1}], dtype=object), y_a=np.zeros(1, np.int64))
    with pytest.raises(DataError, match=r"cannot be read as an \.npz pack of plain arrays"):
        load("npz", root=file)
    for content in (b"hello", b"", file.read_bytes()[:-40]):
        (tmp_path / "text.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"cannot be read as an \.npz pack of plain arrays \(it is no \.npz file\)"):
            load("npz", root=tmp_path / "text.npz")
    damaged = bytearray(save(tmp_path / "p.npz", x_a=images(8, 5, 5), y_a=np.arange(8) % 2).read_bytes())
    damaged[180:200] = bytes(20)
    file.write_bytes(damaged)
    with pytest.raises(DataError, match=r"cannot be read as an \.npz pack"):
        load("npz", root=file)


def write_parquet(file: Path, column: str, count: int, size: int, mode: str = "RGB") -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = []
    for n in range(count):
        content = io.BytesIO()
        Image.new(mode, (size, size), (n, 0, 255) if mode == "RGB" else n).save(content, "PNG")
        rows.append({"bytes": content.getvalue(), "path": None})
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({column: rows, "label": [n % 10 for n in range(count)]})
    parquet.write_table(table, file)


def test_cifar10_is_one_domain_with_its_official_test_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path))
    write_parquet(tmp_path / "cifar10" / "train.parquet", "img", 40, 32)
    write_parquet(tmp_path / "cifar10" / "test.parquet", "img", 10, 32)
    for _ in range(2):  # decoded, then cached
        federation = load("cifar10", partition="even(clients=2)")
        assert [client.name for client in federation.clients] == ["cifar10-0", "cifar10-1"]
        assert federation.clients[0].test.tolist() == list(range(40, 50))
        assert federation.images[:, :, 0, 0].tolist() == [[n, 0, 255] for n in [*range(40), *range(10)]]
        assert federation.classes[federation.labels[3]] == "cat"
    assert federation.train_transform.draws == 3
    assert len(load("cifar10", validation=0.25).clients[0].validation) == 10


def test_digits_five_makes_every_domain_rgb_of_one_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path / "cache"))
    for domain, size, mode in (("mnist", 28, "L"), ("usps", 16, "L"), ("svhn", 32, "RGB")):
        write_parquet(tmp_path / "five" / domain / "train.parquet", "image", 20, size, mode)
        write_parquet(tmp_path / "five" / domain / "test.parquet", "image", 10, size, mode)
    federation = load("digits-five", root=tmp_path / "five")
    assert federation.domains == ["mnist", "svhn", "usps"]
    assert federation.image_shape == (3, 28, 28)
    assert [(c.samples, len(c.test)) for c in federation.clients] == [(20, 10)] * 3
    (tmp_path / "five" / "usps" / "test.parquet").unlink()
    with pytest.raises(DataError, match=r"test\.parquet' is missing"):
        load("digits-five", root=tmp_path / "five")


def test_a_parquet_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    for use in ("train", "test"):
        write_parquet(tmp_path / f"{use}.parquet", "picture", 4, 8)
    with pytest.raises(DataError, match="has the columns picture, label"):
        load("cifar10", root=tmp_path)
    (tmp_path / "train.parquet").write_text("hello")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        load("cifar10", root=tmp_path)


def rewrite(file: Path, **columns: object) -> None:
    """The parquet file with these columns in place of its own."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    own = parquet.read_table(file).to_pydict()
    parquet.write_table(pyarrow.table({**own, **columns}), file)


def test_parquet_may_have_plain_bytes_and_a_null_is_an_image_that_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path / "cache"))
    for use, count in (("train", 200), ("test", 10)):
        write_parquet(tmp_path / f"{use}.parquet", "img", count, 8)
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [row["bytes"] for row in parquet.read_table(tmp_path / "train.parquet")["img"].to_pylist()]
    rewrite(tmp_path / "train.parquet", img=rows)
    federation = load("cifar10", root=tmp_path)
    assert federation.images[:200, 0, 0, 0].tolist() == list(range(200))
    rewrite(tmp_path / "train.parquet", img=[None, *rows[1:]])
    with caplog.at_level(logging.WARNING, "fedkeel"):
        federation = load("cifar10", root=tmp_path)
    assert federation.images[federation.clients[0].train, 0, 0, 0].tolist() == list(range(1, 200))
    assert "train.parquet row 0' of 'cifar10' cannot be decoded and is left out" in caplog.text


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"img": ["a.png"] * 4}, "are no encoded images: store them as {bytes, path} or as bytes"),
        ({"label": ["cat"] * 4}, "labels of .* are not whole numbers"),
        ({"label": [None, 1, 2, 3]}, "labels of .* are not whole numbers"),
        ({"label": [10, 1, 2, 3]}, "has labels that are not one of 10 classes"),
    ],
)
def test_parquet_columns_of_another_type_are_refused(tmp_path: Path, columns: dict[str, object], message: str) -> None:
    for use in ("train", "test"):
        write_parquet(tmp_path / f"{use}.parquet", "img", 4, 8)
    rewrite(tmp_path / "train.parquet", **columns)
    with pytest.raises(DataError, match=message):
        load("cifar10", root=tmp_path)


def test_a_parquet_file_that_is_damaged_inside_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path / "cache"))
    for use in ("train", "test"):
        write_parquet(tmp_path / f"{use}.parquet", "img", 20, 8)
    content = bytearray((tmp_path / "train.parquet").read_bytes())
    content[4:40] = b"\xff" * 36
    (tmp_path / "train.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"train.parquet' cannot be read as parquet \(.*\): download it again") as told:
        load("cifar10", root=tmp_path)
    assert "\n" not in str(told.value)
