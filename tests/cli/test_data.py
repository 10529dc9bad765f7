"""`fedkeel data list`, `data check` and `data pack`, as typed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from fedkeel.cli import main
from fedkeel.data.readers.pacs import PACS
from tests.data.made_up import image, tree


@pytest.fixture(autouse=True)
def _own_places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("FEDKEEL_DATA", raising=False)


def test_data_list_says_where_to_get_it_and_how_it_must_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list", "camelyon17"]) == 0
    text = capsys.readouterr().out
    for part in ("455,954 images", "https://wilds.stanford.edu", "metadata.csv", "CC0", "FEDKEEL_DATA is not set"):
        assert part in text
    assert main(["data", "list", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in entries if entry["found"]] == []
    assert next(entry for entry in entries if entry["name"] == "pacs")["sizes"]["photo"] == {"images": 1670}
    assert main(["data", "list", "camelyon"]) == 2
    assert "did you mean 'camelyon17'?" in capsys.readouterr().err


def test_data_check_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path / "pacs", PACS.domains, PACS.class_names, 1)
    (root / "sketch" / "dog" / "000.png").unlink()
    image(root / "photo" / "cat" / "1.png")
    assert main(["data", "check", "pacs", "--root", str(root)]) == 1
    text = capsys.readouterr().out
    assert text.splitlines()[0] == f"pacs in {root}"
    assert "The class 'dog' of pacs has no images in" in text
    assert "photo/cat' is no class of pacs" in text
    assert "The domain 'photo' has 7 images, and 1,670 are published." in text
    assert main(["data", "check", "pacs", "--root", str(root), "--json", "--decode"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["complete"] is False
    assert {"domain": "photo", "use": "images", "found": 7, "published": [1670]} in document["counts"]
    assert main(["data", "check", "domainnet(classes=[bee])", "--root", str(complete(tmp_path / "net"))]) == 0
    assert "Nothing is missing; there are no published sizes of this choice" in capsys.readouterr().out


def complete(root: Path) -> Path:
    return tree(root, ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"), ("bee",), 1)


def test_data_pack_writes_what_it_says_to_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path / "pacs", PACS.domains, PACS.class_names, 3)
    for out, spec in (("p.npz", "npz(root={}"), ("small", "folder(root={}, size=8")):
        target = tmp_path / out
        arguments = ["data", "pack", "pacs", "--root", str(root), "--size", "8", "--out", str(target)]
        assert main(arguments) == 0
        printed = capsys.readouterr()
        assert printed.out.strip() == str(target)
        assert f"--data '{spec.format(target)}" in printed.err
        data = printed.err.partition("'")[2].partition("'")[0]
        assert main(["data", "describe", data, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["image"] == {"channels": 3, "height": 8, "width": 8}
        assert [client["train"] + client["validation"] + client["test"] for client in document["clients"]] == [21] * 4
        assert main(arguments) == 2
        assert "exists already" in capsys.readouterr().err
    assert main(["data", "pack", "pacs(size=8)", "--size", "9", "--out", str(tmp_path / "x")]) == 2
    assert "The size is given twice" in capsys.readouterr().err
    assert main(["data", "pack", "pacs"]) == 2
    assert "lacks --out" in capsys.readouterr().err


def test_data_check_of_ones_own_folder_lists_what_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree(tmp_path / "images", ("north",), ("cat", "dog"), 8)
    assert main(["data", "check", "folder", "--root", str(root)]) == 0
    assert "Nothing is missing" in capsys.readouterr().out
    for number in range(5):
        (root / "north" / "cat" / f"{number}.nii").write_text("")
    assert main(["data", "check", "folder", "--root", str(root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("  not read: ")] == [
        f"  not read: {root / 'north' / 'cat' / f'{number}.nii'} (.nii)" for number in range(5)
    ]
    assert main(["data", "check", "folder(group=(x)_)", "--root", str(root)]) == 2
    assert "have no group by group='(x)_'" in capsys.readouterr().err
    assert main(["data", "check", "folder(sise=3)", "--root", str(root)]) == 2
    assert "has no option 'sise': did you mean 'size'?" in capsys.readouterr().err


def test_data_cache_lists_and_clears(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree(tmp_path / "images", ("north",), ("cat", "dog"), 8)
    describe = ["data", "describe", "folder(size=8)", "--root", str(root)]
    assert main([*describe, "--no-cache"]) == 0
    assert os.environ["FEDKEEL_CACHE"] != "off"
    capsys.readouterr()
    assert main(["data", "cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(describe) == 0
    capsys.readouterr()
    assert main(["data", "cache"]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert "16 images at 8 x 8 of" in listed
    assert re.search(rf" 1 file, [\d.]+ kB in {os.environ['FEDKEEL_CACHE']}$", listed)
    assert main(["data", "cache", "--clear", "table"]) == 2
    assert "no data set in the cache named 'table'" in capsys.readouterr().err
    assert main(["data", "cache", "--clear", "folder"]) == 0
    assert re.fullmatch(r"Deleted 1 file, [\d.]+ kB\.\n", capsys.readouterr().out)
    assert main(["data", "cache"]) == 0
    assert capsys.readouterr().out.startswith("0 files, 0 B in ")
    monkeypatch.setenv("FEDKEEL_CACHE", "off")
    assert main(["data", "cache"]) == 2
    assert "There is no cache" in capsys.readouterr().err


def test_broken_files_are_tolerated_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path / "images", ("north",), ("cat", "dog"), 8)
    (root / "north" / "cat" / "000.png").write_text("broken")
    describe = ["data", "describe", "folder(size=8)", "--root", str(root)]
    assert main(describe) == 2
    assert "--tolerate 0.063" in capsys.readouterr().err
    assert main([*describe, "--tolerate", "0.063"]) == 0
    assert "1 of the 16 images of 'folder' are left out." in capsys.readouterr().err
    for share, said in (("1", "give a share"), ("some", "give a share"), ("-0.1", "give a share")):
        assert main([*describe, f"--tolerate={share}"]) == 2
        assert said in capsys.readouterr().err
    assert main(["data", "describe", "digits-shift", "--tolerate", "0.1"]) == 2
    assert "has no option 'tolerate'" in capsys.readouterr().err
