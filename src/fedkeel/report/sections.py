"""The part of the page about one federation, section by section. Figures are drawn by `page.js`."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from html import escape
from statistics import fmean
from typing import Any, NamedTuple

from fedkeel.config import MACHINE_OPTIONS, Config
from fedkeel.core import imports
from fedkeel.experiments.difference import UNDECIDED
from fedkeel.experiments.findings import federated, findings
from fedkeel.experiments.tables import percent
from fedkeel.report import figures
from fedkeel.report.clients import clients_table
from fedkeel.report.collect import FEDERATION, Group, Member
from fedkeel.report.commands import compare_command, run_command
from fedkeel.report.figures import Figures, first_shown, hidden
from fedkeel.report.html import DASH, accuracy, code, folded, listed, named, number, table, table_row
from fedkeel.report.images import examples
from fedkeel.report.measures import class_table, confusion_table, site_table
from fedkeel.report.tuning import tuning_section
from fedkeel.report.why import explanations, first_two, rivals, why_section
from fedkeel.runs.origin import read_outline
from fedkeel.runs.run import given_in_python

NO_RESULTS = '<p class="notice">None of these runs is finished yet, so there is no table of results.</p>'
LONG = 60  # letters of a name
FEW = 6  # commands that are shown without being asked for


class Section(NamedTuple):
    """A part of the page that has a heading."""

    anchor: str
    menu: str  # its name in the menu, if it is there
    heading: str
    body: Callable[[Group, Figures], str]


def sections(group: Group, page: Figures, images: int = 0) -> dict[Section, str]:
    """Those that have something to show of this group, with it; their figures go into the page's."""
    bodies = {section: section.body(group, page) for section in SECTIONS}
    if images:
        bodies[EXAMPLES] = examples(group, images)
    return {section: body for section, body in bodies.items() if body}


def part(group: Group, shown: Mapping[Section, str], name: str, *, alone: bool) -> str:
    """Everything about the runs of one federation."""
    title = escape(name)
    body = [
        f'<h2 class="{"unseen" if alone else "data"}">{title}</h2>',
        f'<p class="lead">{lead(group, alone=alone)}</p>',
        key_figures(group),
        "" if group.results.rows else NO_RESULTS,
        *(f'<section id="{group.anchor}-{s.anchor}"><h3>{s.heading}</h3>{text}</section>' for s, text in shown.items()),
    ]
    return f'<section class="part" id="{group.anchor}" aria-label="{title}">{"".join(body)}</section>'


def federation_name(group: Group, *, whole: bool = False) -> str:
    """Long options of the data are left out, unless the `whole` is asked for: the configuration has them."""
    config, default = group.members[0].config, Config()
    data = config.data if whole or len(config.data) <= LONG else f"{config.data.partition('(')[0]}(…)"
    differing = [name for name in FEDERATION[1:] if getattr(config, name) != getattr(default, name)]
    return ", ".join([data, *(f"{name} {getattr(config, name)}" for name in differing)])


def federation_names(groups: Sequence[Group]) -> list[str]:
    short = [federation_name(group) for group in groups]
    return [
        name if short.count(name) == 1 else federation_name(g, whole=True)
        for name, g in zip(short, groups, strict=True)
    ]


def lead(group: Group, *, alone: bool) -> str:
    configs = [member.config for member in group.members]
    models = list(dict.fromkeys(config.model for config in configs))
    rounds = sorted({config.rounds for config in configs})
    length = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    model = f"model <code>{escape(models[0])}</code>" if len(models) == 1 else f"{len(models)} models"
    data = f"data <code>{escape(federation_name(group))}</code>, " if alone else ""  # else the heading says it
    text = f"{data}{model}, {length} rounds."
    return text[0].upper() + text[1:]


def key_figures(group: Group) -> str:
    results, tiles = group.results, []
    if results.rows:
        rows = federated(results) or results.rows
        best = max(rows, key=lambda row: row.average.mean)
        std = best.average.std
        spread = f"±{percent(std)} over {len(best.seeds)} seeds" if std is not None else "one seed"
        label = f"{'best' if results.leads(best, rows) else f'highest, {UNDECIDED}'}: {results.name(best)}"
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


def findings_section(group: Group, _: Figures) -> str:
    said = findings(group.results) if len(group.results.rows) > 1 else []
    sentences = [*said[:-1], *(explanations(group) if said else []), *said[-1:]]
    return listed(sentences, ' class="findings"') if sentences else ""


def results_section(group: Group, _: Figures) -> str:
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
    headings = [*results.headings, *(["s/run"] if timed else [])]
    texts = {"Markdown": results.markdown(), "LaTeX": results.latex(), "CSV": results.csv()}
    copies = "".join(folded(f"As {kind}", code(text)) for kind, text in texts.items())
    return table(headings, rows, results.legend("Bold")) + f'<div class="copies">{copies}</div>' if rows else ""


# -- figures ---------------------------------------------------------------------------------------------------------
def curves_section(group: Group, page: Figures) -> str:
    means = "Mean over seeds; the band is the standard deviation. " if has_seeds(group) else ""
    choice = "; choose methods in the legend" if len(group.labels) > 1 else ""
    few = f" Of {len(group.labels)} methods {figures.SHOWN_AT_FIRST} are shown at first." if hidden(group) else ""
    hint = f"Point at a round, or use the arrow keys, to read all values there{choice}. Ctrl and the wheel zoom."
    most_rounds = max(50, figures.MOST_NUMBERS // (2 * max(1, len(group.labels) * len(group.metrics))))
    drawn = [figures.curves(group, metric, most_rounds) for metric in group.metrics]
    figure = page.one_of(drawn, [metric.name for metric in group.metrics], hidden(group))
    return f'<p class="what">{means}<span class="hint">{hint}</span>{few}</p>{figure}' if group.metrics else ""


def domains_section(group: Group, page: Figures) -> str:
    if not group.results.rows:
        return ""
    seeds = "Whiskers are the standard deviation over seeds, dots the seeds." if has_seeds(group) else ""
    images = "Whiskers are the 95 % interval that the number of test samples leaves." if group.test_images else ""
    figure = page.one_of([figures.by_domain(group)], [""], hidden(group))
    return f'<p class="what">{seeds or images}</p>{figure}{sizes_table(group)}'


def sizes_table(group: Group) -> str:
    """How many images each number is from, and how far it can be off by that alone."""
    best, rows = max(group.results.rows, key=lambda row: row.average.mean), []
    outline = read_outline(group.members[0].run.directory)
    clients = [*outline.clients, *outline.unseen] if outline else []
    for domain in group.results.domains:
        mine = [client for client in clients if client.domain == domain]
        size, cell = group.test_images.get(domain, 0), best.domains.get(domain)
        low, high = figures.interval(cell.mean if cell else None, size)
        off = f"{(high - low) / 2:.1f}" if size and low is not None and high is not None else ""
        known = (len(mine), sum(client.train for client in mine)) if mine else ("", "")
        cells = [number(value, value or DASH) for value in (*known, size or "")]
        rows.append(table_row(named(domain), [*cells, number(off, f"±{off}" if off else DASH)]))
    caption = (
        f"Samples of each domain. The error is half of Wilson's 95 % interval, in points, around the accuracy of "
        f"{group.results.name(best)}: what another draw of as many test samples could change."
    )
    headings = ["domain", "clients", "training samples", "test samples", "error, points"]
    return table(headings, rows, caption) if group.test_images else ""


def measures_section(group: Group, page: Figures) -> str:
    """By site and class, of the first seed of every method."""
    figure = figures.by_class(group)
    if figure is None:
        return ""
    pair = {group.results.name(row) for row in rivals(group.results) or ()}
    others = [name for name in figures.names(group).values() if pair and name not in pair]
    what = "Over all trained sites; whiskers are the 95 % interval that the number of samples leaves."
    parts = [f'<h4>How much of each class is found</h4><p class="what">{what}</p>', page.one_of([figure], [""], others)]
    shown = [member for member in group.measured if member.label in first_shown(group)]
    matrices = {f"{member}: {site}": [one] for member in shown for site, one in figures.confusions(member).items()}
    if matrices:
        whole = [text for text in matrices if text.endswith(": All trained sites")]
        one, other = first_two(group, [text.rpartition(": ")[0] for text in whole])
        place = {text: number for number, text in enumerate(matrices)}
        second = None if other is None else place[whole[other]]
        parts += ["<h4>What is taken for what</h4>", page.beside(matrices, place[whole[one]], second)]
    if counts := figures.class_counts(group.measured[0]):
        parts += ["<h4>What the sites have</h4>", page.one_of([counts], [""])]
    for member in group.measured:
        tables = [site_table(member.run.measures), class_table(member.run.measures)]
        if not figures.confusions(member):
            tables.append(confusion_table(member.run.measures))
        body = "".join(
            table(headings, (table_row(named(first), map(number, cells)) for first, *cells in rows), caption)
            for headings, rows, caption in tables
        )
        parts.append(folded(f"All numbers of {escape(str(member))}", body))
    return "".join(parts)


def clients_section(group: Group, _: Figures) -> str:
    """Of the first seed of every method that is shown at first; open where something was lost."""
    parts, alone = [], len(group.members) == 1
    for label in filter(first_shown(group).__contains__, group.labels):
        for member in [m for m in group.of(label) if m.clients][:1]:
            lost = sum(one.dropped for one in member.clients.values())
            title = escape(f"{member}: {lost} updates dropped" if lost else str(member))
            parts.append(folded(title, clients_table(member.clients), " open" if lost or alone else ""))
    return "".join(parts)


def has_seeds(group: Group) -> bool:
    return len(group.members) > len(group.labels)


# -- configuration, runs, commands -----------------------------------------------------------------------------------
def config_section(group: Group, _: Figures) -> str:
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


def runs_section(group: Group, _: Figures) -> str:
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


def repeat_section(group: Group, _: Figures) -> str:
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
        body = folded("Each run by itself", body, "" if whole or len(singles) > FEW else " open")
        if whole:
            title = "<p>All of it (with <code>--out</code> and its directory, only what is missing):</p>"
            body = title + code(whole) + body
    else:
        path = str(group.members[0].run.directory / "config.toml")
        body += "<p>Or from its configuration:</p>" + code(shlex.join(["fedkeel", "run", "--config", path]))
    own = dict.fromkeys(copy.name for member in group.members for copy in imports.copies(member.run.directory))
    flags = shlex.join(word for file in own for word in ("--import", file))
    return f"{body}<p>With code of one's own, which each of these needs too:</p>{code(flags)}" if own else body


EXAMPLES = Section("images", "Images", "Test images and what the model says", lambda *_: "")
SECTIONS = (
    Section("findings", "", "What the numbers show", findings_section),
    Section("table", "Results", "Results", results_section),
    Section("curves", "Curves", "Curves", curves_section),
    Section("domains", "Domains", "Accuracy by domain", domains_section),
    Section("measures", "By class", "By class and site", measures_section),
    EXAMPLES,
    Section("clients", "Clients", "What each client gave and lost", clients_section),
    Section("diagnostics", "Why", "Why: what the diagnostics say", why_section),
    Section("tuning", "Tuning", "Tuning: how the settings were chosen", tuning_section),
    Section("config", "Configuration", "Configuration", config_section),
    Section("runs", "Runs", "Runs", runs_section),
    Section("repeat", "Repeat it", "Repeat it", repeat_section),
)
