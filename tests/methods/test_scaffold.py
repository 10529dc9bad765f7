from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel import methods
from fedkeel.core.client import LocalClient
from fedkeel.core.composition import Composition
from fedkeel.core.method import Method
from fedkeel.core.state import Tensors
from fedkeel.errors import MethodError
from tests import tiny
from tests.methods import together
from tests.methods.small import started

RATE = 0.1
WEIGHTS = [name for name, _ in tiny.model().named_parameters()]


def control_variate(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.1 * torch.randn(p.shape, generator=generator) for name, p in tiny.model().named_parameters()}


def scoped(tensors: Tensors) -> Tensors:
    return {f"scaffold/{name}": tensor for name, tensor in tensors.items()}


def by_hand(steps: int, c: Tensors, c_i: Tensors, momentum: float = 0.0) -> tuple[Tensors, Tensors]:
    """Eqs. 3 and 4 (option II) on the 14 samples of 'ward' as one batch, in float64: weights and control variate."""
    model, on = tiny.model().double().train(), tiny.federation(augment="")
    indices = on["ward"].train
    x, y = on.images[indices].double() / 255, on.labels[indices]
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    velocity = {name: torch.zeros_like(p) for name, p in start.items()}
    factor = total = 0.0
    for _ in range(steps):
        model.zero_grad()
        F.cross_entropy(model(x).logits, y).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                velocity[name] = momentum * velocity[name] + p.grad - c_i[name].double() + c[name].double()
                p -= RATE * velocity[name]
        factor = momentum * factor + 1
        total += factor
    end = {name: p.detach() for name, p in model.named_parameters()}
    new = {n: c_i[n].double() - c[n].double() + (start[n] - end[n]) / (RATE * total) for n in start}
    return end, new


def trained(
    method: str | Method, steps: int, c: Tensors, c_i: Tensors | None, momentum: float = 0.0, round: int = 3
) -> tuple[Tensors, Tensors, Tensors]:
    """The same by the engine: weights, what the client keeps, what it sends."""
    worker = tiny.setup(
        method,
        on=tiny.federation(augment=""),
        batch_size=14,
        local_epochs=steps,
        learning_rate=RATE,
        momentum=momentum,
    ).worker
    message = tiny.broadcast(worker, round, 10, scoped(c))
    update, memory = worker.train("ward", message, scoped(c_i) if c_i else {})
    return update.weights, {n.partition("/")[2]: t for n, t in memory.items()}, update.extras


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("steps", [1, 3])
def test_steps_and_control_variate_are_those_of_equations_3_and_4(steps: int, momentum: float) -> None:
    c, c_i = control_variate(1), control_variate(2)
    weights, kept, sent = trained("scaffold", steps, c, c_i, momentum)
    expected_weights, expected = by_hand(steps, c, c_i, momentum)
    for name in WEIGHTS:
        torch.testing.assert_close(weights[name].double(), expected_weights[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(kept[name].double(), expected[name], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(sent[f"scaffold/{name}"], kept[name] - c_i[name], rtol=0, atol=0)


class Constant(Method):
    """Puts the same gradient in the place of every step's."""

    name = "constant"

    def __init__(self, gradient: Tensors) -> None:
        self.gradient = gradient

    def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
        for name, parameter in client.model.named_parameters():
            parameter.grad = self.gradient[name].clone()


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_where_the_gradient_is_constant_the_control_variate_is_the_gradient(momentum: float) -> None:
    """With momentum, K steps go further than K lr: a control variate made with K lr would be several times too long."""
    gradient = control_variate(3)
    method = Composition([Constant(gradient), methods.build("scaffold")])
    _, kept, _ = trained(method, 5, control_variate(1), control_variate(2), momentum)
    for name in WEIGHTS:
        torch.testing.assert_close(kept[name], gradient[name], rtol=1e-4, atol=1e-5)


def test_with_one_client_it_is_sgd(tmp_path: Path) -> None:
    """NIID-Bench #8. c is that client's own c_i: the correction is nothing."""
    on = tiny.federation({"ward": 14})
    runs = [tiny.run(tmp_path / text, text, on=on, rounds=3) for text in ("scaffold", "fedavg")]
    models = [safetensors.torch.load_file(run.directory / "model.safetensors") for run in runs]
    together.assert_close(*models, atol=1e-5)


def test_a_control_variate_changes_in_a_round_and_is_there_in_the_next(tmp_path: Path) -> None:
    """FL-bench never writes it back."""
    run = started("scaffold", tmp_path)
    run.round(0)
    first = {name: t.clone() for name, t in run.memory.look("client0").items()}
    assert all(t.abs().max() > 0 for name, t in first.items() if name.endswith("weight"))
    run.round(1)
    second = run.memory.look("client0")
    assert first.keys() == second.keys()
    assert not any(torch.equal(first[name], second[name]) for name in first if name.endswith("weight"))
    worker = run.setup.worker
    client = worker.begin("client0", tiny.broadcast(worker), first)
    assert all(torch.equal(client.views["scaffold"].memory[n.partition("/")[2]], first[n]) for n in first)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_server_holds_the_mean_of_all_clients_control_variates(tmp_path: Path, weighting: str) -> None:
    """Eq. 5, whoever takes part; clients that have not come yet count with zero."""
    run = started("scaffold", tmp_path, participation=0.67, weighting=weighting, rounds=8)
    sizes = {"client0": 24, "client1": 16, "client2": 32}
    came: set[str] = set()
    for round in range(8):
        run.round(round)
        came |= set(run.server.participants)
        shares = {name: sizes[name] if weighting == "samples" else 1 for name in came}
        total = 3 * sum(shares.values()) / len(shares)
        memory = run.memory
        for name, c in run.server.extras.items():
            expected = sum(share * memory.look(client)[name].double() for client, share in shares.items()) / total
            torch.testing.assert_close(c.double(), expected, rtol=1e-4, atol=1e-6)
    assert came == set(sizes)
    assert len(run.server.participants) == 2


def test_it_needs_the_steps_of_sgd(tmp_path: Path) -> None:
    with pytest.raises(MethodError, match="'scaffold' takes steps of SGD, and the optimiser is 'adamw': choose sgd"):
        tiny.run(tmp_path / "r", "scaffold", optimizer="adamw")
