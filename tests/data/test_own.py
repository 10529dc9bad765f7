"""Data from Python are given to clients: by groups, by numbers, by a partition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedkeel import data
from fedkeel.data.federation import Federation
from fedkeel.data.outline import Outline, changed
from fedkeel.errors import DataError, FedkeelError
from tests import vectors

X, Y, SITES = vectors.arrays()


def held(federation: Federation, client: str) -> set[int]:
    """All samples of a client, each of which is in one split."""
    splits = [split.tolist() for split in federation[client].splits]
    everything = {index for split in splits for index in split}
    assert len(everything) == sum(map(len, splits))
    return everything


def test_groups_are_clients_by_name_and_each_is_a_domain() -> None:
    federation = data.federation(X, Y, clients=SITES)
    assert [client.name for client in federation.clients] == sorted(vectors.SITES) == federation.domains
    for site in vectors.SITES:
        assert held(federation, site) == set(np.flatnonzero(site == SITES).tolist())
    assert (federation.name, federation.classes, federation.image_shape) == ("own", ("0", "1", "2"), (6,))


def test_numbers_stay_in_their_order_as_names() -> None:
    federation = data.federation(X, Y, clients=np.arange(120) // 10)
    assert [client.name for client in federation.clients] == [str(number) for number in range(12)]
    with_gaps = np.where(np.arange(120) < 60, 1.0, 7.0)  # as pandas has them beside missing ones
    assert [client.name for client in data.federation(X, Y, clients=with_gaps).clients] == ["1", "7"]


def test_clients_can_be_lists_of_numbers(caplog: pytest.LogCaptureFixture) -> None:
    named = data.federation(X, Y, clients={"one": range(50), "two": torch.arange(50, 120)})
    assert held(named, "one") == set(range(50))
    assert held(named, "two") == set(range(50, 120))
    assert not caplog.records
    few = data.federation(X, Y, clients={0: range(20), 1: range(20, 40)})
    assert [client.name for client in few.clients] == ["0", "1"]
    assert "80 of the 120 samples belong to no client" in caplog.text


def test_shares_are_of_each_class_of_each_client_and_do_not_depend_on_the_seed_of_the_partition() -> None:
    federation = data.federation(X, Y, clients=SITES, test=0.25, validation=0.2)
    for client in federation.clients:
        counts = [np.bincount(Y[split], minlength=3) for split in client.splits]
        of_class = np.sum(counts, axis=0)
        assert np.abs(counts[2] - 0.25 * of_class).max() <= 0.5
        assert np.abs(counts[1] - 0.2 * of_class).max() <= 0.5
    tests = [
        data.federation(X, Y, partition="even(clients=3)", **seeds)["own-0"].test  # type: ignore[arg-type]
        for seeds in ({}, {"seed": 1}, {"split_seed": 1})
    ]
    assert torch.equal(tests[0], tests[1])
    assert not torch.equal(tests[0], tests[2])


def test_test_and_validation_can_be_named() -> None:
    mask = np.arange(120) % 4 == 0
    federation = data.federation(X, Y, clients=SITES, test=mask, validation=[1, 2, 41])
    tests = torch.cat([client.test for client in federation.clients]).tolist()
    assert sorted(tests) == np.flatnonzero(mask).tolist()
    assert sorted(torch.cat([client.validation for client in federation.clients]).tolist()) == [1, 2, 41]
    both = data.federation(X, Y, clients=SITES, test=mask, validation=0.5)["north"]
    assert set(both.test.tolist()) == {index for index in range(40) if index % 4 == 0}
    assert len(both.validation) == pytest.approx(len(both.train), abs=3)


def test_a_group_is_in_one_split() -> None:
    patients = np.arange(120) // 4
    federation = data.federation(X, Y, clients=SITES, groups=patients, test=0.25, validation=0.1)
    for client in federation.clients:
        own = [set(patients[part.numpy()]) for part in client.splits]
        assert all(own)
        assert len(set.union(*own)) == sum(map(len, own))


def test_unseen_clients_and_domains_are_tested_whole_and_never_trained_on() -> None:
    federation = data.federation(X, Y, clients=SITES, unseen="west")
    assert [client.name for client in federation.unseen] == ["west"]
    assert held(federation, "west") == set(federation["west"].test.tolist()) == set(range(80, 120))
    wards = {f"ward {number}": range(20 * number, 20 * number + 20) for number in range(6)}
    where = np.where(np.arange(120) < 80, "city", "east")
    federation = data.federation(X, Y, clients=wards, domains=where, unseen=["east"])
    assert [client.name for client in federation.unseen] == ["ward 4", "ward 5"]
    assert federation.domains == ["city", "east"]


def test_domains_can_be_said_of_samples() -> None:
    federation = data.federation(X, Y, clients=np.arange(120) // 20, domains=SITES)
    assert [client.domain for client in federation.clients] == ["north", "north", "south", "south", "west", "west"]
    alone = data.federation(X, Y, domains=SITES, unseen="south")
    assert [client.name for client in alone.clients] == ["north", "west"]


def test_without_clients_a_partition_cuts_each_domain() -> None:
    federation = data.federation(X, Y, domains=SITES, partition="even(clients=2)")
    assert [client.name for client in federation.clients][:3] == ["north-0", "north-1", "south-0"]
    skewed = data.federation(X, Y, partition="dirichlet(alpha=0.2, clients=4, minimum=2)", name="table")
    assert [client.name for client in skewed.clients] == [f"table-{number}" for number in range(4)]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (np.array(["no", "yes"])[Y % 2], ("no", "yes")),
        ((Y % 2 == 1).tolist(), ("False", "True")),
        (torch.from_numpy(Y % 2)[:, None], ("0", "1")),
    ],
)
def test_labels_become_numbers_and_names_of_classes(labels: Any, classes: tuple[str, ...]) -> None:
    federation = data.federation(X, labels, clients=SITES)
    assert federation.classes == classes
    assert federation.labels.tolist() == (Y % 2).tolist()


def test_classes_can_be_named() -> None:
    assert data.federation(X, Y, clients=SITES, classes=["a", "b", "c"]).classes == ("a", "b", "c")
    text = np.array(["low", "mid", "high"])[Y]
    ordered = data.federation(X, text, clients=SITES, classes=["low", "mid", "high"])
    assert ordered.labels.tolist() == Y.tolist()


def test_floats_are_not_transformed_unless_that_is_asked_for() -> None:
    federation = vectors.federation(train_transform="normalise(mean=[1,1,1,1,1,1], std=2)", test_transform="normalise")
    x = torch.from_numpy(X[:2])
    torch.testing.assert_close(federation.train_transform(x, torch.empty(2, 0)), (x - 1) / 2)
    torch.testing.assert_close(federation.test_transform(x, torch.empty(2, 0)), (x - 0.5) / 0.5)
    plain = vectors.federation()
    assert torch.equal(plain.train_transform(x, torch.empty(2, 0)), x)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"labels": Y.astype(float)}, "The labels are float64: give whole numbers from 0"),
        ({"labels": Y - 1}, r"The label of sample \d+ is -1: give whole numbers from 0"),
        ({"labels": np.eye(3)[Y]}, r"The labels have the shape \(120, 3\): give one class for each sample"),
        ({"labels": Y[:-1]}, "There are 119 labels for 120 samples"),
        ({"labels": [[1], [1, 2]] * 60}, "lists of different lengths"),
        ({"labels": ["a", None] * 60}, "no label of samples 1, 3, 5"),
        ({"labels": Y + 10**9}, "The labels go up to 1,000,000,002, and only 3 are there"),
        ({"labels": None}, "give labels=..., one for each sample"),
        ({"labels": "class"}, "a column is named with label='class'"),
        ({"labels": np.array(["cat", "dog"])[Y % 2], "classes": ["cat", "dogs"]}, "did you mean 'dogs'"),
        ({"classes": ["a", "b"]}, "is 2, and 2 classes are named: labels go from 0 to 1"),
        ({"clients": None}, "Whose the samples are is not said"),
        ({"clients": SITES[:-1]}, "There are clients of shape"),
        ({"clients": [None, "a"] * 60}, "no client of samples 0, 2, .*and 52 more"),
        ({"clients": "hospital"}, "'hospital' would be a column, and these data have none"),
        ({"clients": 3}, "'clients' is 3: give one for each sample"),
        ({"clients": {}}, "There is no client"),
        ({"clients": {"a": range(5), "b": range(4, 9)}}, "Sample 4 is of both 'a' and 'b'"),
        ({"clients": {"a": range(5), "b": []}}, "The client 'b' has no samples"),
        ({"clients": {"a": [0, 120]}}, "The client 'a' has the sample 120, and there are 120"),
        ({"clients": {"a": [0.5]}}, "give the numbers of samples"),
        ({"partition": "even"}, "'partition' would cut them anew: keep one"),
        ({"clients": None, "partition": "evenly"}, "did you mean 'even'"),
        ({"domains": np.arange(120) % 2}, "has samples of the domains '0' and '1'"),
        ({"domains": {"north": "a"}}, "'domains' is .*: give one for each sample"),
        ({"test_share": 0.2}, "did you mean 'test"),
        ({"others": ["a"]}, r"There is no option of federation\(\) named 'others'"),
        ({"unseen": "nort"}, "did you mean 'north'"),
        ({"unseen": vectors.SITES}, "Every domain of 'own' is unseen"),
        ({"test": 1.5}, "'test' is 1.5"),
        ({"test": 0.6, "validation": 0.5}, "leave nothing to train on"),
        ({"test": [3], "validation": [3]}, "Sample 3 is for testing and for validation"),
        ({"test": True}, "'test' is True"),
        ({"train_transform": "flip+normalise"}, r"The transform Flip does not fit samples of shape \(6,\)"),
        ({"train_transform": "jitter"}, "The transform ColourJitter changes colours between 0 and 1"),
        ({"train_transform": "normalise(mean=[1,2])"}, "The transform Normalise does not fit"),
        ({"train_transform": "flop"}, "did you mean 'flip'"),
        ({"sise": 3}, "did you mean 'size'"),
        ({"size": 0}, "'size' is 0"),
        ({"groups": SITES, "test": np.arange(120) < 5}, "The group '.*' of 'north' is for train and for test"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    given = {"labels": Y, "clients": SITES, **options}
    with pytest.raises(FedkeelError, match=sentence) as caught:
        data.federation(X, **given)
    assert "\n" not in str(caught.value)


def test_a_client_without_a_training_sample_is_refused_before_training() -> None:
    with pytest.raises(DataError, match="The client 'north' has no samples to train on"):
        data.federation(X, Y, clients=SITES, test=SITES == "north")
    assert data.federation(X, Y, clients=SITES, test=SITES == "north", unseen="north").unseen[0].name == "north"


def test_a_class_that_nobody_trains_on_is_told(caplog: pytest.LogCaptureFixture) -> None:
    data.federation(X, Y, clients={"a": np.flatnonzero(Y < 2), "b": np.flatnonzero(Y == 2)}, unseen="b")
    assert "'own' has classes that are tested and that nobody trains on: '2'." in caplog.text


def test_other_numbers_are_other_data() -> None:
    before = Outline.of(vectors.federation())
    assert changed(before, Outline.of(vectors.federation())) == ""
    federation = vectors.federation()
    federation.images[federation["south"].test[0], 5] += 1e-6
    assert "the samples of 'south' are not those" in changed(before, Outline.of(federation))


def test_thousands_of_clients_are_made_in_one_go() -> None:
    x = np.zeros((8000, 2))
    federation = data.federation(x, np.arange(8000) % 2, clients=np.arange(8000) // 4, unseen=["7", 8])
    assert (len(federation.clients), [client.name for client in federation.unseen]) == (1998, ["7", "8"])
