"""A federation of real processes on loopback, with TLS and keys: what a person would type, and kills in between."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedkeel

SOURCES = (Path(fedkeel.__file__).parents[1], Path(__file__).parents[2])
CLASSES = ("cat", "dog", "owl")
SITES = {"north": 8, "south": 12, "west": 6}
ALONE: dict[str, Any] = {  # of the same run in one process, where nobody is waited for
    "data": "folder(size=16)",
    "model": "simple_cnn",
    "batch_size": 8,
    "learning_rate": 0.05,
    "device": "cpu",
    "rounds": 2,
}
OPTIONS: dict[str, Any] = {**ALONE, "round_timeout": 90.0}
PROCESSES = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed"),
]


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def draw_images(root: Path, sites: Mapping[str, int] = SITES, classes: tuple[str, ...] = CLASSES) -> None:
    """Noisy patterns, one for each class, each site in a tint of its own; 'west' never sees an owl."""
    generator = np.random.default_rng(5)
    patterns = {label: generator.integers(0, 255, (12, 12, 3)) for label in classes}
    for number, (site, count) in enumerate(sites.items()):
        for label, pattern in patterns.items():
            if site == "west" and label == "owl":
                continue
            folder = root / site / label
            folder.mkdir(parents=True)
            for image in range(count):
                noisy = pattern * (0.4 + 0.25 * number) + generator.integers(0, 60, (12, 12, 3))
                Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{image}.png")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


CABLES = itertools.count()  # a name is free again only some time after its cable is gone


class Networks:
    """A network namespace for each site, joined to the server's by a cable of its own, which can be pulled."""

    def __init__(self, *sites: str) -> None:
        first = os.getpid() % 16 * 16  # other tests on this machine have networks of their own
        self.places = {site: f"fk{os.getpid() % 100_000}n{next(CABLES)}" for site in sites}
        self.addresses = {site: f"198.18.{first + number}.1" for number, site in enumerate(sites)}

    def __enter__(self) -> Networks:
        for site, place in self.places.items():
            here = self.addresses[site]
            there = here.removesuffix("1") + "2"
            ip("netns", "add", place)
            ip("link", "add", f"{place}a", "type", "veth", "peer", "name", f"{place}b", "netns", place)
            ip("addr", "add", f"{here}/24", "dev", f"{place}a")
            ip("link", "set", f"{place}a", "up")
            for words in (["addr", "add", f"{there}/24", "dev", f"{place}b"], ["link", "set", f"{place}b", "up"]):
                ip("-n", place, *words)
            ip("-n", place, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for place in self.places.values():
            ip("netns", "del", place)

    def cut(self, site: str) -> None:
        """Nothing gets through, and nobody is told: packets are lost without a word."""
        ip("link", "set", f"{self.places[site]}a", "down")

    def mend(self, site: str) -> None:
        ip("link", "set", f"{self.places[site]}a", "up")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def has_namespaces() -> bool:
    try:
        with Networks("probe"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


class Loopback:
    """Processes by what they are called. All of them end with the block."""

    def __init__(self, place: Path, networks: Networks | None = None) -> None:
        self.place = place
        self.port = free_port()
        self.networks = networks
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        for name, process in self.processes.items():
            with suppress(OSError):
                self.thaw(name)
            process.terminate()
        for name in list(self.processes):
            self.stop(name)

    def command(self, *words: str, module: str = "fedkeel") -> list[str]:
        return [sys.executable, "-m", module, *words]

    def start(self, name: str, *words: str, module: str = "fedkeel") -> None:
        inside = ["ip", "netns", "exec", self.networks.places[name]] if self.networks and name != "server" else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
        with open(self.place / f"{name}.log", "ab") as output:
            self.processes[name] = subprocess.Popen(
                [*inside, *self.command(*words, module=module)],
                cwd=self.place,
                stdout=output,
                stderr=output,
                env=environment,
            )

    def certificates(self, *sites: str, out: str = "keys") -> None:
        hosts = ["localhost", "127.0.0.1", *(self.networks.addresses.values() if self.networks else ())]
        words = ["certificates", "--out", out, "--sites", ",".join(sites), "--host", ",".join(hosts)]
        subprocess.run(self.command(*words), cwd=self.place, check=True, stdout=subprocess.DEVNULL)

    def site(self, name: str, folder: str = "", key: str = "", module: str = "fedkeel") -> None:
        keys = f"keys/sites/{key or name}"
        host = self.networks.addresses[name] if self.networks else "localhost"
        words = ["--data", folder or f"images/{name}", "--name", name, "--certificates", keys]
        words += ["--state", f"state/{name}", "--device", "cpu"]
        self.start(name, "join", f"{host}:{self.port}", *words, module=module)

    def server(self, out: str, *words: str, **options: Any) -> None:
        config = self.place / f"{out}.toml"
        config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in {**OPTIONS, **options}.items()))
        trust = ["--certificates", "keys/server"]
        self.start("server", "server", "--config", str(config), *trust, "--port", str(self.port), "--out", out, *words)

    def serial(self, out: str, **options: Any) -> fedkeel.Run:
        """The same, in this process, over the same folders."""
        options = {**ALONE, **options, "executor": "serial"}
        options["data"] = options["data"].replace(")", f", root='{self.place / 'images'}')")
        return fedkeel.simulate(options, directory=self.place / out)

    def connected(self, site: str) -> bool:
        """Its Flower process has been let in by the server's."""
        log = self.place / f"state/{site}/supernode.log"
        return log.exists() and "SuperNode ID" in log.read_text(errors="replace")

    def finish(self, seconds: float = 300) -> int:
        status = self.processes["server"].wait(timeout=seconds)
        del self.processes["server"]
        return status

    def kill(self, name: str, *, family: bool = False) -> None:
        """As when it runs out of memory; with its `family`, as when the power is cut."""
        for process in self.family(name) if family else [self.processes[name].pid]:
            os.kill(process, signal.SIGKILL)
        self.processes.pop(name).wait()

    def freeze(self, name: str) -> None:
        """It does nothing any more, and nobody is told; nor does its Flower process."""
        for process in self.family(name):
            os.kill(process, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        for process in self.family(name):
            os.kill(process, signal.SIGCONT)

    def family(self, name: str) -> list[int]:
        parent = self.processes[name].pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return [parent, *map(int, children)]

    def stop(self, name: str) -> None:
        stop(self.processes.pop(name))

    def log(self, name: str) -> str:
        path = self.place / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, happened: Callable[[], bool], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            server = self.processes.get("server")
            ended = server is not None and server.poll() is not None and not happened()
            waited = ended or time.monotonic() > deadline
            assert not waited, f"it did not happen:\n{self.log('server')}"
            time.sleep(0.2)

    def checkpointed(self, out: str, round: int) -> Callable[[], bool]:
        """This round is done, or even later ones: no more than the last few checkpoints are kept."""
        folder, name = self.place / out / "checkpoints", f"round-{round:06d}"
        return lambda: any(path.name >= name for path in folder.glob("round-*"))
