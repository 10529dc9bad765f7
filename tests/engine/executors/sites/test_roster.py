"""Who takes part: sites that fit by name, and a reason for each that does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedkeel
from fedkeel.engine.executors.sites.roster import Description, Roster, agree
from fedkeel.errors import StoreError


def site(name: str = "north", classes: tuple[str, ...] = ("cat", "dog"), **changes: Any) -> Description:
    shape, version = (3, 16, 16), fedkeel.__version__
    return replace(Description(name, name, 20, 3, 5, classes, shape, version), **changes)


def test_sites_that_fit_take_part_in_the_order_of_their_names() -> None:
    roster = agree("1", [site("west"), site("east"), site("north")])
    assert [s.name for s in roster.sites] == ["east", "north", "west"]
    assert roster.sitting_out == {}


def test_classes_are_agreed_by_name_and_not_by_position() -> None:
    roster = agree("1", [site("a", ("dog", "cat")), site("b", ("cat", "dog"))])
    assert roster.classes == ("cat", "dog")
    assert [s.name for s in roster.sites] == ["a", "b"]


def test_a_site_may_lack_a_class_but_not_have_one_of_its_own() -> None:
    roster = agree("1", [site("a"), site("b"), site("c", ("cat",)), site("d", ("cat", "dgo"))])
    assert [s.name for s in roster.sites] == ["a", "b", "c"]
    assert roster.sitting_out == {"d": "it has the class 'dgo' that the others have not"}


def test_between_two_sites_the_longer_list_of_classes_counts() -> None:
    roster = agree("1", [site("a", ("cat",)), site("b", ("cat", "dog"))])
    assert roster.classes == ("cat", "dog")
    assert len(roster.sites) == 2


def test_the_classes_of_the_configuration_count_before_those_of_the_sites() -> None:
    roster = agree("1", [site("a", ("cat", "dog")), site("b", ("owl", "cat"))], classes=["owl", "cat"])
    assert roster.classes == ("owl", "cat")
    assert roster.sitting_out == {"a": "it has the class 'dog' that the others have not"}


def test_another_shape_and_another_version_and_no_images_are_named() -> None:
    strange = [site("c", shape=(1, 16, 16)), site("d", version="0.0.9"), site("e", train=0)]
    roster = agree("1", [site("a"), site("b"), *strange])
    assert roster.sitting_out == {
        "c": "its images have the shape 1x16x16, and those of the federation 3x16x16",
        "d": f"it runs fedkeel 0.0.9, and the server {fedkeel.__version__}",
        "e": "it has no training images",
    }


def test_the_outline_has_sizes_and_names_and_no_image_of_anybody() -> None:
    outline = agree("1", [site("a", train=10**9), site("b", train=0, test=4)], unseen=["b"]).outline()
    assert [(c.name, c.samples, len(c.test)) for c in outline.clients] == [("a", 10**9, 5)]
    assert [(c.name, c.samples, len(c.test)) for c in outline.unseen] == [("b", 0, 4)]
    assert outline.images.shape[1:] == (3, 16, 16)
    assert not outline.images.any()
    assert outline.classes == ("cat", "dog")


def test_a_roster_is_read_as_it_was_saved(tmp_path: Path) -> None:
    roster = agree("1", [site("a"), site("b", ("dog",)), site("c", ("owl",))], unseen=["b"])
    roster.save(tmp_path)
    assert Roster.load(tmp_path) == roster
    assert Roster.load(tmp_path / "elsewhere") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": 1, "classes": ["a"], "sites": [7]}'])
def test_a_roster_that_cannot_be_read_is_told_in_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "sites.json").write_text(text)
    with pytest.raises(StoreError, match="who takes part, and cannot be read: put it back from a copy"):
        Roster.load(tmp_path)
