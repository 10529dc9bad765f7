"""The diagnostics' formulas against loops, integrals and other roads to the same number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from fedkeel.analysis.fairness import spread, worst
from fedkeel.analysis.gradient_norms import gradient_norm
from fedkeel.analysis.label_distribution import label_counts
from fedkeel.analysis.loss_gap import cross_entropy, loss_gaps
from fedkeel.analysis.mixing_factors import global_share
from fedkeel.analysis.moment import Outputs
from fedkeel.analysis.nmi import clustering_nmi
from fedkeel.analysis.probability_floor import bounds, regularisers, true_probabilities
from fedkeel.analysis.prototype_similarity import distances, mean_similarity, prototypes, similarities
from fedkeel.analysis.representation_divergence import divergence
from fedkeel.analysis.singular_values import effective_rank, singular_values
from fedkeel.analysis.statistics_divergence import variance_across_clients
from fedkeel.analysis.tsne import embedding
from tests import tiny

random = np.random.default_rng(5)


def some_outputs(samples: int = 40, classes: int = 5, scale: float = 2.0) -> Outputs:
    labels = random.integers(0, classes, samples)
    return Outputs(np.zeros((samples, 1)), scale * random.normal(size=(samples, classes)), labels)


def test_the_variance_over_clients_is_that_of_each_channel_averaged() -> None:
    statistics = random.normal(size=(4, 3))
    expected = 0.0
    for channel in range(3):
        mean = sum(statistics[k][channel] for k in range(4)) / 4
        expected += sum((statistics[k][channel] - mean) ** 2 for k in range(4)) / 4 / 3
    assert variance_across_clients(statistics) == pytest.approx(expected, rel=1e-12)


def test_the_variance_of_equal_clients_is_zero_however_much_channels_differ() -> None:
    assert variance_across_clients(np.tile([[-3.0, 8.0, 0.5]], (5, 1))) == 0


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
    assert divergence(one, other, eps=1e-14) == pytest.approx(np.mean(expected), rel=1e-6)
    assert divergence(one, other) == pytest.approx(divergence(other, one), rel=1e-12)


def test_a_domain_does_not_diverge_from_itself_and_a_dead_channel_counts_for_nothing() -> None:
    features = random.normal(size=(50, 4))
    features[:, 2] = 0
    assert divergence(features, features) == pytest.approx(0, abs=1e-12)
    assert math.isfinite(divergence(features, features + 1))


def test_the_loss_gap_is_the_difference_of_the_logarithms() -> None:
    under_global, under_batch = some_outputs(), some_outputs()
    under_batch = under_batch._replace(labels=under_global.labels)
    for i, gap in enumerate(loss_gaps(under_global, under_batch)):
        y = under_global.labels[i]
        q_g = math.exp(under_global.logits[i][y]) / sum(map(math.exp, under_global.logits[i]))
        q_b = math.exp(under_batch.logits[i][y]) / sum(map(math.exp, under_batch.logits[i]))
        assert gap == pytest.approx(math.log(q_b) - math.log(q_g), rel=1e-9)


def test_the_loss_of_huge_logits_is_still_a_number() -> None:
    outputs = Outputs(np.zeros((1, 1)), np.array([[2000.0, -2000.0]]), np.array([1]))
    assert cross_entropy(outputs).tolist() == [4000.0]


def test_proposition_1_holds_for_every_sample() -> None:
    for scale in (0.01, 1.0, 6.0):
        under_batch, under_global = some_outputs(300, scale=scale), some_outputs(300, scale=scale)
        under_global = under_global._replace(labels=under_batch.labels)
        gaps = np.abs(loss_gaps(under_global, under_batch))
        assert (gaps <= bounds(under_batch, under_global) * (1 + 1e-9)).all()


def test_the_bound_is_two_over_tau_times_the_root_of_the_regulariser() -> None:
    under_batch, under_global = some_outputs(10), some_outputs(10)
    under_global = under_global._replace(labels=under_batch.labels)
    for i, y in enumerate(under_batch.labels):
        q_b, q_g = (
            [math.exp(z) / sum(map(math.exp, o.logits[i])) for z in o.logits[i]] for o in (under_batch, under_global)
        )
        kl = [sum(a * math.log(a / b) for a, b in zip(*pair, strict=True)) for pair in ((q_b, q_g), (q_g, q_b))]
        assert regularisers(under_batch, under_global)[i] == pytest.approx(sum(kl) / 2, rel=1e-9)
        assert true_probabilities(under_batch)[i] == pytest.approx(q_b[y], rel=1e-9)
        expected = 2 / min(q_b[y], q_g[y]) * math.sqrt(sum(kl) / 2)
        assert bounds(under_batch, under_global)[i] == pytest.approx(expected, rel=1e-9)


def test_prototypes_are_class_means_and_an_absent_class_has_none() -> None:
    features, labels = random.normal(size=(9, 3)), np.array([0, 0, 2, 2, 2, 0, 2, 0, 0])
    found = prototypes(Outputs(features, np.zeros((9, 4)), labels), 4)
    for c in (0, 2):
        rows = [features[i] for i in range(9) if labels[i] == c]
        np.testing.assert_allclose(found[c], sum(rows) / len(rows), rtol=1e-12)
    assert np.isnan(found[[1, 3]]).all()


def test_similarity_is_averaged_over_the_pairs_that_share_a_class_and_then_over_classes() -> None:
    local = random.normal(size=(3, 4, 5))  # three clients, four classes
    local[1, 2] = local[2, 3] = local[0, 3] = np.nan  # class 2 has one pair left, class 3 none

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / math.sqrt(a @ a) / math.sqrt(b @ b))

    pairs = {0: [(0, 1), (0, 2), (1, 2)], 1: [(0, 1), (0, 2), (1, 2)], 2: [(0, 2)]}
    means = [np.mean([cosine(local[i, c], local[j, c]) for i, j in pairs[c]]) for c in pairs]
    assert mean_similarity(local) == pytest.approx(np.mean(means), rel=1e-12)
    assert similarities(local)[0, 0, 1] == pytest.approx(cosine(local[0, 0], local[1, 0]), rel=1e-12)
    assert np.isnan(similarities(local)[2, 0, 1])


def test_distances_are_to_the_mean_of_the_clients_that_have_the_class() -> None:
    local = random.normal(size=(3, 2, 4))
    local[2, 1] = np.nan
    centers = [local[:, 0].sum(axis=0) / 3, (local[0, 1] + local[1, 1]) / 2]
    expected = [
        (np.linalg.norm(local[k, 0] - centers[0]) + np.linalg.norm(local[k, 1] - centers[1])) / 2 for k in (0, 1)
    ]
    expected.append(np.linalg.norm(local[2, 0] - centers[0]))
    assert distances(local) == pytest.approx(expected, rel=1e-12)


def test_the_gradient_norm_is_over_all_tensors_together() -> None:
    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(1))]
    parameters[0].grad, parameters[1].grad = torch.randn(3, 2), torch.randn(4)  # the third is frozen
    everything = np.concatenate([p.grad.numpy().ravel() for p in parameters if p.grad is not None]).astype(np.float64)
    assert float(gradient_norm(parameters)) == pytest.approx(math.sqrt((everything**2).sum()), rel=1e-6)


@pytest.mark.slow
def test_nmi_is_one_for_clusters_that_are_the_classes_and_by_its_definition_otherwise() -> None:
    labels = np.repeat(np.arange(3), 20)
    centers = np.array([[0, 0], [50, 0], [0, 50]])
    assert clustering_nmi(centers[labels] + random.normal(size=(60, 2)), labels, 3) == pytest.approx(1)

    mixed = labels.copy()
    mixed[:7] = 1
    found = clustering_nmi(centers[labels] + random.normal(size=(60, 2)), mixed, 3)
    joint = np.array([[np.mean((labels == u) & (mixed == v)) for v in range(3)] for u in range(3)])
    rows, columns = joint.sum(axis=1), joint.sum(axis=0)
    mutual = sum(
        joint[u, v] * math.log(joint[u, v] / rows[u] / columns[v]) for u in range(3) for v in range(3) if joint[u, v]
    )
    entropies = [-sum(p * math.log(p) for p in side) for side in (rows, columns)]
    assert found == pytest.approx(mutual / (sum(entropies) / 2), rel=1e-9)


def test_nmi_of_features_that_are_all_the_same_is_zero() -> None:
    assert clustering_nmi(np.ones((12, 3)), np.arange(12) % 3, 3) == pytest.approx(0)


def test_the_map_keeps_distant_clusters_apart_and_is_the_same_twice() -> None:
    labels = np.repeat(np.arange(2), 15)
    features = 100.0 * labels[:, None] + random.normal(size=(30, 4))
    places = embedding(features)
    assert places.shape == (30, 2)
    centers = [places[labels == c].mean(axis=0) for c in (0, 1)]
    nearest = [int(np.argmin([np.linalg.norm(p - center) for center in centers])) for p in places]
    assert nearest == labels.tolist()
    np.testing.assert_array_equal(places, embedding(features))


def test_singular_values_are_the_roots_of_the_gram_matrix() -> None:
    weights = random.normal(size=(4, 9))
    eigenvalues = np.sort(np.linalg.eigvalsh(weights @ weights.T))[::-1]
    np.testing.assert_allclose(singular_values(weights), np.sqrt(eigenvalues), rtol=1e-9)


def test_the_effective_rank_counts_equal_singular_values() -> None:
    assert effective_rank(np.array([3.0, 3.0, 3.0, 0.0])) == pytest.approx(3)
    assert 1 < effective_rank(np.array([3.0, 0.1])) < 1.3


def test_label_counts_are_those_of_the_training_samples() -> None:
    federation = tiny.federation()
    counts = label_counts(federation, federation.clients)
    for row, client in zip(counts, federation.clients, strict=True):
        labels = federation.labels[client.train].tolist()
        assert row.tolist() == [labels.count(c) for c in range(4)]
    assert counts[1].tolist() == [3, 3, 3, 0]  # 'clinic' never sees the last class


def test_the_share_of_the_global_statistics_is_half_at_the_start() -> None:
    assert global_share(np.zeros(6)) == 0.5
    alpha = random.normal(size=6)
    assert global_share(alpha) == pytest.approx(sum(1 / (1 + math.exp(-a)) for a in alpha) / 6, rel=1e-12)


def test_spread_and_worst_domain() -> None:
    accuracies = {"photo": 0.9, "sketch": 0.5, "cartoon": 0.7}
    assert spread(accuracies) == pytest.approx(0.2)
    assert worst(accuracies) == "sketch"
    assert spread({"photo": 0.9}) is None
