"""Partitions: exact cuts, decided by the seed alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeel import seeds
from fedkeel.data import PARTITIONS
from fedkeel.data.partition import Dirichlet, apportion, build
from fedkeel.errors import DataError, FedkeelError

labels = st.lists(st.integers(0, 5), min_size=60, max_size=200).map(lambda y: np.array(y, np.int64))
texts = st.sampled_from(
    [
        "domains",
        "even(clients=7)",
        "clients(here=4)",
        "dirichlet(alpha=0.5, clients=4, minimum=1)",
        "dirichlet(alpha=0.05, clients=4, minimum=1, balanced=true)",
        "shards(clients=5, classes_per_client=3)",
    ]
)


def cut(text: str, y: np.ndarray, seed: int = 0) -> list[np.ndarray]:
    return build(text).cut("here", y, seeds.numpy_generator(seed, "partition", "here"))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(texts, labels, st.integers(0, 5))
def test_clients_are_disjoint_and_together_the_domain(text: str, y: np.ndarray, seed: int) -> None:
    parts = cut(text, y, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(y)))


@settings(max_examples=30, deadline=None)
@given(texts, labels, st.integers(0, 5))
def test_the_same_seed_gives_the_same_clients(text: str, y: np.ndarray, seed: int) -> None:
    for one, other in zip(cut(text, y, seed), cut(text, y, seed), strict=True):
        assert one.tolist() == other.tolist()


@settings(max_examples=30, deadline=None)
@given(labels, st.integers(2, 9))
def test_even_differs_by_at_most_one_sample_per_class(y: np.ndarray, clients: int) -> None:
    counts = np.array([np.bincount(y[part], minlength=6) for part in cut(f"even(clients={clients})", y)])
    assert (np.ptp(counts, axis=0) <= 1).all()
    assert np.ptp(counts.sum(axis=1)) <= 1


@settings(max_examples=30, deadline=None)
@given(labels, st.integers(0, 9))
def test_a_client_of_shards_has_no_more_classes_than_asked(y: np.ndarray, seed: int) -> None:
    for part in cut("shards(clients=6, classes_per_client=2)", y, seed):
        assert 1 <= len(np.unique(y[part])) <= 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_apportioned_parts_add_up_and_stay_below_their_sizes(sizes: list[int], data: st.DataObject) -> None:
    total = data.draw(st.integers(0, sum(sizes)))
    counts = apportion(np.array(sizes, np.int64), total)
    assert counts.sum() == total
    assert (counts <= np.array(sizes)).all()
    assert (abs(counts * max(sum(sizes), 1) - np.array(sizes) * total) <= max(sum(sizes), 1)).all()


def test_another_seed_gives_other_clients() -> None:
    y = np.arange(200) % 10
    assert cut("even(clients=4)", y, 0)[0].tolist() != cut("even(clients=4)", y, 1)[0].tolist()


def test_a_large_alpha_is_nearly_even_and_a_small_one_is_not() -> None:
    y = np.repeat(np.arange(10), 500)
    flat = [len(part) for part in cut("dirichlet(alpha=1000, clients=10)", y)]
    skewed = [
        np.bincount(y[part], minlength=10).max() / len(part) for part in cut("dirichlet(alpha=0.1, clients=10)", y)
    ]
    assert max(flat) < 600
    assert np.mean(skewed) > 0.4


def test_dirichlet_respects_the_minimum() -> None:
    y = np.repeat(np.arange(10), 50)
    for seed in range(5):
        assert min(len(part) for part in cut("dirichlet(alpha=0.5, clients=10, minimum=15)", y, seed)) >= 15


def test_dirichlet_gives_up_after_its_redraws() -> None:
    y = np.repeat(np.arange(2), 60)
    with pytest.raises(DataError, match=r"cannot give the 120 training samples of 'here' to 10 clients of at least 12"):
        cut("dirichlet(alpha=0.01, clients=10, minimum=12)", y)


def test_a_hundred_clients_of_fifty_thousand_images_cost_a_draw_for_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    draws, plain = [], Dirichlet.draw

    def counted(self: Dirichlet, sizes: Sequence[int], generator: np.random.Generator) -> np.ndarray:
        draws.append(len(sizes))
        return plain(self, sizes, generator)

    monkeypatch.setattr(Dirichlet, "draw", counted)
    assert len(cut("dirichlet(alpha=0.6, clients=100)", np.repeat(np.arange(10), 5000))) == 100
    assert draws == [10]  # none was thrown away


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dirichlet(alpha=0)", "The 'alpha' of dirichlet is 0: give a number from 1e-06 to"),
        ("dirichlet(alpha=much)", "The 'alpha' of dirichlet is 'much'"),
        ("even(clients=0)", "The 'clients' of even is 0: give at least 1"),
        ("clients", "names no domain"),
        ("clients(photo=0)", "The 'photo' of clients is 0"),
        ("dirichlet(samples=0)", "The 'samples' of dirichlet is 0"),
        ("shards(classes_per_client=1.5)", "The 'classes_per_client' of shards is 1.5"),
        ("dirichlett", "did you mean 'dirichlet'"),
        ("even(client=3)", "did you mean 'clients'"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(FedkeelError, match=message):
        build(text)


def test_too_few_images_or_shards_are_refused() -> None:
    y = np.arange(20) % 10
    with pytest.raises(DataError, match="to 10 clients of at least 10 each"):
        cut("dirichlet(clients=10)", y)
    for text in ("shards(clients=2)", "shards(clients=20)"):
        with pytest.raises(DataError, match=r"shards, and the domain 'here' has 10 classes and 20 training samples"):
            cut(text, y)
    for text in ("dirichlet(samples=21)", "dirichlet(samples=5, balanced=true)"):
        with pytest.raises(DataError, match=r"draws \d+ of 20 training samples: leave balanced out and ask for no"):
            build(text).shares("here", y, 0)


def test_every_partition_has_a_summary() -> None:
    assert all(entry.summary for entry in PARTITIONS)
