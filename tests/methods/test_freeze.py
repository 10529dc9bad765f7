from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fedkeel import methods, models
from fedkeel.core.composition import Composition
from fedkeel.core.types import Classifier
from fedkeel.errors import FedkeelError, MethodError
from tests import tiny
from tests.methods import together
from tests.methods.small import Probe, broadcast, small_model, started, trained
from tests.trust.test_privacy import needs_opacus

HEAD = ("head.weight", "head.bias")


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"optimizer": "adamw", "learning_rate": 1e-3}])
def test_the_head_is_bit_identical_on_every_client_and_in_every_round(tmp_path: Path, options: dict) -> None:
    """FedUV's flag never fires: there the head is trained."""
    run = started("freeze", tmp_path, **options)
    initial = {name: small_model().state_dict()[name] for name in HEAD}
    for round in range(3):
        for update in trained(run, ["client0", "client1", "client2"], broadcast(run, round)):
            assert all(torch.equal(update.weights[name], initial[name]) for name in HEAD)
            assert not torch.equal(update.weights["encoder.0.weight"], run.server.weights["encoder.0.weight"])
        run.round(round)
        assert all(torch.equal(run.server.weights[name], initial[name]) for name in HEAD)


@pytest.mark.parametrize(
    "method",
    [
        "freeze(head=local)",
        *("fedacg+freeze(head=local)", "freeze(head=local)+fedacg", "freeze(head=local)+fedadam"),
        *("scaffold(server_lr=0.5)+freeze(head=local)", "fedheal+freeze(head=local)"),
    ],
)
def test_a_local_head_is_trained_on_the_clients_and_left_out_of_the_mean(tmp_path: Path, method: str) -> None:
    """It is reset each round: what clients start from is the initial one, bit for bit."""
    arrived: list[torch.Tensor] = []
    probe = Probe(start=lambda client: arrived.append(client.model.head.weight.detach().clone()))
    built = methods.build(method)
    run = started([*getattr(built, "parts", [built]), probe], tmp_path)
    initial = {name: small_model().state_dict()[name] for name in HEAD}
    for round in range(3):
        body = run.server.weights["encoder.0.weight"]
        for update in trained(run, ["client0", "client1", "client2"], broadcast(run, round)):
            assert not any(torch.equal(update.weights[name], initial[name]) for name in HEAD)
        run.round(round)
        assert all(torch.equal(run.server.weights[name], initial[name]) for name in HEAD)
        assert not torch.equal(run.server.weights["encoder.0.weight"], body)
    assert len(arrived) == 18
    assert all(torch.equal(head, initial["head.weight"]) for head in arrived)
    assert not any("head" in name for name in run.memory.look("client0") if name.startswith("local/"))


def test_with_a_local_head_clients_train_as_in_fedavg() -> None:
    def trained(method: str) -> dict[str, torch.Tensor]:
        worker = tiny.setup(method, local_epochs=2).worker
        return worker.train("ward", tiny.broadcast(worker), {})[0].weights

    local, plain = trained("freeze(head=local)"), trained("fedavg")
    assert all(torch.equal(local[name], plain[name]) for name in plain)


@needs_opacus
@pytest.mark.parametrize("head", ["fixed", "local"])
def test_noise_on_a_private_mean_does_not_reach_the_head(tmp_path: Path, head: str) -> None:
    run = started(f"freeze(head={head})", tmp_path, dp="central", weighting="uniform")
    run.round(0)
    assert all(torch.equal(run.server.weights[name], small_model().state_dict()[name]) for name in HEAD)


def test_the_body_steps_as_it_does_above_a_head_that_is_not_moved() -> None:
    """The first step of the body is that of FedAvg; from the second on the head below the loss is another."""

    def body(method: str, epochs: int) -> torch.Tensor:
        worker = tiny.setup(method, batch_size=14, learning_rate=0.1, local_epochs=epochs).worker
        return worker.train("ward", tiny.broadcast(worker), {})[0].weights["encoder.0.weight"]

    torch.testing.assert_close(body("freeze", 1), body("fedavg", 1), rtol=0, atol=0)
    assert not torch.allclose(body("freeze", 3), body("fedavg", 3), atol=1e-5)


@pytest.mark.parametrize(
    "method", ["fedprox+freeze", "freeze+fedsam", "moon+freeze", "freeze+fedadam", "fedacg+freeze"]
)
def test_no_other_part_moves_the_head(tmp_path: Path, method: str) -> None:
    run = started(method, tmp_path)
    for round in range(2):
        run.round(round)
    assert torch.equal(run.server.weights["head.weight"], small_model().state_dict()["head.weight"])


def test_the_head_of_any_model_is_found() -> None:
    wrapped = models.wrap(nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 4)), head="2")
    Composition.of(methods.build("freeze")).prepare(wrapped)
    assert [name for name, p in wrapped.named_parameters() if not p.requires_grad] == [
        "network.2.weight",
        "network.2.bias",
    ]
    with pytest.raises(FedkeelError, match="The 'head' of freeze is 'loc': did you mean 'local'"):
        methods.build("freeze(head=loc)")
    with pytest.raises(MethodError, match="none with weights"):
        Composition.of(methods.build("freeze")).prepare(Classifier(nn.Flatten(), nn.Identity(), 4, 4))


def test_a_head_that_another_part_puts_in_is_frozen_too() -> None:
    model = models.build("moon_cnn", num_classes=4, image_size=32)
    methods.build("freeze+moon(projector=16)").prepare(model)
    assert isinstance(model.head, nn.Linear)
    assert model.head.in_features == 16
    assert not model.head.weight.requires_grad


@pytest.mark.parametrize("head", ["fixed", "local"])
def test_a_captured_step_serves_one_client_after_another(head: str) -> None:
    worker = tiny.setup(f"freeze(head={head})").worker
    together.assert_a_slot_serves_all(worker, tiny.broadcast(worker), {name: {} for name in tiny.SIZES})
