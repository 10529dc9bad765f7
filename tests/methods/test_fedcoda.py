from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedkeel import methods
from fedkeel.core.checking import check
from fedkeel.core.messages import Update
from fedkeel.core.method import Method
from fedkeel.engine.rounds import Federated
from fedkeel.errors import MethodError
from tests.methods.small import Probe, broadcast, pixels, small_federation, small_model, started

UNEVEN = [[0, 1, 2] * 4, [0, 0, 0, 1], [0, 2, 2]]  # class 3 is nowhere, class 2 not on client1


def train(run: Federated, name: str = "client0", round: int = 0, memory: dict[str, Tensor] | None = None) -> Update:
    return run.setup.worker.train(name, broadcast(run, round), memory or {})[0]


# -- batch norm ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rounds", "share", "first"), [(4, 0.5, 2), (5, 0.5, 3), (100, 0.5, 50), (100, 0.07, 7), (10, 0.0, 0), (3, 1.0, 3)]
)
def test_calibration_begins_exactly_at_its_round(rounds, share, first):
    method = methods.build("fedcoda", calibrate_from=share)
    assert [method.calibrates(round, rounds) for round in range(rounds)] == [t >= first for t in range(rounds)]


def test_batch_norm_is_untouched_by_local_batches_from_the_calibration_on(tmp_path):
    run = started("fedcoda", tmp_path, rounds=4)
    for round in range(4):
        before = run.server.statistics
        run.round(round)
        after = run.server.statistics
        unchanged = all(torch.equal(tensor, before[name]) for name, tensor in after.items())
        assert unchanged == (round >= 2)


def test_calibrated_training_normalises_with_the_broadcast_statistics(tmp_path):
    """Other samples in the batch do not change a sample's features, and other statistics do."""
    outputs: dict[int, Tensor] = {}

    class Look(Method):
        name = "look"

        def loss(self, client, batch, output):
            outputs[client.round] = (output.features.detach().clone(), batch.x)
            return 0.0

    run = started([methods.build("fedcoda"), Look()], tmp_path, rounds=2, learning_rate=1e-9)
    model = run.setup.worker.model
    for round, calibrated in ((0, False), (1, True)):
        train(run, round=round)
        features, x = outputs[round]
        model.load_state_dict({**run.server.weights, **run.server.statistics})
        model.eval()
        assert torch.allclose(model(x).features, features, atol=1e-4) == calibrated


# -- clipping --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("history_from", "first"), [("start", 0), ("calibration", 2)])
def test_the_history_begins_where_it_is_asked_to(tmp_path, history_from, first):
    """By hand, over four rounds with calibration from the third on: a limit is 0.9 times the history, if there is any.

    Before it begins, nothing of it is kept or sent."""
    alpha, beta = 0.9, 0.5
    before, after = [], []  # of each step: the head's gradient norm as computed, and as the optimiser takes it

    class Before(Probe):
        name = "before"

    probes = [
        Before(gradients=lambda client: before.append(float(client.model.head.weight.grad.norm()))),
        Probe(gradients=lambda client: after.append(float(client.model.head.weight.grad.norm()))),
    ]
    method = methods.build("fedcoda", history_from=history_from, alpha=alpha, beta=beta)
    run = started([probes[0], method, probes[1]], tmp_path, small_federation([[0, 1, 2, 3] * 6]), rounds=4)
    gamma, steps = 0.0, 0
    for round in range(4):
        run.round(round)
        for norm, used in zip(before[steps:], after[steps:], strict=True):
            limit = alpha * gamma if round >= 2 and gamma else norm
            assert used == pytest.approx(min(norm, limit), rel=1e-5)
            if round >= first:
                gamma = beta * gamma + (1 - beta) * norm if gamma else norm
        steps = len(before)
        memory, sent = run.memory.look("client0"), run.server.extras
        assert ("fedcoda/history" in memory) == ("fedcoda/history" in sent) == (round >= first)
        if round >= first:
            assert float(memory["fedcoda/history"][8]) == pytest.approx(gamma, rel=1e-5)
    assert steps == 12
    assert any(used < norm for norm, used in zip(before, after, strict=True))


def test_a_new_client_starts_from_the_mean_history_of_the_others(tmp_path):
    run = started("fedcoda(beta=1.0)", tmp_path)
    run.server.extras = {"fedcoda/history": torch.full((10,), 0.25)}
    assert train(run, "client2", round=1).extras["fedcoda/history"].tolist() == [0.25] * 10

    own = {"fedcoda/history": torch.tensor([0.5] * 10)}
    assert train(run, "client2", round=1, memory=own).extras["fedcoda/history"].tolist() == [0.5] * 10


def test_the_servers_history_leaves_out_clients_that_have_none(tmp_path):
    run = started("fedcoda", tmp_path)
    updates = [train(run, name) for name in ("client0", "client1")]
    own = [
        replace(update, extras={name.partition("/")[2]: t for name, t in update.extras.items()} | {"history": history})
        for update, history in zip(updates, (torch.tensor([1.0, 0.0, 0.0]), torch.tensor([3.0, 4.0, 0.0])), strict=True)
    ]
    (part,), server = run.method.parts, run.server
    assert part.extras(server, own)["history"].tolist() == [2.0, 4.0, 0.0]
    prototypes = {name.partition("/")[2]: t for name, t in updates[0].extras.items()}
    server.extras = prototypes | {"history": torch.tensor([9.0, 9.0, 9.0])}
    assert part.extras(server, own)["history"].tolist() == [2.0, 4.0, 9.0]


# -- prototypes ------------------------------------------------------------------------------------------------
def test_local_prototypes_are_class_means_of_the_trained_model(tmp_path):
    federation = small_federation(UNEVEN)
    run = started("fedcoda", tmp_path, federation)
    update = train(run, "client1")
    check(update, broadcast(run))
    model = run.setup.worker.model
    model.load_state_dict({**update.weights, **update.statistics})
    features = model.eval()(pixels(federation, "client1")).features.detach()
    prototypes = update.extras["fedcoda/prototypes"]
    torch.testing.assert_close(prototypes[0], features[:3].mean(dim=0))
    torch.testing.assert_close(prototypes[1], features[3])
    assert update.extras["fedcoda/present"].tolist() == [True, True, False, False]
    assert torch.equal(prototypes[2:], torch.zeros(2, 8))


def test_a_fair_prototype_is_nearer_to_equidistant_than_the_mean(tmp_path):
    federation = small_federation([[0, 1, 2, 3] * 3] * 5)
    spreads = {}
    for aggregation in ("fair", "mean"):
        run = started(f"fedcoda(aggregation={aggregation})", tmp_path / aggregation, federation)
        updates = [train(run, f"client{k}") for k in range(5)]
        local = torch.stack([update.extras["fedcoda/prototypes"] for update in updates])  # (K, C, d)
        run.round(0)
        prototypes = run.server.extras["fedcoda/prototypes"]
        spreads[aggregation] = (local - prototypes).norm(dim=2).std(dim=0)  # of the distances, for each class
        if aggregation == "mean":
            torch.testing.assert_close(prototypes, local.mean(dim=0))
    assert (spreads["fair"] < 0.5 * spreads["mean"]).all()


@pytest.mark.parametrize(
    ("method", "clients", "told"), [("fedcoda", 9, 1), ("fedcoda", 8, 0), ("fedcoda(aggregation=mean)", 9, 0)]
)
def test_more_clients_than_features_are_told_once(tmp_path, caplog, method, clients, told):
    run = started(method, tmp_path, small_federation([[0, 1, 2, 3]] * clients))  # 8 features
    for round in range(2):
        run.round(round)
    assert sum(f"of {clients} clients can lie far off" in record.getMessage() for record in caplog.records) == told


def test_missing_classes(tmp_path):
    run = started("fedcoda", tmp_path, small_federation(UNEVEN))
    for round in range(3):
        run.round(round)
        prototypes, present = run.server.extras["fedcoda/prototypes"], run.server.extras["fedcoda/present"]
        assert present.tolist() == [True, True, True, False]
        assert torch.equal(prototypes[3], torch.zeros(8))
        assert torch.isfinite(prototypes).all()


# -- losses ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_losses_act_from_round_1_on_and_each_has_its_switch(tmp_path):
    variants = {
        "both": "fedcoda",
        "alignment": "fedcoda(calibrate_prototypes=false)",
        "calibration": "fedcoda(lambda_fa=0)",
        "neither": "fedcoda(lambda_fa=0, lambda_pc=0)",
    }
    weights: dict[str, list[Tensor]] = {}
    for name, text in variants.items():
        run = started(text, tmp_path / name)
        weights[name] = []
        for round in range(2):
            run.round(round)
            weights[name].append(run.server.weights["encoder.0.weight"])
    for name in variants:
        assert torch.equal(weights[name][0], weights["neither"][0])
        for other in variants:
            assert torch.equal(weights[name][1], weights[other][1]) == (name == other)
    assert "fedcoda/prototypes" not in run.server.extras


# -- with other models and methods -----------------------------------------------------------------------------


def test_without_batch_norm_only_the_rest_of_it_works(tmp_path):
    for i, norm in enumerate((nn.Identity, lambda c: nn.BatchNorm2d(c, track_running_stats=False))):
        with pytest.raises(MethodError, match="no layer has any that travel"):
            started("fedcoda", tmp_path / str(i), model=small_model(norm)).round(0)
    for text in ("fedcoda+gn", "fedcoda+fedwon", "silobn+fedcoda"):
        with pytest.raises(MethodError, match="no layer has any that travel"):
            started(text, tmp_path / text).round(0)
    started("fedcoda(calibrate_bn=false)", tmp_path, model=small_model(nn.Identity)).round(0)
