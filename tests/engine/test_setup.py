from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedkeel.config import Config
from fedkeel.data.federation import Client, Federation
from fedkeel.engine.executors.executor import choose_executor
from fedkeel.engine.setup import prepare
from fedkeel.errors import FedkeelError
from fedkeel.models import Classifier, wrap
from fedkeel.trust.rules import clients_per_round
from tests import tiny


def without(part: str) -> Federation:
    federation = tiny.federation()
    empty = torch.empty(0, dtype=torch.int64)
    first, *others = federation.clients
    if part == "validation":
        return replace(federation, clients=[replace(client, validation=empty) for client in federation.clients])
    if part == "test":
        return replace(federation, clients=[replace(client, test=empty) for client in federation.clients])
    return replace(federation, clients=[replace(first, train=empty), *others])


def with_label(label: int) -> Federation:
    federation = tiny.federation()
    labels = federation.labels.clone()
    labels[3] = label
    return replace(federation, labels=labels)


def unseen_of_a_training_domain() -> Federation:
    federation = tiny.federation(unseen=4)
    stranger = federation.unseen[0]
    return replace(federation, unseen=[Client("s", "dark", stranger.train, stranger.validation, stranger.test)])


class Bare(Classifier):
    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.encoder(x))


BARE = Bare(nn.Flatten(), nn.Linear(192, 4), 192, 4)


@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        ({}, {"method": "fedprx"}, "There is no method named 'fedprx': did you mean 'fedprox'?"),
        ({"model": None}, {"model": "simple_cn"}, "did you mean 'simple_cnn'?"),
        ({"federation": None}, {"data": "digit-shift"}, "did you mean 'digits-shift'?"),
        ({}, {"executor": "procesess"}, "no executor named 'procesess': did you mean 'processes'?"),
        ({}, {"device": "cpuu"}, "'device' is 'cpuu', and this machine has"),
        ({}, {"device": "meta"}, "give auto, cpu, cuda or cuda:N."),
        ({"federation": without("train")}, {}, "The client 'ward' has no training samples"),
        ({"federation": without("test")}, {}, "No client of 'tiny' has test samples"),
        ({"federation": without("validation")}, {"result": "best-validation"}, "no client of 'tiny' has validation"),
        ({"federation": replace(tiny.federation(), clients=[])}, {}, "has no client to train on"),
        ({"federation": with_label(4)}, {}, "'tiny' has the label 4, but 4 classes: give labels from 0 to 3."),
        ({"federation": with_label(-1)}, {}, "has the label -1"),
        ({"federation": unseen_of_a_training_domain()}, {}, "'s' is of the domain 'dark', which others train on"),
        ({}, {"min_clients": 4}, "'min_clients' is 4, but a round trains 3: give at most as many."),
        ({}, {"min_clients": 2, "participation": 0.3}, "but a round trains 1"),
        ({}, {"min_clients": 2, "method": "central"}, "but a round trains 1"),
        ({"model": tiny.model(classes=5)}, {}, "The model has 5 outputs, but 'tiny' has 4 classes"),
        ({"model": tiny.model(channels=1)}, {}, "The model does not take samples of shape (3, 8, 8)"),
        ({"model": nn.Linear(3, 4)}, {}, "wrap it with fedkeel.models.wrap"),
        ({"model": BARE}, {}, "The forward of Bare returns a Tensor"),
        ({}, {"stateless": True, "method": "fedbn"}, "'fedbn' needs clients that remember their last round"),
        ({}, {"stateless": True, "method": "fedprox+silobn"}, "'silobn' needs clients that remember"),
        ({"model": tiny.model(norm=False)}, {"method": "fedbn"}, "'fedbn' acts on batch norm, and there is none"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence_before_training(
    given: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    config = Config(**{**tiny.OPTIONS, **options})
    with pytest.raises(FedkeelError) as caught:
        prepare(config, **{"federation": tiny.federation(), "model": tiny.model(), **given})
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    for device in ("cuda", "cuda:3"):
        with pytest.raises(FedkeelError, match="this machine has no GPU that torch sees: give auto, cpu"):
            tiny.setup(device=device)


def test_images_of_another_size_than_the_model_was_built_for_are_refused() -> None:
    network = Classifier(nn.Flatten(), nn.Linear(192, 4), 192, 4)
    with pytest.raises(FedkeelError, match=r"does not take samples of shape \(3, 16, 16\)"):
        tiny.setup(network=network, on=tiny.federation(side=16))


def test_at_least_one_client_takes_part_and_half_goes_up() -> None:
    assert [clients_per_round(Config(participation=p), 5) for p in (0.01, 0.3, 0.5, 1.0)] == [1, 2, 3, 5]


def test_auto_takes_all_cores_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr("fedkeel.engine.executors.processes.has_shared_memory", lambda: True)
    monkeypatch.setattr("fedkeel.engine.executors.processes.available_cores", lambda: 8)
    assert choose_executor(Config(), cpu) == "processes"
    assert choose_executor(Config(workers=1), cpu) == "serial"
    monkeypatch.setattr("fedkeel.engine.executors.processes.available_cores", lambda: 1)
    assert choose_executor(Config(), cpu) == "serial"


def test_a_batch_size_of_one_with_batch_norm_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fedkeel"):
        tiny.setup(batch_size=1, network=tiny.model(norm=False))
        assert not caplog.records
        tiny.setup(batch_size=1)
    assert "A batch of one has no statistics" in caplog.text


def test_a_users_network_is_wrapped() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.ReLU(), nn.Linear(6, 4))
    assert tiny.setup(network=wrap(network, head="3")).worker.layout.weights[0] == "network.1.weight"


def test_the_initial_model_follows_from_the_seed() -> None:
    def initial(seed: int) -> torch.Tensor:
        torch.rand(1)
        setup = prepare(Config(**{**tiny.OPTIONS, "seed": seed}), federation=tiny.federation())
        return next(setup.worker.model.parameters())

    assert torch.equal(initial(1), initial(1))
    assert not torch.equal(initial(1), initial(2))
