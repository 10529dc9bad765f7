"""On Ray itself: two raylets of one core each, as two machines; and a command that is interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedkeel.cli import main
from fedkeel.data.federation import Federation
from fedkeel.engine.executors.ray.cluster import ENVIRONMENT
from fedkeel.engine.executors.ray.crew import Crew, Seat
from fedkeel.engine.executors.ray.passes import Pass
from fedkeel.engine.executors.ray.schedule import Speeds
from fedkeel.runs.run import Run
from tests import tiny
from tests.engine.executors.ray.pretend import pretend, wait_for_all
from tests.engine.executors.ray.test_executor import close
from tests.processes import HANG, children, ended, needs_ray, until

pytestmark = pytest.mark.slow
needs_ray()
PAGES = ("(autoscaler", "(raylet", "Traceback", "RayActorError", "died or was killed", "node_id", "ERROR", "WARNING")


class Machines:
    """A cluster of these tests' own."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False})
        self._others: list[Any] = []

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> str:
        self._others.append(self._cluster.add_node())
        return str(self._others[-1].node_id)

    def kill(self, node: str) -> None:
        """At once, and all of its processes."""
        (found,) = [other for other in self._others if other.node_id == node]
        self._cluster.remove_node(found, allow_graceful=False)

    def shutdown(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tempfile.mkdtemp(prefix="ray-")  # a short path: Ray's sockets lie there,
        patch.setenv("RAY_TMPDIR", folder)  # and the address that 'auto' would find
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        made = Machines()
        try:
            yield made
        finally:
            made.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def second(machines: Machines) -> str:
    return machines.add()


def clients() -> Federation:
    sizes = {"ward": 14, "clinic": 9, "hospital": 21, "lab": 12, "home": 10, "station": 16}
    return tiny.federation(sizes, unseen=4)


def scaffold(directory: Path, **options: Any) -> Run:
    return tiny.run(directory, "scaffold", on=clients(), rounds=4, threads=1, **options)


def worked(run: Run) -> dict[str, int]:
    """How many clients each node trained."""
    document = json.loads((run.directory / "profile.json").read_text())
    return {name: numbers.get("clients", 0) for name, numbers in document["nodes"].items()}


class Together(tiny.Notes):
    """Before the next round begins, all nodes are there; in the place of one that was killed, another."""

    def __init__(self, machines: Machines, crews: list[Crew], node: str, killed: list[str]) -> None:
        super().__init__()
        self.machines, self.crews, self.node, self.killed = machines, crews, node, killed

    def round_done(self, round: int, rounds: int, scores: Any, loss: float) -> None:
        super().round_done(round, rounds, scores, loss)
        crew = self.crews[-1]
        if self.node in self.killed:
            self.node = self.machines.add()

        def is_there() -> bool:  # a round of this size does not wait for it
            crew.muster()
            crew.attend()
            return any(seat.node.id == self.node for seat in crew.seats)

        until(is_there)


def kill_in_the_second_round(monkeypatch: pytest.MonkeyPatch, machines: Machines, victim: str) -> list[str]:
    """From now on a node dies once it has been given something to train, with what it has done of it and what not."""
    killed: list[str] = []
    plain = Pass._send

    def send(self: Pass, seat: Seat, places: list[int]) -> None:
        plain(self, seat, places)
        if self.order.do == "train" and self.order.header["round"] == 1 and seat.node.id == victim and not killed:
            machines.kill(victim)
            killed.append(victim)

    monkeypatch.setattr(Pass, "_send", send)
    return killed


def test_two_nodes_and_one_that_dies_and_one_that_comes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    machines: Machines,
    second: str,
) -> None:
    crews = wait_for_all(monkeypatch)
    monkeypatch.setattr(Speeds, "measure", lambda *_: None)  # nobody seems slow, so all have something in every round
    on_ray: dict[str, Any] = {"executor": "ray", "ray_address": machines.address, "profile": True}
    serial = scaffold(tmp_path / "serial")
    updates = scaffold(tmp_path / "updates", **on_ray, partial_means=False)
    assert tiny.result(updates) == tiny.result(serial)
    assert len(worked(updates)) == 2
    assert sum(worked(updates).values()) == 4 * 6
    assert min(worked(updates).values()) > 0

    with monkeypatch.context() as patch:
        pretend(patch, ["alone"])
        calm = scaffold(tmp_path / "calm", executor="ray")

    capfd.readouterr()
    killed = kill_in_the_second_round(monkeypatch, machines, second)
    stormy = scaffold(tmp_path / "stormy", **on_ray, observer=Together(machines, crews, second, killed))
    close(serial, stormy)
    assert tiny.result(stormy) == tiny.result(calm)  # whoever adds up whom, and however often
    assert killed == [second]
    assert len(worked(stormy)) == 3
    assert min(worked(stormy).values()) > 0
    assert "died; what it had to do for" in caplog.text
    printed = "".join(capfd.readouterr())
    assert not [word for word in PAGES if word in printed], printed


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [other for child in found for other in descendants(child)]


WORDS = ["--subsample", "10", "--model", "simple_cnn(width=2)", "--device", "cpu", "--checkpoint-every", "1"]
WORDS += ["--method", "scaffold", "--rounds", "3", "--threads", "1", "--executor", "ray", "--no-partial-means"]
ROOT = Path(__file__).parents[4]
WAITING = """
import sys
from pathlib import Path
from fedkeel.cli import main
from fedkeel.stopping import RENAMED
from tests.processes import wait_here

if __name__ == "__main__":
    wait_here(RENAMED, "checkpoints/round-000001", Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
"""


def test_an_interrupted_command_leaves_nobody_behind_and_goes_on(tmp_path: Path, machines: Machines) -> None:
    place, ready, few = tmp_path / "run", tmp_path / "ready", ["--ray-actors", "1", "--ray-cores", "1"]
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(ready), "run", *WORDS, *few, "--out", str(place)],
        cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        until(lambda: process.poll() is not None or ready.exists())
        others = descendants(process.pid)
        assert any("ray::" in Path(f"/proc/{pid}/cmdline").read_text() for pid in others)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the command gets it
        out, err = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert f"stopped; continue with: fedkeel resume {place}" in err
    assert "Traceback" not in out + err
    ended(others)
    assert not Run(place).finished

    assert main(["resume", str(place), "--ray-address", machines.address]) == 0
    assert main(["run", *WORDS, "--executor", "serial", "--out", str(tmp_path / "serial")]) == 0
    assert tiny.result(Run(place)) == tiny.result(Run(tmp_path / "serial"))
