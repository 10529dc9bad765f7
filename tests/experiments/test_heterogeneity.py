"""Distances between clients against loops, and their chance against the exact expectation of a deal."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkeel.experiments.heterogeneity import (
    AboveChance,
    above_chance,
    label_distance,
    look_distance,
    within_classes,
)


def drawn(seed: int, samples: int = 300, classes: int = 4, clients: int = 5) -> tuple[Tensor, Tensor]:
    """Labels and clients, of unequal numbers."""
    random = np.random.default_rng(seed)
    shares = random.dirichlet([1.0] * classes, size=clients)
    owners = np.sort(random.integers(0, clients, samples))
    return torch.tensor([random.choice(classes, p=shares[k]) for k in owners]), torch.tensor(owners)


def deal(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seed", range(2))
def test_labels_lie_apart_by_the_total_variation_of_each_client_from_all(seed: int) -> None:
    labels, clients = drawn(seed)
    everyone, expected = Counter(labels.tolist()), 0.0
    for k in set(clients.tolist()):
        mine = Counter(labels[clients == k].tolist())
        size = sum(mine.values())
        expected += size / 300 * sum(abs(mine[c] / size - everyone[c] / 300) for c in everyone) / 2
    assert float(label_distance(labels, clients)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_looks_lie_apart_by_the_variation_between_clients_within_classes(seed: int) -> None:
    labels, clients = drawn(seed)
    values = (
        np.random.default_rng(seed).normal(size=(300, 3)) + labels.numpy()[:, None] + 0.3 * clients.numpy()[:, None]
    )
    between, total = np.zeros(3), np.zeros(3)
    for c in range(4):
        of_class = values[labels.numpy() == c]
        total += ((of_class - of_class.mean(0)) ** 2).sum(0)
        for k in range(5):
            cell = values[(labels.numpy() == c) & (clients.numpy() == k)]
            between += len(cell) * (cell.mean(0) - of_class.mean(0)) ** 2 if len(cell) else 0
    residuals = within_classes(torch.tensor(values), labels)
    # Each number in units of its own spread, so that all count the same.
    assert float(look_distance(residuals, labels, clients)) ** 2 == pytest.approx((between / total).mean(), rel=1e-9)


def test_the_chance_of_a_look_is_what_a_deal_gives_on_average() -> None:
    """Exactly (K_c - 1) / (n_c - 1) of a class's variation, by sampling without replacement."""
    labels, clients = drawn(3)
    residuals = within_classes(torch.randn(300, 2, generator=deal(1)), labels)
    expected = 0.0
    for c in range(4):
        mine = labels == c
        owners = len(torch.unique(clients[mine]))
        expected += float(residuals[mine].square().sum()) * (owners - 1) / (int(mine.sum()) - 1)
    expected /= float(residuals.square().sum())
    found = above_chance(lambda dealt: look_distance(residuals, labels, dealt), clients, labels, deal(), deals=2000)
    assert found.chance**2 == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("seed", range(2))
def test_a_look_that_comes_with_the_class_is_no_shift(seed: int) -> None:
    """Classes look very different and clients have different classes: looks would lie far apart without the classes."""
    labels, clients = drawn(seed, samples=600)
    values = torch.randn(600, 4, generator=deal(seed)) + 5.0 * labels[:, None]
    without = within_classes(values, torch.zeros_like(labels))
    naive = above_chance(
        lambda d: look_distance(without, torch.zeros_like(labels), d), clients, torch.zeros_like(labels), deal()
    )
    residuals = within_classes(values, labels)
    found = above_chance(lambda dealt: look_distance(residuals, labels, dealt), clients, labels, deal())
    assert naive.deviations > 10
    assert found.deviations < 3


@pytest.mark.parametrize("seed", range(2))
def test_a_known_look_is_found_at_its_size(seed: int) -> None:
    """Clients whose means have the variance 1/3 among samples of variance 1: 1/4 of the variation is between them."""
    labels, clients = torch.arange(2000) % 4, torch.arange(2000) // 400
    means = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]) / (2 * 3) ** 0.5  # their variance is 2 / 6
    values = torch.randn(2000, 8, generator=deal(seed)) + means[clients][:, None]
    residuals = within_classes(values, labels)
    found = above_chance(lambda dealt: look_distance(residuals, labels, dealt), clients, labels, deal())
    assert found.above == pytest.approx(0.5, abs=0.03)


def test_squares_add_up() -> None:
    assert AboveChance(0.5, 0.3, 9.0).above == pytest.approx((0.16 / 0.91) ** 0.5)
    assert AboveChance(0.3, 0.5, -2.0).above == 0
    assert AboveChance(1.0, 1.0, 0.0).above == 0


def test_deals_that_cannot_differ_say_nothing() -> None:
    labels, clients = torch.tensor([0, 0]), torch.tensor([0, 1])
    residuals = within_classes(torch.tensor([[0.0], [1.0]]), labels)
    found = above_chance(lambda dealt: look_distance(residuals, labels, dealt), clients, labels, deal())
    assert (found.distance, found.above, found.deviations) == (1.0, 0.0, 0.0)
