"""What each client gave to a run, and what of it was lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from markupsafe import Markup

from fedkeel.experiments.tables import DASH
from fedkeel.report.html import html, number

MOST_CLIENTS = 200  # in a table
HEADINGS = (
    *("client", "updates", "dropped", "not chosen", "training samples"),
    *("last loss", "MB sent", "s/round", "last reason"),
)


@dataclass
class Contribution:
    updates: int = 0  # that arrived in good order
    samples: int = 0  # of one of them: the last
    loss: float | None = None
    dropped: int = 0
    reason: str = ""  # of the last that was dropped
    not_chosen: int = 0
    bytes_up: float = 0.0  # an even share of what all clients of a round sent
    seconds: list[float] = field(default_factory=list)  # of each time that it trained, as far as they are known


def read_clients(records: Iterable[Mapping[str, Any]], timing: Iterable[Mapping[str, Any]]) -> dict[str, Contribution]:
    clients: dict[str, Contribution] = {}
    sent = {r["round"]: r.get("bytes_up", 0) / (r.get("clients") or 1) for r in records if r["kind"] == "round"}
    for record in records:
        if record["kind"] not in ("client", "dropped", "not chosen") or "client" not in record:
            continue
        one = clients.setdefault(record["client"], Contribution())
        if record["kind"] == "client":
            one.updates, one.samples = one.updates + 1, int(record.get("samples") or 0)
            one.loss, one.bytes_up = record.get("loss", one.loss), one.bytes_up + sent.get(record["round"], 0)
        elif record["kind"] == "dropped":
            one.dropped, one.reason = one.dropped + 1, str(record.get("reason", ""))
        else:
            one.not_chosen += 1
    for times in timing:
        for name, seconds in times.get("clients", {}).items():
            if name in clients:
                clients[name].seconds.append(seconds)
    return clients


def clients_table(clients: Mapping[str, Contribution]) -> Markup:
    """Those that lost most first, where there are very many."""
    shown, rows = {*sorted(clients, key=lambda name: -clients[name].dropped)[:MOST_CLIENTS]}, []
    for name, one in clients.items():
        counts = [*map(number, (one.updates, one.dropped, one.not_chosen, one.samples or None))]
        sent, seconds = number(one.bytes_up / 1e6, ".3g"), number(fmean(one.seconds) if one.seconds else None, ".3g")
        cells = [name, *counts, number(one.loss, ".3g"), sent, seconds, one.reason or DASH]
        rows += [cells] if name in shown else []
    caption = (
        f"{len(rows)} of {len(clients)} clients: updates that came, were dropped, or were not chosen by a robust rule. "
        "MB: an even share of what all clients of a round sent. Seconds: of its training in a round, on average; none "
        "where clients ran at once on a GPU."
    )
    return html("table", HEADINGS, rows, caption)
