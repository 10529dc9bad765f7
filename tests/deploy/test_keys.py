"""Who may come in is what the folder of keys says, at every moment."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography, which comes with flwr, is not installed")

from fedkeel.deploy.certificates import make
from fedkeel.deploy.keys import Keys, read_keys
from fedkeel.errors import FedkeelError


class Link:
    """Knows keys by node, as Flower's process does: the same node for the same key."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, int] = {}
        self.calls = 0

    def register(self, keys: Mapping[str, bytes]) -> dict[int, str]:
        self.calls += 1
        return {self.nodes.setdefault(key, 100 + len(self.nodes)): name for name, key in keys.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path, ["north", "south"], ["localhost"])
    make(tmp_path / "elsewhere", ["east", "other"], ["localhost"])
    return tmp_path / "server/sites"


def bring(folder: Path, name: str, under: str = "") -> None:
    shutil.copy(folder.parents[1] / f"elsewhere/server/sites/{name}.pub", folder / f"{under or name}.pub")


def test_a_key_that_is_added_lets_its_site_in_and_one_that_is_removed_shuts_it_out(folder: Path) -> None:
    link, notes = Link(), list[str]()
    keys = Keys(folder, link.register)
    assert sorted(keys.values()) == ["north", "south"]
    keys.look(notes.append)
    assert (notes, link.calls) == ([], 1), "nothing changed"
    bring(folder, "east")
    keys.look(notes.append)
    assert sorted(keys.values()) == ["east", "north", "south"]
    (folder / "north.pub").unlink()
    keys.look(notes.append)
    assert sorted(keys.values()) == ["east", "south"]
    bring(folder, "other", under="south")
    was = next(node for node, name in keys.items() if name == "south")
    keys.look(notes.append)
    assert was not in keys
    assert sorted(keys.values()) == ["east", "south"]
    assert notes == [
        "The key of 'east' is new: this site is let in.",
        "The key of 'north' is gone: this site is shut out.",
        "The key of 'south' is another one now: its old key is shut out.",
    ]


def test_a_file_that_cannot_be_used_keeps_nobody_else_from_coming_or_going(folder: Path) -> None:
    link, notes = Link(), list[str]()
    keys = Keys(folder, link.register)
    (folder / "north.pub").write_text("half of a k")
    (folder / "south.pub").unlink()
    bring(folder, "east")
    (folder / "west.pub").write_text("nonsense")
    bring(folder, "east", under="zoo")
    keys.look(notes.append)
    assert sorted(keys.values()) == ["east", "north"]
    assert [note for note in notes if "'north.pub'" in note or "/north.pub'" in note]
    assert "A key of a site is left aside: 'east.pub' and 'zoo.pub' are the same key" in " ".join(notes)
    told = len(notes)
    keys.look(notes.append)
    assert len(notes) == told, "it is said once"
    bring(folder, "other", under="north")
    keys.look(notes.append)
    assert notes[-1] == "The key of 'north' is another one now: its old key is shut out."


def test_a_folder_that_is_gone_shuts_nobody_out(folder: Path) -> None:
    keys, notes = Keys(folder, Link().register), list[str]()
    folder.rename(folder.with_name("unmounted"))
    keys.look(notes.append)
    keys.look(notes.append)
    assert sorted(keys.values()) == ["north", "south"]
    assert notes == [f"The keys of the sites stay as they were: the folder '{folder}' is gone."]
    folder.with_name("unmounted").rename(folder)
    (folder / "north.pub").unlink()
    keys.look(notes.append)
    assert sorted(keys.values()) == ["south"]


def test_what_flower_could_not_take_up_is_tried_again(folder: Path) -> None:
    link, notes = Link(), list[str]()
    keys = Keys(folder, link.register)
    bring(folder, "east")

    def fail(_: Mapping[str, bytes]) -> dict[int, str]:
        raise OSError

    usual, keys._register = keys._register, fail
    with pytest.raises(OSError):
        keys.look(notes.append)
    keys._register = usual
    keys.look(notes.append)
    assert "east" in keys.values()
    assert notes == ["The key of 'east' is new: this site is let in."]


def test_a_changed_file_of_the_same_length_is_noticed(folder: Path) -> None:
    keys, notes = Keys(folder, Link().register), list[str]()
    path = folder / "north.pub"
    length = path.stat().st_size
    bring(folder, "east", under="north")
    assert path.stat().st_size == length
    keys.look(notes.append)
    assert notes == ["The key of 'north' is another one now: its old key is shut out."]


def test_two_sites_with_one_key_are_refused_at_the_start(folder: Path) -> None:
    shutil.copy(folder / "north.pub", folder / "twin.pub")
    with pytest.raises(FedkeelError, match=r"'north.pub' and 'twin.pub' are the same key"):
        read_keys(folder)
