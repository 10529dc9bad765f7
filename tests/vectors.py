"""A federation of vectors: three sites, whose six features are shifted and scaled in their own ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedkeel import data
from fedkeel.data.federation import Federation

SITES = ("north", "south", "west")


def arrays(count: int = 120, seed: int = 0) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Vectors (N, 6), labels of three classes, and the site of each."""
    generator = np.random.default_rng(seed)
    labels, sites = generator.integers(0, 3, count), np.arange(count) * len(SITES) // count
    x = generator.normal(size=(count, 6)) + labels[:, None] * np.array([1, 0, 2, 0, 1, 0])
    return (x * (1 + sites[:, None]) + sites[:, None]).astype(np.float32), labels, np.array(SITES)[sites]


def federation(**options: Any) -> Federation:
    x, labels, sites = arrays()
    return data.federation(x, labels, **{"clients": sites, "validation": 0.1, **options})
