"""A page that shows a run, or a comparison, as it grows, and the small server on this machine that it asks.

The server listens on the loopback address alone and answers only those who call it by that name, so that no web site
can have a browser read it (DNS rebinding). It has the page, what the page asks for as JSON, and the report as it would
be now; it never hands out a file of the directory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedkeel.core.readable import DASH, duration, percent
from fedkeel.errors import FedkeelError
from fedkeel.report import figures
from fedkeel.report.clients import MOST_CLIENTS
from fedkeel.report.collect import Collected, Group, collect
from fedkeel.report.figures import Figures
from fedkeel.report.moment import FINISHED, RUNNING, Document, Moment, Watch, told
from fedkeel.report.page import heading, read, render, whole
from fedkeel.report.sections import federation_name

HOST, PORT = "127.0.0.1", 8350  # the same whenever it is free: a page that is open goes on after a restart
NAMES = ("127.0.0.1", "localhost", "[::1]")
SHARE, SOONEST, OVER = 0.05, 1.0, 10.0  # of the time that may go into looking; seconds between two looks
MOST_NOTES, MOST_NAMED = 30, 5
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
        try:
            super().__init__((HOST, PORT if port is None else port), Handler)
        except OSError as error:
            if port is not None:
                why = error.strerror or error
                raise FedkeelError(f"The port {port} cannot be had ({why}): give another --port, or none.") from error
            super().__init__((HOST, 0), Handler)
        self.address = f"http://{HOST}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves in the midst of an answer is no error."""

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """What is at this path, and of which kind."""
        if path == "/":
            return "text/html; charset=utf-8", page(self.watch.directory).encode("utf-8", "replace")
        if path == "/report.html":
            collected = collect([self.watch.directory])
            text = render(collected, datetime.now(), f"fedkeel watch {self.watch.directory}")
            return "text/html; charset=utf-8", text.encode("utf-8", "replace")
        if path in ("/state.json", "/figures.json"):
            return "application/json", self._look()[path]
        return None

    def _look(self) -> dict[str, bytes]:
        """At most every second, however many pages ask, and so seldom that a run does not feel it."""
        with self._looking:
            if time.monotonic() < self._next:
                return self._answers
            began = time.monotonic()
            try:
                moment = self.watch.look()
                drawn = json.dumps(drawings(moment.groups), allow_nan=False).encode()
                state = {**shown(moment), "figures": hashlib.sha256(drawn).hexdigest(), "problem": ""}
                pause = OVER if moment.document["state"] == FINISHED else SOONEST
            except FedkeelError as error:
                state, drawn, pause = {"problem": str(error)}, b"{}", SOONEST
            pause = max(pause, (time.monotonic() - began) / SHARE)
            state["again"] = round(pause, 1)
            self._next = time.monotonic() + 0.9 * pause
            self._answers = {"/state.json": json.dumps(state, allow_nan=False).encode(), "/figures.json": drawn}
            return self._answers


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "fedkeel", ""

    def do_GET(self) -> None:
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if name not in NAMES:
            return self._send(403, "text/plain", b"This page is for this machine alone.\n")
        try:
            found = self.server.answer(self.path.partition("?")[0])
        except FedkeelError as error:
            return self._send(409, "text/plain; charset=utf-8", f"{error}\n".encode())
        except Exception:
            log.exception("The page at '%s' could not be made.", self.path)
            return self._send(500, "text/plain", b"This could not be made; the terminal says why.\n")
        if found is None:
            return self._send(404, "text/plain", b"There is nothing here.\n")
        return self._send(200, *found)

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """What is asked for is nobody's concern."""


# -- what the page shows ---------------------------------------------------------------------------------------------
def page(directory: Path) -> str:
    """The page without what it will ask for."""
    parts = """
<header class="top"><div class="bar"><span class="brand">Fedkeel</span><nav aria-label="Other pages">
<a href="report.html" id="report" hidden>The report</a></nav>
<button type="button" id="theme" class="quiet" hidden>Dark</button></div></header>
<main id="content"><h1 id="title">Fedkeel</h1>
<p class="lead" id="told" role="status" aria-live="polite"></p>
<progress id="share" max="1" value="0" aria-label="How much is done"></progress>
<p class="notice" id="lost" role="alert" hidden></p>
<p class="notice" data-nojs>This page needs JavaScript.</p>
<dl class="tiles" id="tiles"></dl>
<section><section id="curves" hidden><h3>Curves so far</h3></section>
<div id="tables"></div>
<section id="noted" hidden><h3>Notes</h3><ul class="findings" id="notes"></ul></section></section>
</main><footer><p id="place"></p></footer>"""
    return whole("Fedkeel", [parts], Figures(), read("watch.js"), "connect-src 'self'; ")


def shown(moment: Moment) -> Document:
    """All of the page but the curves, as text."""
    document = moment.document
    notes = [
        f"{datetime.fromtimestamp(note['at']):%H:%M:%S} " * (note["at"] is not None)
        + f"{note['run']}: " * (bool(note["run"]) and len(document["runs"]) > 1)
        + note["text"]
        for note in document["notes"][-MOST_NOTES:]
    ]
    title = heading(Collected([], moment.groups)) if moment.groups else f"Waiting at {document['directory']}"
    about = {"title": title, "told": told(moment), "tiles": tiles(document), "tables": tables(document)}
    return {**about, "notes": notes[::-1], **{key: document[key] for key in ("directory", "state", "share")}}


def tiles(document: Document) -> list[tuple[str, str, str]]:
    """A name, a number, and what to know of it."""
    runs = document["runs"]
    found = []
    if len(runs) == 1 and runs[0]["state"] == RUNNING:
        found.append(("round", f"{runs[0]['round']} of {runs[0]['rounds']}", training(runs[0]["training"])))
    elif len(runs) > 1:
        over, under_way = (sum(row["state"] == state for row in runs) for state in (FINISHED, RUNNING))
        found.append(("runs finished", f"{over} of {len(runs)}", f"{under_way} under way"))
    known = [row for row in runs if row.get("accuracy") is not None]
    if best := max(known, key=lambda row: row["accuracy"], default=None):
        label = "accuracy so far" if len(runs) == 1 else "highest accuracy so far"
        found.append((label, f"{percent(best['accuracy'])} %", best["run"]))
    if document["state"] == RUNNING:
        left = document["left"]
        found.append(("time left", DASH if left is None else duration(left), "as the last rounds went"))
    if dropped := sum(one["dropped"] for one in {**document.get("clients", {}), **document.get("sites", {})}.values()):
        found.append(("updates dropped", str(dropped), "see the table and the notes"))
    return found


def training(clients: Sequence[str]) -> str:
    more = f" and {len(clients) - MOST_NAMED} others" if len(clients) > MOST_NAMED else ""
    return f"training: {', '.join(clients[:MOST_NAMED])}{more}" if clients else "averaging and testing"


def tables(document: Document) -> list[Document]:
    found = []
    if len(document["runs"]) > 1:
        rows = [
            [
                row["run"],
                row["state"],
                f"{row['round']} of {row['rounds']}" if "rounds" in row else None,
                None if row.get("accuracy") is None else round(100 * row["accuracy"], 1),
                None if row["left"] is None else duration(row["left"]),
                training(row["training"]).removeprefix("training: ") if row["state"] == RUNNING else "",
            ]
            for row in document["runs"]
        ]
        columns = ["run", "state", "round", "accuracy %", "left", "now"]
        found.append({"title": "Runs", "columns": columns, "rows": rows})
    for kind, title in (("sites", "Sites"), ("clients", "Clients")):
        everyone = document.get(kind, {})
        first = sorted(everyone, key=lambda name: (-everyone[name]["training"], -everyone[name]["dropped"]))
        names = {*first[:MOST_CLIENTS]}
        rows = [[name, *client_cells(one)] for name, one in everyone.items() if name in names]
        of_site = ["connected", "last", "since"] if kind == "sites" else ["now"]
        columns = [kind[:-1], *of_site, "updates", "dropped", "last loss", "last seconds", "last reason"]
        if rows:
            few = f"{len(names)} of {len(everyone)}" if len(names) < len(everyone) else ""
            found.append({"title": title, "columns": columns, "rows": rows, "note": few})
    return found


def client_cells(one: Document) -> list[Any]:
    doing = ["yes" if one["connected"] else "no", one["state"], one["at"]] if "connected" in one else None
    gave = [one["updates"], one["dropped"], one["loss"], one["seconds"] and round(one["seconds"], 2), one["reason"]]
    return [*(doing or ["training" if one["training"] else ""]), *gave]


def drawings(groups: Sequence[Group]) -> Document:
    """The curves: of each federation a figure of accuracy and one of loss, each one of several to choose from."""
    every, charts = Figures(), []
    for group in groups:
        choices: list[list[tuple[str, int]]] = [[], []]
        if len(group.labels) == 1 and (own := figures.by_round(group)):
            choices[0].append(("Test accuracy by domain", every.add(own)))
        for metric in group.metrics:
            drawn = every.add(figures.curves(group, metric, figures.MOST_LIVE), figures.hidden(group))
            choices[not metric.is_percent].append((metric.name, drawn))
        name = federation_name(group) if len(groups) > 1 else ""
        charts += [{"name": name, "choices": some} for some in choices if some]
    return {**every.document(), "charts": charts}
