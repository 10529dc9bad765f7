"""A client's dropout masks are its own: the same under every executor, in every order, and after a stop."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from fedkeel import models, simulate
from fedkeel.engine.local import Worker
from fedkeel.models import Classifier
from tests import tiny

METHODS = ["fedavg", "greg", "fedsam", "hbn", "fedfa", "fediir", "scaffold"]


def network(p: float = 0.5) -> Classifier:
    """One layer used twice and another kind."""
    model = tiny.model()
    convolution, norm, relu, pool, flatten = model.encoder  # type: ignore[misc]
    shared = nn.Dropout(p)
    model.encoder = nn.Sequential(convolution, norm, relu, nn.Dropout2d(p), pool, flatten, shared, nn.ReLU(), shared)
    return model


def masks(worker: Worker, client: str, round: int = 0) -> list[tuple[float, ...]]:
    """What the shared layer left of its first input, in every step of this client and round."""
    seen: list[tuple[float, ...]] = []
    layer = next(m for m in worker.model.modules() if type(m).__name__ == "Dropout")

    def note(_: nn.Module, __: tuple[Tensor], output: Tensor) -> None:
        seen.append(tuple((output.flatten() != 0)[:16].tolist()))

    inputs = next(m for m in worker.model.modules() if type(m).__name__ == "Flatten")
    ones = inputs.register_forward_hook(lambda _, __, output: output * 0 + 1)  # so that zeros are those of the mask
    hook = layer.register_forward_hook(note)
    worker.train(client, tiny.broadcast(worker, round), {})
    ones.remove()
    hook.remove()
    return seen


def test_masks_differ_between_clients_rounds_and_steps_and_nothing_else_matters() -> None:
    worker = tiny.setup(network=network()).worker
    of_ward = masks(worker, "ward")
    assert len(set(of_ward)) > 0.9 * len(of_ward)
    others = masks(worker, "clinic") + masks(worker, "hospital") + masks(worker, "ward", round=1)
    assert len(set(of_ward) & set(others)) <= 1  # sixteen values are equal by chance once in 65,536 pairs
    torch.rand(5)
    assert masks(worker, "ward") == of_ward
    assert masks(tiny.setup(network=network()).worker.twin(), "ward") == of_ward
    assert masks(tiny.setup(network=network(), seed=1).worker, "ward") != of_ward


def test_torchs_default_generator_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tiny.setup(network=network()).worker
    message = tiny.broadcast(worker)
    expected, _ = worker.train("ward", message, {})
    for name in ("dropout", "feature_dropout", "bernoulli"):
        monkeypatch.setattr(torch, name, lambda *_, **__: pytest.fail("torch drew"))
    state = torch.get_rng_state()
    again, _ = worker.train("ward", message, {})
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in expected.weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_processes_and_serial_agree_with_dropout(method: str, tmp_path: Path) -> None:
    results = []
    for executor, workers in (("serial", 0), ("processes", 3)):
        run = tiny.run(
            tmp_path / executor, method, network=network(), rounds=2, executor=executor, workers=workers, threads=1
        )
        results.append(safetensors.torch.load_file(run.directory / "model.safetensors"))
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["fedavg", "greg", "fedsam"])
def test_a_resumed_run_with_dropout_is_the_run_that_was_never_stopped(method: str, tmp_path: Path) -> None:
    def stop(round: int) -> None:
        if round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.run(tmp_path / "stopped", method, network=network(), observer=tiny.Notes(stop))
    whole = tiny.run(tmp_path / "whole", method, network=network())
    assert tiny.result(tiny.resume(tmp_path / "stopped", network=network())) == tiny.result(whole)


@pytest.mark.slow
def test_a_compiled_network_draws_the_same_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in its backward pass, which a compiler may begin with masks of its own."""
    # This backend parts forward and backward as the default does, and leaves out the slow half, the machine code.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    results = []
    for compile in (False, True):
        run = tiny.run(tmp_path / str(compile), network=network(), rounds=1, compile=compile)
        results.append(safetensors.torch.load_file(run.directory / "model.safetensors"))
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_the_model_that_a_run_returns_has_torchs_own_layers(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 1, "batch_size": 16, "device": "cpu", "executor": "serial"}
    name = "mobilenetv2(stem=small, dropout=0.5)"
    run = simulate(data="digits-shift", model=name, directory=tmp_path / "r", subsample=16, **settings)
    model = run.model()
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    assert [type(module) for module in dropouts] == [nn.Dropout]
    with torch.random.fork_rng():
        plain = models.build_spec(name, num_classes=model.num_classes, in_channels=3, image_size=(28, 28))
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert list(model.state_dict()) == list(plain.state_dict())


def test_the_network_that_was_given_stays_as_it_is(tmp_path: Path) -> None:
    given = network()
    tiny.run(tmp_path / "r", network=given, rounds=1)
    assert [type(m) for m in given.modules() if isinstance(m, nn.Dropout)] == [nn.Dropout]
    assert not hasattr(given, "dropout_draws")
