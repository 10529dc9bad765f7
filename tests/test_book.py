"""The book: every page has a place, formulas are set, links lead somewhere, and nothing is asked of another host."""

from __future__ import annotations

import base64
import doctest
import functools
import html.parser
import http.server
import importlib.util
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
import yaml

from fedkeel.methods import METHODS
from tests.report.test_browser import ARGUMENTS, CHROMIUM

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def script(name: str) -> ModuleType:
    loader = SourceFileLoader(name.removesuffix(".py"), str(ROOT / ".ci" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = sys.modules[loader.name] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def book() -> ModuleType:
    pytest.importorskip("mkdocs")
    return script("book.py")


@pytest.fixture(scope="module")
def nav() -> list[Any]:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]  # type: ignore[no-any-return]


def leaves(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from leaves(part)


class TestPlaces:
    def test_each_page_is_in_the_navigation_once(self, nav: list[Any]) -> None:
        pages = [path.relative_to(DOCS).as_posix() for kind in ("md", "ipynb") for path in DOCS.rglob(f"*.{kind}")]
        found = Counter(leaves(nav))
        assert sorted(found.elements()) == sorted(
            [*(page.replace(".ipynb", ".md") for page in pages), "contributing.md"]
        )

    def test_each_method_is_once_in_the_overview_which_leads_to_its_page_or_section(self) -> None:
        overview = (DOCS / "methods" / "index.md").read_text()
        places = re.findall(r"^\| \[(\w+)\]\(([\w-]+\.md)#?(\w*)\)", overview, re.M)
        assert sorted(name for name, _, _ in places) == sorted(METHODS.names())
        for name, page, section in places:
            heading = rf"^## {section}$" if section else rf"^# {name}$"
            assert re.search(heading, (DOCS / "methods" / page).read_text(), re.M | re.I), name
            assert section in ("", name)


class TestFormulas:
    def test_the_examples(self, book: ModuleType) -> None:
        assert doctest.testmod(book).failed == 0

    @pytest.mark.parametrize(
        ("tex", "has"),
        [
            (r"\mathcal D \in \mathbb{R}", ("<mi>𝒟</mi>", "<mi>ℝ</mi>")),
            (r"\lVert x \rVert_2", ("<msub><mrow>", "</mrow><mn>2</mn></msub>")),
            (r"\left(\sum_i x\right)", ("<munder><mo>∑</mo>",)),
            (r"\Delta", ('<mi mathvariant="normal">Δ</mi>',)),
            (r"z \sim N", ("<mo>∼</mo>",)),
            (r"a &lt; b", ("<mo>&lt;</mo>",)),
        ],
    )
    def test_what_browsers_need(self, book: ModuleType, tex: str, has: tuple[str, ...]) -> None:
        made = book.mathml(tex, block=True)
        assert all(part in made for part in has), made

    @pytest.mark.parametrize("tex", [r"\arg x", r"\left( a", r"\begin{aligned} a & b \end{aligned}"])
    def test_a_formula_that_cannot_be_set_ends_the_build(self, book: ModuleType, tex: str) -> None:
        from mkdocs.exceptions import PluginError

        with pytest.raises(PluginError, match="formula"):
            book.mathml(tex, block=False)


def test_a_notebook_becomes_a_page(book: ModuleType) -> None:
    def shows(**data: str) -> dict[str, Any]:
        return {"output_type": "display_data", "data": {key.replace("_", "/"): value for key, value in data.items()}}

    svg = {"output_type": "display_data", "data": {"image/svg+xml": ["<svg>", "</svg>"], "text/plain": "Drawing"}}
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["\x1b[1ma < b\x1b[0m\n"]},
        {"output_type": "stream", "name": "stderr", "text": "noise"},
        svg,
        shows(text_html="<table></table>", text_plain="rows"),
        shows(text_html="<script>draw()</script>", text_plain="a figure"),
        shows(image_png="aGk=\n", text_html="<b></b>"),
        shows(text_plain=""),
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Own images\n", "\n", "With $x$."]},
        {"cell_type": "code", "source": "print(1)", "outputs": outputs},
        {"cell_type": "code", "source": ["%%sh\n", "fedkeel demo"], "outputs": []},
        {"cell_type": "code", "source": " ", "outputs": []},
        {"cell_type": "raw", "source": "left out"},
    ]
    text, shown = book.notebook({"cells": cells}, "own-images.ipynb")
    assert text.startswith('# Own images\n\n<p class="download"><a href="own-images.ipynb" download>')
    assert "````python\nprint(1)\n````\n\n" + "\n\n".join(map(book.place, range(5))) in text
    assert text.endswith("````sh\nfedkeel demo\n````")
    inside = [part.removeprefix('<div class="output">').removesuffix("</div>") for part in shown]
    assert inside[0] == "<pre>a &lt; b</pre>"
    assert base64.b64encode(b"<svg></svg>").decode() in inside[1]
    assert inside[2:4] == ["<table></table>", "<pre>a figure</pre>"]
    assert "data:image/png;base64,aGk=" in inside[4]


class Page(html.parser.HTMLParser):
    """Its anchors, what it links to and loads, and its text outside of code."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors, self.links, self.loads, self.text = {""}, [], [], []  # type: ignore[var-annotated]
        self.inside: Counter[str] = Counter()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside[tag] += 1
        given = dict(attrs)
        self.anchors |= {given.get("id"), given.get("name")}
        if tag == "a" and given.get("href") is not None:
            self.links.append(given["href"])
        elif tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.loads.append(given["src"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loads.append(given["href"])

    def handle_endtag(self, tag: str) -> None:
        self.inside[tag] -= 1

    def handle_data(self, data: str) -> None:
        if not any(self.inside[tag] > 0 for tag in ("code", "pre", "script", "style")):
            self.text.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet: it would hide warnings from --strict too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


@pytest.mark.slow
class TestBuilt:
    def test_no_formula_is_left_as_it_was_written(self, pages: dict[Path, Page]) -> None:
        raw = {
            path.name: text
            for path, page in pages.items()
            for text in page.text
            if re.search(r"\\[A-Za-z([]|\$[^$]+\$", text)
        }
        assert raw == {}
        assert sum("<math" in path.read_text() for path in pages) >= 20
        assert not any("merror" in path.read_text() for path in pages)

    def test_every_link_inside_leads_to_a_page_and_an_anchor(self, site: Path, pages: dict[Path, Page]) -> None:
        broken = []
        for path, page in pages.items():
            for link in {*page.links, *page.loads}:
                address, anchor = urldefrag(link)
                if urlsplit(link).scheme:
                    continue
                target = (path.parent / unquote(urlsplit(address).path)).resolve() if address else path
                target = target / "index.html" if target.is_dir() else target
                if not target.is_file() or (target in pages and unquote(anchor) not in pages[target].anchors):
                    broken.append(f"{path.relative_to(site)}: {link}")
        assert broken == []

    def test_nothing_is_loaded_from_elsewhere(self, site: Path, pages: dict[Path, Page]) -> None:
        foreign = {load for page in pages.values() for load in page.loads if urlsplit(load).scheme not in ("", "data")}
        assert foreign == set()
        styles = "".join(path.read_text() for path in site.rglob("*.css"))
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", styles)


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("where", ["a server", "a disk"])
def test_the_search_finds_pages_and_no_other_host_is_asked(where: str, site: Path, served: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    start = served if where == "a server" else site.as_uri()
    asked: list[str] = []
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.on("request", lambda request: asked.append(request.url))
        for name in ("index", "choose", "methods/hbn", "report"):
            page.goto(f"{start}/{name}.html")
        page.goto(f"{start}/index.html")
        page.locator(".md-search__input").press_sequentially("HBN")
        found = page.locator(".md-search-result__item a")
        found.first.wait_for(timeout=120_000)
        links = [link.get_attribute("href") or "" for link in found.all()]
        page.locator(".md-search__input").fill("--unseen")  # a minus is the search's word for without
        page.locator(".md-search-result__item a[href*='/cli.html']").first.wait_for(timeout=120_000)
        browser.close()
    assert any(link.startswith(f"{start}/methods/hbn.html") for link in links)
    assert [url for url in asked if not url.startswith((start, "data:"))] == []
