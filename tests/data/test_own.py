"""Data from Python: what they may be, whose each sample is, and how they are split."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fedkeel import data
from fedkeel.data.federation import Federation
from fedkeel.data.outline import Outline, changed
from fedkeel.errors import DataError, FedkeelError
from tests import vectors

X, Y, SITES = vectors.arrays()
GENERATOR = np.random.default_rng(0)
PICTURES = GENERATOR.integers(0, 256, (12, 5, 7, 3), np.uint8)
LABELS = np.arange(12) % 3
CLIENTS = ["a", "b"] * 6


class Items(Dataset[Any]):
    """A map-style data set of whatever is given."""

    def __init__(self, samples: Any, labels: Any = LABELS) -> None:
        self.samples, self.labels = samples, labels

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index], self.labels[index]


def stored(given: Any, labels: Any = None, **options: Any) -> Tensor:
    return data.federation(given, labels, clients=CLIENTS, **options).images


CHANNELS_FIRST = torch.from_numpy(PICTURES).permute(0, 3, 1, 2)


# -- what samples may be --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "given",
    [
        Items([Image.fromarray(picture) for picture in PICTURES]),
        Items(PICTURES),
        Items(list(CHANNELS_FIRST)),
        [(Image.fromarray(picture), label) for picture, label in zip(PICTURES, LABELS, strict=True)],
        [{"image": picture, "label": label} for picture, label in zip(PICTURES, LABELS, strict=True)],
    ],
    ids=["PIL", "arrays", "tensors", "list", "tables"],
)
def test_pictures_are_stored_as_they_are_however_they_come(given: Any) -> None:
    federation = data.federation(given, clients=CLIENTS)
    assert federation.images.dtype == torch.uint8
    assert torch.equal(federation.images, CHANNELS_FIRST)
    assert federation.labels.tolist() == LABELS.tolist()
    x = federation.test_transform(federation.images, torch.empty(12, 0))
    torch.testing.assert_close(x, (CHANNELS_FIRST / 255 - 0.5) / 0.5)


def test_arrays_of_pictures_may_have_their_channels_last_first_or_not_at_all() -> None:
    assert torch.equal(stored(PICTURES, LABELS), CHANNELS_FIRST)
    assert torch.equal(stored(CHANNELS_FIRST, LABELS), CHANNELS_FIRST)
    assert torch.equal(stored(PICTURES[..., 0], LABELS), CHANNELS_FIRST[:, :1])
    grey = Items([Image.fromarray(picture[..., 0]) for picture in PICTURES])
    assert torch.equal(stored(grey), CHANNELS_FIRST[:, :1])


@pytest.mark.parametrize("kind", [np.float64, np.float16, np.int32, np.uint16, np.bool_])
def test_other_numbers_become_float32(kind: Any) -> None:
    given = GENERATOR.integers(0, 2, (12, 4)).astype(kind)
    for images in (stored(given, LABELS), stored(Items(given))):
        assert images.dtype == torch.float32
        assert images.tolist() == given.astype(np.float64).tolist()


def test_float_images_and_vectors_are_taken_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    images = torch.randn(12, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(stored(images, LABELS), images)
    assert torch.equal(stored(TensorDataset(images, torch.from_numpy(LABELS))), images)
    assert stored(torch.zeros(12, 4, dtype=torch.bfloat16), LABELS).dtype == torch.float32
    assert stored([[1, 2.5]] * 12, LABELS).tolist() == [[1, 2.5]] * 12
    assert stored(torch.zeros(12, 4, dtype=torch.uint8), LABELS).dtype == torch.float32
    assert not caplog.records
    stored(images.permute(0, 2, 3, 1), LABELS)
    assert "are taken as (C, H, W)" in caplog.text


def test_pictures_of_several_sizes_are_brought_to_one_and_dark_scans_are_told(caplog: pytest.LogCaptureFixture) -> None:
    pictures = [Image.new("RGB", (4 + number, 6), (number, 0, 0)) for number in range(12)]
    with pytest.raises(DataError, match=r"give numbers of one size.*size=64 squeezes PIL's pictures"):
        stored(Items(pictures))
    images = stored(Items(pictures), size=8)
    assert images.shape == (12, 3, 8, 8)
    assert images[:, 0, 0, 0].tolist() == list(range(12))
    grey = [Image.fromarray(np.full((4, 4), value, np.uint16)) for value in (4095, 900, 70)] * 4
    stored([(image, 0) for image in grey])
    assert "Of 'own', 12 of the 12 grey images of 16 bits use at most 12 of them" in caplog.text


def test_a_table_s_columns_are_features_but_for_those_that_are_something_else() -> None:
    pandas = pytest.importorskip("pandas")
    x, labels, sites = vectors.arrays(30)
    frame = pandas.DataFrame(x, columns=list("uvwxyz"))
    frame["sick"], frame["site"], frame["old"] = np.array(["no", "yes", "maybe"])[labels], sites, x[:, 0] > 1
    federation = data.federation(frame, label="sick", clients="site", test="old")
    assert torch.equal(federation.images, torch.from_numpy(x))
    assert (federation.classes, federation.columns) == (("maybe", "no", "yes"), tuple("uvwxyz"))
    assert [client.name for client in federation.clients] == ["north", "south", "west"]
    tests = torch.cat([client.test for client in federation.clients])
    assert sorted(tests.tolist()) == np.flatnonzero(x[:, 0] > 1).tolist()
    # Its index is of no importance.
    again = data.federation(frame.sample(frac=1, random_state=0), label="sick", clients="site", test="old")
    assert [client.samples for client in again.clients] == [client.samples for client in federation.clients]


def test_a_hugging_face_data_set_has_names_of_columns_and_classes() -> None:
    datasets = pytest.importorskip("datasets")
    logging.getLogger("datasets").setLevel(logging.ERROR)
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog", "owl"])}
    features = datasets.Features({**kinds, "hospital": datasets.Value("string")})
    columns = {"image": [Image.fromarray(p) for p in PICTURES], "label": LABELS.tolist(), "hospital": CLIENTS}
    faces = datasets.Dataset.from_dict(columns, features=features)
    federation = data.federation(faces, clients="hospital")
    assert torch.equal(federation.images, CHANNELS_FIRST)
    assert (federation.classes, federation.labels.tolist()) == (("cat", "dog", "owl"), LABELS.tolist())
    by_class = data.federation(faces.rename_column("image", "img"), clients="label", image="img", label="hospital")
    assert [client.name for client in by_class.clients] == ["cat", "dog", "owl"]
    assert by_class.classes == ("a", "b")
    for given, options, sentence in (
        (faces.remove_columns("image"), {}, r"A sample has label, hospital: give image= and label=, or data.to_pandas"),
        (faces, {"clients": "ward"}, "no column named 'ward'"),
        (datasets.DatasetDict(train=faces), {}, "that has a length"),
    ):
        with pytest.raises(DataError, match=sentence):
            data.federation(given, **{"clients": CLIENTS, **options})


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (Stream(), "a Stream: give arrays, a pandas table, or a torch .* that has a length"),
        (DataLoader(Items(PICTURES)), "such as loader.dataset"),
        ({"train": PICTURES}, r"such as .* data\['train'\]"),
        ("cifar10", "a name is for data.load"),
        (3, "give arrays, a pandas table"),
        (np.zeros(12), r"float64 of shape \(12,\): give numbers of one size, vectors \(N, D\)"),
        (np.array(["a"] * 12)[:, None], "give numbers of one size"),
        ([[1, 2], [3]] * 6, "give numbers of one size"),
        (np.zeros((12, 2, 2), complex), "give numbers of one size"),
        (Items([]), "has no samples"),
        (Items(["a.png"] * 12), "Sample 0 is 'a.png': give vectors, images"),
        (Items([1.5] * 12), "Sample 0 is 1.5: give vectors, images"),
        ([{"picture": 1}] * 12, "A sample has picture: give image= and label="),
        (Items([[1.0, 2.0]] * 9 + [[np.nan, 1.0]] * 3), "Sample 9 has a number that is not finite"),
        (np.array([[1.0]] * 9 + [[np.inf]] * 3), "Sample 9 has a number that is not finite"),
    ],
)
def test_what_is_no_data_is_refused_with_what_to_give(given: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        stored(given, None if isinstance(given, Dataset) else LABELS)
    assert "\n" not in str(caught.value)


# -- whose they are -------------------------------------------------------------------------------------------
def held(federation: Federation, client: str) -> set[int]:
    """All samples of a client, each of which is in one split."""
    splits = [split.tolist() for split in federation[client].splits]
    everything = {index for split in splits for index in split}
    assert len(everything) == sum(map(len, splits))
    return everything


def test_names_are_clients_in_their_order_and_each_is_a_domain() -> None:
    federation = data.federation(X, Y, clients=SITES)
    assert [client.name for client in federation.clients] == sorted(vectors.SITES) == federation.domains
    for site in vectors.SITES:
        assert held(federation, site) == set(np.flatnonzero(site == SITES).tolist())
    assert (federation.name, federation.classes, federation.image_shape) == ("own", ("0", "1", "2"), (6,))
    numbered = data.federation(X, Y, clients=np.arange(120) // 10)
    assert [client.name for client in numbered.clients] == [str(number) for number in range(12)]
    with_gaps = np.where(np.arange(120) < 60, 1.0, 7.0)  # as pandas has them beside missing ones
    assert [client.name for client in data.federation(X, Y, clients=with_gaps).clients] == ["1", "7"]


def test_thousands_of_clients_are_made_in_one_go() -> None:
    x = np.zeros((8000, 2))
    federation = data.federation(x, np.arange(8000) % 2, clients=np.arange(8000) // 4, unseen=["7", 8])
    assert (len(federation.clients), [client.name for client in federation.unseen]) == (1998, ["7", "8"])


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


def test_what_is_for_testing_can_be_said_of_each_sample() -> None:
    mask = np.arange(120) % 4 == 0
    with pytest.raises(DataError, match="split_seed=1 does nothing"):
        data.federation(X, Y, clients=SITES, test=mask, validation=0.0, split_seed=1)
    federation = data.federation(X, Y, clients=SITES, test=mask, validation=0.5)
    tests = torch.cat([client.test for client in federation.clients]).tolist()
    assert sorted(tests) == np.flatnonzero(mask).tolist()
    assert len(federation["north"].validation) == pytest.approx(federation["north"].samples, abs=3)


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
    where = np.where(np.arange(120) < 80, "city", "east")
    federation = data.federation(X, Y, clients=np.arange(120) // 20, domains=where, unseen=["east"])
    assert [client.name for client in federation.unseen] == ["4", "5"]
    assert federation.domains == ["city", "east"]


def test_without_clients_a_partition_cuts_each_domain() -> None:
    federation = data.federation(X, Y, domains=SITES, partition="even(clients=2)", unseen="south")
    assert [client.name for client in federation] == ["north-0", "north-1", "west-0", "west-1", "south"]
    skewed = data.federation(X, Y, partition="dirichlet(alpha=0.2, clients=4, minimum=2)", name="table")
    assert [client.name for client in skewed.clients] == [f"table-{number}" for number in range(4)]


@pytest.mark.parametrize(
    ("labels", "classes", "names"),
    [
        (np.array(["no", "yes"])[Y % 2], None, ("no", "yes")),
        ((Y % 2 == 1).tolist(), None, ("False", "True")),
        (torch.from_numpy(Y % 2)[:, None], None, ("0", "1")),
        (Y % 2, ["a", "b", "c"], ("a", "b", "c")),
        (np.array(["low", "high"])[Y % 2], ["low", "high"], ("low", "high")),
    ],
)
def test_labels_become_numbers_and_names_of_classes(labels: Any, classes: Any, names: tuple[str, ...]) -> None:
    federation = data.federation(X, labels, clients=SITES, classes=classes)
    assert federation.classes == names
    assert federation.labels.tolist() == (Y % 2).tolist()


def test_floats_are_not_transformed_unless_that_is_asked_for() -> None:
    federation = vectors.federation(train_transform="normalise(mean=[1,1,1,1,1,1], std=2)", test_transform="normalise")
    x = torch.from_numpy(X[:2])
    torch.testing.assert_close(federation.train_transform(x, torch.empty(2, 0)), (x - 1) / 2)
    torch.testing.assert_close(federation.test_transform(x, torch.empty(2, 0)), (x - 0.5) / 0.5)
    assert torch.equal(vectors.federation().train_transform(x, torch.empty(2, 0)), x)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"labels": Y.astype(float)}, "The labels are float64 from 0.0: give whole numbers from 0"),
        ({"labels": Y - 1}, "The labels are int64 from -1: give whole numbers from 0"),
        ({"labels": np.eye(3)[Y]}, "The 'label' has the shape .*: give one for each of the 120 samples"),
        ({"labels": Y[:-1]}, "give one for each of the 120 samples"),
        ({"labels": [[1], [1, 2]] * 60}, "give one for each of the 120 samples"),
        ({"labels": ["a", None] * 60}, "no label of samples 1, 3, 5"),
        ({"labels": None}, "give labels=..., one for each sample"),
        ({"labels": "class"}, "or label=, the name of a column"),
        ({"labels": np.array(["cat", "dog"])[Y % 2], "classes": ["cat", "dogs"]}, "did you mean 'dogs'"),
        ({"classes": ["a", "b"]}, "There is the label 2, and 2 classes are named: labels count from 0"),
        ({"clients": None}, "Whose the samples are is not said"),
        ({"clients": SITES[:-1]}, r"The 'client' has the shape \(119,\): give one for each of the 120 samples"),
        ({"clients": [None, "a"] * 60}, "no client of samples 0, 2, .*and 52 more"),
        ({"clients": "hospital"}, "'hospital' would be a column, and these data have none"),
        ({"clients": 3}, r"The 'client' has the shape \(\): give one for each of the 120 samples"),
        ({"clients": {"a": range(5)}}, "The 'client' has the shape .*: give one for each"),
        ({"partition": "even"}, "'partition' would cut them anew: keep one"),
        ({"clients": None, "partition": "evenly"}, "did you mean 'even'"),
        ({"domains": np.arange(120) % 2}, "has samples of the domains '0' and '1'"),
        ({"test_share": 0.2}, "did you mean 'test"),
        ({"others": ["a"]}, r"There is no option of federation\(\) named 'others'"),
        ({"unseen": "nort"}, "did you mean 'north'"),
        ({"unseen": vectors.SITES}, "Every domain of 'own' is unseen"),
        ({"test": 1.5}, "'test' is 1.5"),
        ({"test": 0.6, "validation": 0.5}, "leave nothing to train on"),
        ({"test": True}, "'test' is True"),
        ({"test": np.arange(120)}, "'test' is a ndarray: give a share below 1, or true or false for each sample"),
        ({"test": SITES == "north"}, "The client 'north' gets 0 of the 0 training samples of 'north', fewer than 1"),
        ({"train_transform": "flip+normalise"}, r"The transform Flip does not fit float samples of shape \(6,\)"),
        ({"train_transform": "jitter"}, "The transform ColourJitter does not fit float samples"),
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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"label": "sick"}, r"The column 'sex' does not hold numbers .*, or leave it out"),
        (
            {"label": "sick", "clients": "sex"},
            "no finite number in samples 1, 2 of the column 'age' and sample 0 of the column 'bmi': fill them in",
        ),
        ({"label": "sik"}, "did you mean 'sick'"),
        ({"label": "sick", "clients": "ward"}, "no column named 'ward'"),
        ({}, "Which column is the label is not said"),
        ({"labels": [0, 1, 0], "label": "sick"}, "and not both"),
    ],
)
def test_a_table_that_is_not_all_numbers_is_refused(options: dict[str, Any], sentence: str) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"age": [40.0, np.nan, np.nan], "bmi": [np.inf, 1, 2], "sex": ["f", "m", "f"], "sick": [0, 1, 0]}
    )
    with pytest.raises(DataError, match=sentence):
        data.federation(frame, **{"clients": [1, 2, 3], **options})


def test_other_numbers_are_other_data() -> None:
    before = Outline.of(vectors.federation())
    assert changed(before, Outline.of(vectors.federation())) == ""
    federation = vectors.federation()
    federation.images[federation["south"].test[0], 5] += 1e-6
    assert "the samples of 'south' are not those" in changed(before, Outline.of(federation))
