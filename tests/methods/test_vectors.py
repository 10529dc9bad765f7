"""Every method on vectors, with batch norm in one dimension, under every executor, and back again for use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedkeel
from fedkeel import methods, models
from fedkeel.config import Config
from fedkeel.core import state
from fedkeel.core.state import Role
from fedkeel.engine.setup import prepare
from fedkeel.methods import METHODS
from tests import tiny, vectors
from tests.methods.together import assert_a_slot_serves_all

MODEL = "mlp(hidden=8)"
OPTIONS: dict[str, Any] = {
    "rounds": 2, "batch_size": 8, "learning_rate": 0.05, "model": MODEL, "device": "cpu", "executor": "serial",
}  # fmt: skip
SHORT = {"fedfm": "fedfm(from_round=1)"}  # what acts from a later round on


def name(method: str) -> str:
    return SHORT.get(method, method)


@pytest.mark.parametrize("method", METHODS.names())
@pytest.mark.slow
def test_it_trains_and_its_model_comes_back_elsewhere(method: str, tmp_path: Path) -> None:
    federation = vectors.federation(unseen="west")
    run = fedkeel.simulate(OPTIONS, method=name(method), federation=federation, directory=tmp_path / "run")
    assert 0 <= run.accuracy <= 1
    personal = methods.build(name(method)).traits.personal
    client = "north" if personal else None
    trained = fedkeel.load(tmp_path / "run", client=client)
    test = federation["north"].test
    predicted = trained.predict(federation.images[test]).probabilities.argmax(1)
    score = next(
        record for record in reversed(run.records("evaluation"))
        if record["client"] == "north" and record["split"] == "test"
    )  # fmt: skip
    assert float((predicted == federation.labels[test]).float().mean()) == pytest.approx(score["accuracy"])


@pytest.mark.parametrize("method", [method for method in METHODS.names() if methods.build(method).traits.capturable])
def test_a_captured_step_asks_the_host_nothing(method: str) -> None:
    setup = prepare(Config(**OPTIONS, method=method), federation=vectors.federation())
    broadcast = tiny.broadcast(setup.worker, round=0)
    if method in ("fedrdn",):
        pytest.skip("needs the answers to its question first")
    assert_a_slot_serves_all(setup.worker, broadcast, {"north": {}, "south": {}})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS.names())
def test_cuda_agrees_with_serial(method: str, tmp_path: Path) -> None:
    models = {}
    for executor in ("serial", "cuda"):
        options = {**OPTIONS, "device": "cuda", "precision": "float32", "executor": executor}
        run = fedkeel.simulate(
            options, method=name(method), federation=vectors.federation(), directory=tmp_path / executor
        )
        models[executor] = run.tensors("model.safetensors")
    for entry, tensor in models["serial"].items():
        torch.testing.assert_close(models["cuda"][entry], tensor, rtol=1e-3, atol=1e-4, msg=entry)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(8, 5), (8, 5, 7)])
@pytest.mark.parametrize("method", ["hbn", "greg", "fedwon"])
def test_one_dimension_on_a_gpu_is_what_it_is_on_a_cpu(method: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    body = nn.Linear(5, 6) if len(shape) == 2 else nn.Conv1d(5, 6, 3)
    network = nn.Sequential(body, nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3)).eval()
    network(torch.zeros(shape))
    model = models.wrap(network.train(), head="4")
    methods.build(method).prepare(model)
    x = torch.randn(shape)
    results = []
    for device in ("cpu", "cuda"):
        model.to(device).zero_grad()
        logits = model(x.to(device)).logits
        logits.square().sum().backward()
        results.append([logits.cpu(), *(p.grad.clone().cpu() for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_the_statistics_of_batch_norm_in_one_dimension_are_statistics() -> None:
    roles = state.roles(models.build_for(MODEL, 3, (6,)))
    assert roles["encoder.layers.1.running_mean"] == roles["encoder.layers.1.running_var"] == Role.STATISTIC
    assert roles["encoder.layers.1.num_batches_tracked"] == Role.COUNTER
    assert roles["encoder.layers.1.weight"] == Role.WEIGHT


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_numbers_and_not_with_others(tmp_path: Path) -> None:
    def stop(round: int) -> None:
        if round == 0:
            raise KeyboardInterrupt

    options = {**OPTIONS, "method": "hbn", "checkpoint_every": 1}
    whole = fedkeel.simulate(options, federation=vectors.federation(), directory=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedkeel.simulate(
            options, federation=vectors.federation(), directory=tmp_path / "run", observer=tiny.Notes(stop)
        )
    other = vectors.federation()
    other.images[other["south"].train[0], 2] += 1
    with pytest.raises(fedkeel.FedkeelError, match="the samples of 'south' are not those"):
        fedkeel.resume(tmp_path / "run", federation=other)
    resumed = fedkeel.resume(tmp_path / "run", federation=vectors.federation())
    assert tiny.result(resumed) == tiny.result(whole)


def test_networks_for_images_are_refused() -> None:
    for model in ("simple_cnn", "resnet18"):
        with pytest.raises(
            fedkeel.FedkeelError, match=r"takes images, and .* the shape \(6,\): choose the model 'mlp'"
        ):
            prepare(Config(**{**OPTIONS, "model": model}), federation=vectors.federation())


@pytest.mark.slow
def test_a_network_of_one_s_own_takes_vectors(tmp_path: Path) -> None:
    def own() -> nn.Module:
        torch.manual_seed(0)
        body = [nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU()]
        return models.wrap(nn.Sequential(*body, nn.Linear(4, 3)), head="6")

    for method in ("hbn", "fedwon", "fedfa", "fedrdn", "gn"):
        directory = tmp_path / method
        run = fedkeel.simulate(
            OPTIONS, method=method, model=own(), federation=vectors.federation(), directory=directory
        )
        client = "north" if method == "fedrdn" else None
        x = vectors.arrays()[0]
        here = run.predict(x, client=client).probabilities
        there = fedkeel.load(directory, model=own(), client=client).predict(x).probabilities
        torch.testing.assert_close(here, there)
