from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedkeel import methods
from fedkeel.core.composition import Composition
from fedkeel.core.state import Tensors
from fedkeel.errors import MethodError
from tests import tiny
from tests.methods.small import names, pixels, small_model, started

RATE = 0.1


def classifier_gradient(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of the cross-entropy with respect to the head, written out: mean (p - y) f^T and mean (p - y)."""
    output = model(x)
    error = output.logits.softmax(1) - torch.eye(output.logits.shape[1], dtype=x.dtype)[y]
    return error.T @ output.features / len(y), error.mean(0)


def ward() -> tuple[Tensor, Tensor]:
    """The 14 samples of 'ward', in float64."""
    on = tiny.federation(augment="")
    indices = on["ward"].train
    return on.images[indices].double() / 255, on.labels[indices]


def mean_gradient(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {"weight": torch.randn(4, 16, generator=generator), "bias": torch.randn(4, generator=generator)}


def one_step(method: str, extras: Tensors, steps: int = 1) -> Tensors:
    worker = tiny.setup(
        method, on=tiny.federation(augment=""), batch_size=14, learning_rate=RATE, local_epochs=steps, momentum=0.0
    ).worker
    message = tiny.broadcast(worker, extras={f"fediir/{name}": tensor for name, tensor in extras.items()})
    return worker.train("ward", message, {})[0].weights


def objective(model: nn.Module, x: Tensor, y: Tensor, gamma: float, mean: Tensors) -> float:
    with torch.no_grad():
        weight, bias = classifier_gradient(model, x, y)
        entropy = -model(x).logits.log_softmax(1)[torch.arange(len(y)), y].mean()
        distance = (weight - mean["weight"]).square().sum() + (bias - mean["bias"]).square().sum()
    return float(entropy + gamma * distance)


def test_a_step_follows_the_gradient_of_cross_entropy_and_penalty_by_finite_differences():
    """Of the encoder too, which only the second-order term reaches through the penalty."""
    gamma, mean = 0.05, mean_gradient()
    new, plain = one_step(f"fediir(gamma={gamma})", mean), one_step("fediir(gamma=0)", mean)
    x, y = ward()
    model = tiny.model().double().train()
    wide = {name: tensor.double() for name, tensor in mean.items()}
    for name, parameter in model.named_parameters():
        flat = parameter.data.view(-1)
        for i in range(0, len(flat), 7):
            values = []
            for sign in (1, -1):
                flat[i] += sign * 1e-5
                values.append(objective(model, x, y, gamma, wide))
                flat[i] -= sign * 1e-5
            slope = (values[0] - values[1]) / 2e-5
            moved = (float(new[name].reshape(-1)[i]) - float(flat[i])) / -RATE
            assert moved == pytest.approx(slope, abs=2e-5, rel=2e-3), name
    assert (new["encoder.0.weight"] - plain["encoder.0.weight"]).abs().max() > 1e-4


def test_the_mean_gradient_is_over_all_batches_of_the_rounds_clients(tmp_path):
    """14, 9 and 21 samples in batches of 4 make 4, 3 and 6 batches, the last of them smaller."""
    setup = tiny.setup("fediir", network=tiny.model(norm=False))
    worker, total, batches = setup.worker, [torch.zeros(4, 16).double(), torch.zeros(4).double()], 0
    sums = []
    for name in ("ward", "clinic", "hospital"):
        message = tiny.broadcast(worker)
        answer, _ = worker.answer(name, message, {}, "fediir/gradient")
        model = copy.deepcopy(worker.model).double()
        for batch in worker.begin(name, message, {}).data.passes(4, augment=True, shuffle=True):
            for part, gradient in zip(total, classifier_gradient(model, batch.x.double(), batch.y), strict=True):
                part += gradient.detach()
            batches += 1
        sums.append(answer.tensors)
    assert [int(answer["batches"]) for answer in sums] == [4, 3, 6]
    torch.testing.assert_close(sum(answer["weight"].double() for answer in sums), total[0], rtol=1e-4, atol=1e-6)
    run = tiny.run(tmp_path / "r", "fediir(ema=0.8)", network=tiny.model(norm=False), rounds=1)
    stored = load_file(next(run.directory.glob("checkpoints/*/*.safetensors")))
    kept = {name.rpartition("/")[2]: tensor for name, tensor in stored.items() if "fediir" in name}
    torch.testing.assert_close(kept["weight"].double(), 0.2 * total[0] / batches, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(kept["bias"].double(), 0.2 * total[1] / batches, rtol=1e-4, atol=1e-7)


def test_the_server_keeps_a_moving_average_of_it(tmp_path):
    run = started("fediir(ema=0.75)", tmp_path, batch_size=64, learning_rate=0.05)
    expected = {"weight": torch.zeros(4, 8).double(), "bias": torch.zeros(4).double()}
    for round in range(3):
        model = copy.deepcopy(run.setup.worker.model)
        model.load_state_dict(run.server.weights | run.server.statistics)
        model = model.double().train()
        sums = {"weight": 0.0, "bias": 0.0}
        for name in names(run):
            y = run.setup.federation.labels[run.setup.federation[name].train]
            weight, bias = classifier_gradient(model, pixels(run.setup.federation, name).double(), y)
            sums = {"weight": sums["weight"] + weight.detach(), "bias": sums["bias"] + bias.detach()}
        expected = {n: 0.75 * old + 0.25 * sums[n] / 3 for n, old in expected.items()}
        run.round(round)
        for name, tensor in expected.items():
            torch.testing.assert_close(run.server.extras[f"fediir/{name}"].double(), tensor, rtol=1e-3, atol=1e-6)


# -- everywhere --------------------------------------------------------------------------------------------------


def test_a_classifier_that_does_not_train_is_refused():
    model = small_model()
    model.head.requires_grad_(False)
    with pytest.raises(MethodError, match="none of its parameters trains"):
        Composition.of(methods.build("fediir")).prepare(model)
