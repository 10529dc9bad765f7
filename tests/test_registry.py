from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedkeel import registry as table
from fedkeel.cli.list import KINDS
from fedkeel.cli.list import registry as list_of
from fedkeel.errors import FedkeelError, nearest
from fedkeel.methods import METHODS
from fedkeel.registry import REGISTRIES, Registry, first_sentence


def pets() -> Registry[str]:
    registry: Registry[str] = Registry("pet")

    @registry.register("dog", paper="Rex 1997")
    def dog(legs: int = 4) -> str:
        """It barks.

        More of it.
        """
        return f"dog on {legs}"

    @registry.register("anything")
    def anything(**options: int) -> str:
        return str(options)

    @registry.register("cat")
    def cat() -> str:
        return "cat"

    return registry


def test_builds_by_name_with_options() -> None:
    assert pets().build("dog", legs=3) == "dog on 3"
    assert pets().build("anything", tail=1) == "{'tail': 1}"
    assert "dog" in pets()
    assert "cow" not in pets()


def test_the_summary_is_the_first_sentence_of_the_docstring() -> None:
    entry = pets().entry("dog")
    assert (entry.summary, entry.paper) == ("It barks.", "Rex 1997")
    assert [entry.name for entry in pets()] == pets().names() == ["anything", "cat", "dog"]


def test_unknown_names_and_options_name_the_nearest() -> None:
    with pytest.raises(FedkeelError, match=r"There is no pet named 'dgo': did you mean 'dog'\?"):
        pets().build("dgo")
    with pytest.raises(FedkeelError, match=r"The pet 'dog' has no option 'leg': did you mean 'legs'\?"):
        pets().build("dog", leg=3)
    with pytest.raises(FedkeelError, match=r"'cat' has no option 'leg': it takes none\."):
        pets().build("cat", leg=3)


def test_without_a_near_one_all_choices_are_named() -> None:
    assert nearest("zzz", ["b", "a"]) == "choose from a, b."
    assert nearest("zzz", []) == "there is nothing to choose from."


def test_a_sentence_of_several_lines_is_not_cut() -> None:
    text = "It flies, unless it is\na penguin. This too,\nand this.\nMore."
    assert first_sentence(text) == "It flies, unless it is a penguin. This too, and this."
    assert first_sentence("No dot\n\nTwo.") == "No dot"
    assert first_sentence("") == ""


def test_everything_that_is_listed_is_told_in_whole_sentences() -> None:
    for kind in KINDS:
        for entry in list_of(kind):
            assert entry.summary, (kind, entry.name)
            # A diagnostic has its title there.
            assert kind == "diagnostics" or entry.summary.endswith("."), (kind, entry.name, entry.summary)


@pytest.fixture
def boxes() -> Iterator[Registry[str]]:
    registry: Registry[str] = Registry("box", "boxes")
    registry.register("tin")(lambda: "tin")
    yield registry
    del REGISTRIES["boxes"]


def test_groups_are_called_as_the_lists_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        assert list_of(kind).group == kind
    monkeypatch.setattr(table, "REGISTRIES", {})
    assert Registry("loss").group == "losses"


def test_what_is_one_s_own_is_a_matter_of_who_defines_it(boxes: Registry[str]) -> None:
    define = "def made(): ...\nboxes.register('{}')(made)"
    exec(define.format("theirs"), {"__name__": "fedkeel.engine.boxes", "boxes": boxes})
    exec(define.format("mine"), {"__name__": "my_boxes", "boxes": boxes})
    assert {entry.name: entry.module for entry in boxes.own()} == {"tin": __name__, "mine": "my_boxes"}
    assert not boxes.entry("theirs").is_own
    assert not METHODS.entry("fedavg").is_own


def test_a_name_of_the_package_s_own_is_not_taken_over() -> None:
    with pytest.raises(FedkeelError, match="There is a method 'fedavg' of Fedkeel's own: give yours another name"):
        METHODS.register("fedavg")(pets)
