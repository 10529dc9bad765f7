from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeel.config import Config
from fedkeel.core.evaluation import Evaluation, summarise
from fedkeel.engine.local import Worker
from fedkeel.models import Classifier
from tests import tiny


def randomised(worker: Worker) -> Worker:
    """Running statistics that are not those of any batch."""
    norm = worker.model.encoder[1]  # type: ignore[index]
    norm.running_mean.copy_(torch.tensor([0.5, -0.3, 0.2, 0.1]))
    norm.running_var.copy_(torch.tensor([0.2, 3.0, 0.5, 1.5]))
    return worker


def brute_force(model: Classifier, x: torch.Tensor, y: torch.Tensor) -> tuple[int, float]:
    correct, loss = 0, 0.0
    with torch.no_grad():
        logits = model(x).logits
    for row, label in zip(logits.tolist(), y.tolist(), strict=True):
        correct += row.index(max(row)) == label
        loss -= float(torch.log_softmax(torch.tensor(row, dtype=torch.float64), 0)[label])
    return correct, loss


@pytest.mark.parametrize("batch", [1, 3, 256])
def test_counts_and_loss_against_brute_force(batch: int) -> None:
    worker = randomised(tiny.setup(evaluation_batch=batch).worker)
    message = tiny.broadcast(worker)
    for client in worker.federation:
        for result in worker.evaluate(client.name, message, {}, ["test", "validation"]):
            indices = client.test if result.split == "test" else client.validation
            model = worker.model.eval()
            x, y = worker.federation.images[indices] / 255, worker.federation.labels[indices]
            correct, loss = brute_force(model, x, y)
            assert (result.correct, result.samples) == (correct, len(indices))
            assert result.loss_sum == pytest.approx(loss, rel=1e-5)
            assert (result.client, result.domain, result.statistics) == (client.name, client.domain, "global")


def test_batch_statistics_differ_and_leave_the_running_ones_alone() -> None:
    worker = randomised(tiny.setup(evaluate_with="both").worker)
    message = tiny.broadcast(worker)
    before = {name: t.clone() for name, t in worker.model.state_dict().items()}
    results = worker.evaluate("ward", message, {}, ["test"])
    assert [r.statistics for r in results] == ["global", "batch"]
    assert results[0].loss != results[1].loss
    assert all(torch.equal(before[name], t) for name, t in worker.model.state_dict().items())
    # By hand: the same network in training mode.
    indices = worker.federation["ward"].test
    copied = tiny.model()
    copied.load_state_dict(before)
    _, loss = brute_force(copied.train(), worker.federation.images[indices] / 255, worker.federation.labels[indices])
    assert results[1].loss_sum == pytest.approx(loss, rel=1e-5)


def test_a_single_sample_under_batch_statistics_uses_the_global_ones() -> None:
    worker = randomised(tiny.setup(evaluate_with="both", evaluation_batch=1).worker)
    one, other = worker.evaluate("ward", tiny.broadcast(worker), {}, ["test"])
    assert one.loss_sum == other.loss_sum


def entry(client: str, domain: str, correct: int, samples: int, loss: float = 1.0) -> Evaluation:
    return Evaluation(client, domain, "test", "global", correct, samples, loss * samples)


def test_batch_statistics_are_those_of_mixed_batches_though_the_images_lie_class_by_class() -> None:
    worker = tiny.setup(evaluate_with="both", evaluation_batch=4).worker
    federation = worker.federation
    ward = federation["ward"]
    by_class = ward.test[federation.labels[ward.test].argsort(stable=True)]
    object.__setattr__(ward, "test", by_class)
    place = {tuple((federation.images[i] / 255).flatten().tolist()): int(i) for i in by_class}
    seen: list[list[int]] = []
    worker.model.register_forward_pre_hook(
        lambda _, inputs: seen.append([place[tuple(image.flatten().tolist())] for image in inputs[0]])
    )
    worker.evaluate("ward", tiny.broadcast(worker), {}, ["test"])
    half = len(seen) // 2
    in_order, mixed = list(chain(*seen[:half])), list(chain(*seen[half:]))
    assert in_order == by_class.tolist()  # under global statistics the order does not matter
    assert sorted(mixed) == sorted(in_order)
    assert mixed != in_order
    before, seen[:] = list(seen), []
    worker.evaluate("ward", tiny.broadcast(worker), {}, ["test"])
    assert seen == before  # the same batches in every round


def test_averages_over_domains_and_over_samples() -> None:
    entries = [
        entry("a1", "a", 10, 10, 0.5),  # 100 %
        entry("a2", "a", 10, 20, 1.0),  # 50 %: the domain is at 75 %
        entry("b", "b", 0, 70, 2.0),
        entry("c", "c", 30, 40),
        entry("d", "d", 10, 40),
    ]
    scores = summarise(entries, unseen=["c", "d"])
    assert scores.domains == {"a": 0.75, "b": 0.0, "c": 0.75, "d": 0.25}
    assert scores.average == 0.375
    assert scores.samples == 0.2
    assert scores.unseen == 0.5
    assert scores.loss == pytest.approx((5 + 20 + 140) / 100)
    assert summarise(entries[:3]).unseen is None


def shared_tests() -> Any:
    federation = tiny.federation({"ward": 6, "clinic": 5, "hospital": 7}, domains={"clinic": "bright"}, validation=0)
    first = federation.clients[0]
    clients = [
        first,
        replace(federation.clients[1], test=first.test, validation=first.validation),
        federation.clients[2],
    ]
    return replace(federation, clients=clients)


def test_a_shared_test_set_is_evaluated_and_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[str] = []
    plain = Worker.evaluate

    def counted(self: Worker, name: str, *rest: Any, detailed: bool) -> list[Evaluation]:
        evaluated.extend([] if detailed else [name])  # once more at the end, for the measures by class
        return plain(self, name, *rest, detailed=detailed)

    monkeypatch.setattr(Worker, "evaluate", counted)
    run = tiny.run(tmp_path / "r", on=shared_tests(), rounds=1)
    assert evaluated == ["ward", "hospital"]
    records = {r["client"]: r for r in run.records("evaluation")}
    assert list(records) == ["ward", "hospital"]
    evaluated.clear()
    tiny.run(tmp_path / "personal", "fedbn", on=shared_tests(), rounds=1)
    assert evaluated == ["ward", "clinic", "hospital"]


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "central", "standalone"])
def test_unseen_domains_are_apart_from_the_average(tmp_path: Path, method: str) -> None:
    run = tiny.run(tmp_path / "r", method, on=tiny.federation(unseen=12), rounds=2)
    assert run.summary is not None
    assert set(run.domains) == {"bright", "dark", "tinted", "foreign"}
    assert run.accuracy == pytest.approx(sum(run.domains[d] for d in ("bright", "dark", "tinted")) / 3)
    assert run.summary["unseen"] == run.domains["foreign"]
    assert run.summary["unseen_domains"] == ["foreign"]
    assert all(r["client"] != "stranger" for r in run.records("client"))


def test_evaluation_every_few_rounds_and_always_in_the_last(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", rounds=5, evaluate_every=2)
    assert [r["round"] for r in run.scores()] == [1, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("evaluate_with", ["global", "both"])
def test_results_by_each_rule(tmp_path: Path, evaluate_with: str) -> None:
    options: dict[str, Any] = {"rounds": 12, "learning_rate": 0.4, "evaluate_with": evaluate_with}
    runs = {
        rule: tiny.run(tmp_path / rule, result=rule, **options) for rule in ("last", "mean-last-10", "best-validation")
    }
    test = [r["average"] for r in runs["last"].scores()]
    assert len(test) == 12
    assert runs["last"].accuracy == test[-1]
    assert runs["mean-last-10"].accuracy == pytest.approx(sum(test[2:]) / 10)
    validation = [r["average"] for r in runs["best-validation"].scores("validation")]
    best = validation.index(max(validation))
    assert best != 11, "this federation does not tell the rules apart"
    summary = runs["best-validation"].summary
    assert summary is not None
    assert (summary["round"], summary["accuracy"], summary["result"]) == (best, test[best], "best-validation")
    # The stored model is the one of that round.
    stopped = tiny.run(tmp_path / "stopped", **{**options, "rounds": best + 1})
    files = [(r.directory / "model.safetensors").read_bytes() for r in (runs["best-validation"], stopped)]
    assert files[0] == files[1]


def test_batch_statistics_alone_are_the_result_where_they_are_asked_for(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", evaluate_with="batch", rounds=2, result="best-validation")
    assert {r["statistics"] for r in run.records("evaluation")} == {"batch"}
    assert run.summary is not None
    assert run.summary["statistics"] == "batch"


@pytest.mark.slow
def test_the_mean_of_the_last_ten_rounds_does_not_depend_on_how_often_is_evaluated(tmp_path: Path) -> None:
    often, seldom = (
        tiny.run(tmp_path / str(every), rounds=12, result="mean-last-10", evaluate_every=every) for every in (1, 6)
    )
    assert [record["round"] for record in seldom.scores()] == list(range(2, 12))
    assert seldom.accuracy == often.accuracy
    assert Config(rounds=30, evaluate_every=7).evaluates(6)
    assert not Config(rounds=30, evaluate_every=7).evaluates(28)
    assert Config(rounds=30, evaluate_every=7).evaluates(29)
    assert Config(rounds=4, evaluate_every=7, result="mean-last-10").evaluates(0)
