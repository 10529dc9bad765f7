"""`fedkeel server` and `fedkeel join`: NVFlare's processes, and one job after another until the run is over.

A job of NVFlare's ends when a site's process does, and a site that comes later is not let into it. So a federation is
a row of jobs, each of which goes on from the run's own checkpoint, which is the same to the bit.
"""

from __future__ import annotations

import gc
import json
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkeel.config import Config
from fedkeel.data.site import check_reading
from fedkeel.deploy.channel import REQUEST
from fedkeel.deploy.controller import FAILURE, PROGRESS
from fedkeel.deploy.executor import LOG
from fedkeel.deploy.kits import CONTROLLER, EXECUTOR, SETTINGS, read_json, tighten, verify, write_json
from fedkeel.deploy.processes import LEAVE, LOOK, Console, Tail, pause, running
from fedkeel.deploy.serving import begun, check
from fedkeel.engine.executors.sites.channel import TELL, wait
from fedkeel.errors import FedkeelError
from fedkeel.runs.run import Run
from fedkeel.runs.store import METRICS
from fedkeel.stopping import Stopped

SILENT, GONE = 20.0, 60.0  # seconds without a word after which a site is not taken into a job, or ends the one it is in
AROUND = 10.0  # between two looks at who is there: each question to NVFlare takes 35 kB for good
LONGEST = 60.0  # seconds between a job that failed and the next one
FAILED_BY = "due to reported failure from "  # of NVFlare's own words, as are those of `LET_IN`
LOST = 3  # jobs in a row that one site failed, after which they go on without it


# -- the server -------------------------------------------------------------------------------------------------------
@dataclass
class Federation:
    """A run over a network, at its server: it waits so many seconds for `sites`, and says what happens."""

    config: Config
    out: Path
    kits: Path
    sites: Sequence[str]
    wait: float
    say: Callable[[str], None]
    imports: Sequence[str] = ()
    _failed: Counter[str] = field(default_factory=Counter)
    _pause: float = LOOK

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
        tighten(kit)
        settings = {"config": self.config.to_dict(), "out": str(self.out.absolute()), "imports": [*self.imports]}
        write_json(kit / "local" / SETTINGS, settings | {"sites": [*self.sites]})
        failure, progress = kit / "local" / FAILURE, kit / "local" / PROGRESS
        failure.unlink(missing_ok=True)
        progress.unlink(missing_ok=True)
        with running(kit) as server, closing(Console(self.kits / "admin", server)) as console:
            wait(lambda: self._absent(console, len(self.sites)), self.say, self.wait, poll=2 * LOOK)
            shown, log = Tail(progress), Tail(kit / "log.txt")
            while not self._over():
                self._one_job(console, kit, shown, log)
            if failure.exists():
                raise FedkeelError(failure.read_text(encoding="utf-8"))
        return Run(self.out)

    def _here(self, console: Console) -> list[str]:
        """Those that may take part now."""
        heard = console.last_heard()
        return [name for name in self.sites if heard.get(name, SILENT) < SILENT and self._failed[name] < LOST]

    def _absent(self, console: Console, needed: int) -> str:
        here = self._here(console)
        absent = ", ".join(name for name in self.sites if name not in here)
        said = f"{len(here)} of {len(self.sites)} sites are connected, waiting for {absent}."
        return said if len(here) < needed else ""

    def _one_job(self, console: Console, kit: Path, shown: Tail, log: Tail) -> None:
        """Run a job to its end, or until a site is there that is not in it."""
        wait(lambda: self._absent(console, self.config.min_clients), self.say, float("inf"), poll=2 * LOOK)
        sites = self._here(console)
        log.lines()  # of earlier jobs
        rounds, why = self._records(), ""
        job = console.submit(job_folder(kit, sites))
        began = asked = time.monotonic()
        try:
            while not why:
                pause(LOOK)
                shown.pass_on(self.say)
                now, over = time.monotonic(), self._over()
                if over or now - asked > AROUND:
                    asked = now
                    if console.has_ended(job):
                        break
                    why = "" if over else self._outdated(console, sites, self._records() > rounds, now - began > SILENT)
                    gc.collect()  # NVFlare leaves a megabyte behind with every question, in circles
        except Stopped:
            console.stop(job, LEAVE)
            raise
        shown.pass_on(self.say)
        if self._records() > rounds:  # a good one
            self._failed.clear()
            self._pause = LOOK
        if why:
            self.say(f"{why}: the next job goes on from the checkpoint.")
            console.stop(job, LEAVE)
        elif not self._over():
            lines = [line.partition(FAILED_BY)[2] for line in log.lines()]
            self._count([name for name in sites if any(line.startswith(f"{name}:") for line in lines)])
            self.say(f"The job ended before the run: the next one goes on from the checkpoint in {self._pause:.0f} s.")
            pause(self._pause)
            self._pause = min(2 * self._pause, LONGEST)

    def _over(self) -> bool:
        return (self.out / "summary.json").exists() or (self.kits / "server" / "local" / FAILURE).exists()

    def _outdated(self, console: Console, sites: Sequence[str], in_round: bool, settled: bool) -> str:
        """Why the job should end and another begin: who is in it and has gone, or is here and has no part in it."""
        heard = console.last_heard()
        gone = [name for name in sites if heard.get(name, GONE) >= GONE]
        if gone and len(gone) < len(sites):
            return f"Nothing was heard of {' and '.join(gone)} for {GONE:.0f} s"
        idle = console.idle(self._here(console)) if settled else []
        back = [name for name in idle if name in sites]
        if len(back) == len(sites):  # it is ending
            return ""
        self._count(back)
        came = [name for name in idle if name in back or in_round]  # one that is new can wait for the round
        return f"{' and '.join(came)} came" if came else ""

    def _count(self, sites: Sequence[str]) -> None:
        """These ended a job, or lost their part of one; it may be their third in a row."""
        for name in sites:
            self._failed[name] += 1
            if self._failed[name] == LOST:
                self.say(f"The site '{name}' did not last in {LOST} jobs in a row: they go on without it.")

    def _records(self) -> int:
        """Grows with every round."""
        path = self.out / METRICS
        return path.stat().st_size if path.exists() else 0


def job_folder(kit: Path, sites: Sequence[str]) -> Path:
    """What NVFlare calls a job: which class runs where, and nothing else."""
    folder = kit / "job"
    shutil.rmtree(folder, ignore_errors=True)
    usual: dict[str, Any] = {"format_version": 2, "task_data_filters": [], "task_result_filters": [], "components": []}
    controller = {"id": REQUEST, "path": CONTROLLER, "args": {}}
    executor = {"tasks": [REQUEST], "executor": {"path": EXECUTOR, "args": {}}}
    # A site asks ten times a second whether there is a task.
    server = usual | {"server": {"task_request_interval": 0.1}, "workflows": [controller]}
    for name, config in (("server", server), ("client", usual | {"executors": [executor]})):
        (folder / name / "config").mkdir(parents=True)
        (folder / name / "config" / f"config_fed_{name}.json").write_text(json.dumps(config))
    deploy = {"server": ["server"], "client": [*sites]}
    meta = {"name": REQUEST, "resource_spec": {}, "min_clients": 1, "deploy_map": deploy}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


# -- a site -----------------------------------------------------------------------------------------------------------
def join(kit: Path, settings: dict[str, Any], say: Callable[[str], None]) -> None:
    """Be this site until stopped; NVFlare's client is started again when it ends."""
    verify(kit)
    write_json(kit / "local" / SETTINGS, settings)
    state, seconds = Path(settings["state"]), LOOK
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
                shown.pass_on(say)
                if not inside and time.monotonic() >= told:
                    say(unreachable(kit))
                    told = time.monotonic() + TELL
                pause(LOOK)
        seconds = LOOK if time.monotonic() - began > LONGEST else min(2 * seconds, LONGEST)
        say(f"NVFlare's client ended, its log is '{kit / 'log.txt'}': it is started again in {seconds:.0f} s")
        pause(seconds)


LET_IN = "Successfully registered client"  # of NVFlare's own words


def unreachable(kit: Path) -> str:
    """What keeps this site from the server."""
    target = str(read_json(kit / "startup" / "fed_client.json")["servers"][0]["service"]["target"])
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=TELL).close()
    except OSError as error:
        return f"waiting for the server: {target} cannot be reached ({error.strerror or error})"
    return f"waiting for the server: {target} is there and has not let this site in yet"
