from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.core.state import Tensors
from fedkeel.core.types import Classifier
from tests import tiny
from tests.methods.small import changed, started

RATE = 0.1


def previous_model() -> Classifier:
    """A model that is neither the broadcast one nor near it; its running statistics are no one's default either."""
    model = tiny.model(seed=5)
    model.encoder[1].running_mean.fill_(0.2)
    model.encoder[1].running_var.fill_(0.3)
    return model


def memory_of(model: nn.Module) -> Tensors:
    return {f"moon/{name}": t.clone() for name, t in model.state_dict().items() if t.is_floating_point()}


def test_a_step_is_that_of_equation_4() -> None:
    """By plain torch in float64: both other networks in evaluation mode, without gradients."""
    mu, tau = 3.0, 0.4
    on = tiny.federation(augment="")
    worker = tiny.setup(
        f"moon(mu={mu}, temperature={tau})", on=on, batch_size=14, learning_rate=RATE, momentum=0.0
    ).worker
    previous = previous_model()
    update, _ = worker.train("ward", tiny.broadcast(worker, 2), memory_of(previous))

    indices = on["ward"].train
    x, y = on.images[indices].double() / 255, on.labels[indices]
    model = tiny.model().double().train()
    with torch.no_grad():
        z_glob = copy.deepcopy(model).eval()(x).features
        z_prev = previous.double().eval()(x).features
    output = model(x)
    pairs = [F.cosine_similarity(output.features, z) / tau for z in (z_glob, z_prev)]
    contrast = F.cross_entropy(torch.stack(pairs, dim=1), torch.zeros(14, dtype=torch.int64))
    loss = F.cross_entropy(output.logits, y) + mu * contrast
    loss.backward()
    assert update.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        expected = parameter.detach() - RATE * parameter.grad
        torch.testing.assert_close(update.weights[name].double(), expected, rtol=1e-4, atol=1e-6)
    for name, buffer in model.named_buffers():  # only the model itself has seen a batch
        torch.testing.assert_close(update.statistics[name].double(), buffer.double(), rtol=1e-5, atol=1e-6)


def test_the_previous_model_is_the_client_s_own_last_one_whenever_that_was(tmp_path: Path) -> None:
    run = started("moon", tmp_path, participation=0.34, rounds=8)
    last: dict[str, dict[str, Tensor]] = {}

    def seen(result: Any) -> Any:
        last[result.client] = {**result.outcome.weights, **result.outcome.statistics}
        return result

    came = []
    for round in range(8):
        with changed(run, seen):
            run.round(round)
        came += run.server.participants
        for client, own in last.items():
            memory = run.memory.look(client)
            for name, tensor in own.items():
                assert not tensor.is_floating_point() or torch.equal(memory[f"moon/{name}"], tensor)
    assert len(came) == 8
    assert len(set(came)) > 1
    assert run.traffic["questions"] == 0


def test_the_previous_network_of_a_client_with_hbn_has_its_own_factors() -> None:
    worker = tiny.setup("hbn+moon").worker
    message = tiny.broadcast(worker, 1)
    _, memory = worker.train("ward", message, {})
    client = worker.begin("ward", message, memory)
    with_global, with_previous = client.views["moon"].scratch["others"]
    factor = memory["local/encoder.1.alpha"]
    assert factor.abs().max() > 0
    assert torch.equal(with_global.encoder[1].alpha, factor)
    assert torch.equal(with_previous.encoder[1].alpha, factor)
    assert torch.equal(with_global.head.weight, message.weights["head.weight"])
    assert torch.equal(with_previous.head.weight, memory["moon/head.weight"])
    assert not any(p.requires_grad for net in (with_global, with_previous) for p in net.parameters())
    assert not with_global.training
