"""`fedkeel server` and `fedkeel join`: NVFlare's processes, and one job after another until the run is over.

A job of NVFlare's ends when a site's process does, and a site that comes later is not let into it. So a federation is
a row of jobs, each of which goes on from the run's own checkpoint, which is the same to the bit.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkeel.config import Config
from fedkeel.data.site import check_reading
from fedkeel.deploy.channel import REQUEST
from fedkeel.deploy.console import LOOK, Console, pause
from fedkeel.deploy.controller import FAILURE, PROGRESS
from fedkeel.deploy.executor import LOG
from fedkeel.deploy.kits import CONTROLLER, EXECUTOR, Settings, read_json, tighten, verify
from fedkeel.deploy.processes import LEAVE, Tail, running
from fedkeel.deploy.serving import begun, check
from fedkeel.engine.executors.sites.executor import STATUS, TELL, read_sites
from fedkeel.errors import FedkeelError
from fedkeel.runs.run import Run
from fedkeel.runs.store import METRICS
from fedkeel.stopping import Stopped

SILENT, GONE = 20.0, 60.0  # seconds without a word after which a site is not taken into a job, or ends the one it is in
LONGEST = 60.0  # seconds between a job that failed and the next one
LOST = 3  # jobs in a row that one site failed, after which they go on without it
TASKS_EVERY = 0.1  # seconds between a site's questions for a task


# -- the server -------------------------------------------------------------------------------------------------------
@dataclass
class Federation:
    """A run over a network, at its server.

    Attributes:
        sites: all that have a kit.
        wait: seconds to wait for them at first; then it begins with `min_clients` or more.
        say: is told what happens, a line at a time.
    """

    config: Config
    out: Path
    kits: Path
    sites: Sequence[str]
    wait: float
    say: Callable[[str], None]
    imports: Sequence[str] = ()
    _failed: Counter[str] = field(default_factory=Counter)
    _wait: float = LOOK

    def check(self) -> None:
        """Refuse what cannot work, before there are kits."""
        check(self.config)
        check_reading(self.config)
        begun(self.config, self.out)

    def run(self) -> Run:
        if begun(self.config, self.out) and Run(self.out).finished:
            return Run(self.out)
        kit = (self.kits / "server").resolve()
        shutil.rmtree(kit / "storage", ignore_errors=True)  # of jobs that ended: what counts is in the run
        tighten(kit, CONTROLLER)
        settings = {"config": self.config.to_dict(), "out": str(self.out.absolute()), "sites": [*self.sites]}
        Settings.write(kit / "local", settings | {"imports": [*self.imports]})
        for name in (FAILURE, PROGRESS):
            (kit / "local" / name).unlink(missing_ok=True)
        with running(kit) as server, Console(self.kits / "admin", server) as console:
            self._wait_for_sites(console)
            shown = Tail(kit / "local" / PROGRESS)
            while not (self.out / "summary.json").exists():
                self._one_job(console, shown)
                if (kit / "local" / FAILURE).exists():
                    raise FedkeelError((kit / "local" / FAILURE).read_text(encoding="utf-8"))
        return Run(self.out)

    def _wait_for_sites(self, console: Console) -> None:
        began = told = time.monotonic()
        while True:
            here, now = near(console.last_heard()), time.monotonic()
            absent = [name for name in self.sites if name not in here]
            if not absent or (now - began > self.wait and len(here) >= self.config.min_clients):
                return
            if now >= told:
                self.say(f"{len(here)} of {len(self.sites)} sites are connected, waiting for {', '.join(absent)}.")
                told = now + TELL
            pause(LOOK)

    def _one_job(self, console: Console, shown: Tail) -> None:
        """Run a job to its end, or until a site is there that is not in it."""
        here = near(console.last_heard())
        sites = [name for name in self.sites if name in here and self._failed[name] < LOST]
        if not sites:
            pause(LOOK)
            return
        job = console.submit(job_folder((self.kits / "server").resolve(), sites))
        began, rounds, why = time.monotonic(), self._records(), ""
        while not why and not console.has_ended(job):
            try:
                pause(LOOK)
            except Stopped:
                console.stop(job, LEAVE)
                raise
            self._show(shown)
            if not self._over():
                in_round, settled = self._records() > rounds, time.monotonic() - began > SILENT
                why = self._outdated(console, sites, in_round=in_round, settled=settled)
        if why:
            self.say(f"{why}: the next job goes on from the checkpoint.")
            console.stop(job, LEAVE)
        self._show(shown)
        if not why and not self._over():
            self._blame(sites)
            # The longer the more often in a row; a job with a round in it was a good one.
            self._wait = LOOK if self._records() > rounds else min(2 * self._wait, LONGEST)
            self.say(f"The job ended before the run: the next one goes on from the checkpoint in {self._wait:.0f} s.")
            pause(self._wait)

    def _over(self) -> bool:
        return (self.out / "summary.json").exists() or (self.kits / "server" / "local" / FAILURE).exists()

    def _show(self, shown: Tail) -> None:
        for line in shown.lines():
            self.say(line.removeprefix("fedkeel: "))

    def _outdated(self, console: Console, sites: Sequence[str], *, in_round: bool, settled: bool) -> str:
        """Why the job should end and another begin: who is in it and has gone, or is back and outside of it."""
        heard = console.last_heard()
        states = read_sites(self.out) if (self.out / STATUS).exists() else {}
        gone = [name for name in sites if heard.get(name, GONE) >= GONE]
        if gone and len(gone) < len(sites):
            return f"Nothing was heard of {' and '.join(gone)} for {GONE:.0f} s"
        here = [name for name in near(heard) if self._failed[name] < LOST]
        late = [name for name in here if name in self.sites and name not in sites]
        done = [name for name in sites if states.get(name, {}).get("state", "").endswith("done")]
        waited = [name for name in here if name in sites and name in states and name not in done]
        back = console.idle(waited) if waited and settled else []
        for name in done if settled else ():
            self._failed[name] = 0
        self._count(back)
        came = dict.fromkeys([*(late if in_round else ()), *back])
        return f"{' and '.join(came)} came" if came else ""

    def _count(self, sites: Sequence[str]) -> None:
        """These ended a job, or lost their part of one; it may be their third in a row."""
        for name in sites:
            self._failed[name] += 1
            if self._failed[name] == LOST:
                self.say(f"The site '{name}' did not last in {LOST} jobs in a row: they go on without it.")

    def _blame(self, sites: Sequence[str]) -> None:
        """A job ended by itself. Those that were at work then may have ended it, unless it was all of them."""
        states = read_sites(self.out) if (self.out / STATUS).exists() else {}
        at_work = [name for name in sites if states.get(name, {}).get("state", "").endswith(("under way", "no reply"))]
        self._count(at_work if len(at_work) < len(sites) else ())

    def _records(self) -> int:
        """Grows with every round."""
        path = self.out / METRICS
        return path.stat().st_size if path.exists() else 0


def near(heard: Mapping[str, float]) -> list[str]:
    return [name for name, seconds in heard.items() if seconds < SILENT]


def job_folder(kit: Path, sites: Sequence[str]) -> Path:
    """What NVFlare calls a job: which class runs where, and nothing else."""
    folder = kit / "job"
    shutil.rmtree(folder, ignore_errors=True)
    executors = [{"tasks": [REQUEST], "executor": {"path": EXECUTOR, "args": {}}}]
    workflows = [{"id": REQUEST, "path": CONTROLLER, "args": {}}]
    usual: dict[str, Any] = {"format_version": 2, "task_data_filters": [], "task_result_filters": [], "components": []}
    apps: dict[str, tuple[str, dict[str, Any]]] = {
        "server": (
            "config_fed_server.json",
            {"server": {"task_request_interval": TASKS_EVERY}, "workflows": workflows},
        ),
        "site": ("config_fed_client.json", {"executors": executors}),
    }
    for app, (name, own) in apps.items():
        config = folder / app / "config"
        config.mkdir(parents=True)
        (config / name).write_text(json.dumps(usual | own))
    deploy = {"server": ["server"], "site": [*sites]}
    (folder / "meta.json").write_text(
        json.dumps({"name": "fedkeel", "resource_spec": {}, "min_clients": 1, "deploy_map": deploy})
    )
    return folder


# -- a site -----------------------------------------------------------------------------------------------------------
def join(kit: Path, settings: dict[str, Any], say: Callable[[str], None]) -> None:
    """Be this site until stopped; NVFlare's client is started again when it ends."""
    verify(kit)
    Settings.write(kit / "local", settings)
    state, wait = Path(settings["state"]), LOOK
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    (state / LOG).unlink(missing_ok=True)
    shown = Tail(state / LOG)
    while True:
        began = told = time.monotonic()
        with running(kit) as client:
            console, inside = Tail(kit / "console.log"), False
            while client.poll() is None:
                if any(LET_IN in line for line in console.lines()):
                    say("the server has let this site in")
                    inside = True
                for line in shown.lines():
                    say(line)
                if time.monotonic() >= told:
                    if problem := unreachable(kit, inside=inside):
                        say(problem)
                    told = time.monotonic() + TELL
                pause(LOOK)
        wait = LOOK if time.monotonic() - began > LONGEST else min(2 * wait, LONGEST)
        say(f"NVFlare's client ended, its log is '{kit / 'log.txt'}': it is started again in {wait:.0f} s")
        pause(wait)


LET_IN = "Successfully registered client"  # of NVFlare's own words


def unreachable(kit: Path, *, inside: bool) -> str:
    """What keeps this site from the server, or nothing."""
    target = str(read_json(kit / "startup" / "fed_client.json")["servers"][0]["service"]["target"])
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=TELL).close()
    except OSError as error:
        return f"waiting for the server: {target} cannot be reached ({error.strerror or error})"
    return "" if inside else f"waiting for the server: {target} is there and has not let this site in yet"
