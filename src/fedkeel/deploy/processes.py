"""Flower's processes beside Fedkeel's: each ends with the one that started it, and goes by the same clock."""

import ctypes
import os
import secrets
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from fedkeel.deploy import clock
from fedkeel.deploy.flower_internals import MESSAGE_TABLES, MORE_PORTS, NEWS, SECRET_FILE, Endpoint
from fedkeel.engine.executors.flower.channel import pause
from fedkeel.errors import FedkeelError

START_TIME = 120.0  # seconds for a Flower process to come up
CLOCKS = "clocks.json"
LOOK = 0.2  # seconds after which it is looked whether the process is still there


class ProcessEnded(FedkeelError):
    """A Flower process is gone, or never came up; the text says where its log is."""


@contextmanager
def process(
    name: str, place: Path, arguments: list[str], address: str, ca: Path | None = None
) -> Iterator[tuple[Endpoint, Callable[[], None]]]:
    """The superlink or a supernode, and what to call while waiting: it raises when the process has ended, and comes
    back at once when the process has news."""
    secret = new_secret(place)
    command = [sys.executable, "-m", f"fedkeel.deploy.{name}", *arguments, "--isolation", "process"]
    command += [SECRET_FILE, str(secret)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(MORE_PORTS)}
    environment |= {"FLWR_HOME": str(place / "home"), "FLWR_TELEMETRY_ENABLED": "0"}
    environment |= {clock.BASE: str(clock.install()), clock.FILE: str(place / CLOCKS)}
    heard, tells = os.pipe()
    environment[NEWS] = str(tells)
    (place / CLOCKS).unlink(missing_ok=True)
    log_file = place / f"{name}.log"
    with open(log_file, "ab") as output:
        child = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=end_with_parent, pass_fds=[tells],
        )  # fmt: skip
    os.close(tells)  # it is the child's: when the child ends, so does what is heard

    def alive() -> None:
        if select.select([heard], [], [], LOOK)[0] and not os.read(heard, 4096):
            pause(LOOK)  # nobody is left to tell anything
        pause(0)
        if child.poll() is not None:
            raise ProcessEnded(f"Flower's {name} ended ({last_words(log_file)}): see '{log_file}'.")

    try:
        yield Endpoint(address, ca, secret.read_bytes()), alive
    finally:
        os.close(heard)
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
    deadline = time.monotonic() + START_TIME
    while not ready():
        if time.monotonic() > deadline:
            raise ProcessEnded(f"Flower did not come up within {START_TIME:g} s: see the log beside the run.")
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


def delete_messages(database: Path) -> None:
    """Of an earlier start, Flower needs to know the nodes again. The messages of a server that was killed, each with
    the whole model, it would keep for ever."""
    if not database.exists():
        return
    try:
        with closing(sqlite3.connect(database, isolation_level=None)) as connection:
            for table in MESSAGE_TABLES:
                connection.execute(f"DELETE FROM {table}")
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error:  # half made, or damaged: without it, sites connect as for the first time
        delete_database(database)


def delete_database(database: Path) -> None:
    for path in database.parent.glob(f"{database.name}*"):
        path.unlink(missing_ok=True)
