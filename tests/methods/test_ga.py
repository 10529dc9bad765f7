from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from fedkeel.core import state
from fedkeel.core.state import select
from fedkeel.data.federation import Federation
from fedkeel.engine.rounds import Federated
from fedkeel.engine.tasks import Result
from fedkeel.methods.ga import adjusted
from tests.methods.small import broadcast, names, small_federation, started


def with_validation(seed: int = 0) -> Federation:
    """The small federation with eight validation images for each client, of random labels."""
    on = small_federation()
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (24, 3, 8, 8), generator=generator).to(torch.uint8)
    labels = torch.randint(0, 4, (24,), generator=generator)
    start = len(on.images)
    clients = [
        replace(client, validation=torch.arange(start + 8 * k, start + 8 * k + 8))
        for k, client in enumerate(on.clients)
    ]
    return replace(
        on, images=torch.cat([on.images, images]), labels=torch.cat([on.labels, labels]), clients=tuple(clients)
    )


def weights_of(run: Federated) -> dict[str, float]:
    known = {name: float(a) for name, a in select(run.server.memory, "ga/weight").items()}
    return {name: known.get(name, 1 / len(names(run))) for name in names(run)}


def accuracy(run: Federated, indices: torch.Tensor, tensors: state.Tensors) -> float:
    """Of a model with these tensors, in evaluation mode, image by image in float64."""
    model = copy.deepcopy(run.setup.worker.model).double().eval()
    model.load_state_dict({name: t.double() if t.is_floating_point() else t for name, t in tensors.items()})
    total = 0.0
    for i in indices.tolist():
        logits = model(run.setup.federation.images[i : i + 1].double() / 255).logits.detach()
        total += int(logits.argmax()) == int(run.setup.federation.labels[i])
    return total / len(indices)


# -- the rule ----------------------------------------------------------------------------------------------------
def test_the_client_whose_accuracy_dropped_most_gains_most():
    """MarsFL has the sign reversed."""
    start = dict.fromkeys("abc", 1 / 3)
    new = adjusted(start, {"a": 0.3, "b": 0.1, "c": -0.2}, step=0.1)
    assert new["a"] > new["b"] > new["c"]
    assert new["a"] > 1 / 3 > new["c"]
    assert sum(new.values()) == pytest.approx(1)


def test_weights_stay_between_zero_and_one_and_keep_their_sum():
    new = adjusted({"a": 0.05, "b": 0.25}, {"a": -1.0, "b": 1.0}, step=0.1)
    assert new == pytest.approx({"a": 0.0, "b": 0.3})  # of a part of the clients, 0.3 in all
    assert adjusted({"a": 0.4, "b": 0.6}, {"a": 0.0, "b": 0.0}, step=0.1) == {"a": 0.4, "b": 0.6}
    assert adjusted({"a": 0.1}, {"a": -1.0}, step=0.2) == {"a": 0.1}
    assert adjusted({}, {}, step=0.2) == {}


# -- in a run ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("validation", [True, False])
def test_weights_follow_the_gaps_measured_image_by_image(tmp_path, validation):
    """On the validation data, or on the training data of clients that have none."""
    on = with_validation() if validation else small_federation()
    run = started("ga(step_size=0.6)", tmp_path, on, rounds=3)
    local = [run.setup.worker.train(name, broadcast(run), {})[0] for name in names(run)]
    run.round(0)
    weights, gaps = dict.fromkeys(names(run), 1 / 3), {}
    assert weights_of(run) == weights
    for update in local:
        site = run.setup.federation[update.client]
        indices = site.validation if validation else site.train
        own = accuracy(run, indices, update.weights | update.statistics)
        gaps[update.client] = own - accuracy(run, indices, run.server.weights | run.server.statistics)
    largest = max(abs(gap) for gap in gaps.values())
    assert largest > 0
    run.round(1)
    new = {name: weights[name] + 0.6 / 3 * gaps[name] / largest for name in weights}  # round 0 of 3: the whole step
    expected = {name: a / sum(new.values()) for name, a in new.items()}
    assert weights_of(run) == pytest.approx(expected, rel=1e-4)
    assert weights_of(run) != pytest.approx(weights, rel=1e-2)


def test_the_step_shrinks_from_round_to_round(tmp_path, monkeypatch):
    steps = []

    def remember(weights, _gaps, step):
        steps.append(step)
        return weights

    monkeypatch.setattr("fedkeel.methods.ga.adjusted", remember)
    run = started("ga(step_size=0.3)", tmp_path, rounds=4)
    for round in range(4):
        run.round(round)
    assert steps == pytest.approx([0.1, 0.075, 0.05])  # 0.3 (1 - t/4) over three clients


def test_weights_and_statistics_are_averaged_with_the_clients_weights(tmp_path):
    run = started("ga", tmp_path)
    shares = {"client0": 0.6, "client1": 0.3, "client2": 0.1}
    run.server.shares = shares
    updates = [run.setup.worker.train(name, broadcast(run), {})[0] for name in names(run)]
    run._aggregate(broadcast(run), [Result(update.client, update) for update in updates])
    for name, tensor in (run.server.weights | run.server.statistics).items():
        theirs = [(update.weights | update.statistics)[name].double() for update in updates]
        if name.endswith("num_batches_tracked"):
            assert tensor == max(theirs)
        else:
            expected = sum(a * t for a, t in zip(shares.values(), theirs, strict=True))
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)


def test_test_data_have_no_say(tmp_path):
    """MarsFL measures on the test data."""
    on = with_validation()
    other = replace(on, clients=tuple(replace(client, test=client.test[:1]) for client in on.clients))
    results = []
    for k, federation in enumerate((on, other)):
        run = started("ga", tmp_path / str(k), federation)
        run.round(0)
        run.round(1)
        results.append(weights_of(run))
    assert results[0] == results[1]


def test_absent_clients_keep_their_weight_and_the_sum_stays(tmp_path):
    run = started("ga", tmp_path, participation=0.67, rounds=6)
    before = weights_of(run)
    for round in range(5):
        trained = list(run.server.participants)
        run.round(round)
        after = weights_of(run)
        assert sum(after.values()) == pytest.approx(1)
        assert all(after[name] == before[name] for name in names(run) if name not in trained)
        before = after


def test_a_client_that_does_not_answer_keeps_its_weight(tmp_path):
    run = started("ga", tmp_path, with_validation())
    run.round(0)
    ask = run.server.asker
    run.server.asker = lambda *args: {n: a for n, a in ask(*args).items() if n != "client1"}  # type: ignore[misc]
    run.round(1)
    assert weights_of(run)["client1"] == 1 / 3
