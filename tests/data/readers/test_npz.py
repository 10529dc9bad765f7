"""npz packs, made up here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedkeel.data import load
from fedkeel.errors import DataError


def images(n: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (n, *shape), dtype=np.uint8)


def save(path: Path, **arrays: object) -> Path:
    np.savez(path, **{key: np.asarray(value) for key, value in arrays.items()})
    return path


def test_a_pack_is_read_with_the_arrays_that_are_held_out(tmp_path: Path) -> None:
    x, held, y = images(20, 8, 6, 3), images(4, 8, 6, 3), np.arange(20) % 2
    file = save(
        tmp_path / "pack.npz", x_a=x, y_a=y, x_a_test=held, y_a_test=[0, 1, 0, 1], x_b=x[:10], y_b=y[:10],
        x_b_validation=held, y_b_validation=[1, 0, 1, 0], classes=["cat", "dog"],
    )  # fmt: skip
    federation = load("npz", root=file)
    assert (federation.classes, federation.domains, federation.image_shape) == (("cat", "dog"), ["a", "b"], (3, 8, 6))
    a, b = federation.clients
    assert federation.images[a.test].permute(0, 2, 3, 1).equal(torch.from_numpy(held))
    assert federation.images[b.validation].permute(0, 2, 3, 1).equal(torch.from_numpy(held))
    assert [len(part) for part in a.splits] == [16, 4, 4]
    assert [len(part) for part in b.splits] == [8, 4, 2]
    assert (federation.labels[a.test].tolist(), federation.labels[b.validation].tolist()) == ([0, 1] * 2, [1, 0] * 2)


def test_a_pack_may_hold_vectors_and_patients(tmp_path: Path) -> None:
    x, y, patients = np.arange(90).reshape(30, 3) / 7, np.arange(30) % 2, np.arange(30) // 3
    for groups in (patients, patients.astype(str)):
        federation = load("npz", root=save(tmp_path / "p.npz", x_a=x, y_a=y, groups_a=groups))
        assert torch.equal(federation.images, torch.from_numpy(x).float())
        owners = [set(patients[part.numpy()]) for part in federation["a"].splits]
        assert sum(map(len, owners)) == len(set.union(*owners)) == 10


def test_grey_images_keep_one_channel(tmp_path: Path) -> None:
    federation = load("npz", root=save(tmp_path / "p.npz", x_a=images(8, 5, 5), y_a=np.arange(8) % 2))
    assert (federation.image_shape, federation.classes) == ((1, 5, 5), ("0", "1"))


FOUR = {"x_a": images(4, 8, 8), "y_a": [0] * 4}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({**FOUR, "x_b": images(4, 8, 8, 3), "y_b": [0] * 4}, r"of the shapes \(1, 8, 8\) and \(3, 8, 8\): store all"),
        ({**FOUR, "x_a_test": images(4, 6, 6), "y_a_test": [0] * 4}, r"of the shapes \(1, 6, 6\) and \(1, 8, 8\)"),
        ({"x_a": images(4, 8, 8)}, r"y_a is int64 of shape \(0,\): store a whole number for each of 4"),
        ({**FOUR, "y_a": [0, 1]}, r"y_a is int64 of shape \(2,\): store a whole number"),
        ({**FOUR, "groups_a": [0.5] * 4}, r"groups_a is float64 of shape \(4,\)"),
        ({**FOUR, "y_a": [0, 1, 2, -1]}, "The labels are int64 from -1: give whole numbers from 0"),
        ({**FOUR, "x_a": ["a"] * 4}, "give numbers of one size"),
        ({"y_a": [0] * 4}, "store a domain's images as x_<domain>"),
        ({**FOUR, "y_a": [0, 1, 2, 3], "classes": ["one"]}, "There is the label 3, and 1 classes are named"),
        ({"x_train": images(4, 8, 8), "y_train": [0] * 4, "x_test": images(4, 8, 8)}, "has x_train, x_test: store"),
        ({**FOUR, "x_b_test": images(4, 8, 8), "y_b_test": [0] * 4}, "what is held out as x_<domain>_validation"),
        ({**FOUR, "users_a": [1] * 4}, "The arrays 'users_a' are not read"),
    ],
)
def test_a_pack_that_contradicts_itself_is_refused(tmp_path: Path, arrays: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load("npz", root=save(tmp_path / "p.npz", **arrays))


def test_pickled_arrays_are_never_loaded(tmp_path: Path) -> None:
    file = tmp_path / "p.npz"
    np.savez(file, x_a=np.array([{"a": 1}], dtype=object), y_a=np.zeros(1, np.int64))
    pickled = file.read_bytes()
    damaged = bytearray(save(file, x_a=images(8, 5, 5), y_a=np.arange(8) % 2).read_bytes())
    damaged[180:200] = bytes(20)
    for content in (pickled, pickled[:-40], b"hello", b"", bytes(damaged)):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"cannot be read as an \.npz pack of plain arrays \(.*\): write it with"):
            load("npz", root=file)
