"""What a run began with is known again: its data, its code, the machine and its threads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedkeel
from fedkeel.cli import main
from fedkeel.config import Config
from fedkeel.core.method import Method
from fedkeel.engine.executors.serial import SerialExecutor
from fedkeel.errors import FedkeelError
from fedkeel.files import seal, unseal
from fedkeel.methods import METHODS
from fedkeel.models import wrap
from fedkeel.runs import origin
from fedkeel.runs.origin import Origin, identify
from fedkeel.runs.run import Run
from tests import tiny
from tests.data.made_up import image, tree
from tests.runs.test_run import interrupted


def edit(directory: Path, **changes: Any) -> None:
    """As if the run had begun otherwise."""
    stored = unseal((directory / origin.FILE).read_bytes())
    (directory / origin.FILE).write_bytes(seal({**stored, **changes}))


# -- data ------------------------------------------------------------------------------------------------------------
def test_a_run_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    run = interrupted(tmp_path / "r")
    before = {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()}
    with pytest.raises(FedkeelError, match="'clinic' has 8 samples to train, and had 9 when the run began: put "):
        tiny.resume(run.directory, on=tiny.federation({**tiny.SIZES, "clinic": 8}))
    with pytest.raises(FedkeelError, match="have changed, the samples of 'ward' are not those") as caught:
        tiny.resume(run.directory, on=tiny.federation(seed=1))
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in run.directory.rglob("*") if path.is_file()} == before
    assert tiny.resume(run.directory).finished


def options(root: Path) -> list[str]:
    given = {"data": f"folder(root={root}, size=8)", "model": "simple_cnn(width=2)", "executor": "serial"}
    return [f"--{name}={value}" for name, value in {**given, "device": "cpu", "seed": 0}.items()]


def delete(root: Path) -> None:
    for path in (root / "a" / "cat").glob("00[0-5].png"):
        path.unlink()


def replace_one(root: Path) -> None:
    """As many images as before, and other pixels."""
    for path in (root / "b" / "dog").iterdir():
        image(path, (99, 98, 97))


def replace_secretly(root: Path) -> None:
    """By one of the same size and date."""
    for path in (root / "b" / "dog").iterdir():
        before = path.stat()
        path.write_bytes((root / "a" / "cat" / "000.png").read_bytes().ljust(before.st_size, b"\0"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def mislabel(root: Path) -> None:
    """An image moves to another class, and one of that class to this: the numbers stay."""
    one, other = root / "a" / "cat" / "000.png", root / "a" / "dog" / "000.png"
    text = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (delete, "the client 'a' has"),
        (replace_one, "samples of 'b' are not"),
        (replace_secretly, "samples of 'b' are not"),
        (mislabel, "samples of 'a' are not"),
    ],
)
def test_images_that_were_deleted_or_replaced_are_noticed_on_the_command_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    said: str,
) -> None:
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path / "cache"))
    root, run = tree(tmp_path / "images", ["a", "b"], ["cat", "dog"], 8), tmp_path / "run"
    assert main(["run", *options(root), "--rounds=2", "--out", str(run), "--quiet"]) == 0
    (run / "summary.json").unlink()
    change(root)
    capsys.readouterr()
    assert main(["resume", str(run), "--quiet"]) == 2
    text = capsys.readouterr().err
    assert said in text
    assert "put them back as they were, or start a new run." in text


FOLDER = pytest.param("folder(root=./images, size=8)", marks=pytest.mark.slow)


@pytest.mark.parametrize("data", ["table(file=lists/images.csv, root=images, size=8)", FOLDER])
def test_a_relative_path_is_found_from_another_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    monkeypatch.setenv("FEDKEEL_CACHE", "off")
    for folder in ("here/lists", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    root, run = tree(tmp_path / "here" / "images", ["a", "b"], ["cat", "dog"], 8), tmp_path / "run"
    files = sorted(file.relative_to(root) for file in root.rglob("*.png"))
    rows = [f"{file},{file.parts[1]},{file.parts[0]}" for file in files]
    (tmp_path / "here/lists/images.csv").write_text("\n".join(["path,label,site", *rows]))
    monkeypatch.chdir(tmp_path / "here")
    assert main(["run", *options(root), f"--data={data}", "--rounds=1", "--out", str(run), "--quiet"]) == 0
    written = (run / "config.toml").read_text()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["resume", str(run), "--rounds=2", "--quiet"]) == 0
    assert main(["show", str(run), "--diagnostic", "label-distribution"]) == 0
    assert main(["report", str(run), "-o", "page.html"]) == 0
    assert (run / "config.toml").read_text() == written.replace("rounds = 1", "rounds = 2")
    root.rename(tmp_path / "elsewhere" / "images")
    (tmp_path / "here/lists").rename(tmp_path / "elsewhere/lists")
    assert main(["resume", str(run), "--rounds=3", "--quiet"]) == 0  # from here
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["resume", str(run), "--rounds=4", "--quiet"]) == 2
    told = capsys.readouterr().err
    assert f"The data of '{run}' are not in '{root}' any more: put them back there, or go to where 'images' is." in told


def test_an_absolute_path_that_leads_nowhere_is_told_and_none_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDKEEL_CACHE", "off")
    root, run = tree(tmp_path / "images", ["a"], ["cat", "dog"], 8), tmp_path / "run"
    assert main(["run", *options(root), "--rounds=1", "--out", str(run), "--quiet"]) == 0
    stored = Origin.load(run)
    assert stored is not None
    assert stored.folder == ""
    root.rename(tmp_path / "moved")
    assert main(["resume", str(run), "--rounds=2", "--quiet"]) == 2
    assert f"The data of '{run}' are not in '{root}' any more: put them back there.\n" in capsys.readouterr().err


# -- code ------------------------------------------------------------------------------------------------------------
MINE = """
import fedkeel

@fedkeel.register("mine-own")
class Mine(fedkeel.Method):
    def gradients(self, client, recompute):
        for parameter in client.model.parameters():
            parameter.grad *= {factor}
"""
SHORT = ["--rounds=1", "--subsample=10", "--model=simple_cnn(width=2)", "--executor=serial", "--device=cpu"]


def test_another_file_of_ones_own_is_told_and_hidden_by_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, run = tmp_path / "mine_of_a_test.py", str(tmp_path / "r")
    file.write_text(MINE.format(factor=1.0))
    monkeypatch.setattr("sys.path", [*sys.path])
    try:
        assert main(["run", "--method=mine-own", *SHORT, "--out", run, "--quiet", "--import", str(file)]) == 0
        go_on = ["resume", run, "--quiet", "--import", str(file)]
        for text, told in ((MINE.format(factor=1.0), False), (MINE.format(factor=0.0), True)):
            file.write_text(text)
            (tmp_path / "r" / "summary.json").unlink()
            capsys.readouterr()
            assert main(go_on) == 0
            said = f"fedkeel: The code of '{file.name}' is not what '{run}' began with"
            assert (said in capsys.readouterr().err) == told
    finally:
        METHODS._entries.pop("mine-own", None)
        sys.modules.pop("mine_of_a_test", None)


def test_another_version_or_commit_is_told(tmp_path: Path) -> None:
    run = interrupted(tmp_path / "r")
    edit(run.directory, fedkeel="0.0.1", commit="abc")
    notes = tiny.Notes()
    tiny.resume(run.directory, observer=notes)
    assert len(notes.notes) == 1
    assert f"began with fedkeel 0.0.1 (abc), and this is {fedkeel.__version__}" in notes.notes[0]


# -- the machine -----------------------------------------------------------------------------------------------------
def test_another_kind_of_machine_is_told(tmp_path: Path) -> None:
    run = interrupted(tmp_path / "r")
    here = unseal((run.directory / origin.FILE).read_bytes())["machine"]
    edit(run.directory, machine={**here, "cpu": "Abacus 3000", "capability": "BEADS"})
    notes = tiny.Notes()
    tiny.resume(run.directory, observer=notes)
    assert len(notes.notes) == 1
    assert f"began on Abacus 3000, BEADS, and goes on on {here['cpu']}, {here['capability']}" in notes.notes[0]
    assert notes.notes[0].endswith("the last bits of its result may differ.")


def test_a_run_goes_on_with_as_many_threads_as_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    cores = [3]
    plain = SerialExecutor.map
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: cores.__setitem__(0, count))

    def watched(self: SerialExecutor, *given: Any) -> Any:
        used.append(torch.get_num_threads())
        return plain(self, *given)

    monkeypatch.setattr(SerialExecutor, "map", watched)
    run = interrupted(tmp_path / "r")
    assert Origin.load(run.directory).threads == 3  # type: ignore[union-attr]
    assert run.config.threads == 0  # the configuration says nothing of the machine
    cores[0] = 1  # another machine
    tiny.resume(run.directory)
    assert set(used) == {3}
    assert cores == [1]
    tiny.resume(interrupted(tmp_path / "chosen").directory, threads=2)
    assert used[-1] == 2


def test_nothing_of_the_machine_is_in_what_equal_runs_have_in_common(tmp_path: Path, monkeypatch: Any) -> None:
    one = tiny.run(tmp_path / "a", rounds=1)
    monkeypatch.setattr(origin, "cpu_name", lambda: "Abacus 3000")
    other = tiny.run(tmp_path / "b", rounds=1)
    for name in ("config.toml", "metrics.jsonl", "model.safetensors", "federation.json"):
        assert (one.directory / name).read_bytes() == (other.directory / name).read_bytes()
    assert "Abacus" in (other.directory / origin.FILE).read_text()


# -- directories of earlier versions, and damage ---------------------------------------------------------------------
def test_a_directory_without_all_this_goes_on_as_ever(tmp_path: Path) -> None:
    whole = tiny.run(tmp_path / "whole", "fedbn", rounds=4)
    run = interrupted(tmp_path / "r", "fedbn")
    for name in ("origin.json", "federation.json"):
        (run.directory / name).unlink()
    notes = tiny.Notes()
    assert tiny.result(tiny.resume(run.directory, observer=notes)) == tiny.result(whole)
    assert notes.notes == []


@pytest.mark.parametrize("name", ["origin.json", "federation.json"])
def test_damage_to_it_is_told_in_one_sentence(tmp_path: Path, name: str) -> None:
    run = interrupted(tmp_path / "r")
    path = run.directory / name
    data = json.loads(path.read_text())
    data["fedkeel" if name == "origin.json" else "name"] = "other"
    path.write_text(json.dumps(data))
    with pytest.raises(
        FedkeelError, match=rf"{name}' is damaged \(its checksum does not match\): put it back"
    ) as error:
        tiny.resume(run.directory)
    assert "\n" not in str(error.value)


# -- what was given in Python ----------------------------------------------------------------------------------------
class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body, self.fc = nn.Flatten(), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(self.body(x))
        return out


class Scaled(Method):
    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self._hidden = factor, object()


def test_objects_have_a_name_and_differ_where_they_are_different() -> None:
    assert identify(wrap(Net(192)))["name"] == "Net"
    nets = []
    for side, seed in ((192, 0), (192, 0), (192, 1), (48, 0)):
        torch.manual_seed(seed)
        nets.append(identify(wrap(Net(side))))
    assert nets[0] == nets[1]
    assert nets[0]["digest"] == nets[2]["digest"] != nets[3]["digest"]
    assert nets[0]["weights"] != nets[2]["weights"]
    assert identify(Scaled(0.5))["name"] == "Scaled(factor=0.5)"
    assert identify(Scaled(0.5)) != identify(Scaled(0.25))
    assert identify(tiny.federation())["name"] == "tiny"


def test_a_configuration_alone_has_no_objects(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(Config().to_toml())
    assert Run(tmp_path).given == {}
