"""Layers, blocks and clipping work inside a CUDA graph: a replay does what the same step does eagerly."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fedkeel import models
from fedkeel.nn import (
    HistoryClip,
    agc_,
    batch_norms,
    frozen_statistics,
    remove_normalisation,
    to_hybrid,
    to_scaled_ws,
    using_statistics,
)
from fedkeel.nn.hybrid_batch_norm import hybrid_norms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

Step = Callable[[], None]


def capture(step: Step) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def plain(model: nn.Module, x: torch.Tensor) -> Step:
    norms = batch_norms(model)
    statistics = {f"{name}.running_mean": torch.rand_like(norm.running_mean) for name, norm in norms.items()}
    clip = HistoryClip(model.named_parameters())

    def step() -> None:
        model.zero_grad(set_to_none=False)
        loss = model(x).logits.square().mean()
        with using_statistics(norms, statistics):
            loss = loss + model(x).logits.square().mean()
        with frozen_statistics(model):
            loss = loss + model(x).features.mean()
        loss.backward()
        agc_(model.parameters(), 0.1)
        clip.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)

    return step


def hybrid(model: nn.Module, x: torch.Tensor) -> Step:
    to_hybrid(model)
    for norm in hybrid_norms(model).values():
        norm.start_recording()
    return trained(model, x)


def standardised(model: nn.Module, x: torch.Tensor) -> Step:
    remove_normalisation(model)
    to_scaled_ws(model, init="keep")
    return trained(model, x)


def wrapped(model: nn.Module, x: torch.Tensor) -> Step:
    return trained(models.wrap(Flat(model), head="model.head", num_classes=5), x)


class Flat(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(x).logits
        return logits


def trained(model: nn.Module, x: torch.Tensor) -> Step:
    def step() -> None:
        model.zero_grad(set_to_none=False)
        output = model(x)
        (output.logits.square().mean() + output.features.square().mean()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.01 * parameter.grad)

    return step


@pytest.mark.parametrize("prepare", [plain, hybrid, standardised, wrapped])
def test_a_replay_does_what_the_eager_step_does(prepare: Callable[[nn.Module, torch.Tensor], Step]) -> None:
    torch.manual_seed(0)
    captured = models.build("simple_cnn", num_classes=5).double().cuda()  # rounding is no excuse then
    eager = copy.deepcopy(captured)
    x = torch.randn(8, 3, 32, 32, device="cuda", dtype=torch.float64)
    torch.manual_seed(1)
    replayed = prepare(captured, x)  # kept by name: the graph writes to tensors that live as long as the step does
    graph = capture(replayed)
    torch.manual_seed(1)
    step = prepare(eager, x)
    graph.replay()
    graph.replay()
    for _ in range(5):  # three to warm up, two replays; capturing itself does not run
        step()
    states = captured.state_dict(), eager.state_dict()
    assert list(states[0]) == list(states[1])
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name], rtol=1e-6, atol=1e-8, msg=name)
    for one, other in zip(hybrid_norms(captured).values(), hybrid_norms(eager).values(), strict=True):
        assert int(one.recorded()[2]) == int(other.recorded()[2]) == 5 * 8
