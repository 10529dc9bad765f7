"""The commands of a real federation, as far as no other process is needed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from fedkeel.cli import main
from tests.deploy.loop import over_network
from tests.deploy.real import draw_images, nvflare


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("words", [["server", "--sites", "a"], ["join", "kit", "--data", "."]], ids=lambda w: w[0])
def test_without_nvflare_one_sentence_says_what_to_install(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "pip install 'fedkeel[nvflare]'" in refused(capsys, *words)


@nvflare
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sites", "a,b", "--data", "pacs"], "sites have folders of images"),
        (["--sites", "a,b", "--method", "central"], "stay where they are"),
        (["--sites", "a/b"], "A site is called 'a/b'"),
    ],
)
def test_what_a_server_cannot_do_is_refused_before_there_are_kits(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, "server", *words)
    assert list(tmp_path.iterdir()) == []


@nvflare
def test_other_options_beside_a_run_that_has_begun_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = over_network(tmp_path, rounds=1)
    said = refused(capsys, "server", "--sites", "a", "--rounds", "9", "--out", str(run.directory))
    assert "holds a run of another configuration" in said


@nvflare
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "is not the kit of a site"),
        (["--data", "nowhere"], "does not exist"),
        (["--group", "(patient)_"], "have no group"),
        (["--group", "patient"], "with one pair of brackets"),
        (["--tolerate", "5%"], "give a share, such as 0.05"),
        (["--bits", "6"], "give a number from 8 to 16"),
        (["--accept", "{policy}"], "did you mean 'rounds'?"),
    ],
)
def test_what_a_site_cannot_do_is_told_there(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw_images(tmp_path / "images")
    (tmp_path / "policy.toml").write_text("round = 3")
    kit = kit_of(tmp_path / "kit") if words else tmp_path
    words = [word.replace("{policy}", str(tmp_path / "policy.toml")) for word in words]
    given = ["--data", str(tmp_path / "images/north"), *words]
    assert said in refused(capsys, "join", str(kit), *given)


@nvflare
def test_a_site_says_itself_what_it_keeps_and_how_its_images_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_images(tmp_path / "images")
    found: list[dict[str, Any]] = []
    monkeypatch.setattr("fedkeel.deploy.jobs.join", lambda _kit, settings, _say: found.append(settings))
    words = ["join", str(kit_of(tmp_path / "kit")), "--data", str(tmp_path / "images/north"), "--state", str(tmp_path)]
    assert main(words) == 0
    assert main([*words, "--calibrate", "--bits", "12"]) == 0
    without, wanting = found
    assert (without["name"], without["calibrate"], without["own"]) == ("north", False, {})
    assert (wanting["calibrate"], wanting["own"], wanting["state"]) == (True, {"bits": 12}, str(tmp_path))


def kit_of(place: Path) -> Path:
    """As much of a kit as says whose it is."""
    (place / "startup").mkdir(parents=True)
    (place / "startup" / "fed_client.json").write_text(json.dumps({"client": {"fqsn": "north"}}))
    return place


def test_a_run_over_a_network_is_continued_by_its_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = over_network(tmp_path, rounds=1)
    (run.directory / "summary.json").unlink()
    command = f"fedkeel server --config {run.directory}/config.toml --out {run.directory} --sites NAMES"
    assert main(["show", str(run.directory)]) == 0
    assert f"not finished: 1 of 1 rounds; continue with: {command}" in capsys.readouterr().out.replace("\n", " ")
    config = run.directory / "config.toml"
    config.write_text("".join(line for line in config.read_text().splitlines(True) if "given in Python" not in line))
    assert command in refused(capsys, "resume", str(run.directory))
