"""Code of one's own is known after `--import`, remembered by its run, and never run because a file says so."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedkeel
from fedkeel.cli import main
from fedkeel.core import imports
from fedkeel.errors import FedkeelError
from fedkeel.experiments import jobs
from fedkeel.files import seal, unseal
from fedkeel.registry import REGISTRIES
from fedkeel.runs.run import Run

CODE = """
from torch import nn, Tensor
import fedkeel
from fedkeel.engine.metrics import METRICS
from fedkeel.models import MODELS, wrap
from own_helper import factor

@fedkeel.register("own-method")
class Own(fedkeel.Method):
    '''Shrinks gradients.'''
    def gradients(self, client, recompute):
        for p in client.model.parameters():
            p.grad *= factor() * {scale}

@MODELS.register("own-model")
def own(num_classes: int, in_channels: int = 3, image_size=None):
    '''A small one.'''
    last = nn.Linear(16 * in_channels, num_classes)
    return wrap(nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), last), head="2")

@METRICS.register("own-metric")
def sure():
    '''How sure it is.'''
    return lambda logits, labels: logits.softmax(1).max(1).values
"""
SHORT = ["--rounds=2", "--subsample=10", "--executor=serial", "--device=cpu", "--quiet"]
OWN = ["--method=own-method", "--model=own-model", "--metrics=own-metric"]


def forget() -> None:
    """As in a new process."""
    for registry in REGISTRIES.values():
        for name in [name for name in registry._entries if name.startswith("own-")]:
            del registry._entries[name]
    imports._imported.clear()
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lib").mkdir()
    file = tmp_path / "lib" / "own_code.py"
    file.write_text(CODE.format(scale=1.0))
    (tmp_path / "lib" / "own_helper.py").write_text("def factor():\n    return 1.0\n")
    forget()
    yield file
    forget()


def run(code: Path, *more: str) -> Path:
    assert main(["run", "--import", str(code), *OWN, *SHORT, "--out", "r", *more]) == 0
    return Path("r").absolute()


def stop(directory: Path) -> None:
    (directory / "summary.json").unlink()


def said(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """What a command that is refused says."""
    capsys.readouterr()
    assert main([*command]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "Traceback" not in text
    return text


# -- importing -------------------------------------------------------------------------------------------------------
def test_what_a_file_registers_is_known_to_the_commands(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("method", "model", "metric"):
        assert main(["list", f"{kind}s", f"own-{kind}", "--import", "lib/own_code.py"]) == 0
    assert "Shrinks gradients." in capsys.readouterr().out
    directory = run(code)
    frame = Run(directory).records("evaluation")
    assert all(0 < record["own-metric"] <= 1 for record in frame)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("import fedkeel\nfedkeel.simulat(\n", "own_bad.py, line 2: SyntaxError"),
        ("x = 1\ny = x / 0\n", "own_bad.py, line 2: ZeroDivisionError: division by zero."),
        ("import not_there_at_all\n", "ModuleNotFoundError: No module named 'not_there_at_all'."),
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3."),
        ("import fedkeel\nfedkeel.simulate(rounds=1)\n", "it starts a run while it is imported: put the call under"),
        (
            "import fedkeel\n@fedkeel.register('fedavg')\nclass A(fedkeel.Method): pass\n",
            "There is a method 'fedavg' of Fedkeel's own: give yours another name.",
        ),
    ],
)
def test_a_file_that_fails_is_told_in_a_sentence(
    code: Path, capsys: pytest.CaptureFixture[str], text: str, wanted: str
) -> None:
    bad = code.parent / "own_bad.py"
    bad.write_text(text)
    assert wanted in said(capsys, "list", "methods", "--import", str(bad))
    assert "own_bad" not in sys.modules
    assert issubclass(REGISTRIES["methods"].entry("fedavg").build, fedkeel.Method)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("lib/none.py", "none.py' is not a Python file that is there"),
        ("lib", "'lib' cannot be imported: there is no such module; give a file"),
        ("lib/notes.ipynb", "is not a Python file"),
        ("own/code", "'own/code' is neither a Python file nor the name of a module"),
        ("", "'' is neither a Python file nor"),
    ],
)
def test_what_cannot_be_imported_is_told(
    code: Path, capsys: pytest.CaptureFixture[str], given: str, wanted: str
) -> None:
    (code.parent / "notes.ipynb").write_text("{}")
    if given == "lib":
        shutil.rmtree(code.parent)
    assert wanted in said(capsys, "list", "methods", "--import", given)


def test_a_file_that_registers_nothing_is_remarked_upon(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code.parent / "own_nothing.py").write_text("x = 1\n")
    assert main(["list", "methods", "--import", "lib/own_nothing.py"]) == 0
    assert "registers nothing: what it defines gets a name" in capsys.readouterr().err


def test_a_module_is_imported_by_its_name_and_a_name_that_is_taken_harms_nobody(code: Path) -> None:
    shutil.move(code, "own_module.py")
    sys.path.insert(0, str(code.parent))
    imports.load("own_module")
    assert "own-method" in REGISTRIES["methods"]
    forget()
    taken = code.parent / "json.py"
    taken.write_text(CODE.format(scale=1.0))
    imports.load(str(taken))
    assert "own-method" in REGISTRIES["methods"]
    assert sys.modules["json"] is json


def test_a_file_is_compiled_as_python_would(code: Path) -> None:
    imports.load(str(code))
    assert REGISTRIES["models"].entry("own-model").build.__annotations__ == {"num_classes": int, "in_channels": int}


def test_an_edit_of_the_same_size_and_time_is_seen(code: Path) -> None:
    imports.load(str(code))
    before, text = code.stat(), code.read_text()
    code.write_text(text.replace("1.0", "2.0"))
    os.utime(code, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert code.stat().st_size == before.st_size
    one = REGISTRIES["methods"].entry("own-method").build
    imports.load(str(code))
    assert REGISTRIES["methods"].entry("own-method").build is not one


def test_an_edit_that_fails_leaves_what_was_imported_before(code: Path) -> None:
    imports.load(str(code))
    before = sys.modules["own_code"]
    code.write_text("x = 1 / 0\n")
    with pytest.raises(FedkeelError, match="ZeroDivisionError"):
        imports.load(str(code))
    assert sys.modules["own_code"] is before


# -- a run remembers -------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_run_keeps_a_copy_and_asks_for_the_file_each_time(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run(code)
    assert (directory / "code" / "own_code.py").read_text() == code.read_text()
    stop(directory)
    forget()
    text = said(capsys, "resume", str(directory))
    assert all(f"the {kind} 'own-{kind}'" in text for kind in ("method", "model", "metric"))
    assert f"of '{code}': name the file with --import" in text
    assert main(["resume", str(directory), "--quiet", "--import", str(code)]) == 0
    assert fedkeel.load(directory).network is not None
    forget()
    with pytest.raises(FedkeelError, match="name the file with --import"):
        fedkeel.load(directory)


def test_code_that_has_changed_is_told(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run(code)
    stop(directory)
    forget()
    code.write_text(CODE.format(scale=0.5))
    named = ["resume", str(directory), "--import", str(code)]
    assert "The code of the method 'own-method' is not what" in said(capsys, *named)
    assert main([*named, "--quiet", "--changed-code"]) == 0


def test_nonsense_in_what_is_remembered_is_told(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run(code)
    stored = unseal((directory / imports.FILE).read_bytes())
    sound = stored["modules"][0]
    for registers in ([1], [["methods", "method", ["x"]]], 3, [[["a"], "b", "c"]]):
        stored["modules"] = [sound | {"registers": registers}]
        (directory / imports.FILE).write_bytes(seal(stored))
        assert "of another version of Fedkeel" in said(capsys, "export", str(directory), "--out", "m.pt2")


def test_a_run_that_uses_nothing_of_it_keeps_nothing(code: Path) -> None:
    assert main(["run", "--import", str(code), "--model=simple_cnn(width=2)", *SHORT, "--out", "r"]) == 0
    assert not Path("r/imports.json").exists()
    assert not Path("r/code").exists()


def test_showing_a_run_needs_none_of_its_code(code: Path) -> None:
    directory = run(code)
    forget()
    code.unlink()
    assert main(["show", str(directory)]) == 0
    assert main(["report", str(directory), "-o", "page.html"]) == 0
    assert f"--import {code}" in Path("page.html").read_text()  # what would repeat it
    assert "own-method" not in REGISTRIES["methods"]


def marked(path: Path, mark: Path) -> None:
    path.write_text(f"open({str(mark)!r}, 'w').close()\n" + CODE.format(scale=1.0))


def test_a_metric_s_code_counts_too(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run(code)
    stop(directory)
    forget()
    code.write_text(code.read_text().replace(".max(1).values", ".min(1).values"))
    text = said(capsys, "resume", str(directory), "--import", str(code))
    assert "The code of the metric 'own-metric' is not what" in text


@pytest.mark.usefixtures("code")
def test_what_was_typed_into_a_notebook_is_asked_for_as_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "", raising=False)
    exec(CODE.format(scale=1.0).replace("from own_helper import factor", "factor = float"), {"__name__": "__main__"})
    fedkeel.simulate(method="own-method", model="own-model", rounds=1, subsample=10, device="cpu", directory="r")
    assert not Path("r/code").exists()
    forget()
    text = said(capsys, "export", "r", "--out", "m.pt2")
    assert "was typed into a notebook (put it into a file): name the file with --import" in text


def test_damage_to_what_is_remembered_is_told(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run(code)
    forget()
    (directory / imports.FILE).write_bytes(seal({"modules": [{"strange": 1}]}))
    assert "of another version of Fedkeel" in said(capsys, "export", str(directory), "--out", "m.pt2")
    (directory / imports.FILE).write_text("{}")
    assert "is damaged" in said(capsys, "export", str(directory), "--out", "m.pt2")


@pytest.mark.slow
def test_opening_a_stranger_s_run_directory_runs_no_code(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, mark = run(code), code.parent / "mark"
    forget()
    evil = directory / "code" / "own_code.py"
    marked(evil, mark)
    stored = unseal((directory / imports.FILE).read_bytes())
    stored["modules"][0] |= {"file": str(evil)}
    (directory / imports.FILE).write_bytes(seal(stored))
    for use in (
        ["predict", str(directory), "x.png"],
        ["export", str(directory), "--out", "m.onnx"],
        ["analyse", "label-distribution", str(directory)],
    ):
        assert "name the file with --import" in said(capsys, *use)
    assert not mark.exists()


# -- several runs ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_comparison_trains_again_when_the_code_has_changed(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "fedavg", "own-method", "--import", str(code), "--model=own-model", "--seeds=1", "--jobs=1"]
    command += [flag for flag in SHORT if "executor" not in flag]
    assert main(command) == 0
    assert main(command) == 0
    assert not Path("runs/compare-digits-shift-2").exists()
    forget()
    code.write_text(CODE.format(scale=0.5))
    capsys.readouterr()
    assert main(command) == 0
    assert "is not used again, since the code of the method 'own-method' has changed" in capsys.readouterr().err
    assert Path("runs/compare-digits-shift-2/own-method/seed0/summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("spawned", [False, True])
def test_processes_find_what_was_imported(code: Path, monkeypatch: pytest.MonkeyPatch, spawned: bool) -> None:
    """Forked, and as where runs share a GPU: a new Python, which has imported nothing."""
    monkeypatch.setattr(jobs, "uses_gpu", lambda _: spawned)
    command = ["compare", "fedavg", "own-method", "--import", str(code), "--model=own-model", "--seeds=1", "--jobs=2"]
    assert main([*command, *SHORT]) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_runs_that_share_a_gpu_find_it(code: Path) -> None:
    command = ["compare", "fedavg", "own-method", "--import", str(code), "--model=own-model", "--seeds=1", "--jobs=2"]
    assert main([*command, "--rounds=2", "--subsample=10", "--device=cuda", "--quiet"]) == 0


@pytest.mark.slow
def test_workers_of_a_run_find_it_too(code: Path) -> None:
    run(code, "--executor=processes", "--workers=2")


def test_what_no_process_can_import_is_refused_before_anything_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {"__name__": "__main__", "fedkeel": fedkeel}
    monkeypatch.setattr(jobs, "uses_gpu", lambda _: True)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "", raising=False)
    exec("@fedkeel.register('own-typed')\nclass Typed(fedkeel.Method): pass\n", made)
    options: Any = {
        "seeds": 1,
        "jobs": 2,
        "rounds": 1,
        "subsample": 10,
        "model": "simple_cnn(width=2)",
        "device": "cpu",
    }
    try:
        with pytest.raises(FedkeelError, match="The method 'own-typed' was typed into a notebook or a shell"):
            fedkeel.compare(["fedavg", "own-typed"], directory=tmp_path, **options)
        with pytest.raises(FedkeelError, match="The method is an object, which processes that share a GPU cannot"):
            fedkeel.compare(["fedavg", made["Typed"]()], directory=tmp_path, **options)
    finally:
        forget()
    assert not list(tmp_path.rglob("config.toml"))
