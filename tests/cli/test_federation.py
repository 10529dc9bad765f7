"""The commands of a real federation, as far as no other process is needed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from fedkeel.cli import main
from tests import tiny
from tests.deploy.loop import over_network
from tests.deploy.real import draw_images

flower = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed")


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["server", "--insecure"], ["join", "localhost", "--data", "."], ["certificates", "--sites", "a"]],
)
def test_without_flower_one_sentence_says_what_to_install(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert "pip install 'fedkeel[flower]'" in refused(capsys, *words)


@flower
def test_without_tls_only_this_machine_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw_images(tmp_path / "images")
    out = str(tmp_path / "run")
    for host in ("0.0.0.0", "10.0.0.5", "fl.example.org"):
        said = refused(capsys, "server", "--insecure", "--sites", "2", "--host", host, "--out", out)
        assert f"'{host}' is not a loopback address" in said
        said = refused(capsys, "join", host, "--data", str(tmp_path / "images/north"), "--insecure")
        assert f"'{host}' is not a loopback address" in said
    assert not (tmp_path / "run").exists()


@flower
def test_tls_and_keys_are_wanted_unless_one_says_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw_images(tmp_path / "images")
    keys = str(tmp_path / "keys")
    said = refused(capsys, "server", "--certificates", keys, "--out", str(tmp_path / "run"))
    assert "certificate of the authority is not at" in said
    said = refused(capsys, "join", "localhost", "--data", str(tmp_path / "images/north"), "--certificates", keys)
    assert "certificate of the authority is not at" in said
    said = refused(capsys, "server", "--insecure", "--certificates", keys)
    assert "keep one" in said
    assert "--sites N" in refused(capsys, "server", "--insecure", "--out", str(tmp_path / "run"))


@flower
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["server", "--insecure", "--sites", "2", "--data", "pacs"], "sites have folders of images"),
        (["server", "--insecure", "--sites", "2", "--method", "central"], "stay where they are"),
        (["server", "--insecure", "--sites", "two"], "'sites' is 'two'"),
        (["join", "localhost", "--data", "nowhere", "--insecure"], "is not a folder"),
        (["join", "localhost", "--data", "{images}", "--insecure", "--group", "(patient)_"], "have no group"),
        (["join", "localhost", "--data", "{images}", "--insecure", "--group", "patient"], "0 pairs of brackets"),
        (["join", "localhost", "--data", "{images}", "--insecure", "--tolerate", "5%"], "give a share, such as 0.05"),
        (["join", "localhost", "--data", "{images}", "--insecure", "--bits", "6"], "give a number from 8 to 16"),
        (["join", "localhost:x", "--data", "{images}", "--insecure"], "give HOST or HOST:PORT"),
        (["certificates", "--sites", "a/b"], "cannot be called 'a/b'"),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_images(tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, *(word.format(images=tmp_path / "images/north") for word in words))


def test_status_shows_how_far_it_is_and_what_each_site_last_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = over_network(tmp_path)
    assert main(["status", str(run.directory)]) == 0
    shown = capsys.readouterr().out
    assert "finished after 3 rounds, accuracy" in shown
    assert shown.count("round 3: evaluate, done") == 3
    assert main(["status", str(run.directory), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert sorted(document["sites"]) == ["clinic", "hospital", "ward"]
    assert (document["done"], document["finished"]) == (3, True)
    assert document["accuracy"] == pytest.approx(run.accuracy)


def test_status_of_another_run_says_what_to_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.run(tmp_path / "run")
    assert "fedkeel show" in refused(capsys, "status", str(tmp_path / "run"))


def test_a_run_over_a_network_is_continued_by_its_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = over_network(tmp_path, rounds=1)
    (run.directory / "summary.json").unlink()
    command = f"fedkeel server --config {run.directory}/config.toml --out {run.directory} --certificates DIR"
    assert main(["show", str(run.directory)]) == 0
    assert f"not finished: 1 of 1 rounds; continue with: {command}" in capsys.readouterr().out.replace("\n", " ")
    config = run.directory / "config.toml"
    config.write_text("".join(line for line in config.read_text().splitlines(True) if "given in Python" not in line))
    assert command in refused(capsys, "resume", str(run.directory))


@pytest.mark.parametrize("text", ["", "[]", '{"ward": 7}', '{"ward": {"state": "x"}}'])
def test_a_status_that_cannot_be_read_is_told_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    run = over_network(tmp_path, rounds=1)
    (run.directory / "status.json").write_text(text)
    for words in ([], ["--json"]):
        said = refused(capsys, "status", str(run.directory), *words)
        assert "cannot be read" in said
        assert said.count("\n") == 1
