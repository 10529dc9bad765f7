"""On Ray itself: two nodes of one core each, as two machines; and a command that is interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedkeel import methods
from fedkeel.cli import main
from fedkeel.core import imports
from fedkeel.core.client import LocalClient
from fedkeel.core.composition import Composition
from fedkeel.core.method import Method
from fedkeel.engine.executors.ray import ENVIRONMENT, RayExecutor
from fedkeel.methods import METHODS
from fedkeel.runs.run import Run
from tests import tiny
from tests.processes import HANG, children, ended, until

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray")
ROOT = Path(__file__).parents[3]
SIZES = {"ward": 14, "clinic": 9, "hospital": 21, "lab": 12, "home": 10, "station": 16}


class Machines:
    """A cluster of these tests' own."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        self._others: list[Any] = []

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def second(self) -> str:
        """The node beside the head, a new one if there is none."""
        if not self._others:
            self._others.append(self._cluster.add_node(num_cpus=1))
        return str(self._others[0].node_id)

    def kill_second(self) -> None:
        """At once, and all of its processes."""
        self._cluster.remove_node(self._others.pop(), allow_graceful=False)

    def shutdown(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tempfile.mkdtemp(prefix="ray-")  # a short path: Ray's sockets lie there,
        patch.setenv("RAY_TMPDIR", folder)  # and the address that 'auto' would find
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        made = Machines()
        try:
            yield made
        finally:
            made.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> list[RayExecutor]:
    """Those that runs make; each begins when all nodes have an actor, so that all have something to do."""
    made: list[RayExecutor] = []
    plain = RayExecutor.__init__

    def noted(self: RayExecutor, *arguments: Any) -> None:
        plain(self, *arguments)
        made.append(self)
        wait_for_all(self)

    monkeypatch.setattr(RayExecutor, "__init__", noted)
    return made


def wait_for_all(executor: RayExecutor) -> None:
    """Until there is an actor on every node: on a slow machine one more takes a while."""

    def are_there() -> bool:
        executor._muster()
        return len(executor._actors) == sum(node["Alive"] for node in ray.nodes())

    until(are_there)


class Tells(Method):
    """Says who trained where, by files; and in one round, on one node, goes on for ever."""

    name = "tells"

    def __init__(self, folder: Path, stays: tuple[int, str] = (-1, "")) -> None:
        self.folder, self.stays = folder, stays

    def start(self, client: LocalClient) -> None:
        node = ray.get_runtime_context().get_node_id()
        (self.folder / f"{client.round} {client.name} {node}").touch()
        if (client.round, node) == self.stays:
            (self.folder / "stays").touch()
            time.sleep(HANG)


def told(folder: Path) -> dict[int, set[str]]:
    """On which nodes clients trained, by round."""
    found: dict[int, set[str]] = {}
    for path in folder.glob("* * *"):
        round, _, node = path.name.split()
        found.setdefault(int(round), set()).add(node)
    return found


def run(directory: Path, *parts: Method, method: str = "scaffold", width: int = 4, **options: Any) -> Run:
    composed = Composition([*parts, *Composition.of(methods.build(method)).parts])
    given = {"rounds": 4, "threads": 1, **options}
    return tiny.run(directory, composed, network=tiny.model(width=width), on=tiny.federation(SIZES, unseen=4), **given)


@pytest.mark.parametrize("method", ["scaffold", "hbn", "fedbn"])
def test_it_gives_the_bits_of_serial_and_both_nodes_have_work(
    tmp_path: Path, machines: Machines, executors: list[RayExecutor], method: str
) -> None:
    """One remembers, one asks, one tests models of its clients' own."""
    second = machines.second()
    (folder := tmp_path / "told").mkdir()
    on_ray: dict[str, Any] = {"executor": "ray", "ray_address": machines.address, "rounds": 2}
    result = run(tmp_path / "ray", Tells(folder), method=method, **on_ray)
    assert tiny.result(result) == tiny.result(run(tmp_path / "serial", method=method, rounds=2))
    assert len(executors) == 1
    assert all(len(nodes) == 2 and second in nodes for nodes in told(folder).values())


def test_a_node_that_dies_in_a_round_and_one_that_comes_change_nothing(
    tmp_path: Path, machines: Machines, executors: list[RayExecutor]
) -> None:
    victim = machines.second()
    (folder := tmp_path / "told").mkdir()
    newcomers: list[str] = []

    def die() -> None:
        until((folder / "stays").exists)
        machines.kill_second()

    def come(round: int) -> None:
        if round == 1:
            newcomers.append(machines.second())
            wait_for_all(executors[0])

    thread = threading.Thread(target=die)
    thread.start()
    on_ray: dict[str, Any] = {"executor": "ray", "ray_address": machines.address, "observer": tiny.Notes(come)}
    result = run(tmp_path / "ray", Tells(folder, (1, victim)), **on_ray)
    thread.join()
    assert tiny.result(result) == tiny.result(run(tmp_path / "serial"))
    nodes = told(folder)
    assert victim in nodes[1]
    for round in (2, 3):
        assert victim not in nodes[round]
        assert newcomers[0] in nodes[round]


def test_where_a_memory_was_lost_with_its_node_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path, machines: Machines, executors: list[RayExecutor]
) -> None:
    machines.second()
    rounds: list[int] = []

    def die(round: int) -> None:
        if round == 2 and 2 not in rounds:  # what was remembered in it is in no file yet
            machines.kill_second()
        rounds.append(round)

    notes = tiny.Notes(die)
    options: dict[str, Any] = {"width": 1500, "checkpoint_every": 2}  # Ray keeps what is small at the driver
    result = run(tmp_path / "ray", executor="ray", ray_address=machines.address, observer=notes, **options)
    assert len(executors) == 2
    assert rounds == [0, 1, 2, 2, 3]
    assert any("remembered was lost with its node" in note for note in notes.notes)
    assert tiny.result(result) == tiny.result(run(tmp_path / "serial", **options))


class Dies(Method):
    """Ends the process that runs one client."""

    name = "dies"

    def start(self, client: LocalClient) -> None:
        if client.name == "clinic":
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_client_that_ends_every_actor_is_missing_by_name_and_no_other(tmp_path: Path, machines: Machines) -> None:
    options: dict[str, Any] = {"executor": "ray", "ray_address": machines.address, "ray_actors": 1, "rounds": 1}
    result = run(tmp_path / "ray", Dies(), **options)
    (dropped,) = result.records("dropped")
    assert dropped["client"] == "clinic"
    assert dropped["reason"].startswith("two actors of Ray died with it")
    assert {record["client"] for record in result.records("client")} == SIZES.keys() - {"clinic"}


class Breaks(Method):
    name = "breaks"

    def start(self, client: LocalClient) -> None:
        if client.name == "clinic":
            raise ZeroDivisionError("a bug in a method")


def test_a_bug_in_a_method_ends_the_run_and_is_shown(tmp_path: Path, machines: Machines) -> None:
    with pytest.raises(RuntimeError, match=r"Client 'clinic' failed in its worker process:\n(.|\n)*a bug in a method"):
        run(tmp_path / "ray", Breaks(), executor="ray", ray_address=machines.address, rounds=1)


METHOD = """
import fedkeel

@fedkeel.register("own-shrink")
class Shrink(fedkeel.Method):
    '''Shrinks gradients.'''

    def gradients(self, client, recompute):
        for parameter in client.model.parameters():
            parameter.grad.mul_(0.5)
"""


def test_code_of_one_s_own_goes_to_nodes_that_do_not_have_its_file(
    tmp_path: Path, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own_shrink.py").write_text(METHOD)
    imports.load(str(folder / "own_shrink.py"))
    plain = RayExecutor._muster

    def without_the_file(self: RayExecutor) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        plain(self)

    monkeypatch.setattr(RayExecutor, "_muster", without_the_file)
    try:
        runs = [
            tiny.run(tmp_path / str(number), "own-shrink", threads=1, rounds=2, **options)
            for number, options in enumerate(({}, {"executor": "ray", "ray_address": machines.address}))
        ]
    finally:
        METHODS._entries.pop("own-shrink", None)
        sys.modules.pop("own_shrink", None)
    assert not folder.exists()
    assert tiny.result(runs[0]) == tiny.result(runs[1])
    assert tiny.result(runs[0]) != tiny.result(tiny.run(tmp_path / "fedavg", threads=1, rounds=2))


# -- the command -----------------------------------------------------------------------------------------------------
def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [other for child in found for other in descendants(child)]


WORDS = ["--subsample", "10", "--model", "simple_cnn(width=2)", "--device", "cpu", "--checkpoint-every", "1"]
WORDS += ["--method", "scaffold", "--rounds", "3", "--threads", "1"]
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


def is_rays(pid: int) -> bool:
    try:
        return "ray::" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # gone in the meantime
        return False


def test_an_interrupted_command_leaves_nobody_behind_and_goes_on(tmp_path: Path, machines: Machines) -> None:
    place, ready = tmp_path / "run", tmp_path / "ready"
    alone = ["--executor", "ray", "--ray-address", "local", "--ray-actors", "1"]  # a Ray of its own
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(ready), "run", *WORDS, *alone, "--out", str(place)],
        cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        # Its actor has a name of Ray's only once it has begun.
        until(lambda: process.poll() is not None or (ready.exists() and any(map(is_rays, descendants(process.pid)))))
        others = descendants(process.pid)
        assert process.poll() is None
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
