"""Metrics beside accuracy and loss: their formulas, what is recorded, and an example of one's own."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fedkeel.core.evaluation import Evaluation, merged
from fedkeel.core.messages import BadMessage
from fedkeel.engine.executors.sites.replies import evaluations_of
from fedkeel.engine.metrics import METRICS, requested
from fedkeel.errors import FedkeelError
from tests import tiny

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 3.0, 1.0], [1.0, 0.5, 0.0]])
LABELS = torch.tensor([0, 2, 2])


def test_the_brier_score_is_the_squared_distance_of_the_probabilities() -> None:
    q = np.exp(LOGITS.numpy()) / np.exp(LOGITS.numpy()).sum(1, keepdims=True)
    expected = [sum((q[i, c] - (LABELS[i].item() == c)) ** 2 for c in range(3)) for i in range(3)]
    assert METRICS.build("brier")(LOGITS, LABELS).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("k", "right"), [(1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1]), (9, [1, 1, 1])])
def test_top_k_counts_a_class_among_the_most_probable(k: int, right: list[int]) -> None:
    assert METRICS.build("top", k=k)(LOGITS, LABELS).int().tolist() == right


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("brierr", "There is no metric named 'brierr': did you mean 'brier'?"),
        ("top(k=0)", "The 'k' of top is 0: give at least 1."),
        ("top(k=2), top(k=2)", "names 'top(k=2)' twice"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_training(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(FedkeelError, match=re.escape(reason)):
        tiny.run(tmp_path / "r", "fedavg", metrics=text)
    assert not (tmp_path / "r").exists()


def test_parts_of_a_test_set_are_pooled_exactly() -> None:
    parts = [
        Evaluation("a", "d", "test", "global", 1, 4, 2.0, {"top": 3.0}),
        Evaluation("a", "d", "test", "global", 2, 6, 1.0, {"top": 4.0}),
    ]
    (whole,) = merged(parts)
    assert whole.metrics == {"top": 0.7}


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_every_evaluation_has_them_and_nothing_else_changes(tmp_path: Path, executor: str) -> None:
    plain = tiny.run(tmp_path / "plain", "fedavg", executor=executor)
    measured = tiny.run(tmp_path / "measured", "fedavg", executor=executor, metrics="brier, top(k=1)")
    for record, wanted in zip(measured.records("evaluation"), plain.records("evaluation"), strict=True):
        assert record["top(k=1)"] == pytest.approx(record["accuracy"])
        assert 0 < record["brier"] < 2
        assert {name: value for name, value in record.items() if name in wanted} == wanted
    for record, wanted in zip(measured.records("scores"), plain.records("scores"), strict=True):
        assert record.pop("metrics").keys() == {"brier", "top(k=1)"}
        assert record == wanted
    assert (tmp_path / "plain/model.safetensors").read_bytes() == (tmp_path / "measured/model.safetensors").read_bytes()


def test_one_of_ones_own_is_one_file(tmp_path: Path) -> None:
    code = (Path(__file__).parents[3] / "examples" / "add" / "sure_and_wrong.py").read_text()
    exec(compile(code, "sure_and_wrong.py", "exec"), {"__name__": "sure_and_wrong"})
    run = tiny.run(tmp_path / "r", "fedavg", metrics="sure-and-wrong(above=0.0)")
    for record in run.records("evaluation"):
        assert record["sure-and-wrong(above=0.0)"] == pytest.approx(1 - record["accuracy"])
    assert requested("sure-and-wrong")["sure-and-wrong"](LOGITS * 9, LABELS).tolist() == [False, True, True]


@pytest.mark.parametrize("sums", [None, {}, {"brier": "x"}, {"brier": 1.0, "more": 1.0}, {"brier": True}])
def test_a_site_cannot_send_other_metrics_than_were_asked_for(sums: object) -> None:
    given = {"split": "test", "statistics": "global", "correct": 1, "samples": 2, "loss_sum": 1.0, "metric_sums": sums}
    with pytest.raises(BadMessage):
        evaluations_of("a", "a", [given], requested("brier"))
    (found,) = evaluations_of("a", "a", [given | {"metric_sums": {"brier": 0.5}}], requested("brier"))
    assert found.metrics == {"brier": 0.25}


@pytest.mark.parametrize("total", [None, float("nan"), float("inf"), 1e300])
def test_a_model_that_diverged_at_a_site_has_no_number_and_still_an_accuracy(total: float | None) -> None:
    given = {"split": "test", "statistics": "global", "correct": 1, "samples": 2, "loss_sum": None}
    (found,) = evaluations_of("a", "a", [given | {"metric_sums": {"brier": total}}], requested("brier"))
    assert found.accuracy == 0.5
    assert np.isnan(found.metrics["brier"])
