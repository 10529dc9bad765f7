"""Metrics of whole test sets: on every executor, in the choice of the best round, and after a resume."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, roc_auc_score

from fedkeel.config import Config
from fedkeel.core.evaluation import Evaluation, Scores, summarise
from fedkeel.engine import rounds
from fedkeel.engine.metrics import METRICS, register_metric, selection
from fedkeel.errors import FedkeelError
from fedkeel.runs.run import Run
from fedkeel.runs.store import fingerprint
from tests import tiny

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def own() -> Iterator[None]:
    """A metric of one's own: a number of the whole set, the lower the better."""

    @register_metric("cost", lower=True)
    def cost(probabilities: np.ndarray, labels: np.ndarray, *, missed: float = 5.0) -> float:
        """What mistakes cost."""
        said = probabilities.argmax(1)
        return float(np.mean(np.where(said == labels, 0.0, np.where(labels == 0, missed, 1.0))))

    yield
    del METRICS._entries["cost"]


def predicted(run: Run, client: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, predicted classes and probabilities, from the file."""
    with open(run.directory / f"predictions/{client}.csv") as file:
        rows = list(csv.DictReader(file))
    place = tiny.CLASSES.index
    chances = np.array([[float(row[f"p({name})"]) for name in tiny.CLASSES] for row in rows])
    labels, said = ([place(row[name]) for row in rows] for name in ("label", "predicted"))
    return np.array(labels), np.array(said), chances


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_measures_are_those_of_the_predictions_that_are_kept(tmp_path: Path, executor: str) -> None:
    options = {**tiny.by(executor), "evaluation_batch": 3, "metrics": "auc"}
    run = tiny.run(tmp_path / "r", on=tiny.federation(test=40), predictions=True, **options)
    last = {r["client"]: r for r in run.records("evaluation") if r["round"] == 2 and r["split"] == "test"}
    for client, domain in tiny.DOMAINS.items():
        labels, said, chances = predicted(run, client)
        assert run.confusion(domain).to_numpy().tolist() == confusion_matrix(labels, said, labels=range(4)).tolist()
        found = run.measure("auc")[domain]
        assert found.value == pytest.approx(roc_auc_score(labels, chances, multi_class="ovr"), abs=1e-12)
        assert last[client]["auc"] == pytest.approx(found.value, abs=1e-12)
        assert run.measure("accuracy")[domain].value == run.domains[domain]
        assert run.measure("loss")[domain].value == pytest.approx(last[client]["loss"], rel=1e-5)


def test_executors_agree_to_the_bit_and_statistics_of_the_batch_are_measured_too(tmp_path: Path) -> None:
    on = tiny.federation(test=40)
    options = {"evaluation_batch": 8, "evaluate_with": "batch", "metrics": "auc,ece,f1,brier", "rounds": 1}
    one, other = (
        tiny.run(tmp_path / executor, on=on, **tiny.by(executor), **options) for executor in ("serial", "processes")
    )
    assert (one.directory / "measures.json").read_bytes() == (other.directory / "measures.json").read_bytes()
    assert one.measure("accuracy")["bright"].value == one.domains["bright"]


@pytest.mark.usefixtures("own")
def test_one_of_ones_own_is_one_function(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", metrics="cost(missed=2.0)", predictions=True)
    labels, said, _ = predicted(run, "ward")
    expected = np.mean(np.where(said == labels, 0, np.where(labels == 0, 2, 1)))
    found = run.measure("cost(missed=2.0)")["bright"]
    assert found.value == pytest.approx(expected)
    assert math.isnan(found.low)  # nobody knows how far another draw of images would change it
    scores = run.frame()
    assert scores["cost(missed=2.0)"].notna().all()
    assert scores["cost(missed=2.0).domains.bright"].iloc[-2] == pytest.approx(expected)  # then the validation
    again = tiny.run(tmp_path / "again", metrics="cost(missed=2.0)")
    assert (again.directory / "measures.json").read_bytes() == (run.directory / "measures.json").read_bytes()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("text", "The metric 'wrong' gives 'text': let it give a number, or one for each of the 4 classes."),
        ([1.0, 2.0], "let it give a number, or one for each of the 4 classes."),
        (ValueError("no such\nthing"), "The metric 'wrong' failed on 8 samples with a ValueError: no such."),
    ],
)
def test_a_function_that_gives_something_else_is_told_in_one_sentence(
    tmp_path: Path, given: Any, sentence: str
) -> None:
    @register_metric("wrong")
    def wrong(_: np.ndarray, __: np.ndarray) -> Any:
        if isinstance(given, Exception):
            raise given
        return given

    try:
        with pytest.raises(FedkeelError) as error:
            tiny.run(tmp_path / "r", metrics="wrong")
    finally:
        del METRICS._entries["wrong"]
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"select_by": "aucc"}, "There is no metric named 'aucc': did you mean 'auc'?"),
        ({"select_by": "auc,f1"}, "'select_by' is 'auc,f1': give accuracy, loss or one metric."),
        ({"select_by": ""}, "'select_by' is '': give accuracy, loss or one metric."),
        ({"metrics": "accuracy"}, "'metrics' names 'accuracy', which every test has: leave it out."),
        ({"metrics": "ece(bins=0)"}, "The 'bins' of ece is 0"),
        ({"metrics": "f1(beta=2)"}, "The metric 'f1' has no option 'beta': it takes none."),
    ],
)
def test_what_cannot_be_chosen_by_is_refused_before_training(
    tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(FedkeelError) as error:
        tiny.run(tmp_path / "r", **options)
    assert sentence in str(error.value)
    assert not (tmp_path / "r").exists()


def test_validation_data_that_cannot_tell_leave_the_last_round_and_it_is_told(tmp_path: Path) -> None:
    notes = tiny.Notes()
    options = {"rounds": 2, "result": "best-validation", "select_by": "auc", "observer": notes}
    run = tiny.run(tmp_path / "r", on=tiny.federation(validation=1), **options)
    assert run.summary is not None
    assert run.summary["round"] == 1
    assert "The validation data give no 'auc': the result is the last round's." in notes.notes + notes.remarks


@pytest.mark.parametrize(("select_by", "best"), [("auc", max), ("loss", min), ("ece(bins=5)", min), ("accuracy", max)])
@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
@pytest.mark.slow
def test_the_best_round_is_best_by_what_was_chosen(tmp_path: Path, select_by: str, best: Any, method: str) -> None:
    on = tiny.federation(validation=12, test=20)
    run = tiny.run(tmp_path / "r", method, on=on, rounds=5, result="best-validation", select_by=select_by)
    named = {"accuracy": "average", "loss": "loss"}
    scores = run.scores("validation")
    values = [e[named[select_by]] if select_by in named else e["metrics"][select_by]["average"] for e in scores]
    assert run.summary is not None
    assert run.summary["round"] == values.index(best(values))
    # What is measured by class is the model of that round, with the layers that clients had then.
    assert {site: measure.value for site, measure in run.measure("accuracy").items()} == run.domains


@pytest.mark.parametrize("method", ["fedbn", "standalone"])  # which has no layer in common
def test_layers_of_ones_own_are_those_of_the_best_round(tmp_path: Path, method: str) -> None:
    run = tiny.run(tmp_path / "r", method, rounds=4, result="best-validation", learning_rate=2.0)
    assert run.summary is not None
    best = run.summary["round"]
    assert best < 3
    for record in run.records("evaluation"):
        if (record["round"], record["split"]) == (best, "test"):
            assert run.measure("loss")[record["domain"]].value == pytest.approx(record["loss"], rel=1e-5)


def test_who_came_after_the_best_round_is_measured_as_then_without_layers_of_its_own(tmp_path: Path) -> None:
    options = {"rounds": 4, "participation": 0.4, "result": "best-validation", "learning_rate": 2.0}
    run = tiny.run(tmp_path / "r", "fedbn", **options)
    assert run.summary is not None
    best = run.summary["round"]
    first = {record["client"]: record["round"] for record in reversed(run.records("client"))}
    assert max(first.values()) > best
    tests = [e for e in run.records("evaluation") if (e["round"], e["split"]) == (best, "test")]
    assert {e["domain"]: pytest.approx(e["loss"], rel=1e-5) for e in tests} == {
        site: measure.value for site, measure in run.measure("loss").items()
    }


def test_where_there_is_no_number_no_round_is_best() -> None:
    good = selection(Config(select_by="auc"))
    assert good({"average": 1.0, "loss": 0.0, "metrics": {"auc": {"average": None}}}) == -np.inf
    assert selection(Config(select_by="brier"))(
        {"average": 0.0, "loss": 0.0, "metrics": {"brier": {"average": 0.5}}}
    ) == pytest.approx(-0.5)


def test_a_value_that_is_infinite_or_a_site_that_diverged_is_worse_than_any() -> None:
    scores = {"average": 0.9, "loss": 0.1, "metrics": {"auc": {"average": 0.9}}}
    for select_by in ("loss", "auc"):
        good = selection(Config(select_by=select_by))
        assert np.isfinite(good(scores))
        assert good({**scores, "diverged": ["ward"]}) == -np.inf
    assert selection(Config(select_by="auc"))({**scores, "metrics": {"auc": {"average": np.inf}}}) == -np.inf
    # Its accuracy is part of the mean, so that a site that diverged costs the round that much and no more.
    assert selection(Config())({**scores, "diverged": ["ward"]}) == 0.9


@pytest.mark.parametrize("select_by", ["loss", "brier"])
def test_a_round_in_which_a_site_diverged_is_never_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, select_by: str
) -> None:
    options = {"rounds": 3, "result": "best-validation", "select_by": select_by, "learning_rate": 0.05}
    plain = tiny.run(tmp_path / "plain", **options)
    assert plain.summary is not None
    best = plain.summary["round"]
    validated: list[bool] = []

    def spoilt(evaluations: list[Evaluation], unseen: Iterable[str]) -> Scores:
        if evaluations[0].split == "validation":
            validated.append(True)
            if len(validated) == best + 1:
                evaluations = [replace(evaluations[0], loss_sum=math.nan), *evaluations[1:]]
        return summarise(evaluations, unseen)

    monkeypatch.setattr(rounds, "summarise", spoilt)
    run = tiny.run(tmp_path / "run", patience=9, **options)
    good = selection(run.config)
    others = [entry for entry in run.scores("validation") if entry["round"] != best]
    assert run.summary is not None
    assert run.summary["round"] == max(others, key=good)["round"] != best
    # The model is that of the round that the summary names, and what patience waits for is its value.
    assert {site: measure.value for site, measure in run.measure("accuracy").items()} == run.domains


@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_a_run_that_was_stopped_has_the_same_measures(tmp_path: Path, method: str) -> None:
    options = {"rounds": 4, "result": "best-validation", "select_by": "auc", "predictions": True}
    whole = tiny.run(tmp_path / "whole", method, **options)

    def stop(round: int) -> None:
        if round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.run(tmp_path / "stopped", method, observer=tiny.Notes(stop), **options)
    resumed = tiny.resume(tmp_path / "stopped")
    for file in ("measures.json", "predictions/ward.csv", "metrics.jsonl", "model.safetensors"):
        assert (resumed.directory / file).read_bytes() == (whole.directory / file).read_bytes()


def test_what_does_not_change_the_result_leaves_the_fingerprint_alone() -> None:
    assert fingerprint(Config(select_by="auc")) != fingerprint(Config())
    assert fingerprint(Config(predictions=True)) == fingerprint(Config())


def test_nothing_of_it_is_in_the_records_unless_it_is_asked_for(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r")
    assert all("metrics" not in record for record in run.records("scores"))
    assert not (run.directory / "predictions").exists()
    measured = json.loads((run.directory / "measures.json").read_bytes())
    assert measured["sites"][0]["measures"].keys() == {"auc", "ece", "loss"}


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_the_replayed_logits_are_those_of_one_batch_after_another(tmp_path: Path) -> None:
    """Several batches of one shape, so that they are captured, in sets of several sizes, so that the buffer grows."""
    on, options = tiny.federation(test=50, validation=20), {"evaluation_batch": 8, "metrics": "auc", "rounds": 3}
    runs = [
        tiny.run(tmp_path / executor, on=on, executor=executor, device="cuda", predictions=True, **options)
        for executor in ("serial", "cuda")
    ]
    for client in tiny.DOMAINS:
        (labels, _, chances), (others, _, replayed) = (predicted(run, client) for run in runs)
        assert labels.tolist() == others.tolist()
        assert np.abs(chances - replayed).max() < 1e-3
    for record, other in zip(*(run.records("evaluation") for run in runs), strict=True):
        assert record["auc"] == pytest.approx(other["auc"], abs=0.02)
