from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel import methods
from fedkeel.core.types import Classifier
from fedkeel.engine.rounds import Federated
from fedkeel.errors import MethodError
from tests.methods import together
from tests.methods.small import CLASSES, broadcast, pixels, small_federation, small_model, started

RATE = 0.5
CLIENTS = ["client0", "client1", "client2"]


class Residual(nn.Module):
    """Two branches, so that the order of calls is not that of the names, and batch norm over vectors at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.early = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.left, self.right = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1)
        self.last = nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.early(self.right(x))
        return self.last((F.relu(self.late(self.left(x))) + skip).square().mean(dim=(2, 3)))


def residual() -> Classifier:
    torch.manual_seed(2)
    return Classifier(Residual(), nn.Linear(4, CLASSES), 4, CLASSES)


def union_step(model: nn.Module, steps: int = 1) -> nn.Module:
    """Plain gradient descent in float64 on all clients' data as one batch."""
    on = small_federation()
    x = torch.cat([pixels(on, name) for name in CLIENTS]).double()
    y = torch.cat([on.labels[on[name].train] for name in CLIENTS])
    model = copy.deepcopy(model).double().train()
    for _ in range(steps):
        model.zero_grad()
        F.cross_entropy(model(x).logits, y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
    return model


def full_batches(method: str, directory: Path, model: nn.Module, **options: object) -> Federated:
    return started(method, directory, model=model, batch_size=64, learning_rate=RATE, momentum=0.0, **options)


@pytest.mark.parametrize("build", [small_model, residual])
def test_one_step_on_every_client_is_one_step_on_the_union(tmp_path: Path, build) -> None:  # type: ignore[no-untyped-def]
    """Over two rounds; FedAvg's mean of steps is another one."""
    run, plain = full_batches("fedtan", tmp_path / "a", build()), full_batches("fedavg", tmp_path / "b", build())
    for round in range(2):
        run.round(round)
        plain.round(round)
        expected = union_step(build(), round + 1)
        for name, tensor in run.server.weights.items():
            wanted = expected.get_parameter(name).detach()
            torch.testing.assert_close(tensor.double(), wanted, rtol=1e-3, atol=2e-5, msg=name)
        far = [
            float((t.double() - expected.get_parameter(name).detach()).abs().max())
            for name, t in plain.server.weights.items()
        ]
        assert max(far) > 1e-3
    for name, buffer in expected.named_buffers():
        if name.endswith("running_mean"):
            torch.testing.assert_close(run.server.statistics[name].double(), buffer, rtol=1e-3, atol=1e-5)
        if name.endswith("num_batches_tracked"):
            assert run.server.statistics[name] == buffer


def test_later_steps_are_those_of_fedavg(tmp_path: Path) -> None:
    run = full_batches("fedtan", tmp_path / "a", small_model(), local_epochs=2)
    first = full_batches("fedtan", tmp_path / "b", small_model(), local_epochs=1)
    for each in (run, first):
        each.server.participants = CLIENTS
        each.method.before_training(each.server)
    two, _ = run.setup.worker.train("client1", broadcast(run), {})
    one, _ = first.setup.worker.train("client1", broadcast(first), {})
    model = small_model().train()
    model.load_state_dict({**one.weights, **one.statistics})
    on = small_federation()
    F.cross_entropy(model(pixels(on, "client1")).logits, on.labels[on["client1"].train]).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(two.weights[name], parameter.detach() - RATE * parameter.grad, rtol=1e-3, atol=1e-5)
    together.assert_close(two.statistics, dict(model.named_buffers()))


def test_models_that_it_cannot_go_through_are_refused(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.bn(x) * 2).mean(dim=(2, 3))

    class Unused(Twice):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(dim=(2, 3))

    for encoder in (Twice(), Unused()):
        model = Classifier(encoder, nn.Linear(3, CLASSES), 3, CLASSES)
        with pytest.raises(MethodError, match="wants each batch norm to be called once"):
            started("fedtan", tmp_path / type(encoder).__name__, model=model).round(0)
    for text in ("fedtan+gn", "fedtan+hbn", "fedtan+greg"):
        with pytest.raises(MethodError):
            methods.build(text).prepare(small_model())
