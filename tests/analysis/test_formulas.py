"""The diagnostics' formulas against loops, integrals and other roads to the same number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from fedkeel.analysis.fairness import spread
from fedkeel.analysis.gradient_norms import gradient_norm
from fedkeel.analysis.loss_gap import loss_gap
from fedkeel.analysis.nmi import clustering_nmi
from fedkeel.analysis.probability_floor import loss_gap_bound, true_class_probability
from fedkeel.analysis.prototype_similarity import mean_similarity, prototype_distances, prototype_similarities
from fedkeel.analysis.representation_divergence import feature_divergence
from fedkeel.analysis.singular_values import effective_rank
from fedkeel.analysis.statistics_divergence import variance_across_clients
from fedkeel.analysis.tsne import embedding

random = np.random.default_rng(5)


def tensor(values: object) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values))


def some_logits(samples: int = 40, classes: int = 5, scale: float = 2.0) -> torch.Tensor:
    return tensor(scale * random.normal(size=(samples, classes)))


def test_the_variance_over_clients_is_that_of_each_channel_averaged() -> None:
    statistics = random.normal(size=(4, 3))
    expected = 0.0
    for channel in range(3):
        mean = sum(statistics[k][channel] for k in range(4)) / 4
        expected += sum((statistics[k][channel] - mean) ** 2 for k in range(4)) / 4 / 3
    assert float(variance_across_clients(tensor(statistics))) == pytest.approx(expected, rel=1e-12)


def test_the_variance_of_equal_clients_is_zero_however_much_channels_differ() -> None:
    assert float(variance_across_clients(tensor(np.tile([[-3.0, 8.0, 0.5]], (5, 1))))) == 0


def test_the_divergence_of_two_domains_is_both_integrals_of_kl() -> None:
    one, other = random.normal(1.0, 0.5, size=(400, 2)), random.normal(-0.2, 1.3, size=(300, 2))
    grid = np.linspace(-15, 15, 200_001)

    def density(values: np.ndarray) -> np.ndarray:
        return np.exp(-((grid - values.mean()) ** 2) / (2 * values.var())) / np.sqrt(2 * math.pi * values.var())

    expected = []
    for channel in range(2):
        p, q = density(one[:, channel]), density(other[:, channel])
        there = (p > 1e-290) & (q > 1e-290)
        step = grid[1] - grid[0]
        ratio = np.log(p[there] / q[there])
        expected.append(float((p[there] * ratio).sum() * step - (q[there] * ratio).sum() * step))
    pair = tensor(one), tensor(other)
    assert float(feature_divergence(*pair, eps=1e-14)) == pytest.approx(np.mean(expected), rel=1e-6)
    assert float(feature_divergence(*pair)) == pytest.approx(float(feature_divergence(*reversed(pair))), rel=1e-12)


def test_a_domain_does_not_diverge_from_itself_and_a_dead_channel_counts_for_nothing() -> None:
    features = tensor(random.normal(size=(50, 4)))
    features[:, 2] = 0
    assert float(feature_divergence(features, features)) == pytest.approx(0, abs=1e-12)
    assert math.isfinite(float(feature_divergence(features, features + 1)))


def test_the_probability_of_the_true_class_is_that_of_the_softmax() -> None:
    logits, labels = some_logits(10), tensor(random.integers(0, 5, 10))
    for row, y, found in zip(logits.tolist(), labels.tolist(), true_class_probability(logits, labels), strict=True):
        assert float(found) == pytest.approx(math.exp(row[y]) / sum(map(math.exp, row)), rel=1e-9)


def test_the_loss_gap_is_the_difference_of_two_cross_entropies_and_its_bound_two_over_tau_times_a_root() -> None:
    under_global, under_batch, labels = some_logits(6), some_logits(6), tensor(random.integers(0, 5, 6))
    gaps, bounds = loss_gap(under_global, under_batch, labels), loss_gap_bound(under_global, under_batch, labels)
    for g, b, y, gap, bound in zip(under_global, under_batch, labels.tolist(), gaps, bounds, strict=True):
        q_g, q_b = (np.exp(row.numpy()) / np.exp(row.numpy()).sum() for row in (g, b))
        assert float(gap) == pytest.approx(np.log(q_b[y]) - np.log(q_g[y]))
        divergence = 0.5 * sum(q_b * np.log(q_b / q_g)) + 0.5 * sum(q_g * np.log(q_g / q_b))
        assert float(bound) == pytest.approx(2 / min(q_g[y], q_b[y]) * np.sqrt(divergence))


def test_proposition_1_holds_for_every_sample_also_of_huge_logits() -> None:
    for scale in (0.01, 1.0, 6.0, 400.0):
        logits, labels = (some_logits(300, scale=scale), some_logits(300, scale=scale)), torch.arange(300) % 5
        assert (loss_gap(*logits, labels).abs() <= loss_gap_bound(*logits, labels) * (1 + 1e-9)).all()


def test_similarity_is_averaged_over_the_pairs_that_share_a_class_and_then_over_classes() -> None:
    local, present = random.normal(size=(3, 4, 5)), torch.ones(3, 4, dtype=torch.bool)  # three clients, four classes
    present[1, 2] = present[2, 3] = present[0, 3] = False  # class 2 has one pair left, class 3 none

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / math.sqrt(a @ a) / math.sqrt(b @ b))

    pairs = {0: [(0, 1), (0, 2), (1, 2)], 1: [(0, 1), (0, 2), (1, 2)], 2: [(0, 2)]}
    means = [np.mean([cosine(local[i, c], local[j, c]) for i, j in pairs[c]]) for c in pairs]
    found = prototype_similarities(tensor(local), present)
    assert float(mean_similarity(found)) == pytest.approx(np.mean(means), rel=1e-12)
    assert float(found[0, 0, 1]) == pytest.approx(cosine(local[0, 0], local[1, 0]), rel=1e-12)
    assert math.isnan(found[2, 0, 1])


def test_clients_that_share_no_class_have_no_similarity() -> None:
    similarities = prototype_similarities(torch.ones(2, 2, 3), torch.eye(2, dtype=torch.bool))
    assert math.isnan(mean_similarity(similarities))


def test_distances_are_to_the_mean_of_the_clients_that_have_the_class() -> None:
    local, present = random.normal(size=(3, 2, 4)), torch.tensor([[True, True], [True, True], [True, False]])
    centers = [local[:, 0].sum(axis=0) / 3, (local[0, 1] + local[1, 1]) / 2]
    expected = [
        (np.linalg.norm(local[k, 0] - centers[0]) + np.linalg.norm(local[k, 1] - centers[1])) / 2 for k in (0, 1)
    ]
    expected.append(np.linalg.norm(local[2, 0] - centers[0]))
    assert prototype_distances(tensor(local), present).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_gradient_norm_is_over_all_tensors_together() -> None:
    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(1))]
    parameters[0].grad, parameters[1].grad = torch.randn(3, 2), torch.randn(4)  # the third is frozen
    everything = np.concatenate([p.grad.numpy().ravel() for p in parameters if p.grad is not None]).astype(np.float64)
    assert float(gradient_norm(parameters)) == pytest.approx(math.sqrt((everything**2).sum()), rel=1e-6)


@pytest.mark.slow
def test_nmi_is_one_for_clusters_that_are_the_classes_and_by_its_definition_otherwise() -> None:
    labels = np.repeat(np.arange(3), 20)
    centers = np.array([[0, 0], [50, 0], [0, 50]])
    assert clustering_nmi(tensor(centers[labels] + random.normal(size=(60, 2))), tensor(labels), 3) == pytest.approx(1)

    mixed = labels.copy()
    mixed[:7] = 1
    found = clustering_nmi(tensor(centers[labels] + random.normal(size=(60, 2))), tensor(mixed), 3)
    joint = np.array([[np.mean((labels == u) & (mixed == v)) for v in range(3)] for u in range(3)])
    rows, columns = joint.sum(axis=1), joint.sum(axis=0)
    mutual = sum(
        joint[u, v] * math.log(joint[u, v] / rows[u] / columns[v]) for u in range(3) for v in range(3) if joint[u, v]
    )
    entropies = [-sum(p * math.log(p) for p in side) for side in (rows, columns)]
    assert found == pytest.approx(mutual / (sum(entropies) / 2), rel=1e-9)


def test_nmi_of_features_that_are_all_the_same_is_zero() -> None:
    assert clustering_nmi(torch.ones(12, 3), torch.arange(12) % 3, 3) == pytest.approx(0)


def test_the_map_keeps_distant_clusters_apart_and_is_the_same_twice() -> None:
    labels = np.repeat(np.arange(2), 15)
    features = 100.0 * labels[:, None] + random.normal(size=(30, 4))
    places = np.array(embedding(tensor(features))).T
    assert places.shape == (30, 2)
    centers = [places[labels == c].mean(axis=0) for c in (0, 1)]
    nearest = [int(np.argmin([np.linalg.norm(p - center) for center in centers])) for p in places]
    assert nearest == labels.tolist()
    np.testing.assert_array_equal(places.T, embedding(tensor(features)))


def test_the_effective_rank_counts_equal_singular_values() -> None:
    assert effective_rank(torch.tensor([3.0, 3.0, 3.0, 0.0])) == pytest.approx(3)
    assert 1 < effective_rank(torch.tensor([3.0, 0.1])) < 1.3


def test_the_spread_is_the_standard_deviation_of_a_sample() -> None:
    assert spread([0.9, 0.5, 0.7]) == pytest.approx(0.2)
    assert spread([0.9]) is None
