"""The examples of a data set of one's own, outside of the package; and what is published."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import fedkeel
from fedkeel.data import DATASETS, load
from fedkeel.data.reader import PUBLISHED, standing
from fedkeel.errors import FedkeelError
from tests.data.made_up import tree

FOLDER = Path(__file__).parents[2] / "examples" / "add"
FILES = [(FOLDER / name).read_text("utf-8") for name in ("street_signs.py", "coin_tosses.py")]
TOTALS = {
    "camelyon17": 455_954, "cifar10": 60_000, "cifar100": 60_000, "digits-dg": 24_000, "digits-five": 737_540,
    "domainnet": 22_851, "ham10000": 10_015, "office-caltech-10": 2_533, "pacs": 9_991, "stl10": 13_000,
    "tiny-imagenet": 110_000, "vlcs": 10_729,
}  # fmt: skip


@pytest.fixture
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


@pytest.mark.usefixtures("_imported")
def test_a_data_set_of_ones_own_is_read_listed_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path))
    root = tree(tmp_path / "street_signs", ("north", "south"), ("stop", "way", "yield"), (20, 10))
    found = standing("street-signs")
    assert (found.root, found.images, found.problems) == (str(root), 90, [])
    federation = load("street-signs")
    assert [(client.name, client.samples) for client in federation.clients] == [("north", 42), ("south", 21)]
    assert (federation.classes, federation.image_shape) == (("stop", "way", "yield"), (3, 64, 64))
    with pytest.raises(FedkeelError, match="The 'size' of street-signs is 0: give at least 1"):
        load("street-signs", size=0)
    (root / "south" / "stop" / "000.png").unlink()
    assert standing("street-signs").problems == ["The domain 'south' has 29 images, and 30 are published."]
    for file in (root / "south" / "way").iterdir():
        file.unlink()
    found = standing("street-signs")
    assert (found.root, len(found.problems)) == (None, 1)
    assert found.problems[0].startswith("The class 'way' of street-signs has no images in")


@pytest.mark.slow
@pytest.mark.usefixtures("_imported")
def test_a_function_that_gives_arrays_is_a_data_set(tmp_path: Path) -> None:
    assert [client.name for client in load("coin-tosses", images=40).clients] == ["table"]
    fedkeel.simulate(data="coin-tosses", rounds=1, batch_size=8, directory=tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "federation.json").read_text())
    assert (stored["name"], stored["shape"], stored["classes"]) == ("coin-tosses", [1, 32, 32], ["heads", "tails"])


def test_every_published_data_set_has_a_reader_a_size_and_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDKEEL_DATA", raising=False)
    assert {name: standing(name).images for name in PUBLISHED} == TOTALS
    for name, entry in PUBLISHED.items():
        assert entry.home.startswith("http")
        assert entry.licence
        assert entry.layout
        assert DATASETS.entry(name).summary
        assert "root" in DATASETS.entry(name).options()
    with pytest.raises(FedkeelError, match=r"no published data set named 'pac': did you mean 'pacs'\?"):
        standing("pac")
