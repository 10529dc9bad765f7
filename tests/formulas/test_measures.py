"""Measures against scikit-learn's, and their intervals against independent ways to get them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn import metrics as reference

from fedkeel.formulas.measures import (
    Array,
    Measure,
    auc,
    calibration_error,
    confusion,
    mean_of,
    mean_of_samples,
    of_confusion,
    resampled,
    wilson,
)


def drawn(samples: int = 240, classes: int = 4, seed: int = 0, signal: float = 1.0) -> tuple[Array, Array]:
    """Probabilities and labels of a model that knows something."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(classes, size=samples)
    logits = generator.normal(size=(samples, classes)) + signal * np.eye(classes)[labels]
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return chances, labels


@pytest.mark.parametrize("seed", range(3))
def test_auc_is_that_of_scikit_learn(seed: int) -> None:
    chances, labels = drawn(seed=seed)
    found = auc(chances, labels)
    assert found.value == pytest.approx(reference.roc_auc_score(labels, chances, multi_class="ovr"), abs=1e-12)
    for c, one in enumerate(found.classes):
        assert one.value == pytest.approx(reference.roc_auc_score(labels == c, chances[:, c]), abs=1e-12)


def test_a_class_that_is_not_there_is_left_out() -> None:
    chances, labels = drawn(classes=3)
    labels[labels == 2] = 1
    found, counts = auc(chances, labels), confusion(labels, chances.argmax(1), 3)
    assert np.isnan(found.classes[2].value)
    assert found.value == pytest.approx(np.mean([found.classes[c].value for c in range(2)]))
    for name in ("recall", "precision", "f1"):
        measure = of_confusion(counts)[name]
        assert np.isnan(measure.classes[2].value)
        assert measure.value == pytest.approx(np.mean([measure.classes[c].value for c in range(2)]))
    assert np.isnan(auc(chances, np.zeros(len(labels), int)).value)  # one class alone cannot be told apart


def test_what_follows_from_the_confusion_matrix_is_that_of_scikit_learn() -> None:
    chances, labels = drawn(seed=5)
    said = chances.argmax(1)
    said[said == 3] = 0  # a class that is never predicted
    counts = confusion(labels, said, 4)
    assert counts.tolist() == reference.confusion_matrix(labels, said).tolist()
    found = of_confusion(counts)
    by_class = reference.precision_recall_fscore_support(labels, said, zero_division=0)
    for name, values in zip(("precision", "recall", "f1"), by_class, strict=False):
        assert [one.value for one in found[name].classes] == pytest.approx(values.tolist())
        assert found[name].value == pytest.approx(values.mean())
    assert found["accuracy"].value == pytest.approx(reference.accuracy_score(labels, said))
    assert found["balanced-accuracy"].value == pytest.approx(reference.balanced_accuracy_score(labels, said))
    assert found["precision"].classes[3] == Measure(0.0, 0.0, 1.0)  # nothing is known of it


@pytest.mark.parametrize(("right", "of"), [(0, 7), (7, 7), (3, 10), (81, 90)])
def test_a_share_has_wilsons_interval(right: int, of: int) -> None:
    expected = binomtest(right, of).proportion_ci(method="wilson")
    assert wilson(right / of, of).tolist() == pytest.approx([right / of, expected.low, expected.high], abs=1e-12)


@pytest.mark.slow
def test_intervals_of_auc_f1_and_ece_are_those_of_a_bootstrap() -> None:
    chances, labels = drawn(600, seed=2, signal=1.5)
    counts = confusion(labels, chances.argmax(1), 4)
    generator = np.random.default_rng(0)

    def again(measure: str, places: Array) -> float:
        p, y = chances[places], labels[places]
        if measure == "auc":
            return float(reference.roc_auc_score(y, p, multi_class="ovr"))
        return float(reference.f1_score(y, p.argmax(1), average="macro"))

    for name, found in (("auc", auc(chances, labels)), ("f1", of_confusion(counts)["f1"])):
        low, high = resampled(lambda places, name=name: again(name, places), 600, generator)  # type: ignore[misc]
        assert found.low < found.value < found.high
        assert (found.high - found.low) == pytest.approx(high - low, rel=0.25)
    error = calibration_error(chances, labels, 15)
    assert error.low < error.value < error.high


def test_calibration_error_is_the_gap_in_each_bin() -> None:
    chances = np.array([[0.9, 0.1]] * 10 + [[0.6, 0.4]] * 10)
    labels = np.array([0] * 9 + [1] + [0] * 2 + [1] * 8)
    assert calibration_error(chances, labels, 10).value == pytest.approx((0.0 * 10 + 0.4 * 10) / 20)


def test_a_mean_of_independent_numbers_is_surer_than_each_and_leaves_out_what_is_not_known() -> None:
    one = Measure(0.5, 0.4, 0.7)
    assert mean_of([one] * 4)[:3] == pytest.approx((0.5, 0.45, 0.6))
    assert mean_of([one, Measure(np.nan, np.nan, np.nan)])[:3] == pytest.approx((0.5, 0.4, 0.7))
    assert np.isnan(mean_of([]).value)


def test_a_mean_over_images_has_its_standard_error() -> None:
    found = mean_of_samples(np.array([0.0, 1.0] * 50))
    assert (found.value, found.high - found.value) == pytest.approx((0.5, 1.96 * 0.5025 / 10), rel=1e-3)
    assert np.isnan(mean_of_samples(np.ones(1)).low)


def test_a_diverged_model_has_no_auc_and_no_calibration() -> None:
    chances, labels = drawn()
    chances[3] = np.nan
    assert np.isnan(auc(chances, labels).value)
    assert np.isnan(calibration_error(chances, labels, 15).value)


def test_a_measure_goes_to_json_and_back() -> None:
    measure = Measure(0.5, np.nan, 0.7, (Measure(0.1, 0.0, 0.2), Measure(np.nan, np.nan, np.nan)))
    assert measure.to_list() == [0.5, None, 0.7, [[0.1, 0.0, 0.2], [None, None, None]]]
    assert Measure.of(measure.to_list()).to_list() == measure.to_list()
