"""A server and its sites: Flower's SuperLink and SuperNode, each with Fedkeel beside it.

With TLS and node keys, unless one says otherwise, and then on this machine only. A site keeps its images and its model
in memory from one message to the next, and no code that came over the network is ever run: a task of Flower's is taken
for its messages alone, the app bundle that comes with it is not even unpacked.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message

from fedkeel.config import Config, from_one
from fedkeel.data.site import check_reading
from fedkeel.deploy import clock, processes
from fedkeel.deploy.addresses import free_port, refuse_beyond_loopback, refuse_taken, refuse_untrusted
from fedkeel.deploy.certificates import ServerFiles, SiteFiles
from fedkeel.deploy.flower_internals import CLIENT_APP, Endpoint, answer_task, server_app
from fedkeel.deploy.grid import GridChannel, from_records, reply_to, to_records
from fedkeel.deploy.keys import Keys
from fedkeel.deploy.processes import CLOCKS, ProcessEnded, private_folder, process, until
from fedkeel.deploy.serving import check, train
from fedkeel.deploy.site import Site
from fedkeel.engine.executors.flower.channel import Table, pause, plain
from fedkeel.engine.executors.flower.roster import Enrolment
from fedkeel.errors import FedkeelError
from fedkeel.files import make_folder
from fedkeel.observer import Observer
from fedkeel.runs.run import Run
from fedkeel.stopping import stop_requested

log = logging.getLogger("fedkeel")
PORT = 9092
RETRY, SELDOM = 5.0, 30.0  # seconds until a site tries again: at first, and when that was in vain many times
LAST_REPLY = 10.0  # seconds

# Flower starts a run of an app. Fedkeel is at both ends already, and takes nothing of it.
APP = {
    "pyproject.toml": b"""[project]
name = "fedkeel-federation"
version = "1.0.0"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41"]

[tool.flwr.app]
publisher = "fedkeel"
components = { serverapp = "app:server_app", clientapp = "app:client_app" }
config = {}
""",
    "app.py": b"from fedkeel.deploy import client_app, server_app\n",
    "LICENSE": b"Apache-2.0\n",
}


@dataclass(frozen=True)
class ServerOptions:
    """Where a server listens, whom it trusts and whom it waits for: see `Enrolment`. Without `files` there is neither
    TLS nor authentication: loopback only."""

    files: ServerFiles | None
    host: str = ""
    port: int = PORT
    sites: int = 0
    wait: float = 600

    def check(self) -> None:
        if self.files is not None:
            self.files.check()
        else:
            refuse_beyond_loopback(self.address)
            if not self.sites:
                raise FedkeelError(
                    "Without keys the server cannot know its sites: say how many to wait for with --sites N."
                )
        refuse_taken(self.address, self.port)

    @property
    def address(self) -> str:
        return self.host or ("127.0.0.1" if self.files is None else "0.0.0.0")

    def arguments(self) -> list[str]:
        """Of Flower's SuperLink."""
        words = ["--host", self.address, "--port", str(self.port), "--disable-runtime-dependency-installation"]
        if self.files is None:
            return ["--insecure", *words]
        tls = ["--ssl-certfile", str(self.files.certificate), "--ssl-keyfile", str(self.files.key)]
        return [*tls, "--ssl-ca-certfile", str(self.files.ca), "--enable-supernode-auth", *words]


def serve(config: Config, out: Path, server: ServerOptions, observer: Observer | None = None) -> Run:
    """Run a federation from this machine."""
    check(config)
    check_reading(config)
    if (out / "summary.json").exists():
        return Run(out)
    server.check()
    made = make_folder(out / "flower")
    try:
        return _serve(config, out, server, observer or Observer())
    except ProcessEnded:
        raise  # its log is in the folder
    except FedkeelError:
        if made and not (out / "config.toml").exists():  # nothing has happened in it
            shutil.rmtree(made[0], ignore_errors=True)
            with suppress(OSError):
                for folder in made[1:]:
                    folder.rmdir()
        raise


def _serve(config: Config, out: Path, server: ServerOptions, observer: Observer) -> Run:
    place, files = private_folder(out / "flower"), server.files
    database = place / "link.db"
    processes.delete_messages(database)
    here = "127.0.0.1" if server.address == "0.0.0.0" else server.address
    arguments = [*server.arguments(), "--database", str(database)]
    ca = files.ca if files else None
    with process("superlink", place, arguments, f"{here}:{server.port}", ca) as (endpoint, alive):
        until(endpoint.is_up, alive)
        keys = Keys(files.sites, endpoint.register) if files else None
        endpoint.start_run(APP)
        clocks = clock.Differences(place / CLOCKS)

        def tell_clocks() -> None:
            for node, ahead in clocks.news().items():
                if keys is not None and int(node) in keys:
                    observer.note(clock.sentence(f"The clock of '{keys[int(node)]}'", ahead, "this server's"))

        with (
            keys.followed(observer.note, tell_clocks) if keys else nullcontext(),
            server_app(endpoint, alive, lost=stop_requested.set) as grid,
        ):
            enrolment = Enrolment(GridChannel(grid), server.sites, server.wait, keys)
            run = train(enrolment, config, out=out, observer=observer)
    processes.delete_database(database)
    return run


def join(address: str, site: Site, place: Path, *, files: SiteFiles | None) -> None:
    """Be this site until stopped; what it writes lies in `place`, its memory too."""
    host, _, port = address.rpartition(":") if ":" in address else (address, "", str(PORT))
    if not port.isdigit():
        raise FedkeelError(f"The server's address is '{address}': give HOST or HOST:PORT.")
    if files is None:
        refuse_beyond_loopback(host)
        trust = ["--insecure"]
    else:
        files.check()
        trust = ["--root-certificates", str(files.ca), "--auth-supernode-private-key", str(files.key)]
    own_port = free_port()
    for folder in (place, site.state or place):
        private_folder(folder)
    arguments = [*trust, "--superlink", f"{host}:{port}", "--host", "127.0.0.1", "--port", str(own_port)]
    warned, wait = False, RETRY / 2
    while True:
        refuse_untrusted(host, int(port), files.ca if files else None)
        began = time.monotonic()
        try:
            with process("supernode", place, arguments, f"127.0.0.1:{own_port}") as (endpoint, alive):
                answer_all(endpoint, site, telling_clock(place, alive))
        except ProcessEnded:
            # A server of another run, or one that does not know this site's key (yet).
            if not warned:
                log.warning(
                    "The server did not let this site in (it does not know its key, or another site uses it), "
                    "or let it go: trying again until it does."
                )
                warned = True
            wait = next_pause(wait, time.monotonic() - began)
            pause(wait)


def telling_clock(place: Path, alive: Callable[[], None]) -> Callable[[], None]:
    """The same, where a person is told how far this machine's clock is off; also when the process has ended."""
    clocks = clock.Differences(place / CLOCKS)

    def check() -> None:
        try:
            alive()
        finally:
            for ahead in clocks.news().values():
                log.warning(clock.sentence("This machine's clock", ahead, "the server's"))

    return check


def next_pause(before: float, lasted: float) -> float:
    """How long to wait before the next attempt: longer and longer, since each costs a process; after a connection that
    lasted, as at first."""
    return RETRY if lasted > 2 * SELDOM else min(2 * before, SELDOM)


def answer_all(endpoint: Endpoint, site: Site, pauses: Callable[[], None]) -> None:
    """Reply to one message after another, until `pauses` raises.

    Each in a thread of its own, since Flower waits for hours for the rest of a message whose server was killed; but
    the site does one thing at a time.
    """
    busy = threading.Lock()

    def answer(message: Message) -> Message:
        table, data = from_records(message.content)
        with busy:
            log.info(summary(table))
            reply = site.reply(table, data)
        return reply_to(message, to_records(*reply))

    def answer_one(token: str) -> None:
        try:
            answer_task(endpoint, token, answer)
        except Exception as error:  # whatever it is, the next message comes
            log.warning("A message could not be replied to: %s.", str(error).rstrip("."))

    try:
        for token in endpoint.tasks(CLIENT_APP, pauses):
            threading.Thread(target=answer_one, args=(token,), daemon=True).start()
    finally:
        busy.acquire(timeout=LAST_REPLY)  # what is under way ends by itself when the site is asked to stop


def summary(request: Table) -> str:
    """What a server asks for, as a line of the site's log: the words are a stranger's."""
    step = request.get("step")
    round = f", round {from_one(step[0])}" if isinstance(step, list) and step and type(step[0]) is int else ""
    return f"{plain(request.get('do'))[:40]}{round}"
