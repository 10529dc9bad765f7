"""Decoded images on disk: found again, mapped, made again where they are damaged, and the same bits in training."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedkeel import simulate
from fedkeel.data import dataset, load
from fedkeel.engine.batches import ImageStore
from fedkeel.errors import DataError
from tests.data.made_up import image, tree


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tree(tmp_path / "images", ("north", "south"), ("cat", "dog"), 10)


def kept() -> list[Path]:
    return sorted(Path(os.environ["FEDKEEL_CACHE"]).glob("*.npy"))


def test_images_are_decoded_once_and_mapped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load("folder", root=root, size=6)
    (file,) = kept()
    assert np.load(file).shape == (40, 6, 6, 3)
    whole = dataset.decode
    monkeypatch.setattr(dataset, "decode", lambda *_: pytest.fail("an image was decoded again"))
    again = load("folder", root=root, size=6)
    assert (first.on_disk, again.on_disk) == (True, True)
    assert again.images.equal(first.images)
    monkeypatch.setattr(dataset, "decode", whole)
    changed = image(root / "north" / "cat" / "000.png", (255, 255, 255))
    os.utime(changed, ns=(1, 1))
    assert load("folder", root=root, size=6).images[0, 0, 0, 0] == 255
    assert load("folder", root=root, size=7).image_shape == (3, 7, 7)
    assert len(kept()) == 3


def test_a_damaged_file_is_made_again_and_half_of_one_is_never_there(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load("folder", root=root, size=6).images.clone()
    (file,) = kept()
    file.write_bytes(file.read_bytes()[:200])
    assert load("folder", root=root, size=6).images.equal(first)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dataset, "in_threads", stop)
    with pytest.raises(KeyboardInterrupt):
        load("folder", root=root, size=8)
    assert [*file.parent.glob(".*"), *kept()] == [file]


def test_a_place_that_cannot_be_written_to_is_told_and_off_keeps_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = load("folder", root=root, size=6)
    # A file where the folder should be can be written to by nobody, not even by root.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"file' cannot keep the decoded images of 'folder' .*: set FEDKEEL_CACHE to"):
        load("folder", root=root, size=6)
    monkeypatch.setenv("FEDKEEL_CACHE", "off")
    held = load("folder", root=root, size=6)
    assert not held.on_disk
    assert held.images.equal(mapped.images)


@pytest.mark.parametrize("executor", ["serial", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_run_is_the_same_wherever_its_images_are(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    models = []
    for place in (str(tmp_path / "cache"), "off"):
        monkeypatch.setenv("FEDKEEL_CACHE", place)
        run = simulate(
            data=f"folder(root={root}, size=16, train_transform='crop(padding=2)+jitter+normalise')",
            model="simple_cnn(width=4)",
            method="fedbn",
            rounds=2,
            batch_size=5,
            device="cpu",
            executor=executor,
            workers=2 if executor == "processes" else 0,
            directory=tmp_path / f"run-{len(models)}",
        )
        models.append(load_file(run.directory / "model.safetensors"))
    for name, tensor in models[0].items():
        assert torch.equal(models[1][name], tensor), name


def test_training_makes_no_copy_of_images_on_disk(root: Path) -> None:
    federation = load("folder", root=root, size=64)
    for last in (False, True):
        assert ImageStore(federation, torch.device("cpu"), channels_last=last).images is federation.images
