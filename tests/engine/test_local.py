"""Local training against computations by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.method import Method, Traits
from fedkeel.core.state import Tensors
from fedkeel.engine.local import ClientFailure, Worker
from fedkeel.errors import TrainingError
from fedkeel.models import Classifier, Output
from tests import tiny

WARD = 14  # samples of the client 'ward'


def worker(method: str | Method = "fedavg", network: nn.Module | None = None, **options: Any) -> Worker:
    on = tiny.federation(augment="")
    return tiny.setup(method, on=on, network=network, **{"batch_size": WARD, **options}).worker


def trained(w: Worker, round: int = 0) -> dict[str, Tensor]:
    update, _ = w.train("ward", tiny.broadcast(w, round), {})
    return {**update.weights, **update.statistics}


def images(w: Worker) -> tuple[Tensor, Tensor]:
    indices = w.federation["ward"].train
    return w.federation.images[indices].float() / 255, w.federation.labels[indices]


def gradients(model: Classifier, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Of the mean cross-entropy, written out, by a second copy of the model in training mode."""
    copied = copy.deepcopy(model).train()
    logits = copied(x).logits
    loss = (torch.logsumexp(logits, 1) - logits[torch.arange(len(y)), y]).mean()
    names, parameters = zip(*copied.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def with_weights(model: Classifier, new: dict[str, Tensor]) -> Classifier:
    copied = copy.deepcopy(model)
    copied.load_state_dict(new, strict=False)
    return copied


def assert_close(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name, tensor in right.items():
        torch.testing.assert_close(left[name], tensor, rtol=1e-4, atol=1e-6)


def test_one_step_of_sgd() -> None:
    w = worker(learning_rate=0.3)
    x, y = images(w)
    g = gradients(w.model, x, y)
    expected = {name: p - 0.3 * g[name] for name, p in weights(w.model).items()}
    z = nn.functional.conv2d(x, w.model.encoder[0].weight, w.model.encoder[0].bias, padding=1).detach()  # type: ignore[index]
    expected["encoder.1.running_mean"] = 0.1 * z.mean((0, 2, 3))
    expected["encoder.1.running_var"] = 0.9 + 0.1 * z.var((0, 2, 3), correction=1)
    expected["encoder.1.num_batches_tracked"] = torch.tensor(1)
    result = trained(w)
    assert result.keys() == expected.keys()
    assert_close(result, expected)


def test_two_steps_with_momentum_and_weight_decay() -> None:
    w = worker(learning_rate=0.2, momentum=0.9, weight_decay=0.01, local_epochs=2)
    (x, y), start = images(w), weights(w.model)
    first = gradients(w.model, x, y)
    v = {name: first[name] + 0.01 * p for name, p in start.items()}
    middle = {name: p - 0.2 * v[name] for name, p in start.items()}
    second = gradients(with_weights(w.model, middle), x, y)
    v = {name: 0.9 * v[name] + second[name] + 0.01 * p for name, p in middle.items()}
    assert_close(trained(w), {name: p - 0.2 * v[name] for name, p in middle.items()})


def test_the_first_step_of_adamw() -> None:
    w = worker(optimizer="adamw", learning_rate=0.01, weight_decay=0.1)
    x, y = images(w)
    g, start = gradients(w.model, x, y), weights(w.model)
    # The corrected moments of the first step are g and g^2; decay is apart from them. Where g is next to nothing
    # (the bias before batch norm), its sign is noise.
    expected = {name: p - 0.01 * 0.1 * p - 0.01 * g[name] / (g[name].abs() + 1e-8) for name, p in start.items()}
    del expected["encoder.0.bias"]
    result = trained(w)
    for name, tensor in expected.items():
        solid = g[name].abs() > 1e-4
        torch.testing.assert_close(result[name][solid], tensor[solid], rtol=1e-3, atol=1e-5)


def test_the_optimiser_is_new_in_every_round() -> None:
    w = worker(momentum=0.9)
    message = tiny.broadcast(w)
    first, _ = w.train("ward", message, {})
    again, _ = w.train("ward", message, {})
    assert all(torch.equal(first.weights[name], again.weights[name]) for name in first.weights)


def test_gradients_are_clipped_together() -> None:
    w = worker(learning_rate=1.0, clip_norm=0.05)
    start = weights(w.model)
    norm = torch.cat([g.flatten() for g in gradients(w.model, *images(w)).values()]).norm()
    assert norm > 0.05
    result = trained(w)
    moved = torch.cat([(result[name] - p).flatten() for name, p in start.items()]).norm()
    assert moved.item() == pytest.approx(0.05, rel=1e-3)


def test_a_gradient_below_the_limit_is_not_clipped() -> None:
    assert_close(trained(worker(clip_norm=1e6)), trained(worker()))


@pytest.mark.parametrize(
    ("schedule", "factor"), [("constant", 1.0), ("exponential(decay=0.5)", 0.25), ("cosine", 0.25)]
)
def test_the_step_follows_the_schedule(schedule: str, factor: float) -> None:
    # cosine: (1 + cos(2 pi / 3)) / 2 = 1/4; exponential: 0.5^2
    w = worker(schedule=schedule, rounds=3, learning_rate=0.1)
    message, start = tiny.broadcast(w), weights(w.model)
    moved = []
    for round in (0, 2):
        update, _ = w.train("ward", type(message)(round, 3, message.weights, message.statistics), {})
        moved.append({name: update.weights[name] - p for name, p in start.items()})
    assert_close(moved[1], {name: factor * step for name, step in moved[0].items()})


def test_the_last_incomplete_batch_is_trained_on() -> None:
    w = worker(batch_size=4)
    assert trained(w)["encoder.1.num_batches_tracked"] == 4
    assert trained(worker(batch_size=4, drop_last=True))["encoder.1.num_batches_tracked"] == 3


def test_a_single_sample_is_normalised_with_the_running_statistics_and_leaves_them_alone() -> None:
    w = worker(batch_size=1, momentum=0.0)
    result = trained(w)
    assert torch.equal(result["encoder.1.running_mean"], torch.zeros(4))
    assert torch.equal(result["encoder.1.running_var"], torch.ones(4))
    assert result["encoder.1.num_batches_tracked"] == 0
    assert not torch.equal(result["head.weight"], tiny.model().head.weight)
    # The whole round by hand: batch norm in evaluation mode is an affine map.
    model = copy.deepcopy(tiny.model()).eval()
    for i in w.plan("ward", 0).order.tolist():
        x, y = w.federation.images[i : i + 1].float() / 255, w.federation.labels[i : i + 1]
        model.zero_grad()
        logits = model(x).logits
        (torch.logsumexp(logits, 1) - logits[0, y]).mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
    assert_close(result, weights(model))


def test_a_single_sample_at_the_end_leaves_the_statistics_of_the_batches_before() -> None:
    w = worker(batch_size=13)  # 13 + 1
    first = w.plan("ward", 0).order[:13]
    z = w.model.encoder[0](w.federation.images[first].float() / 255).detach()  # type: ignore[index]
    result = trained(w)
    torch.testing.assert_close(result["encoder.1.running_mean"], 0.1 * z.mean((0, 2, 3)))
    assert result["encoder.1.num_batches_tracked"] == 1


def test_a_batch_norm_over_vectors_survives_a_single_sample() -> None:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.BatchNorm1d(4))
    network = Classifier(encoder, nn.Linear(4, 4), 4, 4)
    trained(worker(network=network, batch_size=13, evaluate_with="batch"))


class Spoils(Method):
    """A loss of NaN on some clients."""

    name = "spoils"

    def __init__(self, clients: set[str], value: float = math.nan) -> None:
        self.clients, self.value = clients, value

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        return output.logits.sum() * self.value if client.name in self.clients else 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_a_client_whose_loss_is_not_finite_is_dropped_and_the_others_go_on(
    tmp_path: Path, executor: str, value: float
) -> None:
    notes = tiny.Notes()
    method = Spoils({"clinic"}, value)
    run = tiny.run(tmp_path / "r", method, **tiny.by(executor), rounds=2, observer=notes)
    assert [(r["client"], r["round"]) for r in run.records("dropped")] == [("clinic", 0), ("clinic", 1)]
    assert [r["client"] for r in run.records("client")] == ["ward", "hospital"] * 2
    assert all("'clinic' is dropped, its loss became" in note for note in notes.notes)
    assert len(notes.notes) == 2
    without = {name: size for name, size in tiny.SIZES.items() if name != "clinic"}
    assert run.summary is not None
    assert run.summary["dropped_updates"] == 2
    assert len(without) == 2


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_the_run_stops_when_every_client_fails(tmp_path: Path, executor: str) -> None:
    with pytest.raises(
        TrainingError, match="No client had a usable update in round 1; the last: 'hospital', its loss"
    ) as e:
        tiny.run(tmp_path / "r", Spoils(set(tiny.SIZES)), **tiny.by(executor))
    assert "\n" not in str(e.value)


def test_a_client_does_not_remember_what_is_not_finite() -> None:
    class Explodes(Method):
        name, traits = "explodes", Traits(needs_memory=True)

        def finish(self, client: LocalClient) -> Tensors:
            client.memory["x"] = torch.tensor([math.inf])
            return {}

    w = worker(Explodes())
    with pytest.raises(ClientFailure, match="'explodes/x' holds a value that is not finite"):
        w.train("ward", tiny.broadcast(w), {})


def test_a_method_can_recompute_gradients() -> None:
    class Twice(Method):
        name = "twice"

        def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
            before = [p.grad.clone() for p in client.model.parameters() if p.grad is not None]
            with torch.no_grad():
                for p in client.model.parameters():
                    p.mul_(1.0)
            recompute()
            after = [p.grad for p in client.model.parameters() if p.grad is not None]
            assert all(torch.allclose(a, b) for a, b in zip(before, after, strict=True))

    assert_close(trained(worker(Twice())), weights_of(trained(worker())))


def weights_of(result: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in result.items() if "running" not in name and "num_" not in name}


def test_nothing_goes_from_one_client_to_the_next() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(()), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0.1 * self.cache
            self.cache += 1
            return x

    network = tiny.model()
    network.encoder = nn.Sequential(Remembers(), *network.encoder)  # type: ignore[arg-type]
    w = worker(network=network)
    message = tiny.broadcast(w)
    alone, _ = w.train("ward", message, {})
    w.train("clinic", message, {})
    after, _ = w.train("ward", message, {})
    assert all(torch.equal(alone.weights[name], after.weights[name]) for name in alone.weights)


def test_dropout_is_seeded_by_client_and_round() -> None:
    network = tiny.model()
    network.encoder.append(nn.Dropout(0.5))  # type: ignore[operator]
    w = worker(network=network)
    message = tiny.broadcast(w)
    results = []
    for _ in range(2):
        torch.rand(3)  # the default generator is somewhere else
        results.append(w.train("ward", message, {})[0].weights["head.weight"])
    assert torch.equal(*results)
    other, _ = w.train("ward", type(message)(1, 3, message.weights, message.statistics), {})
    assert not torch.equal(results[0], other.weights["head.weight"])


class _Viewing(nn.Module):
    """Flattens by `view`, as much code does: impossible with the channels last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.fc = nn.Linear(4 * 8 * 8, len(tiny.CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(torch.relu(self.conv(x)).view(len(x), -1))
        return logits


def test_a_network_that_flattens_by_view_trains_all_the_same(tmp_path: Path) -> None:
    from fedkeel import simulate
    from fedkeel.models import wrap

    run = simulate(federation=tiny.federation(), model=wrap(_Viewing(), head="fc"), rounds=1, directory=tmp_path / "r")
    assert run.finished
