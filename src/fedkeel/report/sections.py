"""The part of the page about one federation, section by section."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from statistics import fmean
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fedkeel.config import MACHINE_OPTIONS, Config
from fedkeel.experiments.difference import UNDECIDED
from fedkeel.experiments.findings import federated, findings
from fedkeel.experiments.tables import DASH, percent
from fedkeel.report import figures
from fedkeel.report.clients import clients_table
from fedkeel.report.collect import FEDERATION, Group
from fedkeel.report.diagnostics import diagnostics_section
from fedkeel.report.html import Number, html, measured, number
from fedkeel.report.measures import class_table, confusion_table, site_table
from fedkeel.runs.origin import read_outline
from fedkeel.runs.run import given_in_python

if TYPE_CHECKING:
    from fedkeel.report.page import Page

LONG = 60  # letters of a name
MOST_NUMBERS = 240_000  # of all curves together: about two megabytes


def sections(group: Group, page: Page) -> dict[str, tuple[str, Markup]]:
    """Heading and text of each by its anchor; without text there is nothing to show."""
    found = {
        "findings": ("What the numbers show", findings_section(group)),
        "table": ("Results", results_section(group)),
        "curves": ("Curves", curves_section(group, page)),
        "domains": ("Accuracy by domain", domains_section(group, page)),
        "measures": ("By class and site", measures_section(group, page)),
        "clients": ("What each client gave and lost", clients_section(group)),
        "diagnostics": ("Diagnostics", diagnostics_section(group, page)),
        "config": ("Configuration", config_section(group)),
        "runs": ("Runs", runs_section(group)),
        "repeat": ("Repeat it", repeat_section(group)),
    }
    return {anchor: (title, Markup("").join(body)) for anchor, (title, body) in found.items()}


# -- above the sections ----------------------------------------------------------------------------------------------
def federation_names(groups: Sequence[Group]) -> list[str]:
    """The data with what is not the default; long options only where two would read the same."""

    def name(config: Config, longest: float) -> str:
        data = config.data if len(config.data) <= longest else f"{config.data.partition('(')[0]}(…)"
        differing = [n for n in FEDERATION[1:] if getattr(config, n) != getattr(Config(), n)]
        return ", ".join([data, *(f"{n} {getattr(config, n)}" for n in differing)])

    configs = [group.members[0].config for group in groups]
    short = [name(config, LONG) for config in configs]
    return [one if short.count(one) == 1 else name(c, float("inf")) for one, c in zip(short, configs, strict=True)]


def key_figures(group: Group) -> Markup:
    results, tiles = group.results, []
    if results.rows:
        rows = federated(results) or results.rows
        best = max(rows, key=lambda row: row.average.mean)
        std = best.average.std
        spread = f"±{percent(std)} over {len(best.seeds)} seeds" if std is not None else "one seed"
        label = f"{'best' if results.leads(best, rows) else f'highest, {UNDECIDED}'}: {results.name(best)}"
        label = "average accuracy" if len(results.rows) == 1 else label
        hardest, cell = min(best.domains.items(), key=lambda item: item[1].mean)
        tiles.append((label, f"{percent(best.average.mean)} %", spread))
        tiles.append(("its hardest domain", f"{percent(cell.mean)} %", hardest))
        if best.traffic:
            tiles.append(("its traffic a round", f"{best.traffic.megabytes} MB", "up and down, all clients"))
    configs = [member.config for member in group.members]
    models, rounds = {config.model for config in configs}, sorted({config.rounds for config in configs})
    tiles.append(
        ("rounds", " to ".join(map(str, rounds[:: max(1, len(rounds) - 1)])), f"model {', '.join(sorted(models))}")
    )
    finished = sum(member.summary is not None for member in group.members)
    methods = f"{len(group.labels)} method{'s' if len(group.labels) > 1 else ''}"
    return html("tiles", [*tiles, ("runs finished", f"{finished} of {len(group.members)}", methods)])


# -- what the numbers show -------------------------------------------------------------------------------------------
def findings_section(group: Group) -> Iterator[Markup]:
    if len(group.results.rows) > 1 and (said := findings(group.results)):
        yield html("items", said)


def results_section(group: Group) -> Iterator[Markup]:
    """As `fedkeel compare` prints it, with the seconds a run took."""
    results, rows = group.table, []
    if not results.rows:
        yield html("text", "None of these runs is finished yet, so there is no table of results.", "notice")
        return
    for row in results.rows:
        cells = [measured(cell, best=best) for cell, best in results.marked(row)]
        costs = [Number(float(cost) if cost else "", cost) for cost in results.traffic(row)]
        seconds = number(fmean(m.summary["seconds"] for m in group.of(row.method) if m.summary), ".1f")
        rows.append([results.name(row), *cells, *costs, seconds])
    yield html("table", [*results.headings, "s/run"], rows, results.legend("Bold"))
    for kind, text in (("Markdown", results.markdown()), ("LaTeX", results.latex()), ("CSV", results.csv())):
        yield html("folded", f"As {kind}", html("code", text))


def curves_section(group: Group, page: Page) -> Iterator[Markup]:
    if not group.metrics:
        return
    hints = ["Point at a round to read all values there; Ctrl and the wheel zoom, a double click goes back."]
    if len(group.members) > len(group.labels):
        hints.insert(0, "Mean over seeds; the band is the standard deviation.")
    if len(group.labels) > 1:
        hints.append("A click in the legend shows a method alone, with Shift one more.")
    if len(group.shown) < len(group.labels):
        hints.append(f"Of {len(group.labels)} methods {len(group.shown)} are shown at first.")
    most = max(50, MOST_NUMBERS // (2 * len(group.labels) * len(group.metrics)))
    yield html("text", " ".join(hints))
    yield page.choice({metric.name: [figures.curves(group, metric, most)] for metric in group.metrics})


def domains_section(group: Group, page: Page) -> Iterator[Markup]:
    """With how many samples each number is from, and how far it can be off by that alone."""
    if not group.results.rows:
        return
    if len(group.members) > len(group.labels):
        yield html("text", "Whiskers are the standard deviation over seeds, dots the seeds.")
    elif group.test_images:
        yield html("text", "Whiskers are the 95 % interval that the number of test samples leaves.")
    yield page.choice({"": [figures.by_domain(group)]})
    best, rows = max(group.results.rows, key=lambda row: row.average.mean), []
    outline = read_outline(group.members[0].run.directory)
    for domain, size in group.test_images.items():
        mine = [c for c in (*outline.clients, *outline.unseen) if c.domain == domain] if outline else []
        low, high = figures.interval(best.domains[domain].mean, size) if domain in best.domains else (0.0, 0.0)
        known = (len(mine) or None, sum(client.train for client in mine) or None, size)
        rows.append([domain, *map(number, known), number((high - low) / 2, ".1f")])
    caption = (
        "Samples of each domain. The error is half of Wilson's 95 % interval, in points, around the accuracy of "
        f"{group.results.name(best)}: what another draw of as many test samples could change."
    )
    if rows:
        yield html("table", ["domain", "clients", "training samples", "test samples", "error, points"], rows, caption)


def measures_section(group: Group, page: Page) -> Iterator[Markup]:
    """By site and class, of the first seed of every method; of very many classes as numbers alone."""
    if figure := figures.by_class(group):
        yield html("heading", "How much of each class is found")
        yield html("text", "Over all trained sites; whiskers are the 95 % interval that the number of samples leaves.")
        yield page.choice({"": [figure]})
        shown = [member for member in group.measured if member.label in group.shown]
        found = [(str(member), site, one) for member in shown for site, one in figures.confusions(member)]
        yield html("heading", "What is taken for what")
        two = group.two_of(member for member, _, _ in found)
        yield page.choice({f"{member}: {site}": [one] for member, site, one in found}, two)
        yield page.choice({"": [figures.class_counts(group.measured[0])]})
    for member in group.measured:
        tables = (table(member.run.measures) for table in (site_table, class_table, confusion_table))
        numbers = (
            html("table", headings, [[row[0], *(Number(cell, cell) for cell in row[1:])] for row in rows], caption)
            for headings, rows, caption in tables
        )
        yield html("folded", f"All numbers of {member}", Markup("").join(numbers))


def clients_section(group: Group) -> Iterator[Markup]:
    """Of the first seed of every method that is shown at first; open where something was lost."""
    for member in (m for label in group.shown for m in [m for m in group.of(label) if m.clients][:1]):
        lost = sum(one.dropped for one in member.clients.values())
        title = f"{member}: {lost} updates dropped" if lost else str(member)
        yield html("folded", title, clients_table(member.clients), lost > 0 or len(group.members) == 1)


# -- configuration, runs, commands -----------------------------------------------------------------------------------
def config_section(group: Group) -> Iterator[Markup]:
    tables = {label: group.of(label)[0].config.to_dict() for label in group.labels}
    several, body = len(group.members) > 1, Markup("")
    options = [option for option in fields(Config) if not several or option.name not in ("seed", *MACHINE_OPTIONS)]
    same = [option for option in options if len({str(values[option.name]) for values in tables.values()}) == 1]

    def cell(label: str, option: Any) -> Number:
        value = tables[label][option.name]
        return Number(str(value), str(value) or DASH, is_best=value != option.default)

    if differing := [option for option in options if option not in same]:
        rows = [[label, *(cell(label, option) for option in differing)] for label in tables]
        body += html("table", ["row", *(o.name for o in differing)], rows, "Options in which the methods differ.")
    rows = [[option.name, cell(group.labels[0], option), str(option.metadata["help"])] for option in same]
    note = f"{'The same for all runs; bold' if several else 'Bold'} is what differs from the default."
    yield html("folded", "All options", body + html("table", ["option", "value", "meaning"], rows, note))


def runs_section(group: Group) -> Iterator[Markup]:
    rows = []
    for member in group.members:
        summary = member.summary or {}
        rounds, planned = summary.get("rounds", member.rounds_done), member.config.rounds
        early = f"stopped early, {rounds} of {planned} rounds" if "planned_rounds" in summary else "finished"
        state = early if summary else f"{rounds} of {planned} rounds"
        share, where = summary.get("accuracy"), (str(summary[key]) for key in ("executor", "device") if key in summary)
        cells = [number(share and 100 * share, ".1f"), number(summary.get("seconds"), ".1f"), ", ".join(where)]
        rows.append([member.label, number(member.seed), state, *cells, str(member.run.directory)])
    headings = ["method", "seed", "state", "accuracy %", "seconds", "where", "directory"]
    yield html("folded", f"{len(rows)} run{'s' if len(rows) > 1 else ''}", html("table", headings, rows, "Every run."))


def repeat_section(group: Group) -> Iterator[Markup]:
    """From the configuration in the directory of one of the runs: that of a method without options of its own."""
    first = next((member for member in group.members if "@" not in member.label), group.members[0])
    if given := given_in_python(first.config):
        yield html("text", f"The {' and the '.join(given)} was given in Python: run that program again.")
        return
    config, seeds = str(first.run.directory / "config.toml"), sorted({member.seed for member in group.members})
    command = ["fedkeel", "run"]
    if len(group.members) > 1:
        command = ["fedkeel", "compare", *group.labels, "--seeds", ",".join(map(str, seeds)) + ","]
    code = [word for file in sorted((first.run.directory / "code").glob("*.py")) for word in ("--import", str(file))]
    yield html("code", shlex.join([*command, "--config", config, *code]))
