"""Clients that are made on demand: the same whoever asks, whenever, and none that nobody asked for."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkeel.data import DATASETS, contact_sheet, describe, load
from fedkeel.data.dataset import Dataset, Split, indices
from fedkeel.data.federation import Client
from fedkeel.data.load import Cut
from fedkeel.data.partition import Dirichlet
from fedkeel.data.population import RECENT, Population
from fedkeel.data.transforms import Pipeline
from fedkeel.errors import DataError

IMAGES, TESTS = 5000, 100
MANY = "dirichlet(alpha=0.3, clients=50000, samples=20)"  # in each of two domains
EVERY_KIND = [MANY, "even(clients=300)", "dirichlet(clients=20, minimum=1)"]


def read() -> Dataset:
    """Two domains of 5,000 training samples, of a class each, and 100 for testing."""
    generator = np.random.default_rng(0)
    total = 2 * (IMAGES + TESTS)
    labels = torch.from_numpy(generator.choice(4, total, p=[0.4, 0.3, 0.2, 0.1]))
    splits = {}
    for domain, start in (("left", 0), ("right", IMAGES + TESTS)):
        stop = start + IMAGES
        splits[domain] = Split(indices(range(start, stop)), indices([]), indices(range(stop, stop + TESTS)))
    images = torch.zeros(total, 1, 4, 4, dtype=torch.uint8)
    return Dataset("crowd", images, labels, ("a", "b", "c", "d"), splits, Pipeline(), Pipeline())


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    DATASETS.register("crowd")(read)
    yield
    del DATASETS._entries["crowd"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all clients that were made since."""
    names: list[str] = []
    plain = Client.__init__

    def counted(self: Client, name: str, domain: str, train: Tensor, validation: Tensor, test: Tensor) -> None:
        names.append(name)
        plain(self, name, domain, train, validation, test)

    monkeypatch.setattr(Client, "__init__", counted)
    return names


def living() -> int:
    gc.collect()
    return sum(type(thing) is Client for thing in gc.get_objects())


# -- the same, whoever asks ----------------------------------------------------------------------------------
@pytest.mark.parametrize("partition", EVERY_KIND)
def test_a_client_is_the_same_in_whatever_order_they_are_asked_for(partition: str) -> None:
    one, other = (load("crowd", partition=partition, seed=5) for _ in range(2))
    places = random.Random(0).sample(range(len(one.clients)), 30)
    expected = {place: one.clients[place] for place in sorted(places)}
    for place in places:
        client = other.clients[place]
        assert (client.name, client.domain) == (expected[place].name, expected[place].domain)
        assert client.train.equal(expected[place].train)
        assert one[client.name].train.equal(client.train)
    again = load("crowd", partition=partition, seed=6)
    assert not all(again.clients[i].train.equal(expected[i].train) for i in places)


@pytest.mark.parametrize("partition", EVERY_KIND)
def test_it_is_a_sequence_like_a_list(partition: str) -> None:
    clients = load("crowd", partition=partition).clients
    listed = [client.name for client, _ in zip(clients, range(30), strict=False)]
    assert listed == [clients[i].name for i in range(len(listed))] == [c.name for c in clients[: len(listed)]]
    assert clients[-1].name == clients[len(clients) - 1].name
    with pytest.raises(IndexError):
        clients[len(clients)]


def test_names_are_found_and_near_ones_are_not() -> None:
    federation = load("crowd", partition=MANY, unseen="right")
    clients = federation.clients
    assert isinstance(clients, Population)
    assert [clients.number(clients[i].name) for i in (0, 17, 49_999)] == [0, 17, 49_999]
    for wrong in ("left-17", "left-000017", "left-50000", "left-", "left", "right-00017", "left--0001", "left-٠٠٠١٧"):
        assert clients.number(wrong) is None
    assert federation["right"].samples == 0
    with pytest.raises(DataError, match="There is no client named 'left-17': did you mean 'left-000"):
        federation["left-17"]


# -- what they have ------------------------------------------------------------------------------------------
def test_a_drawn_client_has_that_many_different_images_of_its_domain() -> None:
    federation = load("crowd", partition=MANY)
    for place in (0, 1, 999, 49_999, 50_000, 99_999):
        client = federation.clients[place]
        start = 0 if client.domain == "left" else IMAGES + TESTS
        assert len(set(client.train.tolist())) == 20
        assert start <= client.train.min()
        assert client.train.max() < start + IMAGES
    assert not federation.clients[0].train.equal(federation.clients[50_000].train - IMAGES - TESTS)


def test_the_number_of_clients_does_not_change_a_client() -> None:
    few = load("crowd", partition="dirichlet(alpha=0.3, clients=100, samples=20)")
    assert few["left-17"].train.equal(load("crowd", partition=MANY)["left-00017"].train)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 50.0])
def test_drawn_proportions_are_those_of_an_exact_cut_into_many_clients(alpha: float) -> None:
    """Mean and spread over clients of each class's share, against the cut that gives each image to one client."""
    labels = np.repeat(np.arange(4), [8000, 6000, 4000, 2000])
    draws = Dirichlet(alpha, 600, samples=200).shares("d", labels, 3)
    drawn = np.array([np.bincount(labels[draws.positions(i)], minlength=4) for i in range(600)]) / 200
    cut = np.random.default_rng(1).dirichlet(np.full(100, alpha), size=(150, 4))  # class by class, over 100 clients
    images = (cut * np.array([8000, 6000, 4000, 2000])[None, :, None]).transpose(0, 2, 1).reshape(-1, 4)
    exact = images[images.sum(1) > 20]
    exact = exact / exact.sum(1, keepdims=True)
    assert np.abs(drawn.mean(0) - exact.mean(0)).max() < 0.04
    # Drawing 200 images adds the variance of counting them.
    spread = np.sqrt(exact.var(0) + (exact * (1 - exact)).mean(0) / 200)
    assert np.abs(drawn.std(0) - spread).max() < 0.04


@pytest.mark.parametrize("alpha", [1e-6, 0.01, 100.0])
def test_a_class_that_is_used_up_leaves_the_rest_to_others(alpha: float) -> None:
    labels = np.repeat(np.arange(3), [5, 7, 9])
    draws = Dirichlet(alpha, 50, samples=20).shares("d", labels, 0)
    for number in range(50):
        assert len(set(draws.positions(number).tolist())) == 20
    everything = Dirichlet(alpha, 1, samples=21).shares("d", labels, 0)
    assert everything.positions(0).tolist() == list(range(21))


# -- none that nobody asked for ------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_hundred_thousand_clients_are_none_until_asked_for(made: list[str]) -> None:
    before = living()
    federation = load("crowd", partition=MANY)
    assert len(federation.clients) == 100_000
    assert len(made) <= 2  # one of each domain, to look at its test set
    assert federation.domains == ["left", "right"]
    assert federation.most_samples == 20
    assert len(federation.pooled().clients[0].train) == 2 * IMAGES
    assert [row.client for row in describe(federation, most=3)] == ["left-00000", "left-00001", "left-00002"]
    made.clear()
    for place in range(0, 100_000, 37):
        federation.clients[place]
    assert len(made) < 3000
    assert living() - before <= RECENT + 3


@pytest.mark.slow
@pytest.mark.parametrize("ask", [False, True])
def test_memory_does_not_grow_with_the_number_of_clients(ask: bool) -> None:
    def bytes_of(clients: int) -> int:
        tracemalloc.start()
        federation = load("crowd", partition=f"dirichlet(clients={clients}, samples=20)")
        if ask:
            for place in range(0, len(federation.clients), len(federation.clients) // 500):
                _ = federation.clients[place].train
        gc.collect()
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(federation.clients) == 2 * clients
        return size

    bytes_of(1000)  # what is imported or compiled on first use
    assert bytes_of(100_000) < bytes_of(1000) + 100_000


def test_the_picture_shows_what_clients_draw_from(tmp_path: object) -> None:
    federation = load("crowd", partition=MANY, unseen="right")
    assert contact_sheet(federation, f"{tmp_path}/sheet.png", per_class=1, cell=16).exists()


# -- refused -------------------------------------------------------------------------------------------------
def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(DataError, match="draws its own samples, so subsample=10 has nothing to do"):
        load("crowd", partition=MANY, subsample=10)
    with pytest.raises(DataError, match="or let clients share samples by samples=N"):
        load("crowd", partition="dirichlet(clients=100000)")


@pytest.mark.parametrize("unseen", ["", "site-1"])
def test_two_domains_whose_clients_would_share_a_name_are_refused(unseen: str) -> None:
    splits = {"site": Split(*map(indices, ([0, 1], [], [2]))), "site-1": Split(*map(indices, ([3, 4], [], [5])))}
    few = Dataset("few", torch.zeros(6, 1, 4, 4).byte(), torch.zeros(6).long(), ("a",), splits)
    assert len(Cut(partition="even(clients=2)").federation(few).clients) == 4
    with pytest.raises(DataError, match="are called 'site-1'"):
        Cut(partition="clients(site=2)", unseen=unseen).federation(few)
