from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedkeel import methods
from fedkeel.core.checking import check
from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import BadMessage, Update
from fedkeel.core.method import Method
from fedkeel.engine.executors.cuda.slot import variant_of
from fedkeel.engine.rounds import Federated
from fedkeel.errors import MethodError
from fedkeel.formulas.losses import feature_alignment, prototype_calibration
from fedkeel.formulas.prototypes import global_prototypes, local_prototypes
from tests.methods.small import CLASSES, Probe, broadcast, pixels, small_federation, small_model, started

CLIENTS = ["client0", "client1", "client2"]
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


def test_a_captured_step_knows_what_it_depends_on(tmp_path):
    run = started("fedcoda", tmp_path, small_federation([[0, 1, 2, 3]]))
    variants = []
    for round in range(4):
        run.round(round)
        sent = run.server.broadcast(run.server.weights)
        client = run.setup.worker.begin(run.federation.clients[0].name, replace(sent, round=round), {})
        variants.append(("fedcoda", "calibrates", round >= 2) in variant_of(client))
    assert variants == [True] * 4


def test_without_batch_norm_calibration_statistics_go_on_changing(tmp_path):
    run = started("fedcoda(calibrate_bn=false)", tmp_path, rounds=2)
    update = train(run, round=1)
    assert not torch.equal(update.statistics["encoder.1.running_mean"], run.server.statistics["encoder.1.running_mean"])
    assert "fedcoda/history" not in update.extras


# -- clipping --------------------------------------------------------------------------------------------------
def lengths(directory, method: str, round: int, history: float | None = None) -> tuple[list[float], Update]:
    """Length of the head's gradient after clipping, at every step, and the update."""
    seen: list[float] = []
    probe = Probe(gradients=lambda client: seen.append(float(client.model.head.weight.grad.norm())))
    run = started([methods.build(method), probe], directory, rounds=4)
    memory = {} if history is None else {"fedcoda/history": torch.full((10,), history)}
    return seen, train(run, round=round, memory=memory)


def test_gradients_are_clipped_against_their_history_only_after_the_calibration(tmp_path):
    seen, _ = lengths(tmp_path / "a", "fedcoda(alpha=1.5, beta=1.0)", round=2, history=1e-3)
    assert seen == pytest.approx([1.5e-3] * 3)
    seen, update = lengths(tmp_path / "b", "fedcoda(alpha=1.5, beta=1.0)", round=1, history=1e-3)
    assert min(seen) > 1e-2
    assert update.extras["fedcoda/history"].tolist() == pytest.approx([1e-3] * 10)


def test_the_history_is_of_unclipped_norms_and_kept_from_round_0(tmp_path):
    seen, update = lengths(tmp_path, "fedcoda(beta=0.9)", round=0)
    gamma = seen[0]
    for norm in seen[1:]:
        gamma = 0.9 * gamma + 0.1 * norm
    assert float(update.extras["fedcoda/history"][8]) == pytest.approx(gamma, rel=1e-5)

    run = started("fedcoda", tmp_path / "memory")
    run.round(0)
    for name in CLIENTS:
        assert (run.memory.look(name)["fedcoda/history"] > 0).all()


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


def test_a_history_that_comes_too_early_is_not_expected(tmp_path):
    run = started("fedcoda(history_from=calibration)", tmp_path, rounds=4)
    update = train(run)
    run.method.check_extras(run.server, update.extras)
    with pytest.raises(BadMessage, match="not expected"):
        run.method.check_extras(run.server, update.extras | {"fedcoda/history": torch.ones(10)})
    run.server.round = 2
    with pytest.raises(BadMessage, match="missing"):
        run.method.check_extras(run.server, update.extras)


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


def test_fixed_clipping_and_none(tmp_path):
    totals: dict[str, list[float]] = {}
    for clip in ("fixed", "none"):
        for round in (1, 2):
            seen = totals.setdefault(f"{clip}{round}", [])

            def look(client: LocalClient, seen: list[float] = seen) -> None:
                seen.append(float(torch.stack([p.grad.norm() for p in client.model.parameters()]).norm()))

            method = methods.build("fedcoda", clip=clip, **({"clip_norm": 0.01} if clip == "fixed" else {}))
            run = started([method, Probe(gradients=look)], tmp_path / f"{clip}{round}")
            assert "history" not in str(list(train(run, round=round).extras))
    assert totals["fixed2"] == pytest.approx([0.01] * 3, rel=1e-3)
    assert min(totals["fixed1"] + totals["none1"] + totals["none2"]) > 0.1


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


def test_prototypes_do_not_depend_on_how_samples_are_batched():
    model, x, y = small_model(), torch.rand(10, 3, 8, 8), torch.tensor([0, 1, 1, 0, 3, 3, 3, 0, 1, 3])
    whole, counts = local_prototypes(model, [Batch(x, y)], CLASSES)
    parts, _ = local_prototypes(model, [Batch(x[i : i + 3], y[i : i + 3]) for i in range(0, 10, 3)], CLASSES)
    torch.testing.assert_close(whole, parts)
    assert counts.tolist() == [3, 3, 0, 4]
    assert model.training


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


def test_a_class_that_no_client_of_a_round_has_keeps_its_prototype():
    def mean(rows: Tensor) -> Tensor:
        return rows.mean(dim=0)

    has = torch.tensor
    first = global_prototypes([torch.ones(3, 2), 3 * torch.ones(3, 2)], [has([1, 1, 0]) > 0, has([1, 0, 0]) > 0], mean)
    second = global_prototypes([torch.full((3, 2), 9.0)], [has([1, 0, 0]) > 0], mean, first)
    assert first[0][:, 0].tolist() == [2.0, 1.0, 0.0]
    assert second[0][:, 0].tolist() == [9.0, 1.0, 0.0]
    assert second[1].tolist() == [True, True, False]
    assert first[0][:, 0].tolist() == [2.0, 1.0, 0.0]  # not changed in place


def test_a_single_client(tmp_path):
    run = started("fedcoda", tmp_path, small_federation([[0, 1, 2, 3] * 3]))
    for round in range(3):
        run.round(round)
    local = train(run, round=3).extras["fedcoda/present"]
    assert local.all()
    assert all(torch.isfinite(tensor).all() for tensor in run.server.extras.values())


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


def test_alignment_draws_features_to_their_prototypes_and_calibration_draws_classes_apart(tmp_path):
    losses: dict[str, tuple[float, float]] = {}
    for name, text in {
        "neither": "fedcoda(lambda_fa=0, lambda_pc=0.000001)",
        "alignment": "fedcoda(lambda_fa=2, calibrate_prototypes=false)",
        "calibration": "fedcoda(lambda_fa=0, lambda_pc=2)",
    }.items():
        run = started(text, tmp_path / name, learning_rate=0.03)
        run.round(0)
        prototypes, present = run.server.extras["fedcoda/prototypes"], run.server.extras["fedcoda/present"]
        update = train(run, round=1)
        model = run.setup.worker.model
        model.load_state_dict({**update.weights, **update.statistics})
        features = model.eval()(pixels(run.federation, "client0")).features.detach()
        y = torch.tensor([0, 1, 2, 3] * 6)
        losses[name] = (
            float(feature_alignment(features, y, prototypes, 0.1, present)),
            float(prototype_calibration(features, y, prototypes, present)),
        )
    assert losses["alignment"][0] < losses["neither"][0]
    assert losses["calibration"][1] < losses["neither"][1]


class NoWaiting(TorchDispatchMode):
    """Fails on every operation that would make the host wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["adaptive", "fixed"])
def test_a_step_does_not_wait_for_the_device(tmp_path, clip):
    method = methods.build("fedcoda", clip=clip)

    class Watched(type(method)):  # type: ignore[misc]
        def loss(self, client, batch, output):
            with NoWaiting():
                return super().loss(client, batch, output)

        def gradients(self, client, recompute):
            with NoWaiting():
                super().gradients(client, recompute)

    method.__class__ = Watched
    run = started(method, tmp_path)
    for round in range(3):
        run.round(round)


# -- with other models and methods -----------------------------------------------------------------------------


def test_stateless_clients_will_do(tmp_path):
    run = started("fedcoda", tmp_path, stateless=True)
    for round in range(3):
        run.round(round)
    assert run.memory.look("client0") == {}
    assert (run.server.extras["fedcoda/history"] > 0).all()


def test_without_batch_norm_only_the_rest_of_it_works(tmp_path):
    for i, norm in enumerate((nn.Identity, lambda c: nn.BatchNorm2d(c, track_running_stats=False))):
        with pytest.raises(MethodError, match="no layer has any that travel"):
            started("fedcoda", tmp_path / str(i), model=small_model(norm)).round(0)
    for text in ("fedcoda+gn", "fedcoda+fedwon", "silobn+fedcoda"):
        with pytest.raises(MethodError, match="no layer has any that travel"):
            started(text, tmp_path / text).round(0)
    started("fedcoda(calibrate_bn=false)", tmp_path, model=small_model(nn.Identity)).round(0)
