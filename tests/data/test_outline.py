"""A federation in outline: enough to build a network of, and to know the data again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeel import data
from fedkeel.data import outline as module
from fedkeel.data.federation import Client, Federation
from fedkeel.data.outline import Outline, changed
from fedkeel.data.transforms import TRANSFORMS, Unknown, parse_transforms, transforms_text
from fedkeel.files import seal, unseal
from tests import tiny, vectors
from tests.engine.test_scale import crowd


def stored(federation: Federation) -> Outline:
    """As it comes back from a file."""
    return Outline.from_dict(unseal(seal(Outline.of(federation).to_dict())))


def test_it_comes_back_from_a_file_as_it_was() -> None:
    federation = tiny.federation(unseen=3)
    assert stored(federation) == Outline.of(federation)
    again = stored(federation).federation()
    assert (again.classes, again.image_shape, again.num_classes) == (federation.classes, (3, 8, 8), 4)
    assert [(c.name, c.domain, c.samples, len(c.test)) for c in again] == [
        (c.name, c.domain, c.samples, len(c.test)) for c in federation
    ]
    assert [c.name for c in again.unseen] == ["stranger"]
    assert not again.images.any()


def test_it_knows_what_the_network_sees() -> None:
    federation = replace(tiny.federation(), test_transform=parse_transforms("resize(size=5)+normalise"))
    again = stored(federation).federation()
    assert again.image_shape == (3, 8, 8)
    assert again.test_transform == federation.test_transform
    assert again.test_transform(again.images, torch.empty(2, 0)).shape == (2, 3, 5, 5)


@dataclass(frozen=True)
class Doubled:
    """A transform of the user's own, that no name stands for."""

    draws = 0

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        return (x.float() / 255).repeat(1, 2, 1, 1)


def test_of_a_transform_without_a_name_what_the_network_sees_is_left() -> None:
    again = stored(replace(tiny.federation(), test_transform=Doubled())).federation()
    assert isinstance(again.test_transform, Unknown)
    assert again.test_transform(again.images, torch.empty(2, 0)).shape == (2, 6, 8, 8)


@pytest.mark.parametrize("name", [entry.name for entry in TRANSFORMS])
def test_every_transform_is_the_same_after_it_was_text(name: str) -> None:
    transform = parse_transforms(f"flip(p=0.25)+{name}")
    assert parse_transforms(str(transforms_text(transform))) == transform


# -- the fingerprint -------------------------------------------------------------------------------------------------
def fewer(federation: Federation) -> Federation:
    first, *others = federation.clients
    return replace(federation, clients=[replace(first, train=first.train[:-1]), *others])


def other_pixel(federation: Federation) -> Federation:
    images = federation.images.clone()
    images[federation.clients[1].test[2], 1, 3, 3] ^= 1
    return replace(federation, images=images)


def other_label(federation: Federation) -> Federation:
    labels = federation.labels.clone()
    labels[federation.clients[2].train[0]] = 3 - labels[federation.clients[2].train[0]]
    return replace(federation, labels=labels)


def other_order(federation: Federation) -> Federation:
    first, *others = federation.clients
    return replace(federation, clients=[replace(first, train=first.train.flip(0)), *others])


def no_client(federation: Federation) -> Federation:
    return replace(federation, clients=list(federation.clients)[1:])


def renamed_class(federation: Federation) -> Federation:
    return replace(federation, classes=("dot", "bar", "cross", "ring"))


def other_augmentation(federation: Federation) -> Federation:
    return replace(federation, train_transform=parse_transforms("flip(p=0.1)"))


CHANGES: list[tuple[Callable[[Federation], Federation], str]] = [
    (fewer, "the client 'ward' has 13 samples to train, and had 14 when the run began"),
    (other_pixel, "the samples of 'clinic' are not those that the run began with"),
    (other_label, "the samples of 'hospital' are not those that the run began with"),
    (other_order, "the samples of 'ward' are not those that the run began with"),
    (no_client, "the client 'ward' is gone since the run began"),
    (renamed_class, "the classes are 'dot', 'bar', 'cross', 'ring' and were 'dot', 'bar', 'cross', 'frame' when"),
    (other_augmentation, "the train transform is 'flip(p=0.1)' and was 'flip(p=0.5)' when the run began"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_what_has_changed_is_named(change: Callable[[Federation], Federation], said: str) -> None:
    before = stored(tiny.federation(unseen=3))
    assert changed(before, Outline.of(tiny.federation(unseen=3))) == ""
    assert changed(before, Outline.of(change(tiny.federation(unseen=3)))).startswith(said)


def test_every_bit_of_images_and_vectors_counts() -> None:
    federation = tiny.federation()
    at, before = int(federation.clients[0].train[0]), Outline.of(federation)
    for place in range(0, federation.images[at].numel(), 7):
        for bit in range(8):
            other = federation.images.clone()
            other[at].view(-1)[place] ^= 1 << bit
            assert "the samples of 'ward' are not" in changed(before, Outline.of(replace(federation, images=other)))
    rows = vectors.federation(unseen="west")
    assert stored(rows) == Outline.of(rows)
    again = stored(rows).federation()
    assert (again.image_shape, again.images.dtype) == ((6,), torch.float32)
    for place in range(6):
        other = rows.images.clone()
        other[1, place] = torch.nextafter(other[1, place], torch.tensor(9e9))
        assert "the samples of 'north'" in changed(Outline.of(rows), Outline.of(replace(rows, images=other)))


def test_an_outline_of_an_earlier_version_is_of_uint8_images() -> None:
    table = Outline.of(tiny.federation()).to_dict()
    del table["dtype"]
    assert Outline.from_dict(table) == stored(tiny.federation())


def test_images_that_lie_otherwise_in_memory_are_the_same() -> None:
    federation = tiny.federation()
    laid_out = federation.images.contiguous(memory_format=torch.channels_last)
    moved = torch.cat([torch.zeros_like(federation.images[:2]), laid_out])
    clients = [Client(c.name, c.domain, c.train + 2, c.validation + 2, c.test + 2) for c in federation.clients]
    labels = torch.cat([torch.zeros(2, dtype=torch.int64), federation.labels])
    there = Outline.of(replace(federation, images=moved, labels=labels, clients=clients))
    assert changed(Outline.of(federation), there, divided=False) == ""


def test_of_a_data_set_with_a_name_the_images_do_not_depend_on_the_seed_and_the_division_does() -> None:
    options: dict[str, Any] = {"partition": "dirichlet(alpha=1, clients=3)"}
    first, second = (Outline.of(data.load("digits-shift", seed=seed, **options)) for seed in (0, 1))
    assert first.unit == "domain"
    assert changed(first, second, divided=False) == ""
    assert changed(first, second) == "the samples are divided among the clients in another way than when the run began"


def test_of_very_many_clients_a_few_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    population, count = crowd(), [0]
    plain = Client.__init__

    def counted(self: Client, *given: Any, **named: Any) -> None:
        plain(self, *given, **named)
        count[0] += 1

    monkeypatch.setattr(Client, "__init__", counted)
    found = Outline.of(population)
    assert count[0] < 10
    assert found.number == 100_000
    assert list(found.content) == ["bright", "dark", "stranger"]
    assert len(seal(found.to_dict())) < 5000


def test_of_a_very_large_store_every_image_is_still_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = tiny.federation()
    monkeypatch.setattr(module, "MOST_BYTES", federation.images.numel() // 3)
    before = Outline.of(federation)
    images = federation.images.clone()
    images[federation.clients[0].train[5]] += 1
    assert "the samples of 'ward'" in changed(before, Outline.of(replace(federation, images=images)))


def test_a_run_that_wrote_a_whole_number_where_it_is_a_float_now_has_the_same_data() -> None:
    now = Outline.of(data.load("digits-shift", train_transform="rotation(degrees=30)+flip(p=1)"))
    assert now.train_transform == "rotation(degrees=30)+flip(p=1)"
    before = replace(now, train_transform="rotation(degrees=30.0)+flip(p=1)")
    assert changed(before, now) == ""
    other = replace(now, train_transform="rotation(degrees=31)+flip(p=1)")
    assert "the train transform is" in changed(other, now)
    # Of transforms that are not known here nothing but the text can be compared.
    mine, yours = (replace(now, train_transform=text) for text in ("my-own(a=1)", "my-own(a=2)"))
    assert "the train transform is" in changed(mine, yours)
