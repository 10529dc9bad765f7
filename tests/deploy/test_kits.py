"""What the server and the sites are given, and what of it is refused when somebody has loosened it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedkeel.deploy import kits
from fedkeel.errors import FedkeelError
from tests.deploy.real import nvflare

pytestmark = [pytest.mark.slow, nvflare]
SITES = ["north", "south"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "kits"
    assert kits.make(folder, "localhost", 8002, SITES) == SITES
    return folder


def test_each_end_has_its_own_key_and_nobody_the_authority_s(made: Path) -> None:
    keys = [path.read_bytes() for path in made.glob("**/*.key")]
    assert len(keys) == len(set(keys)) == len(SITES) + 2
    assert not any("rootCA.key" in path.name for path in made.glob("**/*"))
    assert kits.name_of(made / "sites" / "north") == "north"


def test_a_new_site_gets_a_kit_of_the_same_authority_and_the_others_keep_theirs(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kits"
    shutil.copytree(made, folder)
    before = (folder / "sites/north/startup/client.key").read_bytes()
    assert kits.make(folder, "localhost", 8002, [*SITES, "west"]) == ["west"]
    assert (folder / "sites/north/startup/client.key").read_bytes() == before
    roots = {(folder / "sites" / name / "startup/rootCA.pem").read_bytes() for name in (*SITES, "west")}
    assert len(roots) == 1
    assert kits.make(folder, "localhost", 8002, [*SITES, "west"]) == []
    with pytest.raises(FedkeelError, match="are of the server 'localhost:8002': give that address"):
        kits.make(folder, "elsewhere", 8002, SITES)
    shutil.rmtree(folder / "authority")
    with pytest.raises(FedkeelError, match="no kit for east, and no 'authority' to make one"):
        kits.make(folder, "localhost", 8002, [*SITES, "east"])


def test_kits_are_strict(made: Path) -> None:
    for kit in (made / "server", *(made / "sites").iterdir()):
        kits.verify(kit)


def loosened(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def loosen(local: Path) -> None:
        table = json.loads((local / name).read_text())
        change(table)
        (local / name).write_text(json.dumps(table))

    return loosen


def with_code(local: Path) -> None:
    (local / "custom").mkdir()
    (local / "custom" / "mine.py").write_text("")


POPEN = {"id": "x", "path": "subprocess.Popen", "args": {"args": ["true"]}}
LOOSE = [
    ("resources.json", loosened("resources.json", lambda t: t.update(allow_log_streaming=True))),
    ("resources.json", loosened("resources.json", lambda t: t.update(class_list_enforcement_mode="warn"))),
    ("resources.json", loosened("resources.json", lambda t: t["class_allow_list"].append("subprocess.Popen"))),
    ("resources.json", loosened("resources.json", lambda t: t["components"].append(POPEN))),
    ("authorization.json", loosened("authorization.json", lambda t: t["permissions"].update(lead={"byoc": "any"}))),
    ("custom", with_code),
]


@pytest.mark.parametrize(("file", "loosen"), LOOSE)
def test_a_kit_that_was_loosened_is_refused(
    file: str, loosen: Callable[[Path], None], made: Path, tmp_path: Path
) -> None:
    kit = tmp_path / "kit"
    shutil.copytree(made / "sites" / "north", kit)
    loosen(kit / "local")
    with pytest.raises(FedkeelError, match=f"'{file}' in .* is not as it was made: take that folder from a copy"):
        kits.verify(kit)
