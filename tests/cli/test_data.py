"""`fedkeel data list`, `data check` and `data pack`, as typed."""

from __future__ import annotations

import json
import os
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


def test_data_check_counts_and_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path / "pacs", PACS.domains, PACS.class_names, 1)
    image(root / "photo" / "cat" / "1.png")
    assert main(["data", "check", "pacs", "--root", str(root)]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == f"pacs in {root}"
    assert "photo/cat' is no class of pacs" in printed.err
    assert "The domain 'photo' has 7 images, and 1,670 are published." in printed.out
    assert main(["data", "check", "pacs", "--root", str(root), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["complete"] is False
    assert {"domain": "photo", "use": "images", "found": 7, "published": [1670]} in document["counts"]
    (root / "sketch" / "dog" / "000.png").unlink()
    assert main(["data", "check", "pacs", "--root", str(root)]) == 2
    assert "The class 'dog' of pacs has no images in" in capsys.readouterr().err
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


def test_data_check_of_ones_own_folder_says_what_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tree(tmp_path / "images", ("north",), ("cat", "dog"), 8)
    (root / "north" / "cat" / "1.nii").write_text("")
    assert main(["data", "check", "folder", "--root", str(root)]) == 0
    printed = capsys.readouterr()
    assert "Nothing is missing" in printed.out
    assert "1 file of 'north' is not read: 1 .nii ('1.nii')" in printed.err
    assert main(["data", "check", "folder(group=(x)_)", "--root", str(root)]) == 2
    assert "have no group by group='(x)_'" in capsys.readouterr().err
    assert main(["data", "check", "folder(sise=3)", "--root", str(root)]) == 2
    assert "has no option 'sise': did you mean 'size'?" in capsys.readouterr().err


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
    assert "1 of the 16 images of 'folder' are left out." in capsys.readouterr().err
    for share, said in (("1", "give a share"), ("some", "give a share"), ("-0.1", "give a share")):
        assert main([*describe, f"--tolerate={share}"]) == 2
        assert said in capsys.readouterr().err
    assert main(["data", "describe", "digits-shift", "--tolerate", "0.1"]) == 2
    assert "has no option 'tolerate'" in capsys.readouterr().err
