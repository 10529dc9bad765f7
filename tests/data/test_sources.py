"""Arrays, tables, torch data sets and Hugging Face data sets become the same store."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fedkeel import data
from fedkeel.errors import DataError
from tests import vectors

GENERATOR = np.random.default_rng(0)
PICTURES = GENERATOR.integers(0, 256, (12, 5, 7, 3), np.uint8)
LABELS = np.arange(12) % 3
CLIENTS = ["a", "b"] * 6


class Items(Dataset[Any]):
    """A map-style data set of whatever is given."""

    def __init__(self, samples: Any, labels: Any = LABELS) -> None:
        self.samples, self.labels = samples, labels
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.samples[index], self.labels[index]


def stored(given: Any, labels: Any = None, **options: Any) -> Tensor:
    return data.federation(given, labels, clients=CLIENTS, **options).images


CHANNELS_FIRST = torch.from_numpy(PICTURES).permute(0, 3, 1, 2)


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
    assert "taken as channels first" in caplog.text


def test_images_of_several_sizes_are_brought_to_one() -> None:
    pictures = [Image.new("RGB", (4 + number, 6), (number, 0, 0)) for number in range(12)]
    with pytest.raises(DataError, match=r"Sample 1 is torch.uint8 of shape \(3, 6, 5\).* bring all to one.*size=64"):
        stored(Items(pictures))
    images = stored(Items(pictures), size=8)
    assert images.shape == (12, 3, 8, 8)
    assert images[:, 0, 0, 0].tolist() == list(range(12))
    as_files = np.asarray(Image.fromarray(PICTURES[0]).resize((4, 4), Image.Resampling.BILINEAR))
    assert torch.equal(stored(Items(PICTURES), size=4)[0], torch.from_numpy(as_files).permute(2, 0, 1))


class Table:
    def __init__(self, frame: Any) -> None:
        self.frame = frame


def test_a_table_s_columns_are_features_but_for_those_that_are_something_else() -> None:
    pandas = pytest.importorskip("pandas")
    x, labels, sites = vectors.arrays(30)
    frame = pandas.DataFrame(x, columns=list("uvwxyz"))
    frame["sick"], frame["site"], frame["old"] = np.array(["no", "yes", "maybe"])[labels], sites, x[:, 0] > 1
    federation = data.federation(frame, label="sick", clients="site", test="old")
    assert torch.equal(federation.images, torch.from_numpy(x))
    assert federation.classes == ("maybe", "no", "yes")
    assert [client.name for client in federation.clients] == ["north", "south", "west"]
    tests = torch.cat([client.test for client in federation.clients])
    assert sorted(tests.tolist()) == np.flatnonzero(x[:, 0] > 1).tolist()
    # Its index is of no importance.
    shuffled = frame.sample(frac=1, random_state=0)
    again = data.federation(shuffled, label="sick", clients="site", test="old")
    assert {client.name: client.samples for client in again.clients} == {
        client.name: client.samples for client in federation.clients
    }


def test_a_table_that_is_not_all_numbers_is_refused() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"age": [40.0, np.nan, np.nan], "bmi": [np.inf, 1, 2], "sex": ["f", "m", "f"], "sick": [0, 1, 0]}
    )
    for options, sentence in (
        ({"label": "sick"}, "The column 'sex' does not hold numbers .*, and features are numbers"),
        (
            {"label": "sick", "clients": "sex"},
            "no finite number in samples 1, 2 of the column 'age' and sample 0 of the column 'bmi': fill them in",
        ),
        ({"label": "sik"}, "did you mean 'sick'"),
        ({"label": "sick", "clients": "ward"}, "no column named 'ward'"),
        ({}, "Which column is the label is not said"),
        ({"labels": [0, 1, 0], "label": "sick"}, "The labels are given twice"),
    ):
        with pytest.raises(DataError, match=sentence):
            data.federation(frame, **{"clients": [1, 2, 3], **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_a_number_is_named(bad: float) -> None:
    x = np.ones((12, 3), np.float32)
    x[9, 1] = bad
    for given in (x, Items(x)):
        with pytest.raises(DataError, match=rf"Sample 9 has no finite number at place 1 \({bad}\)"):
            stored(given, LABELS)


def test_dark_scans_of_a_torch_data_set_are_told(caplog: pytest.LogCaptureFixture) -> None:
    grey = [Image.fromarray(np.full((4, 4), value, np.uint16)) for value in (4095, 900, 70)] * 4
    stored([(image, 0) for image in grey])
    assert [message[:86] for message in caplog.messages] == [
        "Of 'own', 12 of the 12 grey images of 16 bits use at most 12 of them, so that they com"
    ]


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
        (np.zeros(12), r"shape \(12,\): give vectors \(N, D\)"),
        (np.array(["a"] * 12)[:, None], "and not numbers"),
        ([[1, 2], [3]] * 6, "The samples differ in size"),
        (Items([]), "has no samples"),
        (Items(["a.png"] * 12), "Sample 0 is 'a.png': give PIL images"),
        (Items([1.5] * 12), "Sample 0 is a single number"),
        ([{"picture": 1}] * 12, "A sample has no 'image': give image= and label=, of picture"),
        (np.zeros((12, 2, 2), complex), "not numbers"),
    ],
)
def test_what_is_no_data_is_refused_with_what_to_give(given: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        stored(given, None if isinstance(given, Dataset) else LABELS)
    assert "\n" not in str(caught.value)


def test_labels_of_several_classes_are_refused() -> None:
    with pytest.raises(DataError, match="several classes for a sample are not supported"):
        stored(Items(PICTURES, torch.eye(12)))


class TestHuggingFace:
    """With the real package."""

    @pytest.fixture
    def faces(self, tmp_path: Path) -> Any:
        datasets = pytest.importorskip("datasets")
        logging.getLogger("datasets").setLevel(logging.ERROR)
        datasets.disable_progress_bars()
        features = datasets.Features(
            {
                "picture": datasets.Image(),
                "kind": datasets.ClassLabel(names=["cat", "dog", "owl"]),
                "hospital": datasets.Value("string"),
            }
        )
        columns = {"picture": [Image.fromarray(p) for p in PICTURES], "kind": LABELS.tolist(), "hospital": CLIENTS}
        made = datasets.Dataset.from_dict(columns, features=features)
        made.save_to_disk(tmp_path / "faces")
        return datasets.load_from_disk(tmp_path / "faces")

    def test_image_and_label_are_found_by_what_the_columns_are(self, faces: Any) -> None:
        federation = data.federation(faces, clients="hospital")
        assert torch.equal(federation.images, CHANNELS_FIRST)
        assert federation.classes == ("cat", "dog", "owl")
        assert federation.labels.tolist() == LABELS.tolist()
        assert [client.name for client in federation.clients] == ["a", "b"]
        by_class = data.federation(faces.with_format("torch"), clients="kind", label="hospital")
        assert [client.name for client in by_class.clients] == ["cat", "dog", "owl"]
        assert by_class.classes == ("a", "b")

    def test_columns_of_numbers_are_a_table(self, faces: Any) -> None:
        numbers = faces.remove_columns("picture").add_column("age", list(range(12)))
        federation = data.federation(numbers, clients="hospital")
        assert federation.images.tolist() == [[float(age)] for age in range(12)]
        assert federation.classes == ("cat", "dog", "owl")

    def test_what_is_wrong_is_said(self, faces: Any) -> None:
        datasets = pytest.importorskip("datasets")
        twice = faces.add_column("other", LABELS.tolist()).cast_column("other", faces.features["kind"])
        for given, options, sentence in (
            (faces, {"label": "kinds"}, "did you mean 'kind'"),
            (faces, {"image": "pictures"}, "did you mean 'picture'"),
            (faces, {"clients": "ward"}, "no column named 'ward'"),
            (twice, {}, r"Several columns could be the label \(kind, other\): give label='name'"),
            (faces.remove_columns("kind"), {}, "Which column is the label is not said"),
            (datasets.DatasetDict(train=faces), {}, "that has a length"),
        ):
            with pytest.raises(DataError, match=sentence):
                data.federation(given, **{"clients": CLIENTS, **options})  # type: ignore[arg-type]

    def test_a_stream_is_refused(self, faces: Any) -> None:
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("a stream of datasets shares its epoch in /dev/shm")
        with pytest.raises(DataError, match="that has a length"):
            data.federation(faces.to_iterable_dataset(), clients=CLIENTS)
