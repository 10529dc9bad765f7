"""From a name to clients: names, shared test sets, unseen domains, subsamples."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from fedkeel.data import DATASETS, Federation, load, load_spec
from fedkeel.data.dataset import Dataset, Split, indices
from fedkeel.data.load import with_own_mix
from fedkeel.data.transforms import Pipeline
from fedkeel.data.transforms.colour import Normalise
from fedkeel.data.transforms.geometry import Crop
from fedkeel.errors import DataError, FedkeelError
from tests import tiny

PARTITIONS = ["domains", "even(clients=3)", "clients(paper=2)", "dirichlet(clients=4, minimum=1)", "shards(clients=5)"]


@pytest.mark.parametrize("partition", PARTITIONS)
def test_clients_of_a_domain_cut_its_training_set_and_share_its_test_set(partition: str) -> None:
    whole = load("digits-shift")
    federation = load("digits-shift", partition=partition, seed=3)
    for domain in whole.clients:
        own = [client for client in federation.clients if client.domain == domain.name]
        assert torch.cat([client.train for client in own]).sort().values.equal(domain.train.sort().values)
        for client in own:
            assert client.test is own[0].test
            assert client.validation.equal(domain.validation)
            assert client.test.equal(domain.test)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_seed_decides_everything(partition: str) -> None:
    one, two = (load("digits-shift", partition=partition, seed=5, subsample=10) for _ in range(2))
    assert [client.name for client in one] == [client.name for client in two]
    assert all(a.train.equal(b.train) for a, b in zip(one, two, strict=True))


def test_holding_out_a_domain_does_not_change_the_others() -> None:
    every = load("digits-shift", partition="even(clients=2)")
    fewer = load("digits-shift", partition="even(clients=2)", unseen="scan")
    assert fewer["paper-1"].train.equal(every["paper-1"].train)


def test_client_names_sort_as_numbers_do() -> None:
    federation = load("digits-shift", partition="clients(scan=11)")
    names = [client.name for client in federation.clients]
    assert names[:11] == [f"scan-{i:02d}" for i in range(11)]
    assert names[11:] == ["paper", "texture", "stroke", "street"]


def test_an_unseen_domain_is_tested_whole() -> None:
    federation = load("digits-shift", unseen=["street"])
    client = federation["street"]
    assert list(federation.unseen) == [client]
    assert client.samples == len(client.validation) == 0
    assert len(client.test) == 359
    assert len(load("digits-shift", unseen="street", unseen_split="test")["street"].test) == 90


def test_several_unseen_domains_can_be_typed() -> None:
    federation = load_spec("digits-shift(unseen=[street, scan], partition=even(clients=2))")
    assert [client.name for client in federation.unseen] == ["street", "scan"]
    assert len(federation.clients) == 6


def test_subsampled_clients_have_equally_many_images_of_each_class() -> None:
    federation = load("digits-shift", subsample=50)
    for client in federation.clients:
        assert client.samples == 50
        assert federation.labels[client.train].bincount().max() <= 6
        assert set(client.train.tolist()) <= set(load("digits-shift")[client.name].train.tolist())


def test_too_large_a_subsample_names_the_client() -> None:
    with pytest.raises(
        DataError, match="The client 'scan' gets 220 of the 220 training samples of 'scan', fewer than 500"
    ):
        load("digits-shift", subsample=500)


def test_transforms_can_be_replaced() -> None:
    federation = load_spec("digits-shift(train_transform=crop(padding=2)+normalise)")
    assert federation.train_transform == Pipeline((Crop(2), Normalise()))
    assert federation.test_transform == Pipeline((Normalise(),))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unseen": "streat"}, "did you mean 'street'"),
        ({"unseen": ["scan", "paper", "texture", "stroke", "street"]}, "leave at least one"),
        ({"unseen_split": "some"}, "unseen_split is 'some': choose from all, test"),
        ({"subsample": 0}, "subsample is 0"),
        ({"partition": "clients(strret=2)"}, "no training domain named 'strret'"),
        ({"partition": "even(clients=500)"}, "The client 'scan-220' gets 0 of the 220 training samples"),
        ({"size": 3}, "has no option 'size'"),
    ],
)
def test_what_cannot_be_loaded_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(FedkeelError, match=message):
        load("digits-shift", **options)  # type: ignore[arg-type]


def test_an_option_given_twice_is_refused() -> None:
    with pytest.raises(DataError, match="The partition is given twice"):
        load_spec("digits-shift(partition=domains)", partition="even(clients=2)")
    with pytest.raises(FedkeelError, match="did you mean 'digits-shift'"):
        load("digit-shift")


def test_a_class_that_is_only_tested_is_named(caplog: pytest.LogCaptureFixture) -> None:
    name = "untrained-class"

    @DATASETS.register(name)
    def read() -> Dataset:
        """Two classes, of which one is only tested."""
        splits = {"here": Split(indices([0, 1]), indices([]), indices([2]))}
        labels = torch.tensor([0, 0, 1])
        images = torch.zeros(3, 3, 4, 4, dtype=torch.uint8)
        return Dataset(name, images, labels, ("cat", "dog"), splits, Pipeline(), Pipeline())

    try:
        with caplog.at_level(logging.WARNING, "fedkeel"):
            load(name)
    finally:
        del DATASETS._entries[name]
    assert caplog.messages == [
        f"'{name}' has classes that are tested and that nobody trains on: 'dog'.",
        f"'{name}' has classes with a single sample, which cannot be both trained on and tested: 'here/dog'.",
    ]


def test_an_image_in_two_parts_of_a_split_is_refused() -> None:
    splits = {"here": Split(indices([0, 1]), indices([]), indices([1]))}
    with pytest.raises(DataError, match="domain 'here' is in two splits: keep it in one"):
        Dataset("x", torch.zeros(2, 3, 4, 4).byte(), torch.zeros(2).long(), ("a",), splits, Pipeline(), Pipeline())


def test_two_clients_of_one_name_are_refused() -> None:
    federation = load("digits-shift")
    with pytest.raises(DataError, match="Two clients of 'digits-shift' are called 'scan'"):
        Federation(
            name=federation.name,
            images=federation.images,
            labels=federation.labels,
            classes=federation.classes,
            clients=[federation["scan"], federation["scan"]],
            train_transform=federation.train_transform,
            test_transform=federation.test_transform,
        )


# -- tests of one's own ----------------------------------------------------------------------------------------------
def test_clients_with_tests_of_their_own_have_the_class_mix_that_they_train_on() -> None:
    shared, own = (
        load("digits", partition="dirichlet(alpha=0.3, clients=6)", tests=tests) for tests in ("shared", "own")
    )
    for client, before in zip(own.clients, shared.clients, strict=True):
        assert torch.equal(client.train, before.train)
        assert set(client.test.tolist()) <= set(before.test.tolist())
        assert len(client.test.unique()) == len(client.test) > 0
        trained, tested = (own.labels[part].bincount(minlength=10).double() for part in (client.train, client.test))
        assert (trained / trained.sum() - tested / tested.sum()).abs().max() < 0.6 / len(client.test) * 10
        largest = own.labels[before.test].bincount(minlength=10)
        assert bool((tested == largest)[trained > 0].any())  # as many as there are


def test_tests_of_their_own_are_the_same_each_time_and_every_client_is_tested() -> None:
    first, second = (load("digits", partition="shards(clients=5, classes_per_client=2)", tests="own") for _ in range(2))
    assert all(torch.equal(a.test, b.test) for a, b in zip(first.clients, second.clients, strict=True))
    assert len(list(first.one_of_each())) == 5
    with pytest.raises(FedkeelError, match="tests"):
        load("digits", tests="mine")


def test_a_client_without_training_samples_has_no_class_mix_to_be_tested_on() -> None:
    on = tiny.federation()
    client = replace(on.clients[0], train=on.clients[0].train[:0])
    assert len(with_own_mix(client, on.labels, seed=0).test) == 0
