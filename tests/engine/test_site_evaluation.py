"""Every client tested after calibration on images of its own: `evaluate_with="site"`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeel.core.client import Batch
from fedkeel.nn.calibration import Calibrator
from tests import tiny

LARGE = {"ward": 40, "clinic": 30, "hospital": 50}


def records(run: Any, statistics: str, split: str = "test") -> dict[str, dict[str, Any]]:
    found = [r for r in run.records("evaluation") if (r["statistics"], r["split"]) == (statistics, split)]
    last = max(record["round"] for record in found)
    return {record["client"]: record for record in found if record["round"] == last}


def test_a_client_is_tested_with_its_own_training_images_mixed_in() -> None:
    """Against a calibration of the same network by hand, on all of its images."""
    worker = tiny.setup(on=tiny.federation(LARGE), evaluate_with="all", site_images=0, evaluation_batch=7).worker
    message = tiny.broadcast(worker)
    as_it_is, _, site = worker.evaluate("ward", message, {}, ["test"])
    assert (as_it_is.statistics, site.statistics) == ("global", "site")

    ward, images, labels = worker.federation["ward"], worker.federation.images, worker.federation.labels
    network = tiny.model()
    network.load_state_dict({**message.weights, **message.statistics})
    network.eval()
    by_hand = copy.deepcopy(network)
    train = images[ward.train] / 255
    record = Calibrator(by_hand, lambda x: by_hand(x).logits).calibrate(lambda: [Batch(train, labels[ward.train])])
    assert record.share > 0
    with torch.no_grad():
        for model, result in ((network, as_it_is), (by_hand, site)):
            logits = model(images[ward.test] / 255).logits
            loss = torch.nn.functional.cross_entropy(logits, labels[ward.test], reduction="sum")
            assert result.loss_sum == pytest.approx(float(loss), rel=1e-4)


def test_the_next_client_and_the_next_round_begin_with_the_federations_statistics(tmp_path: Path) -> None:
    options: dict[str, Any] = {"on": tiny.federation(LARGE), "rounds": 3}
    plain = tiny.run(tmp_path / "plain", **options)
    tested = tiny.run(tmp_path / "tested", evaluate_with="all", **options)
    for name, tensor in plain.model().state_dict().items():
        assert torch.equal(tested.model().state_dict()[name], tensor)
    assert records(plain, "global") == records(tested, "global")
    assert plain.accuracy == tested.accuracy  # what is told of first stays that of the model as it is


def test_calibration_helps_where_images_look_different(tmp_path: Path) -> None:
    """The tiny clients differ in contrast and tint, and their losses say so."""
    run = tiny.run(tmp_path / "r", on=tiny.federation(LARGE), rounds=12, evaluate_with="all", site_images=0)
    before, after = (sum(r["loss"] for r in records(run, kind).values()) for kind in ("global", "site"))
    assert after < before


def test_what_is_told_is_of_the_calibrated_models_where_only_these_are_tested(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", on=tiny.federation(LARGE), evaluate_with="site", result="best-validation")
    assert {r["statistics"] for r in run.records("evaluation")} == {"site"}
    assert run.summary is not None
    assert run.summary["statistics"] == "site"
    assert set(run.measure("recall")) == {"bright", "dark", "tinted"}


def test_an_unseen_client_is_calibrated_on_some_of_its_test_images_and_tested_on_the_others(tmp_path: Path) -> None:
    on = tiny.federation(LARGE, unseen=40)
    for given, left in ((10, 30), (64, 20), (0, 20)):  # at least half are left
        run = tiny.run(tmp_path / f"{given}", on=on, rounds=1, evaluate_with="all", site_images=given)
        assert records(run, "site")["stranger"]["samples"] == left
        assert records(run, "global")["stranger"]["samples"] == 40


def test_labels_of_the_images_that_it_is_calibrated_on_do_not_matter() -> None:
    from dataclasses import replace

    on = tiny.federation(LARGE)
    other = on.labels.clone()
    for client in on.clients:
        other[client.train] = (other[client.train] + 1) % 4
    losses = []
    for federation in (on, replace(on, labels=other)):
        worker = tiny.setup(on=federation, evaluate_with="site").worker
        losses.append([worker.evaluate(c.name, tiny.broadcast(worker), {}, ["test"])[0].loss for c in on.clients])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "silobn", "hbn", "greg", "central"])
def test_it_composes_with_every_way_to_treat_statistics(method: str, tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", method, on=tiny.federation(LARGE, unseen=12), rounds=2, evaluate_with="all")
    assert records(run, "site").keys() == records(run, "global").keys()
    assert all(record["loss"] is not None for record in records(run, "site").values())


def test_a_client_without_trained_statistics_is_normalised_with_its_own_alone() -> None:
    """FedBN's layers stay on the clients, and a stranger has none: the prior would be that of an untrained network."""
    worker = tiny.setup("fedbn", on=tiny.federation(LARGE, unseen=24), evaluate_with="site").worker
    message = tiny.broadcast(worker)
    (found,) = worker.evaluate("stranger", message, {}, ["test"])
    state = {name: tensor.clone() for name, tensor in worker.model.state_dict().items()}
    x = worker.federation.images[worker.federation["stranger"].test] / 255
    inputs = worker.model.encoder[0](x).transpose(0, 1).flatten(1)
    assert found.samples == 12
    assert (state["encoder.1.running_mean"] - inputs.mean(1)).abs().max() < 0.05
    assert not torch.equal(state["encoder.1.running_mean"], torch.zeros(4))


@pytest.mark.parametrize("method", ["fixbn", "fbn", "fedcoda"])
def test_weights_that_were_trained_under_the_federations_statistics_keep_them(method: str, tmp_path: Path) -> None:
    on = tiny.federation(LARGE)
    for always in (False, True):
        run = tiny.run(tmp_path / f"{always}", method, on=on, rounds=4, evaluate_with="all", site_always=always)
        before, after = ([r["loss"] for r in records(run, kind).values()] for kind in ("global", "site"))
        assert (before == after) != always


def test_a_model_without_statistics_is_the_same_and_that_is_told(tmp_path: Path, caplog: Any) -> None:
    run = tiny.run(tmp_path / "r", network=tiny.model(norm=False), rounds=1, evaluate_with="all")
    for client, record in records(run, "site").items():
        assert record["loss"] == records(run, "global")[client]["loss"]
    assert "the model has no batch norm: nothing differs" in caplog.text


@pytest.mark.slow
def test_processes_give_the_numbers_of_serial(tmp_path: Path) -> None:
    on = tiny.federation(LARGE, unseen=31, test=33)
    options: dict[str, Any] = {"on": on, "rounds": 2, "evaluate_with": "all", "evaluation_batch": 4}
    serial = tiny.run(tmp_path / "serial", **options)
    parallel = tiny.run(tmp_path / "processes", executor="processes", workers=2, **options)
    for kind in ("global", "batch", "site"):
        for client, record in records(serial, kind).items():
            other = records(parallel, kind)[client]
            assert (other["samples"], other["accuracy"]) == (record["samples"], record["accuracy"])
            assert other["loss"] == pytest.approx(record["loss"], rel=1e-4)


def test_clients_that_share_a_test_set_are_each_tested_on_it(tmp_path: Path) -> None:
    import fedkeel

    data = "digits(train_transform='resize(size=8)', test_transform='resize(size=8)')"
    options: dict[str, Any] = {"partition": "even(clients=3)", "subsample": 40, "rounds": 1, "executor": "serial"}
    run = fedkeel.simulate(
        data=data, model="simple_cnn(width=4)", evaluate_with="all", directory=tmp_path / "r", verbose=False, **options
    )
    assert len(records(run, "site")) == 3
    assert len({record["loss"] for record in records(run, "global").values()}) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fedavg", "fedbn", "hbn"])
@pytest.mark.parametrize("batch", [256, 16])
def test_cuda_gives_the_numbers_of_serial(method: str, batch: int, tmp_path: Path) -> None:
    """With one batch, which settles all layers at once, and with several; replayed from the second round on."""
    on = tiny.federation({"ward": 64, "clinic": 64, "hospital": 64}, unseen=64, test=48)
    options: dict[str, Any] = {"on": on, "rounds": 4, "device": "cuda", "precision": "float32"}
    options |= {"evaluate_with": "all", "evaluation_batch": batch}
    serial = tiny.run(tmp_path / "serial", method, **options)
    cuda = tiny.run(tmp_path / "cuda", method, **{**options, "executor": "cuda"})
    for kind in ("global", "site"):
        for client, record in records(serial, kind).items():
            assert records(cuda, kind)[client]["loss"] == pytest.approx(record["loss"], rel=1e-2)
