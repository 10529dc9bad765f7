from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import nn

from fedkeel.core import state
from fedkeel.methods import build
from fedkeel.methods.fedbn import batch_norm_entries
from fedkeel.models import Classifier
from fedkeel.runs.run import Run
from tests import tiny

NORM = [f"encoder.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]


def personal(run: Run, client: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run.directory / "personal" / f"{client}.safetensors")


def test_batch_norm_stays_and_the_rest_travels() -> None:
    layout = tiny.setup("fedbn").worker.layout
    assert sorted(layout.local) == sorted(NORM)
    assert layout.weights == ["encoder.0.weight", "encoder.0.bias", "head.weight", "head.bias"]
    assert layout.statistics == []


def test_layers_go_by_what_they_are_not_by_their_name() -> None:
    model = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2), 4, 2)
    model.encoder.add_module("bn_lookalike", nn.Linear(4, 4))
    assert all(name.startswith("encoder.2.") for name in batch_norm_entries(model))


def test_a_layer_used_in_two_places_stays_under_both_names() -> None:
    norm = nn.BatchNorm1d(4)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)
    model = Classifier(encoder, nn.Linear(4, 2), 4, 2)
    method = build("fedbn")
    method.prepare(model)
    travelling = [name for name, role in state.roles(model, method).items() if role is not state.Role.LOCAL]
    assert travelling == [
        "encoder.1.weight",
        "encoder.1.bias",
        "encoder.3.weight",
        "encoder.3.bias",
        "head.weight",
        "head.bias",
    ]


def test_a_client_is_evaluated_with_its_own_layers() -> None:
    worker = tiny.setup("fedbn").worker
    message = tiny.broadcast(worker)
    _, memory = worker.train("ward", message, {})
    scaled = {name: t * 3 if name.endswith("bias") or "mean" in name else t for name, t in memory.items()}
    losses = [worker.evaluate("ward", message, m, ["test"])[0].loss for m in (memory, scaled)]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("method", ["fedbn", "silobn"])
def test_an_unseen_client_follows_the_declared_rule(method: str) -> None:
    on = tiny.federation(unseen=6)
    for rule in ("batch", "initial"):
        worker = tiny.setup(f"{method}(unseen={rule})", on=on).worker
        initial = {name: t.clone() for name, t in worker.initial_local.items()}
        message = tiny.broadcast(worker)
        worker.train("ward", message, {})  # leaves ward's layers in the resident model
        (result,) = worker.evaluate("stranger", message, {}, ["test"])
        model = tiny.model()
        model.load_state_dict({**message.weights, **message.statistics, **initial})
        model.train(rule == "batch")
        indices = on["stranger"].test
        with torch.no_grad():
            logits = model(on.images[indices] / 255).logits
        loss = nn.functional.cross_entropy(logits, on.labels[indices], reduction="sum")
        assert result.loss_sum == pytest.approx(float(loss), rel=1e-5)
        assert result.statistics == "global"  # the column it is reported in
