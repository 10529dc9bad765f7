"""A federation of real processes on loopback: what a person would type, and kills in between."""

from __future__ import annotations

import importlib.util
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
OPTIONS: dict[str, Any] = {**ALONE, "round_timeout": 60.0}
nvflare = pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="nvflare is not installed")
PROCESSES = [pytest.mark.slow, pytest.mark.network, nvflare]


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


class Loopback:
    """Processes by what they are called. All of them end with the block."""

    def __init__(self, place: Path) -> None:
        self.place, self.port = place, free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.terminate()
        for name in list(self.processes):
            self.stop(name)

    def start(self, name: str, *words: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, SOURCES))}
        with open(self.place / f"{name}.log", "ab") as output:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "fedkeel", *words], cwd=self.place, stdout=output, stderr=output, env=environment
            )

    def site(self, name: str, *words: str, folder: str = "", kit: str = "") -> None:
        data = ["--data", folder or f"images/{name}", "--state", f"state/{name}", "--device", "cpu"]
        self.start(name, "join", kit or f"kits/sites/{name}", *data, *words)

    def server(self, out: str, sites: str = ",".join(SITES), **options: Any) -> None:
        config = self.place / f"{out}.toml"
        config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in {**OPTIONS, **options}.items()))
        self.start(
            "server", "server", "--config", str(config), "--sites", sites, "--port", str(self.port), "--out", out
        )

    def serial(self, out: str, **options: Any) -> fedkeel.Run:
        """The same, in this process, over the same folders."""
        options = {**ALONE, **options, "executor": "serial"}
        options["data"] = options["data"].replace(")", f", root='{self.place / 'images'}')")
        return fedkeel.simulate(options, directory=self.place / out)

    def finish(self, seconds: float = 240) -> int:
        status = self.processes["server"].wait(timeout=seconds)
        del self.processes["server"]
        return status

    def kill(self, name: str) -> None:
        """As when the power is cut: all that this end has started too."""
        family = self.family(name)
        for process in family:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.processes.pop(name).wait()

    def family(self, name: str) -> list[int]:
        found = [self.processes[name].pid]
        for parent in found:
            with suppress(OSError):
                for thread in Path(f"/proc/{parent}/task").iterdir():
                    found += map(int, (thread / "children").read_text().split())
        return found

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def log(self, name: str) -> str:
        path = self.place / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, happened: Callable[[], bool], seconds: float = 120) -> None:
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
