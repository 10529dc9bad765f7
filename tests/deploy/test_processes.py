"""Who waits for a Flower process hears of its news at once, and of its end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from fedkeel.deploy import processes
from fedkeel.deploy.flower_internals import NEWS
from fedkeel.deploy.processes import ProcessEnded, process
from fedkeel.stopping import Stopped, stop_requested
from tests.processes import HANG

TELLS_AND_STAYS = f"import os, sys; os.write(int(os.environ['{NEWS}']), b'.'); sys.stdin.read()"
CLOSES_AND_ENDS_WHEN_TOLD = f"import os, sys; os.close(int(os.environ['{NEWS}'])); sys.stdin.read(); print('an error')"


def wait_for_ever(alive: Callable[[], None]) -> None:
    while True:
        alive()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """In place of Flower's processes, the script that is put here; then they are here, as they were started."""
    real, made = subprocess.Popen, list[Any]()

    def start(_: list[str], **options: Any) -> Any:
        command = [sys.executable, "-c", made.pop()]
        made.append(real(command, **options | {"stdin": subprocess.PIPE}))
        return made[0]

    monkeypatch.setattr(processes.subprocess, "Popen", start)
    return made


def test_news_end_the_waiting(started: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LOOK", HANG)
    started.append(TELLS_AND_STAYS)
    began = time.monotonic()
    with process("supernode", tmp_path, [], "127.0.0.1:1") as (_, alive):
        alive()
    assert time.monotonic() - began < HANG


def test_the_end_is_noticed_also_when_it_said_so_before(started: list[Any], tmp_path: Path) -> None:
    started.append(CLOSES_AND_ENDS_WHEN_TOLD)
    with process("supernode", tmp_path, [], "127.0.0.1:1") as (_, alive):
        alive()
        started[0].stdin.close()
        with pytest.raises(ProcessEnded, match="an error"):
            wait_for_ever(alive)


def test_a_stop_ends_the_waiting(started: list[Any], tmp_path: Path) -> None:
    started.append(TELLS_AND_STAYS)
    with process("supernode", tmp_path, [], "127.0.0.1:1") as (_, alive):
        stop_requested.set()
        try:
            with pytest.raises(Stopped):
                alive()
        finally:
            stop_requested.clear()
