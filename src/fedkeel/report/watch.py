"""A page that shows a run, or a comparison, as it grows, and the small server on this machine that it asks.

The server listens on the loopback address alone and answers only those who call it by that name, so that no web site
can have a browser read it (DNS rebinding). It has the page, what the page asks for as JSON, and the report as it would
be now; it never hands out a file of the directory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedkeel.errors import FedkeelError
from fedkeel.files import plain
from fedkeel.report import figures
from fedkeel.report.collect import Group, collect
from fedkeel.report.figures import Figures
from fedkeel.report.moment import FINISHED, Document, Watch
from fedkeel.report.page import read, render, whole
from fedkeel.report.sections import federation_names

HOST, PORT = "127.0.0.1", 8350  # the same whenever it is free: a page that is open goes on after a restart
NAMES = ("127.0.0.1", "localhost", "[::1]")
SHARE, SOONEST, OVER = 0.05, 1.0, 10.0  # of the time that may go into looking; seconds between two looks
MOST_ROUNDS = 400  # of a curve that is drawn again and again
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the pages have theirs inside
}
log = logging.getLogger("fedkeel")


class Server(ThreadingHTTPServer):
    """Shows a directory at `address` while `serve_forever` runs."""

    daemon_threads = True

    def __init__(self, directory: str | Path, port: int | None = None) -> None:
        self.watch, self._looking = Watch(directory), threading.Lock()
        self._next, self._answers = 0.0, dict[str, bytes]()
        self._curves, self._drawn = list[Any]([None]), b"{}"  # what was drawn last
        try:
            super().__init__((HOST, PORT if port is None else port), Handler)
        except (OSError, OverflowError) as error:
            if port is not None:
                raise FedkeelError(f"The port {port} cannot be had ({error}): give another --port, or none.") from error
            super().__init__((HOST, 0), Handler)
        self.address = f"http://{HOST}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves in the midst of an answer is no error."""

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """What is at this path, and of which kind."""
        if path in ("/state.json", "/figures.json"):
            return "application/json", self._look()[path]
        if path == "/":
            text = whole("Fedkeel", [read("watch.html")], Figures(), read("watch.js"), "connect-src 'self'; ")
        elif path == "/report.html":
            command = shlex.join(["fedkeel", "report", str(self.watch.directory)])
            text = render(collect([self.watch.directory]), datetime.now(), command)
        else:
            return None
        return "text/html; charset=utf-8", text.encode("utf-8", "replace")

    def _look(self) -> dict[str, bytes]:
        """At most every second, however many pages ask, and so seldom that a run does not feel it."""
        with self._looking:
            if time.monotonic() < self._next:
                return self._answers
            began, pause, drawn = time.monotonic(), SOONEST, b"{}"
            try:
                document, groups = self.watch.look()
                curves = [(str(member), member.curves) for group in groups for member in group.members]
                if curves != self._curves:
                    self._curves, self._drawn = curves, json.dumps(drawings(groups), allow_nan=False).encode()
                drawn = self._drawn
                document |= {"figures": hashlib.sha256(drawn).hexdigest(), "problem": ""}
                pause = OVER if document["state"] == FINISHED else SOONEST
            except (FedkeelError, OSError) as error:  # the latter of a run that was moved or removed meanwhile
                document = {"problem": str(error)}
            pause = max(pause, (time.monotonic() - began) / SHARE)
            state = json.dumps(plain({**document, "again": pause})).encode()
            self._next, self._answers = began + 0.9 * pause, {"/state.json": state, "/figures.json": drawn}
            return self._answers


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "fedkeel", ""

    def do_GET(self) -> None:
        name, colon, port = self.headers.get("Host", "").rpartition(":")
        if (name if port.isdecimal() else name + colon + port) not in NAMES:
            return self._send(403, "text/plain", b"This page is for this machine alone.\n")
        try:
            found = self.server.answer(self.path.partition("?")[0])
        except FedkeelError as error:
            return self._send(409, "text/plain; charset=utf-8", f"{error}\n".encode("utf-8", "replace"))
        except Exception:
            log.exception("What is at '%s' could not be made.", self.path)
            return self._send(500, "text/plain", b"This could not be made; the terminal says why.\n")
        return self._send(200, *found) if found else self._send(404, "text/plain", b"There is nothing here.\n")

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """What is asked for is nobody's concern."""


def drawings(groups: Sequence[Group]) -> Document:
    """The curves: of each federation a figure of accuracy and one of loss, each one of several to choose from."""
    every, charts = Figures(), []
    for group, name in zip(groups, federation_names(groups), strict=True):
        choices: list[list[tuple[str, int]]] = [[], []]
        if len(group.labels) == 1 and (own := figures.by_round(group, MOST_ROUNDS)):
            choices[0].append(("Test accuracy by domain", every.add(own)))
        for metric in group.metrics:
            drawn = every.add(figures.curves(group, metric, MOST_ROUNDS), figures.hidden(group))
            choices[not metric.is_percent].append((metric.name, drawn))
        charts += [{"name": name if len(groups) > 1 else "", "choices": some} for some in choices if some]
    return {**every.document(), "charts": charts}
