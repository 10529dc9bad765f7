from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedkeel.formulas import clustering as module
from fedkeel.formulas.clustering import cluster_means, finch


def by_hand(points: NDArray[np.float64]) -> list[int]:
    """One level, from Eq. 1 pair by pair: joined if j is i's first neighbour, i is j's, or both have the same."""
    n = len(points)

    def cosine(i: int, j: int) -> float:
        return float(points[i] @ points[j] / np.sqrt((points[i] @ points[i]) * (points[j] @ points[j])))

    first = [max((j for j in range(n) if j != i), key=lambda j: cosine(i, j)) for i in range(n)]
    cluster = list(range(n))
    for i in range(n):
        for j in range(n):
            if first[i] == j or first[j] == i or first[i] == first[j]:
                old, new = max(cluster[i], cluster[j]), min(cluster[i], cluster[j])
                cluster = [new if c == old else c for c in cluster]
    numbers = {c: k for k, c in enumerate(dict.fromkeys(cluster))}
    return [numbers[c] for c in cluster]


def hierarchy_by_hand(points: NDArray[np.float64]) -> list[list[int]]:
    partitions = [by_hand(points)]
    while max(partitions[-1]) > 0:
        last = np.array(partitions[-1])
        means = np.stack([points[last == k].mean(axis=0) for k in range(last.max() + 1)])
        merged = [by_hand(means)[k] for k in last]
        if max(merged) == 0:
            break
        partitions.append(merged)
    return partitions


@pytest.mark.parametrize("n", [2, 3, 4, 7, 20, 41])
def test_partitions_are_those_of_equation_1_level_by_level(n):
    for seed in range(5):
        points = np.random.default_rng(seed).normal(size=(n, 5))
        assert finch(points).tolist() == hierarchy_by_hand(points)[-1]


@pytest.mark.parametrize(
    ("points", "clusters"),
    [
        ([[1.0, 2.0]], [0]),
        ([[0.0, 0.0]], [0]),
        ([[1.0, 0.0], [0.0, 1.0]], [0, 0]),
        ([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], [0, 0, 0]),
        ([[0.3, 0.7, 0.1]] * 9, [0] * 9),
        ([[0.0, 0.0]] * 4, [0] * 4),
        ([[0.3, 0.7]] * 3 + [[0.7, -0.3]] * 3, [0, 0, 0, 1, 1, 1]),
    ],
    ids=["one", "one zero", "two", "three", "identical", "zeros", "two of three identical"],
)
def test_few_and_identical_points(points, clusters):
    assert finch(np.array(points)).tolist() == clusters


def test_many_identical_points_are_one_cluster_whatever_the_rounding():
    point = np.random.default_rng(1).normal(size=(1, 33))
    assert finch(point.repeat(100, axis=0)).max() == 0


def test_looking_at_the_points_in_blocks_changes_nothing(monkeypatch):
    points = np.random.default_rng(5).normal(size=(50, 6))
    whole = finch(points).tolist()
    monkeypatch.setattr(module, "_ROWS", 7)
    assert finch(points).tolist() == whole


def test_the_means_are_of_the_points_and_not_of_the_means():
    points = torch.from_numpy(np.random.default_rng(2).normal(size=(60, 4))).float()
    clusters = torch.from_numpy(finch(points.numpy()))
    expected = torch.stack([points[clusters == k].mean(dim=0) for k in range(int(clusters.max()) + 1)])
    torch.testing.assert_close(cluster_means(points), expected)
    assert cluster_means(points).dtype == torch.float32
