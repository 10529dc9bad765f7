"""A client's dropout masks are its own: the same whoever trained before or beside it, and after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from fedkeel import models, simulate
from fedkeel.engine.executors.serial import SerialExecutor
from fedkeel.engine.local import Worker
from fedkeel.models import Classifier
from tests import tiny
from tests.engine.executors.pretended import pretend

METHODS = ["fedavg", "greg", "fedsam", "hbn", "fedfa", "fediir", "scaffold"]


def network(p: float = 0.5) -> Classifier:
    """One layer used twice and another kind."""
    model = tiny.model()
    convolution, norm, relu, pool, flatten = model.encoder  # type: ignore[misc]
    shared = nn.Dropout(p)
    model.encoder = nn.Sequential(convolution, norm, relu, nn.Dropout2d(p), pool, flatten, shared, nn.ReLU(), shared)
    return model


class Unknown(nn.Module):
    """Draws from torch's default generator in a way that no surgery knows."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).uniform_(0.5, 1.5) if self.training else x


def masks(worker: Worker, client: str, round: int = 0) -> list[tuple[float, ...]]:
    """What the shared layer left of its first input, in every step of this client and round."""
    seen: list[tuple[float, ...]] = []
    inputs = next(m for m in worker.model.modules() if type(m).__name__ == "Flatten")
    ones = inputs.register_forward_hook(lambda _, __, output: output * 0 + 1)  # so that zeros are those of the mask
    layer = list(worker.model.encoder.children())[-2]  # after `Flatten`
    hook = layer.register_forward_hook(lambda _, __, output: seen.append(tuple((output.flatten() != 0)[:16].tolist())))
    worker.train(client, tiny.broadcast(worker, round), {})
    ones.remove()
    hook.remove()
    return seen


@pytest.mark.parametrize("beside", [False, True], ids=["one after another", "side by side"])
def test_masks_differ_between_clients_rounds_and_steps_and_nothing_else_matters(beside: bool) -> None:
    def made(**options: Any) -> Worker:
        worker = tiny.setup(network=network(), **options).worker
        return worker.twin() if beside else worker

    worker = made()
    of_ward = masks(worker, "ward")
    assert len(set(of_ward)) > 0.9 * len(of_ward)
    others = masks(worker, "clinic") + masks(worker, "hospital") + masks(worker, "ward", round=1)
    assert len(set(of_ward) & set(others)) <= 1  # sixteen values are equal by chance once in 65,536 pairs
    torch.rand(5)
    assert masks(worker, "ward") == of_ward
    assert masks(made(), "ward") == of_ward
    assert masks(made(seed=1), "ward") != of_ward


@pytest.mark.parametrize("method", ["fedavg", "greg", "fedsam"])
def test_clients_whose_steps_alternate_are_what_they_are_one_after_another(method: str) -> None:
    """As in the slots of a GPU, where all clients would draw from one generator."""
    worker = tiny.setup(method, network=network()).worker
    message, names = tiny.broadcast(worker, round=1), ["ward", "clinic", "hospital"]
    expected = {name: worker.twin().train(name, message, {})[0] for name in names}
    state = torch.get_rng_state()
    twins = {name: worker.twin() for name in names}
    clients = {name: twin.begin(name, message, {}) for name, twin in twins.items()}
    batches = worker.store.batches
    plans = {name: list(batches(worker.plan(name, 1), worker.federation.train_transform)) for name in names}
    for number in range(max(map(len, plans.values()))):
        for name, twin in twins.items():
            if number < len(plans[name]):
                twin.step(clients[name], plans[name][number])
    for name, twin in twins.items():
        update, _ = twin.end(clients[name], 0.0)
        assert all(torch.equal(update.weights[n], tensor) for n, tensor in expected[name].weights.items()), name
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, "unknown"])
def test_processes_and_serial_agree_with_dropout(method: str, tmp_path: Path) -> None:
    results = []
    for executor, workers in (("serial", 0), ("processes", 3)):
        model = network()
        if method == "unknown":
            model.encoder.append(Unknown())  # type: ignore[operator]
        named = "fedavg" if method == "unknown" else method
        options: dict[str, Any] = {"executor": executor, "workers": workers, "threads": 1, "rounds": 2}
        run = tiny.run(tmp_path / executor, named, network=model, **options)
        results.append(safetensors.torch.load_file(run.directory / "model.safetensors"))
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=1e-4, atol=1e-6)


def test_what_draws_from_it_trains_as_under_serial_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card = pretend(monkeypatch.setattr)
    model = network()
    model.encoder.append(Unknown())  # type: ignore[operator]
    setup = tiny.setup(network=model, executor="cuda")
    message, tasks = tiny.broadcast(setup.worker), tiny.training("ward", "clinic")
    expected = {result.client: result for result in SerialExecutor(setup.worker).map(tasks, message)}
    executor = setup.executor()
    for _ in range(2):
        for result in executor.map(tasks, message):
            one, other = (found.outcome.weights for found in (result, expected[result.client]))  # type: ignore[union-attr]
            assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
    assert card.replays == 0
    assert caplog.text.count("the model or the method draws from torch's default generator") == 1


@pytest.mark.parametrize("method", ["fedavg", "greg", "fedsam"])
@pytest.mark.slow
def test_a_resumed_run_with_dropout_is_the_run_that_was_never_stopped(method: str, tmp_path: Path) -> None:
    def stop(round: int) -> None:
        if round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.run(tmp_path / "stopped", method, network=network(), observer=tiny.Notes(stop))
    whole = tiny.run(tmp_path / "whole", method, network=network())
    assert tiny.result(tiny.resume(tmp_path / "stopped", network=network())) == tiny.result(whole)


@pytest.mark.slow
def test_the_model_that_a_run_returns_has_torchs_own_layers(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 1, "batch_size": 16, "device": "cpu", "executor": "serial", "subsample": 16}
    data = "digits-shift(train_transform='resize(size=8)', test_transform='resize(size=8)')"
    run = simulate(data=data, model="digits_cnn", directory=tmp_path / "r", **settings)
    model = run.model()
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert [type(module) for module in dropouts] == [nn.Dropout]
    with torch.random.fork_rng():
        plain = models.build("digits_cnn", num_classes=model.num_classes, image_size=8)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert list(model.state_dict()) == list(plain.state_dict())


def test_the_network_that_was_given_stays_as_it_is(tmp_path: Path) -> None:
    given = network()
    tiny.run(tmp_path / "r", network=given, rounds=1)
    assert [type(m) for m in given.modules() if "Dropout" in type(m).__name__] == [nn.Dropout2d, nn.Dropout]
