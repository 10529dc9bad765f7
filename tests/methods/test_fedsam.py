from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel import methods
from fedkeel.errors import MethodError
from tests import tiny

RATE = 0.1


def by_hand(steps: int, rho: float, momentum: float) -> dict[str, Tensor]:
    """Weights and running statistics after full-batch steps on 'ward', by plain loops in float64."""
    model, on = tiny.model().double().train(), tiny.federation(augment="")
    indices = on["ward"].train
    x, y = on.images[indices].double() / 255, on.labels[indices]
    velocity: dict[str, Tensor] = {}
    for _ in range(steps):
        model.zero_grad()
        F.cross_entropy(model(x).logits, y).backward()
        statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
        gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
        length = sum(float(g.square().sum()) for g in gradient.values()) ** 0.5
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for name, p in model.named_parameters():
                p += rho * gradient[name] / length
        model.zero_grad()
        F.cross_entropy(model(x).logits, y).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                velocity[name] = momentum * velocity.get(name, 0) + p.grad
                p.copy_(start[name] - RATE * velocity[name])
            for name, buffer in model.named_buffers():
                buffer.copy_(statistics[name])
    return {name: t.detach() for name, t in model.state_dict().items()}


def trained(method: str, steps: int, momentum: float = 0.0, round: int = 0) -> tuple[dict[str, Tensor], float]:
    options = {"batch_size": 14, "learning_rate": RATE, "local_epochs": steps, "momentum": momentum}
    worker = tiny.setup(method, on=tiny.federation(augment=""), **options).worker
    update, _ = worker.train("ward", tiny.broadcast(worker, round), {})
    return {**update.weights, **update.statistics}, update.metrics["loss"]


@pytest.mark.parametrize(("steps", "rho", "momentum"), [(1, 0.1, 0.0), (2, 0.5, 0.9), (3, 2.0, 0.0)])
def test_a_step_uses_the_gradient_at_the_worst_point_nearby(steps: int, rho: float, momentum: float) -> None:
    given, _ = trained(f"fedsam(rho={rho})", steps, momentum)
    for name, tensor in by_hand(steps, rho, momentum).items():
        torch.testing.assert_close(given[name].double(), tensor.double(), rtol=1e-3, atol=1e-5, msg=name)


def test_running_statistics_are_those_of_the_first_pass() -> None:
    """One step: the same statistics, counter included, as without the second pass, however far that one is away."""
    sam, plain = trained("fedsam(rho=5)", 1), trained("fedavg", 1)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(sam[0][f"encoder.1.{name}"], plain[0][f"encoder.1.{name}"])
    assert sam[1] == plain[1]  # the loss that is reported is that of the model, too


def test_a_gradient_of_zero_stays_zero() -> None:
    worker = tiny.setup("fedsam").worker
    client = worker.begin("ward", tiny.broadcast(worker), {})
    for parameter in worker.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: p.detach().clone() for name, p in worker.model.named_parameters()}
    worker.method.gradients(client, lambda: torch.zeros(()))
    assert all(torch.equal(p, before[name]) for name, p in worker.model.named_parameters())


def test_it_is_written_before_what_corrects_gradients() -> None:
    """SCAFFOLD's correction would be lost when the gradient is computed anew."""
    with pytest.raises(MethodError, match="write 'fedsam' before 'scaffold'"):
        methods.build("scaffold+fedsam")
    corrected = {f"scaffold/{n}": torch.ones_like(p) for n, p in tiny.model().named_parameters()}
    results = []
    for method, extras in (("fedsam+scaffold", corrected), ("fedsam", {})):
        worker = tiny.setup(method, on=tiny.federation(augment=""), batch_size=14, learning_rate=RATE).worker
        update, _ = worker.train("ward", tiny.broadcast(worker, 1, extras=extras), {})
        results.append(update.weights)
    for name, plain in results[1].items():
        torch.testing.assert_close(results[0][name], plain - RATE, rtol=1e-4, atol=1e-6)
