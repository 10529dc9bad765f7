"""The page: one HTML file with its style, its script and its numbers inside, and no request to anywhere.

Tables are in the page without JavaScript; `page.js` makes them sortable and has Vega, which is in the page too, packed,
draw the figures. A Content-Security-Policy names the scripts and the style by their hashes and forbids everything else,
so a name that looks like markup could do nothing even if it were not escaped.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from typing import Any

from markupsafe import Markup

import fedkeel
from fedkeel.analysis.figures import Figure
from fedkeel.drawing.show import packed_vega
from fedkeel.drawing.theme import COLOURS, config
from fedkeel.drawing.vega import chart
from fedkeel.report.collect import Collected, Group
from fedkeel.report.html import TEMPLATES, html
from fedkeel.report.sections import federation_names, key_figures, sections

GENERATOR = "Fedkeel report"  # how a page is known as one that may be written over


class Page:
    """A page that is being made; it has its figures by number."""

    def __init__(self) -> None:
        self.figures: list[dict[str, Any]] = []

    def choice(self, choices: Mapping[str, Sequence[Figure]], first: Sequence[int] = (0,)) -> Markup:
        """The place of figures to choose from, by a name that may stand for several; or places beside each other."""
        numbers = {}
        for name, figures in choices.items():
            numbers[name] = [*range(len(self.figures), len(self.figures) + len(figures))]
            for figure in figures:
                table = {key: figure[key] for key in ("title", "columns", "rows") if figure["kind"] == "table"}
                self.figures.append({"note": figure.get("note", ""), **(table or {"spec": chart(figure)})})
        return html("choice", numbers, first)

    def whole(self, title: str, asks: str = "", **content: Any) -> str:
        """A file. `asks`: what its policy lets its script ask for."""
        vega = packed_vega()
        style, script = (
            resources.files(__package__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js")
        )
        scripts = f"{_hash(script)} {_hash(gzip.decompress(vega).decode())}"
        policy = f"default-src 'none'; script-src {scripts}; style-src {_hash(style)}; img-src data:; {asks}"
        return TEMPLATES.get_template("page.html").render(
            title=title,
            policy=f"{policy}base-uri 'none'; form-action 'none'",
            generator=f"{GENERATOR} {fedkeel.__version__}",
            style=Markup(style),
            script=Markup(script),
            vega=base64.b64encode(vega).decode(),
            numbers={"themes": {theme: config(theme) for theme in COLOURS}, "figures": self.figures},
            **content,
        )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def heading(groups: Sequence[Group]) -> str:
    methods = list(dict.fromkeys(label for group in groups for label in group.labels))
    names = federation_names(groups)
    what = methods[0] if len(methods) == 1 else f"{len(methods)} methods"
    return f"{what} on {names[0] if len(names) == 1 else f'{len(names)} federations'}"


def render(collected: Collected, made: datetime, command: str) -> str:
    """The whole page. `command` is the one that made it."""
    page, parts, notices = Page(), [], collected.notices
    for number, (group, name) in enumerate(zip(collected.groups, federation_names(collected.groups), strict=True)):
        shown = [(f"g{number}-{key}", title, body) for key, (title, body) in sections(group, page).items() if body]
        parts.append((f"g{number}", name, key_figures(group), shown))
    told = "One thing to know" if len(notices) == 1 else f"{len(notices)} things to know"
    content: dict[str, Any] = {
        "menu": [(f"#{part[0]}", part[1]) for part in (parts if len(parts) > 1 else parts[0][3])],
        "notices": html("folded", told, html("items", notices), len(notices) <= 6) if notices else "",
        "footer": f"Made {made:%Y-%m-%d %H:%M} by Fedkeel {fedkeel.__version__} with '{command}'.",
    }
    return page.whole(heading(collected.groups), parts=parts, **content)
