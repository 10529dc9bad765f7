"""FINCH: Sarfraz et al., "Efficient Parameter-free Clustering Using First Neighbor Relations", CVPR 2019, Eq. 1 and
Algorithm 1.

Two points belong together if one is the other's first neighbour, or if both have the same (Eq. 1). The clusters that
this makes are points again, their means, and so on, until a single one would be left. There is nothing to tune.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ROWS = 1024  # of the table of similarities that is in memory at a time
_DIGITS = 12  # similarities that agree so far are the same: which of them is greater would be noise


def finch(points: NDArray[Any]) -> NDArray[np.int64]:
    """The cluster of each point in the coarsest partition, (n, d) -> (n,) from 0, by cosine similarity.

    A single cluster for all points is no partition, unless it is the only one there is. With two points or more, no
    cluster has a single point. The same points give the same partition: of several nearest neighbours the first
    counts, and clusters are numbered by their first point. The similarity of a zero vector to everything is 0.

    Reference: Sarfraz et al., CVPR 2019, Algorithm 1.

    >>> finch(np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])).tolist()
    [0, 0, 1, 1]
    """
    clusters = merged = _linked(points)
    while merged.max() > 0:
        clusters = merged
        merged = _linked(_means(points, clusters))[clusters]
    return clusters


def cluster_means(points: Tensor) -> Tensor:
    """The means of FINCH's clusters: (n, d) -> (k, d), with k from 1 to max(1, n // 2). In float64 on the CPU.

    >>> cluster_means(torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [0.0, 5.0]]))
    tensor([[2., 0.],
            [0., 3.]])
    """
    rows = points.detach().cpu().double().numpy()
    return torch.from_numpy(_means(rows, finch(rows))).to(points)


def _linked(points: NDArray[np.float64]) -> NDArray[np.int64]:
    """Eq. 1: components of the graph that links each point with its first neighbour. (n, d) -> (n,)."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(points)
    if n == 1:
        return np.zeros(1, dtype=np.int64)
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    directions = np.divide(points, lengths, out=np.zeros_like(points), where=lengths > 0)
    neighbours = np.empty(n, dtype=np.int64)
    for start in range(0, n, _ROWS):
        similar = np.round(directions[start : start + _ROWS] @ directions.T, _DIGITS)
        own = np.arange(len(similar))
        similar[own, start + own] = -np.inf
        neighbours[start : start + _ROWS] = similar.argmax(axis=1)
    links = coo_array((np.ones(n), (np.arange(n), neighbours)), shape=(n, n))
    _, found = connected_components(links, directed=False)
    _, first, inverse = np.unique(found, return_index=True, return_inverse=True)
    numbers: NDArray[np.int64] = np.argsort(np.argsort(first))[inverse]
    return numbers


def _means(points: NDArray[np.float64], clusters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Mean point of each cluster: (n, d), (n,) -> (k, d)."""
    sums = np.zeros((int(clusters.max()) + 1, points.shape[1]))
    np.add.at(sums, clusters, points)
    return sums / np.bincount(clusters)[:, None]
