"""NVFlare's processes of a kit, the lines that they leave in files, and what is asked of its server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TypeVar

import psutil
from filelock import FileLock, Timeout
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from fedkeel.deploy.kits import ADMIN
from fedkeel.errors import FedkeelError
from fedkeel.stopping import Stopped, stop_requested

T = TypeVar("T")
LOOK = 1.0  # seconds between two looks
PATIENCE = 90.0  # seconds for the server to start, or to answer on a busy machine
LEAVE = 15.0  # seconds for them to end


@contextmanager
def running(kit: Path) -> Iterator[subprocess.Popen[bytes]]:
    """NVFlare's server or client, started by the kit's own script, and all that it starts, until the block ends."""
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    environment.pop("NVFL_WORKSPACE", None)  # the kit is the workspace
    try:
        with FileLock(kit / ".lock", timeout=0), open(kit / "console.log", "wb") as output:
            end_all(kit)  # that a killed one left
            process = subprocess.Popen(
                ["bash", str(kit / "startup" / "sub_start.sh"), "--once"],
                cwd=kit,
                env=environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which ends the others in order
            )
            try:
                yield process
            finally:
                end_all(kit)
                process.wait()
    except Timeout:
        raise FedkeelError(f"The kit '{kit}' is in use: stop what runs with it first.") from None


def end_all(kit: Path) -> None:
    """NVFlare's processes of this kit."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if str(kit) in words and any("nvflare." in word for word in words):
                process.terminate()
                found.append(process)
    for process in psutil.wait_procs(found, timeout=LEAVE)[1]:
        with suppress(psutil.Error):
            process.kill()


@dataclass
class Tail:
    """The lines that came into a file since the last look."""

    path: Path
    position: int = 0

    def lines(self) -> list[str]:
        with suppress(OSError), open(self.path, "rb") as file:
            file.seek(self.position)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self.position += len(whole)
            return whole.decode(errors="replace").splitlines()
        return []

    def pass_on(self, say: Callable[[str], None]) -> None:
        for line in self.lines():
            say(line.removeprefix("fedkeel: "))


class Console:
    """A session of an administrator. One that breaks is made anew; it is closed in any case, since an open one keeps
    this process from ending."""

    def __init__(self, kit: Path, server: subprocess.Popen[bytes]) -> None:
        self._kit, self._server = kit, server
        self._session: Session | None = None

    def close(self) -> None:
        if self._session is not None:
            with suppress(Exception):  # it may be broken
                self._session.close()
        self._session = None

    def _ask(self, question: Callable[[Session], T]) -> T:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                if self._session is None:
                    with redirect_stdout(StringIO()):  # it has a word of its own for every attempt
                        self._session = new_secure_session(ADMIN, str(self._kit.absolute()), timeout=5.0)
                return question(self._session)
            except Exception as error:  # NVFlare raises many kinds; none of them ends a run by itself
                self.close()
                if self._server.poll() is not None or time.monotonic() > deadline:
                    raise FedkeelError(
                        f"NVFlare's server does not answer ({type(error).__name__}), perhaps its port is taken: see "
                        "'console.log' in the server's kit."
                    ) from error
            pause(LOOK)

    def last_heard(self) -> dict[str, float]:
        """How many seconds ago NVFlare's server heard of each client; they say every five that they are there."""
        clients = self._ask(lambda session: session.get_connected_client_list())
        return {one.name: time.time() - one.last_connect_time for one in clients}

    def idle(self, names: Sequence[str]) -> list[str]:
        """Those of these that say they run no job. NVFlare gives up on all when one of them does not reply."""
        with suppress(Exception):
            rows = self._session.get_client_job_status([*names]) if self._session is not None and names else ()
            return [row["client_name"] for row in rows or () if row.get("status") == "no_jobs"]
        self.close()
        return []

    def submit(self, folder: Path) -> str:
        token = str(uuid.uuid4())  # what is submitted twice under one is one job
        return str(self._ask(lambda session: session.submit_job(str(folder), submit_token=token)))

    def has_ended(self, job: str) -> bool:
        return str(self._ask(lambda session: session.get_job_status(job))).startswith("FINISHED")

    def stop(self, job: str, seconds: float) -> None:
        """As far as it has not ended by itself; no longer than so many seconds."""
        deadline = time.monotonic() + seconds
        with suppress(Exception):  # whatever comes of it, the processes are ended afterwards
            if self._session is not None:
                self._session.abort_job(job)
            while time.monotonic() < deadline and not self.has_ended(job):
                time.sleep(LOOK)


def pause(seconds: float) -> None:
    if stop_requested.wait(seconds):
        raise Stopped
