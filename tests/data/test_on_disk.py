"""Images that stay on disk train to the bits of images in memory, and no worker holds them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedkeel import simulate
from fedkeel.data import load
from fedkeel.data import memory as room
from fedkeel.engine.batches import ImageStore
from tests.data.made_up import tree


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tree(tmp_path / "images", ("north", "south"), ("cat", "dog"), 10)


@pytest.mark.parametrize("executor", ["serial", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_run_is_the_same_wherever_its_images_are(root: Path, tmp_path: Path, executor: str) -> None:
    models = []
    for keep in ("memory", "disk"):
        run = simulate(
            data=f"folder(root={root}, size=16, keep={keep}, train_transform='crop(padding=2)+jitter+normalise')",
            model="simple_cnn(width=4)",
            method="fedbn",
            rounds=2,
            batch_size=5,
            device="cpu",
            executor=executor,
            workers=2 if executor == "processes" else 0,
            directory=tmp_path / keep,
        )
        models.append(load_file(run.directory / "model.safetensors"))
    for name, tensor in models[0].items():
        assert torch.equal(models[1][name], tensor), name


def test_training_needs_no_memory_for_images_on_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = load("folder", root=root, size=64, keep="disk")
    batch = 64 * 3 * 64 * 64
    monkeypatch.setattr(room, "available", lambda: 5 * batch)  # of some images as floats, and not of a copy of all
    assert ImageStore(federation, torch.device("cpu"), channels_last=True).images.is_contiguous()
    pooled = federation.pooled()
    assert pooled.on_disk
    assert ImageStore(pooled, torch.device("cpu"), channels_last=True).images is federation.images
