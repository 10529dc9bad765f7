"""A run killed with SIGKILL at any of its named points and resumed is the run that was never disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

from fedkeel import stopping
from fedkeel.core.state import Tensors
from fedkeel.engine.memory import ClientMemory
from fedkeel.runs.run import Run
from fedkeel.runs.store import read_checkpoint
from fedkeel.stopping import EVALUATION, LOCAL_STEP, RENAMED, RENAMING, UPDATE, WRITING, undisturbed
from tests import tiny
from tests.processes import HANG, exit_code, forked

METHODS = ["fedavg", "scaffold"]  # clients that remember nothing, and clients that do
EXECUTORS = ["serial", "processes"]
CLIENTS = {"ward": 6, "clinic": 5, "hospital": 9}


class Point(NamedTuple):
    """A place on a run's way, and the file that is at work there, by a part of its path."""

    name: str
    file: str = ""

    def is_at(self, name: str, path: Path | None) -> bool:
        return name == self.name and self.file in str(path)


IN_ROUNDS = [
    Point(LOCAL_STEP),
    Point(UPDATE),
    Point(EVALUATION),
    Point(WRITING, "metrics.jsonl"),
    Point(WRITING, "server.safetensors"),
    Point(WRITING, "checkpoint.json"),
    Point(RENAMING, "checkpoints/round-"),
    Point(RENAMED, "checkpoints/round-"),
]
OF_MEMORY = [Point(WRITING, "memory/")]
AT_THE_ENDS = [
    Point(WRITING, "config.toml"),
    Point(RENAMED, "config.toml"),
    Point(WRITING, "model.safetensors"),
    Point(RENAMING, "summary.json"),
]


def half_written(path: Path) -> None:
    """What a kill in the middle of writing leaves; of a file that grows, what was there before stays."""
    size = path.stat().st_size
    os.truncate(path, max(size - 7, 0) if path.suffix == ".jsonl" else size // 2)


def killed(point: Point, passing: int, act: Callable[[], Any], *, only_the_worker: bool = False) -> bool:
    """Do it in a process of its own, which is killed when it, or a worker of it, passes the point for the `passing`th
    time. Returns whether that came about."""
    left, filling = os.pipe()  # not a Value, whose lock needs /dev/shm: each that passes takes a byte
    os.write(filling, b"." * (passing - 1) + b"!")
    os.close(filling)
    child = os.fork()
    if child == 0:
        run = os.getpid()

        def hook(name: str, path: Path | None) -> None:
            if not point.is_at(name, path):
                return
            now = os.read(left, 1) == b"!"
            if now and name == WRITING:
                assert path is not None
                half_written(path)
            if now:
                os.kill(os.getpid() if only_the_worker else run, signal.SIGKILL)

        stopping.hook = hook
        try:
            act()
            os._exit(0)
        except BaseException:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    came = not os.read(left, passing)
    os.close(left)
    return came


def start_or_go_on(directory: Path, method: str, executor: str) -> Run:
    on = tiny.federation(CLIENTS, unseen=4)
    if (directory / "config.toml").exists():
        return tiny.resume(directory, on=on)
    options: dict[str, Any] = {"rounds": 3, "participation": 0.7, **tiny.by(executor)}
    return tiny.run(directory, method, on=on, **options)


def everything(directory: Path) -> dict[str, Any]:
    """All of a finished run but its times: what was recorded, the result, and where it would have gone on from."""
    summary = json.loads((directory / "summary.json").read_bytes())
    names = {path.relative_to(directory).as_posix() for path in directory.rglob("*")}
    state: dict[str, Any] = {
        **tiny.result(Run(directory)),
        "summary": {name: value for name, value in summary.items() if name != "seconds"},
        "files": {name for name in names if not name.startswith("memory/")},
    }
    for folder in sorted((directory / "checkpoints").iterdir()):
        _, checkpoint = read_checkpoint(folder)
        state[folder.name] = {group: bits(tensors) for group, tensors in checkpoint.groups.items()}
        state[f"best of {folder.name}"] = checkpoint.best
        remembered = ClientMemory(directory / "memory").as_of(checkpoint.round)
        state |= {f"{folder.name}, {client}": bits(remembered(client)) for client in CLIENTS}
    return state


def bits(tensors: Tensors) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, Any]]:
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def of(method: str, executor: str) -> dict[str, Any]:
        if (method, executor) not in known:
            directory = tmp_path_factory.mktemp("whole") / "run"
            start_or_go_on(directory, method, executor)
            known[method, executor] = everything(directory)
        return known[method, executor]

    return of


# Processes whose clients remember nothing differ from these in nothing that is written; they are killed below.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "executor"), [("fedavg", "serial"), ("scaffold", "serial"), ("scaffold", "processes")]
)
def test_killed_at_any_point_and_resumed_it_is_the_same_run(
    tmp_path: Path, method: str, executor: str, undisturbed_run: Callable[[str, str], dict[str, Any]]
) -> None:
    whole = undisturbed_run(method, executor)
    assert any(whole[f"round-000002, {client}"] for client in CLIENTS) == (method == "scaffold")
    moments = [(point, 1) for point in AT_THE_ENDS] + [(point, 2) for point in IN_ROUNDS]
    moments += [(point, 1) for point in IN_ROUNDS if executor == "serial"]
    moments += [(point, passing) for point in OF_MEMORY for passing in (1, 3)]
    for number, (point, passing) in enumerate(moments):
        directory = tmp_path / str(number)
        came = killed(point, passing, lambda d=directory: start_or_go_on(d, method, executor))  # type: ignore[misc]
        assert came == (method == "scaffold" or point not in OF_MEMORY), point
        start_or_go_on(directory, method, executor)
        assert everything(directory) == whole, (point, passing)


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("method", METHODS)
def test_killed_again_and_again_it_is_the_same_run(
    tmp_path: Path, method: str, executor: str, undisturbed_run: Callable[[str, str], dict[str, Any]]
) -> None:
    draws = random.Random(f"{method} {executor}")
    points = IN_ROUNDS + (OF_MEMORY if method == "scaffold" else [])
    directory = tmp_path / "run"
    kills = sum(
        killed(draws.choice(points), draws.choice([1, 2]), lambda: start_or_go_on(directory, method, executor))
        for _ in range(6)
    )
    assert kills >= 4  # the same in every test: nothing here is a matter of time
    start_or_go_on(directory, method, executor)
    assert everything(directory) == undisturbed_run(method, executor)


@pytest.mark.slow
@pytest.mark.parametrize("point", [LOCAL_STEP, EVALUATION])
def test_a_worker_killed_once_changes_nothing(
    tmp_path: Path, point: str, undisturbed_run: Callable[[str, str], dict[str, Any]]
) -> None:
    """What it had to do is done again by another one."""
    directory = tmp_path / "run"
    act = lambda: start_or_go_on(directory, "scaffold", "processes")  # noqa: E731
    assert killed(Point(point), 4, act, only_the_worker=True)
    assert everything(directory) == undisturbed_run("scaffold", "processes")


def test_without_a_hook_a_point_is_passed_without_notice() -> None:
    assert stopping.hook is None
    stopping.reached(LOCAL_STEP)


def test_a_request_to_stop_waits_for_what_must_not_be_left_half_done() -> None:
    done = []

    def act() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            act()
        assert done == ["all of it"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_request_to_stop_may_come_at_every_point_of_another() -> None:
    """The handler of a signal that comes in the midst of setting, or of waiting, waits for nobody."""

    def everywhere(frame: FrameType, *_: object) -> Any:
        if frame.f_code.co_filename in (stopping.__file__, threading.__file__):
            signal.raise_signal(signal.SIGTERM)  # what handles it is not traced in turn
        return everywhere

    def act() -> None:
        flag = type(stopping.stop_requested)()
        signal.signal(signal.SIGTERM, lambda *_: flag.set())
        signal.alarm(int(HANG))
        sys.settrace(everywhere)
        assert flag.wait(HANG)
        flag.set()
        sys.settrace(None)
        assert flag.is_set()

    assert exit_code(forked(act)) == 0
