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

from fedkeel.errors import FedkeelError

_ROWS = 1024  # of the table of similarities that is in memory at a time
_DIGITS = 12  # similarities that agree so far are the same: which of them is greater would be noise


def finch(points: NDArray[Any]) -> list[NDArray[np.int64]]:
    """The hierarchy of partitions, from the finest to the coarsest, by cosine similarity.

    Every cluster of a partition is a union of clusters of the one before. A single cluster for all points is no
    partition, unless it is the only one there is. With two points or more, no cluster has a single point.

    The same points give the same partitions: of several nearest neighbours the first counts, and clusters are numbered
    by their first point. A zero vector has no direction, and its similarity to everything is 0.

    Args:
        points: (n, d), at least one.

    Returns:
        For each partition, the cluster of each point, (n,), from 0.

    Reference: Sarfraz et al., CVPR 2019, Algorithm 1.

    >>> finch(np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]))[-1].tolist()
    [0, 0, 1, 1]
    """
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2 or not len(points) or not np.isfinite(points).all():
        raise FedkeelError(f"FINCH got points of shape {points.shape}: give finite rows (n, d), at least one.")
    clusters = _linked(points)
    partitions = [clusters]
    while clusters.max() > 0:
        clusters = _linked(_means(points, clusters))[clusters]
        if clusters.max() == 0:
            break
        partitions.append(clusters)
    return partitions


def cluster_means(points: Tensor) -> Tensor:
    """The means of the clusters of FINCH's last partition: (n, d) -> (k, d), with k from 1 to max(1, n // 2).

    Computed on the CPU in float64.

    >>> cluster_means(torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [0.0, 5.0]]))
    tensor([[2., 0.],
            [0., 3.]])
    """
    rows = points.detach().cpu().double().numpy()
    return torch.from_numpy(_means(rows, finch(rows)[-1])).to(points)


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
