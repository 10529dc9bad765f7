from __future__ import annotations

from typing import Any

import pytest

from fedkeel.errors import FedkeelError, nearest
from fedkeel.registry import Registry, first_sentence


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


def test_where_several_are_equally_near_all_of_them_are_named() -> None:
    assert nearest("fedbm", ["fedavg", "fedbn", "fedfm", "hbn"]) == "did you mean 'fedbn' or 'fedfm'?"
    assert nearest("fedbn", ["fedavg", "fedbn", "fedfn"]) == "did you mean 'fedbn'?"


def test_a_sentence_that_goes_on_in_the_next_line_is_not_cut() -> None:
    registry: Registry[str] = Registry("pet")

    @registry.register("bird")
    def bird() -> str:
        """It flies, unless it is
        a penguin. This is left out,

        and so is this.
        """
        return ""

    @registry.register("fish")
    def fish() -> str:
        """It swims.
        And more.
        """
        return ""

    assert registry.entry("fish").summary == "It swims."
    assert registry.entry("bird").summary == "It flies, unless it is a penguin. This is left out,"


def test_without_a_near_one_all_choices_are_named() -> None:
    assert nearest("zzz", ["b", "a"]) == "choose from a, b."
    assert nearest("zzz", []) == "there is nothing to choose from."


def test_a_sentence_of_several_lines_is_not_cut() -> None:
    def cow() -> str:
        """It gives milk, and where the
        docstring is long, more of it
        follows. What comes then is left out.

        Nor this.
        """
        return "cow"

    registry: Registry[str] = Registry("pet")
    registry.register("cow")(cow)
    wanted = "It gives milk, and where the docstring is long, more of it follows. What comes then is left out."
    assert registry.entry("cow").summary == wanted
    assert first_sentence("") == ""
    assert first_sentence("One.\nTwo.") == "One."
    assert first_sentence("No dot\n\nTwo.") == "No dot"


def test_everything_that_is_listed_is_told_in_whole_sentences() -> None:
    from fedkeel.cli.list import KINDS, registry

    for kind in KINDS:
        for entry in registry(kind):
            assert entry.summary, (kind, entry.name)
            # A diagnostic has its title there.
            assert kind == "diagnostics" or entry.summary.endswith("."), (kind, entry.name, entry.summary)


def test_a_name_for_type_checkers_alone_does_not_leave_the_other_options_unchecked() -> None:
    registry: Registry[object] = Registry("thing")
    code = """
from __future__ import annotations
from fedkeel.options import Share
def thing(share: Share = 0.5, other: OnlyForTypeCheckers = None) -> object:
    return share
"""
    names: dict[str, Any] = {"__name__": "somewhere"}
    exec(compile(code, "somewhere.py", "exec"), names)
    registry.register("thing")(names["thing"])
    assert registry.build("thing", share=1, other="any") == 1.0
    with pytest.raises(FedkeelError, match=r"The 'share' of thing is 2: give a number from 0 to 1\."):
        registry.build("thing", share=2)
