"""`fedkeel data list`, `describe` and `pack`, as typed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fedkeel.cli import main
from fedkeel.data.readers.trees import PACS
from tests.data.made_up import tree


@pytest.fixture(autouse=True)
def _own_places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("FEDKEEL_DATA", raising=False)


def test_data_list_says_where_to_get_it_and_how_it_must_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list", "camelyon17"]) == 0
    text = capsys.readouterr().out
    for part in ("455,954 images", "https://wilds.stanford.edu", "metadata.csv", "CC0", "or set FEDKEEL_DATA"):
        assert part in text
    assert main(["data", "list", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in entries if entry["complete"]] == []
    assert next(entry for entry in entries if entry["name"] == "pacs")["sizes"]["photo"] == 1670
    assert main(["data", "list", "camelyon"]) == 2
    assert "did you mean 'camelyon17'?" in capsys.readouterr().err


def test_data_list_counts_what_is_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDKEEL_DATA", str(tmp_path))
    root = tree(tmp_path / "pacs", [*PACS.sizes], PACS.class_names, 1)
    assert main(["data", "list", "pacs"]) == 0
    printed = capsys.readouterr().out
    assert str(root) in printed
    assert "The domain 'photo' has 7 images, and 1,670 are published." in printed
    (root / "sketch" / "dog" / "000.png").unlink()
    assert main(["data", "list", "pacs"]) == 0
    assert "The class 'dog' of pacs has no images in" in capsys.readouterr().out


def test_data_pack_writes_what_it_says_to_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path / "pacs", [*PACS.sizes], PACS.class_names, 3)
    target = tmp_path / "small"
    arguments = ["data", "pack", "pacs", "--root", str(root), "--size", "8", "--out", str(target)]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == str(target)
    assert f"--data 'folder(root={target}, size=8" in printed.err
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


def test_decoded_images_are_kept_unless_the_cache_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path / "images", ("north",), ("cat", "dog"), 8)
    describe = ["data", "describe", "folder(size=8)", "--root", str(root)]
    kept = Path(os.environ["FEDKEEL_CACHE"])
    before = len(list(kept.glob("*")))
    with monkeypatch.context() as patched:
        patched.setenv("FEDKEEL_CACHE", "off")
        assert main(describe) == 0
    assert len(list(kept.glob("*"))) == before
    assert main(describe) == 0
    assert len(list(kept.glob("*.npy"))) == len(list(kept.glob("*.json"))) > 0


def test_broken_files_are_tolerated_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path / "images", ("north",), ("cat", "dog"), 8)
    (root / "north" / "cat" / "000.png").write_text("broken")
    describe = ["data", "describe", "folder(size=8)", "--root", str(root)]
    assert main(describe) == 2
    assert "--tolerate 0.063" in capsys.readouterr().err
    assert main([*describe, "--tolerate", "0.063"]) == 0
    assert "1 of the 16 images of 'folder' cannot be decoded and are left out" in capsys.readouterr().err
    for share, said in (("1", "give a share"), ("some", "give a share"), ("-0.1", "give a share")):
        assert main([*describe, f"--tolerate={share}"]) == 2
        assert said in capsys.readouterr().err
    assert main(["data", "describe", "digits-shift", "--tolerate", "0.1"]) == 2
    assert "has no option 'tolerate'" in capsys.readouterr().err
