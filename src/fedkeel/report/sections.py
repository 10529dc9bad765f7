"""The part of the page about one federation, section by section. Tables are whole; figures are left to `page.js`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from html import escape
from typing import Any

from fedkeel.config import MACHINE_OPTIONS, Config
from fedkeel.experiments.demo import findings
from fedkeel.experiments.tables import Cell, Results, Row, apart, competes, percent
from fedkeel.report.collect import FEDERATION, Group, Member
from fedkeel.report.commands import compare_command, given_in_python, run_command
from fedkeel.report.diagnostics import ALL_RUNS, CIRCUMSTANCES, QUESTIONS, DiagnosticFigures, place
from fedkeel.report.numbers import SHOWN_AT_FIRST, first_shown
from fedkeel.report.why import Reading, explanations, readings, rivals, sentence

NO_RESULTS = '<p class="notice">None of these runs is finished yet, so there is no table of results.</p>'


def contents(group: Group) -> list[tuple[str, str]]:
    """The sections that this group has: anchor and name."""
    finished = bool(group.results.rows)
    present = {"table": finished, "curves": bool(group.metrics), "domains": finished}
    present["diagnostics"] = bool(group.diagnostics)
    names = {
        "table": "Results",
        "curves": "Curves",
        "domains": "Domains",
        "diagnostics": "Why",
        "config": "Configuration",
        "runs": "Runs",
        "repeat": "Repeat it",
    }
    return [(anchor, text) for anchor, text in names.items() if present.get(anchor, True)]


def part(group: Group, name: str, *, alone: bool) -> str:
    """Everything about the runs of one federation."""
    results = group.results
    there = dict(contents(group))
    body = [
        f'<h2 class="{"unseen" if alone else "data"}">{escape(federation_name(group))}</h2>',
        f'<p class="lead">{lead(group)}</p>',
        key_figures(group, results),
        findings_section(group, name),
        summary_table(group, results, name) if "table" in there else NO_RESULTS,
        curves_section(group, name) if "curves" in there else "",
        domains_section(group, name) if "domains" in there else "",
        diagnostics_section(group, name) if "diagnostics" in there else "",
        config_section(group, name),
        runs_section(group, name),
        repeat_section(group, name),
    ]
    return f'<section class="part" id="{name}" aria-label="{escape(federation_name(group))}">{"".join(body)}</section>'


def section(name: str, heading: str, body: str) -> str:
    return f'<section id="{name}"><h3>{heading}</h3>{body}</section>'


def federation_name(group: Group) -> str:
    config = group.members[0].config
    more = [
        f"{name} {getattr(config, name)}" for name in FEDERATION[1:] if getattr(config, name) != getattr(Config(), name)
    ]
    return ", ".join([config.data, *more])


def lead(group: Group) -> str:
    config = group.members[0].config
    models = list(dict.fromkeys(member.config.model for member in group.members))
    rounds = sorted({member.config.rounds for member in group.members})
    length = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    model = f"model <code>{escape(models[0])}</code>" if len(models) == 1 else f"{len(models)} models"
    data = federation_name(group)
    if len(data) > 60:  # the whole of it is in the configuration
        data = f"{config.data.partition('(')[0]}(…)"
    return f"Data <code>{escape(data)}</code>, {model}, {length} rounds."


def key_figures(group: Group, results: Results) -> str:
    finished = sum(member.summary is not None for member in group.members)
    tiles: list[tuple[str, str, str]] = []
    if results.rows:
        rivals = [row for row in results.rows if row.method.partition("@")[0] != "central"] or results.rows
        best = max(rivals, key=lambda row: row.average.mean)
        unit = f"{percent(best.average.mean)} %"
        spread = (
            f"±{percent(best.average.std)} over {len(best.seeds)} seeds" if best.average.std is not None else "one seed"
        )
        ahead = all(apart(best.average, row.average) for row in rivals if row is not best)
        label = f"{'best' if ahead else 'highest, within the spread'}: {results.name(best)}"
        label = "average accuracy" if len(results.rows) == 1 else label
        tiles.append((label, unit, spread))
        worst = min(best.domains.items(), key=lambda item: item[1].mean)
        tiles.append(("its hardest domain", f"{percent(worst[1].mean)} %", worst[0]))
        if best.traffic:
            tiles.append(("its traffic a round", f"{best.traffic.megabytes} MB", "up and down, all clients"))
    runs = f"{finished} of {len(group.members)}" if finished < len(group.members) else str(finished)
    tiles.append(("runs finished", runs, f"{len(group.labels)} method{'s' if len(group.labels) > 1 else ''}"))
    items = "".join(
        f"<div><dt>{escape(term)}</dt><dd><b>{escape(value)}</b><span>{escape(below)}</span></dd></div>"
        for term, value, below in tiles
    )
    return f'<dl class="tiles">{items}</dl>'


def findings_section(group: Group, name: str) -> str:
    sentences = [*findings(group), *explanations(group)] if len(group.results.rows) > 1 else []
    if not sentences:
        return ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return section(f"{name}-findings", "What the numbers show", f'<ul class="findings">{items}</ul>')


# -- tables ----------------------------------------------------------------------------------------------------------
def table(headings: Sequence[str], rows: Sequence[str], caption: str, *, sortable: bool = True) -> str:
    broken = (named(text) if len(text) > 20 else escape(text).replace("/", "/<wbr>") for text in headings)
    heads = "".join(f'<th scope="col">{text}</th>' for text in broken)
    kind = "sortable" if sortable else "plain"
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table class="{kind}">'
        f"<caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f'<p class="note" aria-hidden="true">{escape(caption)}</p>'
    )


def summary_table(group: Group, results: Results, name: str) -> str:
    """As `fedkeel compare` prints it, with the seconds a run took."""
    timed = any("seconds" in (member.summary or {}) for member in group.members)
    rows = []
    for row in results.rows:
        cells = "".join(number_cell(cell, best) for cell, best in results.marked(row))
        cost = "".join(f'<td class="n" data-v="{escape(text)}">{escape(text)}</td>' for text in results.traffic(row))
        seconds = [m.summary["seconds"] for m in group.of(row.method) if m.summary and "seconds" in m.summary]
        mean = f"{sum(seconds) / len(seconds):.1f}" if seconds else ""
        time = f'<td class="n" data-v="{mean}">{mean}</td>' if timed else ""
        full = f' title="{escape(row.method)}"' if results.name(row) != row.method else ""
        rows.append(
            f'<tr><th scope="row" data-v="{escape(row.method)}"{full}>{named(results.name(row))}</th>'
            f"{cells}{cost}{time}</tr>"
        )
    caption = results.caption + (" The best of each column is bold." if len(results.rows) > 1 else "")
    headings = [*results.headings, *(["s/run"] if timed else [])]
    texts = [("Markdown", results.markdown()), ("LaTeX", results.latex()), ("CSV", results.csv())]
    copies = "".join(f"<details><summary>As {kind}</summary>{code(text)}</details>" for kind, text in texts)
    body = table(headings, rows, caption) + f'<div class="copies">{copies}</div>'
    return section(f"{name}-table", "Results", body)


def named(text: str) -> str:
    """A name that may be long: it breaks where its parts meet, if it must."""
    broken = re.sub(r"([_(,+@=])", r"\1<wbr>", escape(text))
    return f'<span class="name">{broken}</span>'


def number_cell(cell: Cell | None, best: bool) -> str:
    if cell is None:
        return '<td class="n" data-v="">–</td>'
    spread = f' <span class="spread">±{percent(cell.std)}</span>' if cell.std is not None else ""
    mean = f"<b>{percent(cell.mean)}</b>" if best else percent(cell.mean)
    return f'<td class="n" data-v="{cell.mean:.6f}">{mean}{spread}</td>'


def code(text: str) -> str:
    return f'<div class="code"><pre tabindex="0"><code>{escape(text)}</code></pre></div>'


# -- figures that page.js draws --------------------------------------------------------------------------------------
def curves_section(group: Group, name: str) -> str:
    options = "".join(f'<option value="{escape(m.key)}">{escape(m.name)}</option>' for m in group.metrics)
    means = "Mean over seeds; the band is the standard deviation. " if has_seeds(group) else ""
    choice = "; choose methods in the legend" if len(group.labels) > 1 else ""
    hidden = len(group.labels) > SHOWN_AT_FIRST
    few = f" Of {len(group.labels)} methods {SHOWN_AT_FIRST} are shown at first." if hidden else ""
    body = (
        f'<p class="what">{means}<span class="hint">Point at a round, or use the arrow keys, to read all values '
        f"there{choice}.</span>{few}</p>"
        '<div class="controls" data-js hidden><label>Show '
        f'<select data-metric="{name}">{options}</select></label></div>'
        f'<div data-curves="{name}"></div>'
    )
    return section(f"{name}-curves", "Curves", body)


def domains_section(group: Group, name: str) -> str:
    bars = "Bars are means over seeds, whiskers the standard deviation, dots the seeds. " if has_seeds(group) else ""
    body = f'<p class="what">{bars}Accuracy in %.</p><div class="panels" data-panels="{name}"></div>'
    return section(f"{name}-domains", "Accuracy by domain", body)


def has_seeds(group: Group) -> bool:
    return any(len(group.of(label)) > 1 for label in group.labels)


def diagnostics_section(group: Group, name: str) -> str:
    """The key numbers of all methods first, then the diagnostics by the question that they answer."""
    found, results = readings(group), group.results
    asked: dict[str, list[str]] = {}
    for number, diagnostic in enumerate(group.diagnostics):
        mine = [reading for reading in found if reading.diagnostic == diagnostic.name]
        told = [text for reading in mine if (text := sentence(reading, results))]
        recorded = {member.label for member in group.members if str(member) in diagnostic.runs}
        pair = rivals(results, recorded)
        block = diagnostic_block(diagnostic, f"{name} {number}", told or single_readings(diagnostic), group, pair)
        asked.setdefault(list(QUESTIONS)[place(diagnostic.name)[0]], []).append(block)
    parts = [key_table(group, found, results)] if found and results.rows else []
    for question, blocks in asked.items():
        body = "".join(blocks)
        if question == CIRCUMSTANCES and len(asked) > 1:
            parts.append(f'<details class="question"><summary><h4>{question}</h4></summary>{body}</details>')
        else:
            parts.append(f'<div class="question"><h4>{question}</h4>{body}</div>')
    return section(f"{name}-diagnostics", "Why: what the diagnostics say", "".join(parts))


def key_table(group: Group, found: Sequence[Reading], results: Results) -> str:
    """A row for each number: their names are long, and those of methods are short."""
    shown = first_shown(group, {row.method: row for row in results.rows})
    pair = rivals(results) or ()
    # The two that the sentences are about come first, so that a phone shows them.
    columns = [*pair, *(row for row in results.rows if row.method in shown and row not in pair)]
    competing = [row.method for row in results.rows if competes(row)]
    accuracies = "".join(number_cell(row.average, best=False) for row in columns)
    rows = [f'<tr><th scope="row">accuracy, %</th>{accuracies}</tr>']
    for reading in found:
        top = reading.best(competing)
        cells = (reading_cell(reading, row.method, best=row.method in top) for row in columns)
        rows.append(f'<tr><th scope="row">{escape(reading.heading)}</th>{"".join(cells)}</tr>')
    few = f" Of {len(results.rows)} methods {len(columns)} are shown." if len(columns) < len(results.rows) else ""
    caption = (
        "One number of each diagnostic, at the last round it was recorded in; mean over the seeds that have it. "
        f"\u2193 lower is better, \u2191 higher is better, the best in bold.{few} What goes with accuracy need not "
        "cause it."
    )
    body = table(["", *(results.name(row) for row in columns)], rows, caption, sortable=False)
    return f'<div class="keys">{body}</div>'


def reading_cell(reading: Reading, method: str, *, best: bool) -> str:
    if method not in reading.methods:
        return '<td class="n">\u2013</td>'
    mean, _, spread = reading.text(method).partition(" ")
    mean = f"<b>{mean}</b>" if best else mean
    return f'<td class="n">{mean} <span class="spread">{spread}</span></td>'


def single_readings(diagnostic: DiagnosticFigures) -> list[str]:
    """Of a report in which no two methods can be compared: the number by itself."""
    if len(diagnostic.runs) > 1:
        return []
    keys = [figure["key"] for figures in diagnostic.runs.values() for figure in figures if "key" in figure]
    way = {"low": "; lower is better", "high": "; higher is better"}
    return [
        f"{key['label'][0].upper()}{key['label'][1:]}: "
        + (f"{100 * key['value']:.1f} points" if key["percent"] else f"{key['value']:.3g}")
        + f"{way.get(key['better'] or '', '')}."
        for key in keys
    ]


def diagnostic_block(
    diagnostic: DiagnosticFigures, anchor: str, told: Sequence[str], group: Group, pair: tuple[Row, Row] | None
) -> str:
    runs = list(diagnostic.runs)

    def options(chosen: int | None) -> str:
        mark = {chosen: " selected"}
        return "".join(f'<option value="{i}"{mark.get(i, "")}>{escape(run)}</option>' for i, run in enumerate(runs))

    def of(row: Row) -> int:
        names = [str(member) for member in group.of(row.method)]
        return next(i for i, run in enumerate(runs) if run in names)

    one, other = 0, next((i for i, run in enumerate(runs) if _method(run) != _method(runs[0])), None)
    if pair:
        one, other = of(pair[0]), of(pair[1])
    pick = f'<label>Run <select data-run="0">{options(one)}</select></label>'
    if len(runs) > 1:
        every = f'<option value="">nothing</option>{options(other)}'
        pick += f'<label>beside <select data-run="1">{every}</select></label>'
    hidden = "" if runs != [ALL_RUNS] else ' class="unseen"'
    paper = f' <span class="paper">{escape(diagnostic.paper)}</span>' if diagnostic.paper else ""
    findings = "".join(f'<p class="finding">{escape(text)}</p>' for text in told)
    return (
        f'<article class="diagnostic" data-diagnostic="{anchor}"><h5>{escape(diagnostic.title)}</h5>{findings}'
        f'<p class="what">{escape(diagnostic.what)}{paper}</p>'
        f'<div{hidden}><div class="controls" data-js hidden>{pick}</div></div><div class="beside"></div></article>'
    )


def _method(run: str) -> str:
    return run.rpartition(", seed ")[0]


# -- configuration, runs, commands -----------------------------------------------------------------------------------
def config_section(group: Group, name: str) -> str:
    tables = {label: group.of(label)[0].config.to_dict() for label in group.labels}
    first = next(iter(tables.values()))
    skipped = () if len(group.members) == 1 else ("seed", *MACHINE_OPTIONS)
    entries = [entry for entry in fields(Config) if entry.name not in skipped]
    same = [e for e in entries if len({str(t[e.name]) for t in tables.values()}) == 1]
    differing = [e for e in entries if e not in same]

    def changed(value: Any, entry: Any) -> str:
        text = escape(str(value)) or "–"
        return f"<td><b>{text}</b></td>" if value != entry.default else f"<td>{text}</td>"

    rows = [
        f'<tr><th scope="row">{entry.name}</th>{changed(first[entry.name], entry)}'
        f"<td>{escape(entry.metadata['help'])}</td></tr>"
        for entry in same
    ]
    body = ""
    if differing and len(tables) > 1:
        lines = [
            f'<tr><th scope="row">{named(label)}</th>{"".join(changed(t[e.name], e) for e in differing)}</tr>'
            for label, t in tables.items()
        ]
        body += table(["row", *(e.name for e in differing)], lines, "Options in which the methods differ.")
    note = (
        "The same for all runs; bold is what differs from the default."
        if len(group.members) > 1
        else "Bold is what differs from the default."
    )
    body += table(["option", "value", "meaning"], rows, note, sortable=False)
    return section(f"{name}-config", "Configuration", f"<details><summary>All options</summary>{body}</details>")


def runs_section(group: Group, name: str) -> str:
    rows = [run_row(member) for member in group.members]
    body = table(["method", "seed", "state", "accuracy %", "seconds", "where", "directory"], rows, "Every run.")
    word = "1 run" if len(rows) == 1 else f"{len(rows)} runs"
    return section(f"{name}-runs", "Runs", f"<details><summary>{word}</summary>{body}</details>")


def run_row(member: Member) -> str:
    summary = member.summary or {}
    done = "finished" if member.summary else f"{member.rounds_done} of {member.config.rounds} rounds"
    accuracy = percent(summary["accuracy"]) if summary else ""
    seconds = f"{summary['seconds']:.1f}" if "seconds" in summary else ""
    where = ", ".join(str(summary[key]) for key in ("executor", "device") if key in summary)
    return (
        f'<tr><th scope="row">{named(member.label)}</th><td class="n" data-v="{member.seed}">{member.seed}</td>'
        f'<td class="line">{done}</td><td class="n" data-v="{accuracy}">{accuracy or "–"}</td>'
        f'<td class="n" data-v="{seconds}">{seconds or "–"}</td>'
        f'<td class="line">{escape(where)}</td>'
        f"<td><code>{escape(str(member.run.directory))}</code></td></tr>"
    )


def repeat_section(group: Group, name: str) -> str:
    configs = {label: [member.config for member in group.of(label)] for label in group.labels}
    whole = compare_command(configs) if len(group.members) > 1 else None
    body = []
    if whole:
        body.append("<p>All of it (with <code>--out</code> and its directory, only what is missing):</p>")
        body.append(code(whole))
    singles = []
    for member in group.members:
        command = run_command(member.config)
        if command is None:
            what = " and ".join(given_in_python(member.config))
            singles.append(f"<p>{escape(str(member))}: its {what} was given in Python; run that program again.</p>")
        else:
            title = f"<p>{escape(str(member))}:</p>" if len(group.members) > 1 else ""
            singles.append(title + code(command))
    if len(group.members) > 1:
        shown = "" if whole else " open"
        body.append(f"<details{shown}><summary>Each run by itself</summary>{''.join(singles)}</details>")
    else:
        body += singles
        body.append("<p>Or from its configuration:</p>")
        path = str(group.members[0].run.directory / "config.toml")
        body.append(code(shlex.join(["fedkeel", "run", "--config", path])))
    return section(f"{name}-repeat", "Repeat it", "".join(body))
