"""The app of `examples/flower`, started by Flower's own commands: as a simulation, and over plain SuperNodes."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import fedkeel
from tests.deploy.real import ALONE, OPTIONS, PROCESSES, SOURCES, draw_images, free_port, stop
from tests.engine.executors.flower.test_executor import assert_same

pytestmark = PROCESSES
APP = Path(__file__).parents[2] / "examples" / "flower"
METHOD = "scaffold+fedbn"  # its memory must survive from one message to the next, each in a process of its own


def environment(place: Path, link: str) -> dict[str, str]:
    home = place / "home"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{link}\n')
    sources = os.pathsep.join(map(str, SOURCES))
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )  # Flower starts its own tools
    own = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "PYTHONPATH": sources, "PATH": path}
    return {**os.environ, **own}


@contextmanager
def running(place: Path, name: str, given: dict[str, str], *words: str) -> Iterator[None]:
    with open(place / f"{name}.log", "wb") as log:
        process = subprocess.Popen([flower(name.split("-")[0]), *words], env=given, stdout=log, stderr=log)
    try:
        yield
    finally:
        stop(process)


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise AssertionError("Flower's SuperLink did not come up")


def flower(command: str) -> str:
    return str(
        Path(sys.executable).parent / {"link": "flower-superlink", "node": "flower-supernode"}.get(command, "flwr")
    )


def flwr_run(place: Path, given: dict[str, str], *words: str, **options: Any) -> str:
    chosen = place / "options.toml"
    chosen.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items()))
    command = [flower("run"), "run", str(APP), "here", "--stream", *words, "--run-config", str(chosen)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=400, check=False)
    (place / "run.log").write_text(done.stdout + done.stderr)
    return done.stdout + done.stderr


def options_of_the_app(place: Path, data: str) -> dict[str, Any]:
    """Those that its pyproject.toml has; the others stay at their defaults."""
    known = ("model", "batch_size", "learning_rate", "device", "rounds", "round_timeout")
    chosen = {name: OPTIONS[name] for name in known}
    return {**chosen, "method": METHOD, "data": data, "out": str(place / "run"), "sites": 2}


def serial(place: Path, **options: Any) -> fedkeel.Run:
    chosen = {**ALONE, "method": METHOD, "executor": "serial", **options}
    return fedkeel.simulate(chosen, directory=place / "serial")


def test_plain_supernodes_give_what_one_process_gives(tmp_path: Path) -> None:
    draw_images(tmp_path / "images", {"north": 8, "south": 12})
    port = free_port()
    given = environment(tmp_path, f'address = "127.0.0.1:{port}"\ninsecure = true')
    words = ["--insecure", "--port", str(port), "--disable-runtime-dependency-installation"]

    def node(name: str) -> Any:
        folders = f'data="{tmp_path / "images" / name}" state="{tmp_path / "state" / name}" device="cpu"'
        own = ["--insecure", "--superlink", f"127.0.0.1:{port}", "--port", str(free_port()), "--node-config", folders]
        return running(tmp_path, f"node-{name}", given, *own)

    with running(tmp_path, "link", given, *words), node("north"), node("south"):
        wait_for(port)
        said = flwr_run(tmp_path, given, **options_of_the_app(tmp_path, "folder(size=16)"))
        assert (tmp_path / "run" / "summary.json").exists(), said
    wanted = serial(tmp_path, data=f"folder(size=16, root='{tmp_path / 'images'}')")
    assert_same(fedkeel.Run(tmp_path / "run"), wanted)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_simulation_on_ray_gives_what_one_process_gives(tmp_path: Path) -> None:
    draw_images(tmp_path / "images", {"north": 8, "south": 12})
    port = free_port()
    given = environment(tmp_path, f'address = "127.0.0.1:{port}"\ninsecure = true')
    words = ["--insecure", "--simulation", "--port", str(port), "--disable-runtime-dependency-installation"]
    data = f"folder(size=16, root='{tmp_path / 'images'}')"
    with running(tmp_path, "link", given, *words):
        wait_for(port)
        said = flwr_run(
            tmp_path, given, "--federation-config", "num-supernodes=2", **options_of_the_app(tmp_path, data)
        )
        assert (tmp_path / "run" / "summary.json").exists(), said
    assert_same(fedkeel.Run(tmp_path / "run"), serial(tmp_path, data=data))
