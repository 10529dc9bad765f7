"""The page: one HTML file with its style, its script and its numbers inside, and no request to anywhere.

Tables are written here, so that they are there without JavaScript; `page.js` makes them sortable and draws the figures
from the numbers in the page. A Content-Security-Policy names the one script and the one style by their hashes and
forbids everything else, so a name that looks like markup could do nothing even if it were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from html import escape
from importlib import resources
from typing import Any

import fedkeel
from fedkeel.config import Config
from fedkeel.demo import findings
from fedkeel.report.collect import FEDERATION, Collected, Curve, Group, Member, Metric, most_rounds, thinned
from fedkeel.report.commands import compare_command, given_in_python, run_command
from fedkeel.report.diagnostics import short
from fedkeel.store import MACHINE_OPTIONS
from fedkeel.tables import Cell, Results, Row, percent

GENERATOR = "Fedkeel report"  # how a page is known as one that may be written over
SHOWN_AT_FIRST = 10  # curves; more of them hide each other


def render(collected: Collected, made: datetime, command: str) -> str:
    """The whole page. `command` is the one that made it."""
    style, script = (resources.files(__package__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    groups = collected.groups
    title = heading(collected)
    parts = [
        masthead(title, collected),
        notices(collected.notices),
        *(part(group, f"g{number}", alone=len(groups) == 1) for number, group in enumerate(groups)),
        footer(made, command),
    ]
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="{GENERATOR} {escape(fedkeel.__version__)}">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the results</a>
{"".join(parts)}
<script type="application/json" id="numbers">{embedded(numbers(groups))}</script>
<script>{script}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def embedded(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


# -- the numbers of the figures --------------------------------------------------------------------------------------
def numbers(groups: Sequence[Group]) -> dict[str, Any]:
    most = most_rounds(groups)
    return {"groups": [group_numbers(group, most) for group in groups]}


def group_numbers(group: Group, most: int) -> dict[str, Any]:
    results = group.results
    rows = {row.method: row for row in results.rows}
    shown = first_shown(group, rows)
    # Those that are seen first have colours of their own.
    colours = sorted(group.labels, key=lambda label: label not in shown)
    series = [
        {
            "name": name_in(results, rows, label),
            "label": label,
            "colour": colours.index(label),
            "shown": label in shown,
            "curves": {metric.key: curve_numbers(group, label, metric, most) for metric in group.metrics},
        }
        for label in group.labels
    ]
    return {
        "metrics": [{"key": m.key, "name": m.name, "percent": m.is_percent} for m in group.metrics],
        "series": series,
        "panels": panels(group, results),
        "diagnostics": [
            {"runs": [{"name": run, "figures": figures} for run, figures in diagnostic.runs.items()]}
            for diagnostic in group.diagnostics
        ],
    }


def curve_numbers(group: Group, label: str, metric: Metric, most: int) -> dict[str, Any]:
    curve: Curve = thinned(group.curve(label, metric), most)
    scale = 100 if metric.is_percent else 1
    document: dict[str, Any] = {"x": curve.rounds, "y": [short(scale * value) for value in curve.mean]}
    if any(std is not None for std in curve.std):
        document["spread"] = [None if std is None else float(f"{scale * std:.3g}") for std in curve.std]
        document["seeds"] = curve.seeds if len(set(curve.seeds)) > 1 else curve.seeds[0]
    return document


def panels(group: Group, results: Results) -> list[dict[str, Any]]:
    """A panel of bars for the average and for each domain: mean, spread and each seed's own value, in percent."""

    def values(label: str, domain: str | None) -> list[float]:
        summaries = [m.summary for m in group.of(label) if m.summary is not None]
        found = [s["accuracy"] if domain is None else s["domains"].get(domain) for s in summaries]
        return [round(100 * value, 3) for value in found if value is not None]

    def panel(title: str, domain: str | None) -> dict[str, Any]:
        bars = []
        for row in results.rows:
            cell = row.average if domain is None else row.domains.get(domain)
            if cell is not None:
                entry = {"mean": round(100 * cell.mean, 3), "values": values(row.method, domain)}
                bars.append({"label": row.method, **entry, "spread": _percent(cell.std)})
        return {"title": title, "bars": bars}

    headed = zip(results.domains, results.headings[1:], strict=False)
    average = "average over domains" if not results.unseen else "average over trained domains"
    return [panel(average, None), *(panel(title, domain) for domain, title in headed)] if results.rows else []


def _percent(std: float | None) -> float | None:
    return None if std is None else float(f"{100 * std:.4g}")


def first_shown(group: Group, rows: dict[str, Row]) -> set[str]:
    """All methods when they are few; else the best, the baselines among them."""
    if len(group.labels) <= SHOWN_AT_FIRST:
        return set(group.labels)
    ranked = sorted(group.labels, key=lambda label: -rows[label].average.mean if label in rows else 1.0)
    baselines = [label for label in group.labels if label.partition("@")[0] in ("central", "fedavg")]
    return set(dict.fromkeys([*baselines, *ranked][:SHOWN_AT_FIRST]))


def name_in(results: Results, rows: dict[str, Row], label: str) -> str:
    return results.name(rows[label]) if label in rows else label


# -- the page from top to bottom -------------------------------------------------------------------------------------
def heading(collected: Collected) -> str:
    members = collected.members
    methods = list(dict.fromkeys(member.label for member in members))
    data = list(dict.fromkeys(member.config.data.partition("(")[0] for member in members))
    shown = data[0] if len(data) == 1 else f"{len(data)} data sets"
    if len(members) == 1:
        return f"{methods[0]} on {shown}"
    if len(methods) == 1:
        return f"{methods[0]} on {shown}, {len(members)} seeds"
    return f"{len(methods)} methods on {shown}"


def masthead(title: str, collected: Collected) -> str:
    links = []
    for number, group in enumerate(collected.groups):
        name = "Results" if len(collected.groups) == 1 else group.members[0].config.data.partition("(")[0]
        links.append(f'<a href="#g{number}">{escape(name)}</a>')
        if len(collected.groups) == 1:
            sections = [("curves", "Curves"), ("domains", "Domains")]
            sections += [("diagnostics", "Diagnostics")] if group.diagnostics else []
            sections += [("config", "Configuration"), ("runs", "Runs"), ("repeat", "Repeat it")]
            links += [f'<a href="#g0-{anchor}">{text}</a>' for anchor, text in sections if has(group, anchor)]
    return f"""
<header class="top">
<div class="bar"><span class="brand">Fedkeel</span><nav aria-label="Sections">{"".join(links)}</nav>
<button type="button" id="theme" class="quiet" hidden>Dark</button></div>
</header>
<main id="content">
<h1>{escape(title)}</h1>
<noscript><p class="notice">The tables and the configuration are here; the figures need JavaScript.</p></noscript>
"""


def has(group: Group, section: str) -> bool:
    if section == "curves":
        return bool(group.metrics)
    return bool(group.results.rows) if section == "domains" else True


def notices(texts: Sequence[str]) -> str:
    if not texts:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    word = "One thing to know" if len(texts) == 1 else f"{len(texts)} things to know"
    shown = " open" if len(texts) <= 6 else ""
    return f'<details class="notice"{shown}><summary>{word}</summary><ul>{items}</ul></details>'


def part(group: Group, name: str, *, alone: bool) -> str:
    """Everything about the runs of one federation."""
    results = group.results
    config = group.members[0].config
    title = "" if alone else f"<h2>{escape(federation_name(group))}</h2>"
    body = [key_figures(group, results), findings_section(group, name)]
    if results.rows:
        body.append(summary_table(group, results, name))
    else:
        body.append('<p class="notice">None of these runs is finished yet, so there is no table of results.</p>')
    if group.metrics:
        body.append(curves_section(group, name))
    if results.rows:
        body.append(domains_section(group, name))
    body += [diagnostics_section(group, name), config_section(group, name), runs_section(group, name)]
    body.append(repeat_section(group, name))
    data = f'<p class="lead">{lead(group, config)}</p>'
    return f'<section class="part" id="{name}" aria-label="Results">{title}{data}{"".join(body)}</section>'


def federation_name(group: Group) -> str:
    config = group.members[0].config
    more = [
        f"{name} {getattr(config, name)}" for name in FEDERATION[1:] if getattr(config, name) != getattr(Config(), name)
    ]
    return ", ".join([config.data, *more])


def lead(group: Group, config: Config) -> str:
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
        label = "average accuracy" if len(results.rows) == 1 else f"best: {results.name(best)}"
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
    sentences = findings(group) if len(group.results.rows) > 1 else []
    if not sentences:
        return ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<section id="{name}-findings"><h3>What the numbers show</h3><ul class="findings">{items}</ul></section>'


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
            f'<tr><th scope="row" data-v="{escape(row.method)}"{full}>{named(results.name(row))}</th>{cells}{cost}{time}</tr>'
        )
    caption = results.caption + (" The best of each column is bold." if len(results.rows) > 1 else "")
    headings = [*results.headings, *(["s/run"] if timed else [])]
    texts = [("Markdown", results.markdown()), ("LaTeX", results.latex()), ("CSV", results.csv())]
    copies = "".join(f"<details><summary>As {kind}</summary>{code(text)}</details>" for kind, text in texts)
    return f'<section id="{name}-table"><h3>Results</h3>{table(headings, rows, caption)}<div class="copies">{copies}</div></section>'


def named(text: str) -> str:
    return f'<span class="name">{escape(text)}</span>'


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
    return (
        f'<section id="{name}-curves"><h3>Curves</h3><p class="what">{means}Point at a round, or use the arrow keys, to '
        f"read all values there{choice}.{few}</p>"
        f'<div class="controls" data-js hidden><label>Show <select data-metric="{name}">{options}</select></label></div>'
        f'<div data-curves="{name}"></div></section>'
    )


def domains_section(group: Group, name: str) -> str:
    bars = "Bars are means over seeds, whiskers the standard deviation, dots the seeds. " if has_seeds(group) else ""
    return (
        f'<section id="{name}-domains"><h3>Accuracy by domain</h3><p class="what">{bars}Accuracy in %.</p>'
        f'<div class="panels" data-panels="{name}"></div></section>'
    )


def has_seeds(group: Group) -> bool:
    return any(len(group.of(label)) > 1 for label in group.labels)


def diagnostics_section(group: Group, name: str) -> str:
    if not group.diagnostics:
        return ""
    blocks = []
    for number, diagnostic in enumerate(group.diagnostics):
        runs = list(diagnostic.runs)
        options = "".join(f'<option value="{i}">{escape(run)}</option>' for i, run in enumerate(runs))
        pick = f'<label>Run <select data-run="0">{options}</select></label>'
        if len(runs) > 1:
            other = next((i for i, run in enumerate(runs) if _method(run) != _method(runs[0])), None)
            more = options.replace(f'value="{other}"', f'value="{other}" selected') if other is not None else options
            pick += f'<label>beside <select data-run="1"><option value="">nothing</option>{more}</select></label>'
        paper = f' <span class="paper">{escape(diagnostic.paper)}</span>' if diagnostic.paper else ""
        blocks.append(
            f'<article class="diagnostic" data-diagnostic="{name} {number}"><h4>{escape(diagnostic.title)}</h4>'
            f'<p class="what">{escape(diagnostic.what)}{paper}</p>'
            f'<div class="controls" data-js hidden>{pick}</div><div class="beside"></div></article>'
        )
    return f'<section id="{name}-diagnostics"><h3>Diagnostics</h3>{"".join(blocks)}</section>'


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
        f'<tr><th scope="row">{entry.name}</th>{changed(first[entry.name], entry)}<td>{escape(entry.metadata["help"])}</td></tr>'
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
    return f'<section id="{name}-config"><h3>Configuration</h3><details><summary>All options</summary>{body}</details></section>'


def runs_section(group: Group, name: str) -> str:
    rows = [run_row(member) for member in group.members]
    body = table(["method", "seed", "state", "accuracy %", "seconds", "where", "directory"], rows, "Every run.")
    return (
        f'<section id="{name}-runs"><h3>Runs</h3><details><summary>{len(rows)} run{"s" if len(rows) > 1 else ""}</summary>'
        f"{body}</details></section>"
    )


def run_row(member: Member) -> str:
    summary = member.summary or {}
    done = "finished" if member.summary else f"{member.rounds_done} of {member.config.rounds} rounds"
    accuracy = percent(summary["accuracy"]) if summary else ""
    seconds = f"{summary['seconds']:.1f}" if "seconds" in summary else ""
    where = ", ".join(str(summary[key]) for key in ("executor", "device") if key in summary)
    return (
        f'<tr><th scope="row">{named(member.label)}</th><td class="n" data-v="{member.seed}">{member.seed}</td>'
        f'<td>{done}</td><td class="n" data-v="{accuracy}">{accuracy or "–"}</td><td class="n" data-v="{seconds}">{seconds or "–"}</td>'
        f"<td>{escape(where)}</td><td><code>{escape(str(member.run.directory))}</code></td></tr>"
    )


def repeat_section(group: Group, name: str) -> str:
    configs = {label: [member.config for member in group.of(label)] for label in group.labels}
    whole = compare_command(configs) if len(group.members) > 1 else None
    body = []
    if whole:
        body.append(
            f"<p>All of it, continued where it stands when its directory is given with <code>--out</code>:</p>{code(whole)}"
        )
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
        body.append(code(f"fedkeel run --config {group.members[0].run.directory / 'config.toml'}"))
    return f'<section id="{name}-repeat"><h3>Repeat it</h3>{"".join(body)}</section>'


def footer(made: datetime, command: str) -> str:
    return (
        f"</main><footer><p>Made {made:%Y-%m-%d %H:%M} by Fedkeel {escape(fedkeel.__version__)} with "
        f"<code>{escape(command)}</code>. This page is one file: it asks nothing of any network.</p></footer>"
    )
