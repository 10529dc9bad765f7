"""The page: one HTML file with its style, its script and its numbers inside, and no request to anywhere.

Tables are written here, so that they are there without JavaScript; `page.js` makes them sortable and has Vega, which is
in the page too, packed, draw the figures. A Content-Security-Policy names the two scripts and the one style by their
hashes and forbids everything else, so a name that looks like markup could do nothing even if it were not escaped.
"""

import base64
import gzip
import hashlib
from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from importlib import resources

import fedkeel
from fedkeel.drawing.show import embedded, packed_vega
from fedkeel.report.collect import Collected, Group
from fedkeel.report.figures import Figures
from fedkeel.report.html import folded, listed
from fedkeel.report.sections import Section, federation_names, part, sections

GENERATOR = "Fedkeel report"  # how a page is known as one that may be written over


def render(collected: Collected, made: datetime, command: str, images: int = 0) -> str:
    """The whole page. `command` is the one that made it; `images`: so many examples of each site."""
    figures = Figures()
    groups = collected.groups
    title, shown = heading(collected), [sections(group, figures, images) for group in groups]
    parts = [
        masthead(title, collected, shown[0]),
        notices(collected.notices),
        *(part(*given, alone=len(groups) == 1) for given in zip(groups, shown, federation_names(groups), strict=True)),
        footer(made, command),
    ]
    return whole(title, parts, figures)


def whole(title: str, parts: Iterable[str], figures: Figures, more: str = "", asks: str = "") -> str:
    """A page of these parts. `more` is a script besides the report's own; `asks`, what the policy lets it ask for."""
    vega = packed_vega()
    style, script = (read(name) for name in ("page.css", "page.js"))
    scripts = " ".join(map(_hash, filter(None, (script, more, gzip.decompress(vega).decode()))))
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src {_hash(style)}; img-src data:; {asks}"
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
<script type="application/json" id="numbers">{embedded(figures.document())}</script>
<script type="text/plain" id="vega">{base64.b64encode(vega).decode()}</script>
<script>{script}</script>{f"<script>{more}</script>" if more else ""}
</body>
</html>
"""


def read(name: str) -> str:
    """A file of this folder."""
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# -- the page from top to bottom -------------------------------------------------------------------------------------
def heading(collected: Collected) -> str:
    members = collected.members
    methods = list(dict.fromkeys(member.label for member in members))
    groups = collected.groups
    shown = told_apart(groups)[0] if len(groups) == 1 else f"{len(groups)} federations: {', '.join(told_apart(groups))}"
    if len(members) == 1:
        return f"{methods[0]} on {shown}"
    if len(methods) == 1:
        return f"{methods[0]} on {shown}, {len(members)} seeds"
    return f"{len(methods)} methods on {shown}"


def told_apart(groups: Sequence[Group]) -> list[str]:
    """Short names of federations; where two would read the same, with what they differ in."""
    short = [group.members[0].config.data.partition("(")[0] for group in groups]
    whole = federation_names(groups)
    return [name if short.count(name) == 1 else other for name, other in zip(short, whole, strict=True)]


def masthead(title: str, collected: Collected, first: Iterable[Section]) -> str:
    """`first`: the sections of the first group, which are the menu where it is the only one."""
    groups = collected.groups
    if len(groups) == 1:
        links = [(f"{groups[0].anchor}-{section.anchor}", section.menu) for section in first if section.menu]
    else:
        links = [(group.anchor, name) for group, name in zip(groups, told_apart(groups), strict=True)]
    anchors = "".join(f'<a href="#{anchor}">{escape(text)}</a>' for anchor, text in links)
    return f"""
<header class="top">
<div class="bar"><span class="brand">Fedkeel</span><nav aria-label="Sections">{anchors}</nav>
<button type="button" id="theme" class="quiet" hidden>Dark</button></div>
</header>
<main id="content">
<h1>{escape(title)}</h1>
<p class="notice" data-nojs>The tables and the configuration are here; the figures need JavaScript.</p>
"""


def notices(texts: Sequence[str]) -> str:
    word = "One thing to know" if len(texts) == 1 else f"{len(texts)} things to know"
    shown = " open" if len(texts) <= 6 else ""
    return folded(word, listed(texts), f' class="notice"{shown}') if texts else ""


def footer(made: datetime, command: str) -> str:
    return (
        f"</main><footer><p>Made {made:%Y-%m-%d %H:%M} by Fedkeel {escape(fedkeel.__version__)} with "
        f"<code>{escape(command)}</code>. This page is one file: it asks nothing of any network.</p></footer>"
    )
