"""The part of the page about one federation, section by section. Tables are whole; figures are left to `page.js`."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from html import escape
from statistics import fmean
from typing import Any, NamedTuple

from fedkeel.config import MACHINE_OPTIONS, Config
from fedkeel.core import imports
from fedkeel.experiments.demo import findings
from fedkeel.experiments.tables import apart, competes, percent
from fedkeel.report.collect import FEDERATION, Group, Member
from fedkeel.report.commands import compare_command, run_command
from fedkeel.report.html import DASH, accuracy, code, folded, listed, named, number, table, table_row
from fedkeel.report.measures import class_table, confusion_table, site_table
from fedkeel.report.numbers import SHOWN_AT_FIRST
from fedkeel.report.why import explanations, why_section
from fedkeel.runs.run import given_in_python

NO_RESULTS = '<p class="notice">None of these runs is finished yet, so there is no table of results.</p>'


class Section(NamedTuple):
    """A part of the page that has a heading."""

    anchor: str
    menu: str  # its name in the menu, if it is there
    heading: str
    body: Callable[[Group], str]


def sections(group: Group) -> dict[Section, str]:
    """Those that have something to show of this group, with it."""
    bodies = {section: section.body(group) for section in SECTIONS}
    return {section: body for section, body in bodies.items() if body}


def part(group: Group, shown: Mapping[Section, str], *, alone: bool) -> str:
    """Everything about the runs of one federation."""
    title = escape(federation_name(group))
    body = [
        f'<h2 class="{"unseen" if alone else "data"}">{title}</h2>',
        f'<p class="lead">{lead(group)}</p>',
        key_figures(group),
        "" if group.results.rows else NO_RESULTS,
        *(f'<section id="{group.anchor}-{s.anchor}"><h3>{s.heading}</h3>{text}</section>' for s, text in shown.items()),
    ]
    return f'<section class="part" id="{group.anchor}" aria-label="{title}">{"".join(body)}</section>'


def federation_name(group: Group) -> str:
    config, default = group.members[0].config, Config()
    differing = [name for name in FEDERATION[1:] if getattr(config, name) != getattr(default, name)]
    return ", ".join([config.data, *(f"{name} {getattr(config, name)}" for name in differing)])


def lead(group: Group) -> str:
    configs = [member.config for member in group.members]
    models = list(dict.fromkeys(config.model for config in configs))
    rounds = sorted({config.rounds for config in configs})
    length = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    model = f"model <code>{escape(models[0])}</code>" if len(models) == 1 else f"{len(models)} models"
    data = federation_name(group)
    if len(data) > 60:  # the whole of it is in the configuration
        data = f"{configs[0].data.partition('(')[0]}(…)"
    return f"Data <code>{escape(data)}</code>, {model}, {length} rounds."


def key_figures(group: Group) -> str:
    results, tiles = group.results, []
    if results.rows:
        rivals = [row for row in results.rows if competes(row)] or results.rows
        best = max(rivals, key=lambda row: row.average.mean)
        std = best.average.std
        spread = f"±{percent(std)} over {len(best.seeds)} seeds" if std is not None else "one seed"
        ahead = all(apart(best.average, row.average) for row in rivals if row is not best)
        label = f"{'best' if ahead else 'highest, within the spread'}: {results.name(best)}"
        label = "average accuracy" if len(results.rows) == 1 else label
        hardest, cell = min(best.domains.items(), key=lambda item: item[1].mean)
        tiles = [
            (label, f"{percent(best.average.mean)} %", spread),
            ("its hardest domain", f"{percent(cell.mean)} %", hardest),
        ]
        if best.traffic:
            tiles.append(("its traffic a round", f"{best.traffic.megabytes} MB", "up and down, all clients"))
    finished, all_runs = sum(member.summary is not None for member in group.members), len(group.members)
    runs = f"{finished} of {all_runs}" if finished < all_runs else str(finished)
    tiles.append(("runs finished", runs, f"{len(group.labels)} method{'s' if len(group.labels) > 1 else ''}"))
    items = "".join(
        f"<div><dt>{escape(term)}</dt><dd><b>{escape(value)}</b><span>{escape(below)}</span></dd></div>"
        for term, value, below in tiles
    )
    return f'<dl class="tiles">{items}</dl>'


def findings_section(group: Group) -> str:
    sentences = [*findings(group.results), *explanations(group)] if len(group.results.rows) > 1 else []
    return listed(sentences, ' class="findings"') if sentences else ""


def results_section(group: Group) -> str:
    """As `fedkeel compare` prints it, with the seconds a run took."""
    results = group.table
    timed = any("seconds" in (member.summary or {}) for member in group.members)
    rows = []
    for row in results.rows:
        cells = [accuracy(cell, best=best) for cell, best in results.marked(row)]
        cells += map(number, results.traffic(row))
        if timed:
            seconds = [m.summary["seconds"] for m in group.of(row.method) if m.summary and "seconds" in m.summary]
            cells.append(number(f"{fmean(seconds):.1f}" if seconds else ""))
        full = f' title="{escape(row.method)}"' if results.name(row) != row.method else ""
        rows.append(table_row(named(results.name(row)), cells, f' data-v="{escape(row.method)}"{full}'))
    caption = results.caption + (" The best of each column is bold." if len(results.rows) > 1 else "")
    headings = [*results.headings, *(["s/run"] if timed else [])]
    texts = {"Markdown": results.markdown(), "LaTeX": results.latex(), "CSV": results.csv()}
    copies = "".join(folded(f"As {kind}", code(text)) for kind, text in texts.items())
    return table(headings, rows, caption) + f'<div class="copies">{copies}</div>' if rows else ""


# -- figures that page.js draws --------------------------------------------------------------------------------------
def curves_section(group: Group) -> str:
    options = "".join(f'<option value="{escape(m.key)}">{escape(m.name)}</option>' for m in group.metrics)
    means = "Mean over seeds; the band is the standard deviation. " if has_seeds(group) else ""
    choice = "; choose methods in the legend" if len(group.labels) > 1 else ""
    hidden = len(group.labels) > SHOWN_AT_FIRST
    few = f" Of {len(group.labels)} methods {SHOWN_AT_FIRST} are shown at first." if hidden else ""
    figure = (
        f'<p class="what">{means}<span class="hint">Point at a round, or use the arrow keys, to read all values '
        f"there{choice}.</span>{few}</p>"
        '<div class="controls" data-js hidden><label>Show '
        f'<select data-metric="{group.anchor}">{options}</select></label></div>'
        f'<div data-curves="{group.anchor}"></div>'
    )
    return figure if group.metrics else ""


def domains_section(group: Group) -> str:
    bars = "Bars are means over seeds, whiskers the standard deviation, dots the seeds. " if has_seeds(group) else ""
    figure = f'<p class="what">{bars}Accuracy in %.</p><div class="panels" data-panels="{group.anchor}"></div>'
    return figure if group.results.rows else ""


def measures_section(group: Group) -> str:
    """By site and class, of the first seed of every method."""
    parts = []
    for member in group.measured:
        tables = [site_table(member.run.measures), class_table(member.run.measures)]
        tables.append(confusion_table(member.run.measures))
        body = "".join(
            table(headings, (table_row(named(first), map(number, cells)) for first, *cells in rows), caption)
            for headings, rows, caption in tables
        )
        parts.append(folded(escape(str(member)), body, " open" if len(group.measured) == 1 else ""))
    return "".join(parts)


def has_seeds(group: Group) -> bool:
    return len(group.members) > len(group.labels)


# -- configuration, runs, commands -----------------------------------------------------------------------------------
def config_section(group: Group) -> str:
    tables = {label: group.of(label)[0].config.to_dict() for label in group.labels}
    first, several = next(iter(tables.values())), len(group.members) > 1
    skipped = ("seed", *MACHINE_OPTIONS) if several else ()
    options = [option for option in fields(Config) if option.name not in skipped]
    same = [o for o in options if len({str(values[o.name]) for values in tables.values()}) == 1]
    differing = [option for option in options if option not in same]

    def cell(value: Any, option: Field[Any]) -> str:
        text = escape(str(value)) or DASH
        return f"<td><b>{text}</b></td>" if value != option.default else f"<td>{text}</td>"

    body = ""
    if differing:
        rows = [table_row(named(label), (cell(t[o.name], o) for o in differing)) for label, t in tables.items()]
        body += table(["row", *(o.name for o in differing)], rows, "Options in which the methods differ.")
    rows = [table_row(o.name, (cell(first[o.name], o), f"<td>{escape(o.metadata['help'])}</td>")) for o in same]
    note = f"{'The same for all runs; bold' if several else 'Bold'} is what differs from the default."
    body += table(["option", "value", "meaning"], rows, note, sortable=False)
    return folded("All options", body)


def runs_section(group: Group) -> str:
    rows = [run_row(member) for member in group.members]
    body = table(["method", "seed", "state", "accuracy %", "seconds", "where", "directory"], rows, "Every run.")
    return folded("1 run" if len(rows) == 1 else f"{len(rows)} runs", body)


def run_row(member: Member) -> str:
    summary = member.summary or {}
    done = "finished" if summary else f"{member.rounds_done} of {member.config.rounds} rounds"
    if "planned_rounds" in summary:
        done = f"stopped early, {summary['rounds']} of {summary['planned_rounds']} rounds"
    percents = percent(summary["accuracy"]) if summary else ""
    seconds = f"{summary['seconds']:.1f}" if "seconds" in summary else ""
    where = ", ".join(str(summary[key]) for key in ("executor", "device") if key in summary)
    cells = (
        number(member.seed),
        f'<td class="line">{done}</td>',
        number(percents, percents or DASH),
        number(seconds, seconds or DASH),
        f'<td class="line">{escape(where)}</td>',
        f"<td><code>{escape(str(member.run.directory))}</code></td>",
    )
    return table_row(named(member.label), cells)


def repeat_section(group: Group) -> str:
    several = len(group.members) > 1
    singles = []
    for member in group.members:
        if command := run_command(member.config):
            singles.append((f"<p>{escape(str(member))}:</p>" if several else "") + code(command))
        else:
            what = " and ".join(given_in_python(member.config))
            singles.append(f"<p>{escape(str(member))}: its {what} was given in Python; run that program again.</p>")
    body = "".join(singles)
    if several:
        whole = compare_command({label: [member.config for member in group.of(label)] for label in group.labels})
        body = folded("Each run by itself", body, "" if whole else " open")
        if whole:
            title = "<p>All of it (with <code>--out</code> and its directory, only what is missing):</p>"
            body = title + code(whole) + body
    else:
        path = str(group.members[0].run.directory / "config.toml")
        body += "<p>Or from its configuration:</p>" + code(shlex.join(["fedkeel", "run", "--config", path]))
    own = dict.fromkeys(file for member in group.members for file in imports.files(member.run.directory))
    flags = shlex.join(word for file in own for word in ("--import", file))
    return f"{body}<p>With code of one's own, which each of these needs too:</p>{code(flags)}" if own else body


SECTIONS = (
    Section("findings", "", "What the numbers show", findings_section),
    Section("table", "Results", "Results", results_section),
    Section("curves", "Curves", "Curves", curves_section),
    Section("domains", "Domains", "Accuracy by domain", domains_section),
    Section("measures", "By class", "By class and site", measures_section),
    Section("diagnostics", "Why", "Why: what the diagnostics say", why_section),
    Section("config", "Configuration", "Configuration", config_section),
    Section("runs", "Runs", "Runs", runs_section),
    Section("repeat", "Repeat it", "Repeat it", repeat_section),
)
