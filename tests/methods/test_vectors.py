"""Methods on vectors, with batch norm in one dimension."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedkeel
from fedkeel import models
from fedkeel.config import Config
from fedkeel.engine.setup import prepare
from tests import vectors

MODEL = "mlp(hidden=8)"
OPTIONS: dict[str, Any] = {
    "rounds": 2, "batch_size": 8, "learning_rate": 0.05, "model": MODEL, "device": "cpu", "executor": "serial",
}  # fmt: skip


def test_networks_for_images_are_refused() -> None:
    for model in ("simple_cnn", "resnet18"):
        with pytest.raises(
            fedkeel.FedkeelError, match=r"takes images, and .* the shape \(6,\): choose the model 'mlp'"
        ):
            prepare(Config(**{**OPTIONS, "model": model}), federation=vectors.federation())


@pytest.mark.parametrize("method", ["fedfa", "fedrdn"])
def test_what_acts_on_images_alone_is_refused(method: str) -> None:
    with pytest.raises(fedkeel.FedkeelError, match="choose a convolutional model"):
        prepare(Config(**OPTIONS, method=method), federation=vectors.federation())


@pytest.mark.slow
def test_a_network_of_one_s_own_takes_vectors(tmp_path: Path) -> None:
    def own() -> nn.Module:
        torch.manual_seed(0)
        body = [nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU()]
        return models.wrap(nn.Sequential(*body, nn.Linear(4, 3)), head="6")

    for method in ("hbn", "fedwon", "gn", "greg"):
        directory = tmp_path / method
        run = fedkeel.simulate(
            OPTIONS, method=method, model=own(), federation=vectors.federation(), directory=directory
        )
        x = vectors.arrays()[0]
        here = run.predict(x).probabilities
        there = fedkeel.load(directory, model=own()).predict(x).probabilities
        torch.testing.assert_close(here, there)
