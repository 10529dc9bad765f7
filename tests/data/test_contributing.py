"""The examples of a data set of one's own, outside of the package."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import fedkeel
from fedkeel.data import DATASETS, load
from fedkeel.data.check import check, standings
from fedkeel.data.reader import PUBLISHED
from fedkeel.errors import FedkeelError
from tests.data.made_up import tree

FOLDER = Path(__file__).parents[2] / "examples" / "add"
FILES = [(FOLDER / name).read_text("utf-8") for name in ("street_signs.py", "coin_tosses.py")]


@pytest.fixture(autouse=True)
def _imported() -> Iterator[None]:
    """The two files, imported as a user's modules; nothing is left of them afterwards."""
    modules = [ModuleType(f"own_data_set_{number}") for number in range(len(FILES))]
    for module, text in zip(modules, FILES, strict=True):
        sys.modules[module.__name__] = module
        exec(compile(text, module.__name__, "exec"), vars(module))
    yield
    for module in modules:
        del sys.modules[module.__name__]
    for name in ("street-signs", "coin-tosses"):
        DATASETS._entries.pop(name, None)
        PUBLISHED.pop(name, None)


def test_a_data_set_of_ones_own_is_read_listed_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path))
    root = tree(tmp_path / "street_signs", ("north", "south"), ("stop", "way", "yield"), (20, 10))
    assert check("street-signs").problems == []
    assert standings(["street-signs"])[0].found == f"{root}: 90 images, as published"
    federation = load("street-signs")
    assert [(client.name, client.samples) for client in federation.clients] == [("north", 42), ("south", 21)]
    assert federation.classes == ("stop", "way", "yield")
    assert federation.image_shape == (3, 64, 64)
    with pytest.raises(FedkeelError, match="The 'size' of street-signs is 0: give at least 1"):
        load("street-signs", size=0)
    (root / "south" / "stop" / "000.png").unlink()
    assert check("street-signs").problems == ["The domain 'south' has 29 images, and 30 are published."]


@pytest.mark.slow
def test_a_function_that_gives_arrays_is_a_data_set(tmp_path: Path) -> None:
    assert [client.name for client in load("coin-tosses", images=40).clients] == ["table"]
    fedkeel.simulate(data="coin-tosses", rounds=1, batch_size=8, directory=tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "federation.json").read_text())
    assert (stored["name"], stored["shape"], stored["classes"]) == ("coin-tosses", [1, 32, 32], ["heads", "tails"])
