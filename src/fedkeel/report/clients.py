"""What each client gave to a run, and what of it was lost."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from statistics import fmean

from fedkeel.report.html import DASH, named, number, table, table_row
from fedkeel.runs.run import Run
from fedkeel.runs.timing import read_timing

MOST_CLIENTS = 200  # in a table


@dataclass
class Contribution:
    updates: int = 0  # that arrived in good order
    images: int = 0  # of one of them: the last
    loss: float | None = None
    dropped: int = 0
    reason: str = ""  # of the last that was dropped
    not_chosen: int = 0
    bytes_up: float = 0.0  # an even share of what all clients of a round sent
    seconds: list[float] = field(default_factory=list)  # of each time that it trained, as far as they are known


def read_clients(run: Run) -> dict[str, Contribution]:
    clients: dict[str, Contribution] = {}
    sent = {
        record["round"]: record.get("bytes_up", 0) / (record.get("clients") or 1) for record in run.records("round")
    }
    for record in run.records():
        if record["kind"] not in ("client", "dropped", "not chosen") or "client" not in record:
            continue
        one = clients.setdefault(record["client"], Contribution())
        if record["kind"] == "client":
            one.updates, one.images = one.updates + 1, int(record.get("samples") or 0)
            one.loss, one.bytes_up = record.get("loss", one.loss), one.bytes_up + sent.get(record["round"], 0)
        elif record["kind"] == "dropped":
            one.dropped, one.reason = one.dropped + 1, str(record.get("reason", ""))
        else:
            one.not_chosen += 1
    for times in read_timing(run.directory):
        for name, seconds in times.get("clients", {}).items():
            if name in clients:
                clients[name].seconds.append(seconds)
    return clients


def clients_table(clients: Mapping[str, Contribution]) -> str:
    """Those that lost most first, where there are very many."""
    shown = {*sorted(clients, key=lambda name: -clients[name].dropped)[:MOST_CLIENTS]}
    rows = [table_row(named(name), _cells(clients[name])) for name in clients if name in shown]
    few = f" {MOST_CLIENTS} of {len(clients)} clients." if len(shown) < len(clients) else ""
    caption = (
        "Updates that came, were dropped, or were not chosen by a robust rule. MB: an even share of what all clients "
        "of a round sent. Seconds: of its training in a round, on average; none where clients ran at once on a GPU."
    )
    headings = ["client", "updates", "dropped", "not chosen", "training samples", "last loss", "MB sent", "s/round"]
    return table([*headings, "last reason"], rows, f"{caption}{few}")


def _cells(one: Contribution) -> list[str]:
    loss = f"{one.loss:.3g}" if one.loss is not None else ""
    seconds = f"{fmean(one.seconds):.3g}" if one.seconds else ""
    cells = [one.updates, one.dropped, one.not_chosen, one.images or "", loss, f"{one.bytes_up / 1e6:.3g}", seconds]
    return [
        *(number(str(cell), escape(str(cell)) or DASH) for cell in cells),
        f'<td class="reason">{escape(one.reason) or DASH}</td>',
    ]
