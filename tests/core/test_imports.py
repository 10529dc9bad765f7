"""Code of one's own is known after `--import`, remembered by its run, and never run because a file says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedkeel
from fedkeel.cli import main
from fedkeel.errors import FedkeelError
from fedkeel.experiments import jobs
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
        ("import fedkeel\nfedkeel.simulat(\n", "'own_bad.py' cannot be imported, SyntaxError: "),
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
        ("lib/notes.ipynb", "is not a Python file"),
        ("own_module", "'own_module' is not a Python file that is there"),
        ("lib/json.py", "there is a module 'json' already: rename the file"),
    ],
)
def test_what_cannot_be_imported_is_told(
    code: Path, capsys: pytest.CaptureFixture[str], given: str, wanted: str
) -> None:
    (code.parent / "notes.ipynb").write_text("{}")
    (code.parent / "json.py").write_text("")
    assert wanted in said(capsys, "list", "methods", "--import", given)


# -- a run remembers -------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_run_keeps_a_copy_and_asks_for_the_file_each_time(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run(code)
    assert (directory / "code" / "own_code.py").read_text() == code.read_text()
    stop(directory)
    forget()
    text = said(capsys, "resume", str(directory))
    assert "uses a file 'own_code.py': name it with --import" in text
    assert main(["resume", str(directory), "--quiet", "--import", str(code)]) == 0
    assert fedkeel.load(directory).network is not None
    forget()
    with pytest.raises(FedkeelError, match="name it with --import"):
        fedkeel.load(directory)


def test_code_that_has_changed_is_told(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run(code)
    stop(directory)
    forget()
    code.write_text(CODE.format(scale=0.5))
    named = ["resume", str(directory), "--import", str(code)]
    capsys.readouterr()
    assert main([*named, "--quiet"]) == 0
    assert "The code of 'own_code.py' is not what" in capsys.readouterr().err


def test_a_run_that_uses_nothing_of_it_keeps_nothing(code: Path) -> None:
    assert main(["run", "--import", str(code), "--model=simple_cnn(width=2)", *SHORT, "--out", "r"]) == 0
    assert not Path("r/code").exists()


def test_showing_a_run_needs_none_of_its_code(code: Path) -> None:
    directory = run(code)
    forget()
    code.unlink()
    assert main(["show", str(directory)]) == 0
    assert main(["report", str(directory), "-o", "page.html"]) == 0
    assert f"--import {directory}/code/own_code.py" in Path("page.html").read_text()  # what would repeat it
    assert "own-method" not in REGISTRIES["methods"]


def marked(path: Path, mark: Path) -> None:
    path.write_text(f"open({str(mark)!r}, 'w').close()\n" + CODE.format(scale=1.0))


@pytest.mark.slow
def test_opening_a_stranger_s_run_directory_runs_no_code(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, mark = run(code), code.parent / "mark"
    forget()
    evil = directory / "code" / "own_code.py"
    marked(evil, mark)
    for use in (
        ["predict", str(directory), "x.png"],
        ["export", str(directory), "--out", "m.onnx"],
        ["show", str(directory), "--diagnostic", "label-distribution"],
    ):
        assert "name it with --import" in said(capsys, *use)
    assert not mark.exists()


# -- several runs ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_comparison_trains_again_when_the_code_has_changed(code: Path) -> None:
    command = ["compare", "fedavg", "own-method", "--import", str(code), "--model=own-model", "--seeds=1", "--jobs=1"]
    command += [flag for flag in SHORT if "executor" not in flag]
    assert main(command) == 0
    assert main(command) == 0
    assert not Path("runs/compare-digits-shift-2").exists()
    forget()
    code.write_text(CODE.format(scale=0.5))
    assert main(command) == 0
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
        with pytest.raises(FedkeelError, match="'own-typed' is an object, or was typed into a notebook"):
            fedkeel.compare(["fedavg", "own-typed"], directory=tmp_path, **options)
        with pytest.raises(FedkeelError, match="'method' is an object, or was typed"):
            fedkeel.compare(["fedavg", made["Typed"]()], directory=tmp_path, **options)
    finally:
        forget()
    assert not list(tmp_path.rglob("config.toml"))
