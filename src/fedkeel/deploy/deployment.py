"""A server and its sites as processes: Flower's SuperLink and SuperNode, each with Fedkeel beside it.

With TLS and node keys, unless one says otherwise, and then on this machine only.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path

from fedkeel.config import Config
from fedkeel.data.site import check_reading, class_folders
from fedkeel.deploy import clock
from fedkeel.deploy.addresses import free_port, loopback, refuse_taken, refuse_untrusted
from fedkeel.deploy.certificates import ServerFiles, SiteFiles
from fedkeel.deploy.federation import carry_out, check
from fedkeel.deploy.keys import Keys
from fedkeel.deploy.policy import Policy
from fedkeel.deploy.site import Site, own_folder
from fedkeel.engine.executors.flower.gathering import Channel, pause
from fedkeel.errors import FedkeelError
from fedkeel.observer import Observer
from fedkeel.runs.run import Run

log = logging.getLogger("fedkeel")
PORT = 9092
RETRY, SELDOM = 5.0, 30.0  # seconds until a site tries again: at first, and when that was in vain many times
PATIENCE = 120.0  # for a Flower process to come up
CLOCKS = "clocks.json"
DOORS_OF_FLOWER = "FLWR_INTERNAL_"  # variables that open further ports, which nobody guards

APP = {
    "pyproject.toml": b"""[project]
name = "fedkeel-federation"
version = "1.0.0"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41"]

[tool.flwr.app]
publisher = "fedkeel"

[tool.flwr.app.components]
serverapp = "app:server_app"
clientapp = "app:client_app"

[tool.flwr.app.config]
""",
    "app.py": b"from fedkeel.deploy import client_app, server_app\n",
    "LICENSE": b"Apache-2.0\n",
}


class ProcessEnded(FedkeelError):
    """A Flower process is gone; the text has its last words."""


def serve(
    config: Config,
    out: Path,
    *,
    files: ServerFiles | None,
    host: str = "",
    port: int = PORT,
    sites: int = 0,
    wait: float = 600,
    observer: Observer | None = None,
) -> Run:
    """Run a federation from this machine. Without `files` there is neither TLS nor authentication: loopback only."""
    from fedkeel.deploy import runtime

    check(config)
    check_reading(config)
    if (out / "summary.json").exists():
        return Run(out)
    if files is None:
        host = loopback(host or "127.0.0.1")
        if not sites:
            raise FedkeelError(
                "Without keys the server cannot know its sites: say how many to wait for with --sites N."
            )
        trust = ["--insecure"]
    else:
        files.check()
        host = host or "0.0.0.0"
        trust = ["--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key)]
        trust += ["--ssl-ca-certfile", str(files.ca), "--enable-supernode-auth"]
    refuse_taken(host, port)
    place = private_folder(out / "flower")
    database = place / "link.db"
    sweep(database)
    command = [sys.executable, "-m", "fedkeel.deploy.link", *trust, "--host", host, "--port", str(port)]
    command += ["--isolation", "process", "--disable-runtime-dependency-installation"]
    command += ["--database", str(database), "--superexec-auth-secret-file", str(new_secret(place))]
    here = "127.0.0.1" if host in ("0.0.0.0", "") else host
    ca = files.ca if files else None
    endpoint = runtime.Endpoint(f"{here}:{port}", ca, (place / "secret").read_bytes())
    with process(command, place, "superlink") as alive:
        until(lambda: runtime.is_up(endpoint), alive)
        keys = Keys(files.sites, functools.partial(runtime.register, endpoint)) if files else None
        runtime.start_run(endpoint, APP)
        result: list[Run] = []

        def act(channel: Channel) -> None:
            run = carry_out(channel, config, out=out, sites=sites, wait=wait, owners=keys, observer=observer)
            result.append(run)

        note, clocks = (observer or Observer()).note, clock.Differences(place / CLOCKS)

        def tell() -> None:
            for node, ahead in clocks.news().items():
                if keys is not None and int(node) in keys:
                    note(clock.sentence(f"The clock of '{keys[int(node)]}'", ahead, "this server's"))

        with keys.followed(note, tell) if keys else nullcontext():
            runtime.serve(endpoint, alive, act)
    for path in place.glob(f"{database.name}*"):
        path.unlink(missing_ok=True)
    return result[0]


def join(
    address: str,
    folder: Path,
    name: str,
    state: Path,
    *,
    files: SiteFiles | None,
    device: str = "auto",
    policy: Policy | None = None,
) -> None:
    """Be a site until stopped. `policy`: None for the default one."""
    from fedkeel.deploy import runtime

    class_folders(folder)
    host, _, port = address.rpartition(":") if ":" in address else (address, "", str(PORT))
    if not port.isdigit():
        raise FedkeelError(f"The server's address is '{address}': give HOST or HOST:PORT.")
    if files is None:
        loopback(host)
        trust = ["--insecure"]
    else:
        files.check()
        trust = ["--root-certificates", str(files.ca), "--auth-supernode-private-key", str(files.key)]
    place = private_folder(state)
    own_port = free_port()
    command = [sys.executable, "-m", "fedkeel.deploy.node", *trust, "--superlink", f"{host}:{port}"]
    command += ["--isolation", "process", "--host", "127.0.0.1", "--port", str(own_port)]
    command += ["--superexec-auth-secret-file", str(new_secret(place))]
    endpoint = runtime.Endpoint(f"127.0.0.1:{own_port}", None, (place / "secret").read_bytes())
    memory = private_folder(place / "memory")
    site = Site(own_folder(folder, name), memory, name, device, policy=policy or Policy())
    told, pauses = False, Pauses()
    while True:
        refuse_untrusted(host, int(port), files.ca if files else None)
        pauses.begin()
        try:
            with process(command, place, "supernode") as alive:
                runtime.answer_all(endpoint, site, telling_clock(place, alive))
        except ProcessEnded:
            # A server of another run, or one that does not know this site's key (yet).
            if not told:
                log.warning(
                    "The server did not let this site in (it does not know its key, or another site uses it), "
                    "or let it go: trying again until it does."
                )
                told = True
            pause(pauses.next())


def telling_clock(place: Path, alive: Callable[[], None]) -> Callable[[], None]:
    """The same, where a person is told how far this machine's clock is off; also, and then above all, at the end."""
    clocks = clock.Differences(place / CLOCKS)

    def check() -> None:
        try:
            alive()
        finally:
            for ahead in clocks.news().values():
                log.warning(clock.sentence("This machine's clock", ahead, "the server's"))

    return check


class Pauses:
    """How long to wait before the next attempt: longer and longer, since each costs a process; after a connection that
    lasted, as at first."""

    def __init__(self) -> None:
        self._next, self._began = RETRY, 0.0

    def begin(self) -> None:
        self._began = time.monotonic()

    def next(self) -> float:
        if time.monotonic() - self._began > 2 * SELDOM:
            self._next = RETRY
        now, self._next = self._next, min(2 * self._next, SELDOM)
        return now


# -- processes ------------------------------------------------------------------------------------------------------
@contextmanager
def process(command: list[str], place: Path, name: str) -> Iterator[Callable[[], None]]:
    """A Flower process that ends with this one, and goes by the same clock. Yields what to call while waiting: it
    raises when the process ended."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(DOORS_OF_FLOWER)}
    environment |= {"FLWR_HOME": str(place / "home"), "FLWR_TELEMETRY_ENABLED": "0"}
    environment |= {clock.BASE: str(clock.install()), clock.FILE: str(place / CLOCKS)}
    (place / CLOCKS).unlink(missing_ok=True)
    log_file = place / f"{name}.log"
    with open(log_file, "ab") as output:
        child = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=end_with_parent,
        )  # fmt: skip

    def alive() -> None:
        pause(0.2)
        if child.poll() is not None:
            raise ProcessEnded(f"Flower's {name} ended ({last_words(log_file)}): see '{log_file}'.")

    try:
        yield alive
    finally:
        child.terminate()
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def end_with_parent() -> None:
    """A killed server or site must not leave a process that goes on in its name."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, where there is such a thing


def last_words(log_file: Path) -> str:
    lines = [line.strip() for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines[-40:] if "error" in line.lower() or "denied" in line.lower()]
    return (telling or lines or ["it said nothing"])[-1][:300]


def until(ready: Callable[[], bool], alive: Callable[[], None]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not ready():
        if time.monotonic() > deadline:
            raise FedkeelError(f"Flower did not come up within {PATIENCE:g} s: see the log beside the run.")
        alive()


def private_folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def new_secret(place: Path) -> Path:
    """What Fedkeel and its own Flower process know of each other, and no other user of this machine."""
    path = place / "secret"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))
    return path


MESSAGES = (
    "message_ins", "message_res", "object_push_session_pending", "object_push_session_roots", "object_push_sessions",
    "object_children", "run_objects", "objects",
)  # fmt: skip


def sweep(database: Path) -> None:
    """Of an earlier start, Flower needs to know the nodes again. The messages of a server that was killed, each with
    the whole model, it would keep for ever."""
    if not database.exists():
        return
    try:
        with closing(sqlite3.connect(database, isolation_level=None)) as connection:
            for table in MESSAGES:
                connection.execute(f"DELETE FROM {table}")
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error:  # half made, or damaged: without it, sites connect as for the first time
        for path in database.parent.glob(f"{database.name}*"):
            path.unlink(missing_ok=True)
