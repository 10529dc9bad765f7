"""The report's page on runs that go on, and the small server on this machine that it asks.

The server listens on the loopback address alone and answers only those who call it by that name, so that no web site
can have a browser read it (DNS rebinding). It has the page, what changes in it, and the report as it would be now; it
never hands out a file of the directory.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedkeel.core.readable import duration
from fedkeel.errors import FedkeelError
from fedkeel.experiments.tables import percent
from fedkeel.files import plain
from fedkeel.options import as_path
from fedkeel.report.collect import collect
from fedkeel.report.html import html, number
from fedkeel.report.moment import FINISHED, Document, checked, look
from fedkeel.report.page import Page, heading, render
from fedkeel.report.sections import clients_section, curves_section

HOST, PORT = "127.0.0.1", 8350  # the same whenever it is free: a page that is open goes on after a restart
NAMES = ("127.0.0.1", "localhost", "[::1]")
SHARE, SOONEST = 0.05, 1.0  # of the time that may go into looking; seconds between two looks
MOST_NOTES = 30
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the pages have theirs inside
}


class Server(ThreadingHTTPServer):
    """Shows a directory at `address` while `serve_forever` runs."""

    daemon_threads = True

    def __init__(self, directory: str | Path, port: int | None = None) -> None:
        self.directory, self._looking = checked(as_path(directory)), threading.Lock()
        self._next, self._state = 0.0, Document()
        try:
            super().__init__((HOST, PORT if port is None else port), Handler)
        except (OSError, OverflowError) as error:
            if port is not None:
                raise FedkeelError(f"The port {port} cannot be had ({error}): give another --port, or none.") from error
            super().__init__((HOST, 0), Handler)
        self.address = f"http://{HOST}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves in the midst of an answer is no error."""

    def answer(self, path: str, known: str = "") -> tuple[str, str] | None:
        """What is at this path, and of which kind; figures that are `known` by their digest are left out."""
        if path == "/state.json":
            state = self._look()
            found = {key: value for key, value in state.items() if key != "figures" or state["drawn"] != known}
            return "application/json", json.dumps(plain(found))
        if path == "/":
            content = {"menu": [("report.html", "The report")], "parts": [], "watched": True}
            return "text/html; charset=utf-8", Page().whole("Fedkeel", "connect-src 'self'; ", **content)
        if path == "/report.html":
            command = f"fedkeel report {self.directory}"
            return "text/html; charset=utf-8", render(collect([self.directory]), datetime.now(), command)
        return None

    def _look(self) -> Document:
        """At most every second, however many pages ask, and so seldom that a run does not feel it."""
        with self._looking:
            if time.monotonic() >= self._next:
                began = time.monotonic()
                try:
                    self._state = shown(self.directory) | {"problem": ""}
                except (FedkeelError, OSError) as error:  # the latter of a run that was moved or removed meanwhile
                    self._state = {**self._state, "problem": str(error)}
                pause = max(SOONEST, (time.monotonic() - began) / SHARE)
                self._next, self._state["again"] = began + 0.9 * pause, pause
            return self._state


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "fedkeel", ""

    def do_GET(self) -> None:
        name, colon, port = self.headers.get("Host", "").rpartition(":")
        if (name if port.isdecimal() else name + colon + port) not in NAMES:
            return self._send(403, "text/plain", "This page is for this machine alone.\n")
        path, _, known = self.path.partition("?")
        try:
            found = self.server.answer(path, known)
        except FedkeelError as error:
            return self._send(409, "text/plain; charset=utf-8", f"{error}\n")
        return self._send(200, *found) if found else self._send(404, "text/plain", "There is nothing here.\n")

    def _send(self, code: int, kind: str, text: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(code)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """What is asked for is nobody's concern."""


def shown(directory: Path) -> Document:
    """What the page shows now: how far all is, and the sections of the report that grow, with their figures."""
    document, groups = look(directory)
    page, parts = Page(), Markup("")
    for group in groups:
        for title, body in (("Curves so far", curves_section(group, page)), ("Clients", clients_section(group))):
            text = Markup("").join(body)
            parts += Markup("<section><h3>{}</h3>{}</section>").format(title, text) if text else ""
    drawn = hashlib.sha256(json.dumps(page.figures).encode()).hexdigest()
    title = f"{100 * document['share']:.0f} % of {heading(groups)}" if groups else "Nothing has begun yet"
    return {"title": title, "status": status(document), "parts": parts, "figures": page.figures, "drawn": drawn}


def status(document: Document) -> Markup:
    runs = document["runs"]
    done = sum(row["state"] == FINISHED for row in runs)
    best = max((row for row in runs if row.get("accuracy") is not None), key=lambda row: row["accuracy"], default=None)
    tiles = [("state", document["state"], f"{done} of {len(runs)} runs finished")]
    tiles += [("highest accuracy so far", f"{percent(best['accuracy'])} %", best["run"])] if best else []
    if document["left"] is not None:
        tiles.append(("time left", duration(document["left"]), "if it goes on like the last rounds"))
    rows = [
        [
            *(row["run"], row["state"], f"{row['round']} of {row['rounds']}" if "round" in row else ""),
            number(None if row.get("accuracy") is None else 100 * row["accuracy"], ".1f"),
            " of ".join(map(str, row.get("clients", ()))),
            "; ".join(filter(None, (row.get("reason"), row.get("continue")))),
        ]
        for row in runs
    ]
    headings = ["run", "state", "round", "accuracy %", "clients trained", "why it stopped, and how to go on"]
    body = html("tiles", tiles) + html("progress", document["share"]) + html("table", headings, rows, "Every run.")
    if sites := document["sites"]:
        told = [[n, "yes" if s["connected"] else "no", s["state"], str(s["at"])] for n, s in sorted(sites.items())]
        body += html("table", ["site", "connected", "last", "since"], told, "Every site.")
    notes = [f"{n['run']}: {n['text']}".lstrip(": ") for n in reversed(document["notes"][-MOST_NOTES:])]
    return body + (html("folded", "Notes, the newest first", html("items", notes), True) if notes else Markup(""))
