from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedkeel import methods
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
        *("scaffold+freeze(head=local)", "fedheal+freeze(head=local)"),
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


@needs_opacus
@pytest.mark.parametrize("head", ["fixed", "local"])
def test_noise_on_a_private_mean_does_not_reach_the_head(tmp_path: Path, head: str) -> None:
    run = started(f"freeze(head={head})", tmp_path, dp="central", weighting="uniform")
    run.round(0)
    assert all(torch.equal(run.server.weights[name], small_model().state_dict()[name]) for name in HEAD)


@pytest.mark.parametrize(
    "method", ["fedprox+freeze", "freeze+fedsam", "moon+freeze", "freeze+fedadam", "fedacg+freeze"]
)
def test_no_other_part_moves_the_head(tmp_path: Path, method: str) -> None:
    run = started(method, tmp_path)
    for round in range(2):
        run.round(round)
    assert torch.equal(run.server.weights["head.weight"], small_model().state_dict()["head.weight"])
