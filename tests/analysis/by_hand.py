"""What a diagnostic should say, without torch: the tiny network's forward pass in NumPy, in double precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import fedkeel
from fedkeel.core import state
from fedkeel.data.federation import Federation
from fedkeel.engine.tasks import fetched
from fedkeel.observer import Aggregated
from fedkeel.runs.run import Run
from tests import tiny

CONV, NORM, HEAD = "encoder.0", "encoder.1", "head"


def forward(entries: Mapping[str, Any], images: Tensor, *, batch: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Features and logits of `tests.tiny.model` on uint8 images, batch norm under its own or under batch statistics."""
    w = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in entries.items()}
    x = images.numpy().astype(np.float64) / 255
    n, _, height, width = x.shape
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    kernel = w[f"{CONV}.weight"]
    y = np.zeros((n, len(kernel), height, width))
    for i in range(height):
        for j in range(width):
            patch = padded[:, :, i : i + 3, j : j + 3]
            y[:, :, i, j] = np.einsum("nchw,ochw->no", patch, kernel) + w[f"{CONV}.bias"]
    mean = y.mean(axis=(0, 2, 3)) if batch else w[f"{NORM}.running_mean"]
    var = y.var(axis=(0, 2, 3)) if batch else w[f"{NORM}.running_var"]
    y = (y - mean[:, None, None]) / np.sqrt(var[:, None, None] + 1e-5)
    y = np.maximum(y * w[f"{NORM}.weight"][:, None, None] + w[f"{NORM}.bias"][:, None, None], 0)
    half_h, half_w = height // 2, width // 2
    pooled = np.stack(
        [y[:, :, a : a + half_h, b : b + half_w].mean(axis=(2, 3)) for a in (0, half_h) for b in (0, half_w)],
        axis=-1,
    )
    features = pooled.reshape(n, -1)
    return features, features @ w[f"{HEAD}.weight"].T + w[f"{HEAD}.bias"]


def probabilities(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits)
    return powers / powers.sum(axis=1, keepdims=True)


def losses(logits: np.ndarray, labels: Tensor) -> np.ndarray:
    rows = probabilities(logits)
    return np.array([-np.log(row[label]) for row, label in zip(rows, labels.tolist(), strict=True)])


def moved(sent: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> float:
    """How far the weights went."""
    weights = [k for k in update if "running" not in k and "num_batches" not in k]
    return float(np.linalg.norm(np.concatenate([(sent[k] - update[k]).double().numpy().ravel() for k in weights])))


def mutual_information(a: np.ndarray, b: np.ndarray) -> float:
    """Normalised by the mean of the entropies; from the table of counts, in natural logarithms."""
    joint = np.array([[np.mean((a == i) & (b == j)) for j in set(b.tolist())] for i in set(a.tolist())])
    p, q = joint.sum(axis=1), joint.sum(axis=0)
    shared = sum(w * np.log(w / (p[i] * q[j])) for (i, j), w in np.ndenumerate(joint) if w > 0)
    return float(shared / ((-(p * np.log(p)).sum() - (q * np.log(q)).sum()) / 2))


@dataclass
class Kept:
    """A round as it went by."""

    sent: dict[str, Tensor]
    model: dict[str, Tensor]
    updates: dict[str, dict[str, Tensor]]
    local: dict[str, dict[str, Tensor]]


class Memory(fedkeel.Observer):
    """Copies every round's tensors before anything can change them."""

    def __init__(self) -> None:
        self.rounds: dict[int, Kept] = {}
        self.seen: set[str] = set()  # clients

    def aggregated(self, seen: Aggregated) -> None:
        self.seen |= {update.client for update in seen.updates}
        self.rounds[seen.sent.round] = Kept(
            sent=state.clone({**seen.sent.weights, **seen.sent.statistics}),
            model=state.clone({**seen.model.weights, **seen.model.statistics}),
            updates={update.client: state.clone({**update.weights, **update.statistics}) for update in seen.updates},
            local={name: state.clone(kept) for name in sorted(self.seen) if (kept := fetched(seen.memory.look(name)))},
        )


def recorded_run(directory: Path, record: str, method: str = "fedavg", **options: Any) -> tuple[Run, Memory]:
    """Batches that hold a client's whole data: batch statistics then do not depend on the order of the samples."""
    memory = Memory()
    settings = {"batch_size": 64, "record": record, "record_every": 1, **options}
    return tiny.run(directory, method, observer=memory, **settings), memory


def by_round(document: dict[str, Any], key: str) -> dict[int, Any]:
    """What stands under a key of the numbers, in every round."""
    return {entry["round"]: entry["numbers"][key] for entry in document["rounds"]}


def last(document: dict[str, Any], key: str) -> Any:
    return document["rounds"][-1]["numbers"][key]


def images(federation: Federation, indices: Tensor) -> tuple[Tensor, Tensor]:
    return federation.images[indices], federation.labels[indices]
