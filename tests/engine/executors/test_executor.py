"""An executor is one file that is found by itself: that of the examples, and the others."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedkeel.engine.executors
from fedkeel.config import Config
from fedkeel.core.client import LocalClient
from fedkeel.core.method import Method
from fedkeel.engine.executors.executor import EXECUTORS, choose_executor, executor_class
from fedkeel.errors import FedkeelError
from fedkeel.registry import discover
from tests import tiny

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def debug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example, put into the folder of the executors."""
    code = (Path(__file__).parents[3] / "examples" / "add" / "debug_executor.py").read_text()
    folder = tmp_path / "executors"
    folder.mkdir()
    (folder / "debug.py").write_text(code)
    monkeypatch.setattr(fedkeel.engine.executors, "__path__", [*fedkeel.engine.executors.__path__, str(folder)])
    discover("fedkeel.engine.executors")
    yield "debug"
    del EXECUTORS._entries["debug"], sys.modules["fedkeel.engine.executors.debug"]


class Breaks(Method):
    name = "breaks"

    def start(self, client: LocalClient) -> None:
        if client.name == "clinic":
            raise ValueError("something is wrong")


def test_the_file_of_the_guide_is_found_and_agrees_with_the_reference(tmp_path: Path, debug: str) -> None:
    assert executor_class(debug).__doc__ == "One client after another on the CPU; an error says whose it is."
    for method in ("hbn", "fedbn"):  # one that asks questions, one that remembers
        runs = [tiny.run(tmp_path / f"{method}-{name}", method, executor=name) for name in ("serial", debug)]
        assert tiny.result(runs[0]) == tiny.result(runs[1])
    with pytest.raises(RuntimeError, match="Round 0, client 'clinic' with 9 samples: something is wrong"):
        tiny.run(tmp_path / "breaks", Breaks(), executor=debug)


def test_what_it_says_of_itself_decides_where_it_runs(debug: str) -> None:
    assert choose_executor(Config(executor=debug), CPU) == debug
    assert choose_executor(Config(), CPU) != debug  # without a rank it is only chosen by name
    with pytest.raises(FedkeelError, match="The executor 'debug' is for the CPU: give '--device cpu'"):
        choose_executor(Config(executor=debug), GPU)


@pytest.mark.parametrize(
    ("options", "device", "reason"),
    [
        ({"executor": "cuda"}, CPU, "'cuda' needs a GPU: choose 'processes' or 'serial'."),
        ({"executor": "cuda", "dp": "local"}, GPU, "'cuda' replays steps as they were captured, and 'dp=local' has"),
        ({"executor": "processes"}, GPU, "'processes' uses CPU cores: give '--device cpu', or the executor 'serial'."),
        ({"executor": "processes", "threads": 4}, CPU, "'processes' has one thread in each process, and 'threads' is"),
    ],
)
def test_one_that_cannot_run_here_says_why(options: dict[str, Any], device: torch.device, reason: str) -> None:
    with pytest.raises(FedkeelError) as error:
        choose_executor(Config(**options), device)
    assert str(error.value).startswith(f"The executor {reason}")


def test_auto_takes_the_best_for_the_device_and_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeel.engine.executors.processes.has_shared_memory", lambda: True)
    monkeypatch.setattr("fedkeel.engine.executors.processes.available_cores", lambda: 8)
    assert choose_executor(Config(), GPU) == choose_executor(Config(workers=1), GPU) == "cuda"
    assert choose_executor(Config(), CPU) == "processes"
    assert choose_executor(Config(threads=4), CPU) == choose_executor(Config(dp="local"), GPU) == "serial"


def test_no_executor_is_spelled_where_a_run_is_set_up_or_goes_on() -> None:
    names, package = "|".join(EXECUTORS.names()), Path(fedkeel.__file__).parent
    engine = [f"engine/{name}.py" for name in ("setup", "rounds", "checks", "outcome")]
    for module in (*engine, "trust/privacy.py", "trust/rules.py", "simulation.py", "runs/origin.py"):
        text = (package / module).read_text()
        spelled = [line for line in text.splitlines() if re.search(rf"""["'](?:{names})["']""", line)]
        assert all("device" in line for line in spelled), (module, spelled)  # cuda is a kind of device too
