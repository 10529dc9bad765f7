"""The page in a real browser: it opens in silence, its table sorts, its curves toggle, and it can be read by anyone."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedkeel import report
from fedkeel.drawing.theme import COLOURS
from fedkeel.errors import FedkeelError
from tests.blocks.pages import BY_PAGE
from tests.report.samples import DOMAINS, accuracy, add_cost, add_diagnostics, make_comparison, make_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
METHODS = ("fedbn", "fedavg", "greg")
ROUNDS = 20
ODD = "fedprox(note='<script>alert(1)</script>')"
ODD_DOMAIN = '"><img src=x onerror=alert(2)>'
LONG = "fedprox(mu=0.1)+" + "a_method_whose_name_does_not_end_" * 8

IN_CHROMIUM = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]
pytestmark = IN_CHROMIUM
Open = Callable[..., Any]
LINES, BANDS = ".plot .mark-line > path", ".plot .mark-area > path"
BARS = CELLS = ".plot .mark-rect > path"
POINTS = ".plot .mark-symbol > path"


def wait_for(locator: Any, count: int) -> None:
    """Figures are drawn a moment after something was asked for."""
    expect = pytest.importorskip("playwright.sync_api").expect
    expect(locator).to_have_count(count, timeout=120_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as engine:
        running = engine.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of a comparison, of names of every kind, of many methods, and of runs that do not go together."""
    root = tmp_path_factory.mktemp("reports")
    comparison = make_comparison(root / "comparison", METHODS, seeds=3, rounds=ROUNDS, unseen=("clipart",))
    for row in (1, 2):
        add_diagnostics(comparison / f"row{row}" / "seed0", seed=row)
        add_cost(comparison / f"row{row}" / "seed0")
    path = comparison / "row2" / "seed0" / "diagnostics" / "every-kind.json"
    document = json.loads(path.read_text())
    for series in document["figures"][0]["series"]:  # else two figures would have the same axes by themselves
        series["y"] = [value and 5 * value for value in series["y"]]
    path.write_text(json.dumps(document))
    make_run(root / "odd" / "a", ODD, domains=(ODD_DOMAIN, "b" * 150, "日本語"))
    add_diagnostics(root / "odd" / "a")
    make_run(root / "odd" / "b", LONG, domains=(ODD_DOMAIN, "b" * 150, "日本語"))
    make_comparison(root / "forty", tuple(f"fedprox(mu={i / 10})" for i in range(40)), seeds=1, rounds=10)
    make_run(root / "mixed" / "a")
    make_run(root / "mixed" / "b", "fedbn", done=4, skipped=(1,))
    make_run(root / "mixed" / "c", "fedbn", data="pacs", domains=("art",))
    make_run(root / "unfinished" / "a", done=1)
    make_run(root / "empty" / "a", done=0)
    return {place.name: report.write([place]) for place in sorted(root.iterdir())}


@pytest.fixture
def opened(browser: Any, pages: dict[str, Path]) -> Iterator[Open]:
    """Opens a report by name; when the test ends, nothing was complained about and nothing was asked for."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def open_page(name: str, *, width: int = 1200, dark: bool = False, **options: Any) -> Any:
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, **options)
        contexts.append(context)
        page, address = context.new_page(), pages[name].resolve().as_uri()
        listen(page, complaints, lambda url: url == address)
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def listen(page: Any, complaints: list[str], may_ask: Callable[[str], bool], quiet: str = "\0") -> None:
    """All that a page should not do is a complaint; but for what has `quiet` in it."""
    page.on("console", lambda message: quiet in message.text or complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append("a dialog"), dialog.dismiss()))
    page.on("request", lambda request: may_ask(request.url) or complaints.append(f"asked for {request.url}"))


ALL = ["comparison", "odd", "forty", "mixed", "unfinished", "empty"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("width", [320, 1200])
def test_it_opens_in_silence_and_is_no_wider_than_the_screen(opened: Open, name: str, width: int) -> None:
    page = opened(name, width=width)
    assert page.locator("h1").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_everything_has_a_name_and_headings_do_not_skip(opened: Open, name: str) -> None:
    page = opened(name)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, select, [role], svg, a, summary")].filter((node) => {
            if (node.closest("[aria-hidden=true]")) return false;
            const label = node.labels?.[0]?.textContent || node.getAttribute("aria-label") || node.textContent;
            return !label.trim();
        }).map((node) => node.outerHTML.slice(0, 80))"""
    )
    assert nameless == []
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map((node) => Number(node.tagName[1]))")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(ids) == len(set(ids))
    anchors = page.evaluate("[...document.querySelectorAll('nav a')].map((node) => node.getAttribute('href').slice(1))")
    assert set(anchors) <= set(ids)


class TestTable:
    @pytest.mark.slow
    def test_it_sorts_both_ways_by_a_number_and_by_name(self, opened: Open) -> None:
        page = opened("comparison")
        table = page.locator("#g0-table table")
        methods = table.locator("tbody th")
        assert methods.all_inner_texts() == list(METHODS)
        last = {m: sum(accuracy(m, s, 0, ROUNDS - 1, ROUNDS) for s in range(3)) for m in METHODS}
        best_first = sorted(METHODS, key=lambda method: -last[method])
        assert best_first not in (list(METHODS), list(METHODS)[::-1]), "else sorting would show nothing"
        button = table.get_by_role("button", name="photo")
        button.click()
        assert methods.all_inner_texts() == best_first
        heading = table.locator("thead th", has_text="photo")
        assert heading.get_attribute("aria-sort") == "descending"
        button.press("Enter")
        assert methods.all_inner_texts() == best_first[::-1]
        assert heading.get_attribute("aria-sort") == "ascending"
        table.get_by_role("button", name="method").click()
        assert methods.all_inner_texts() == sorted(METHODS)
        assert heading.get_attribute("aria-sort") is None

    @pytest.mark.slow
    def test_it_is_there_without_javascript(self, opened: Open) -> None:
        page = opened("comparison", java_script_enabled=False)
        assert page.locator("#g0-table tbody tr").count() == len(METHODS)
        assert page.get_by_text("the figures need JavaScript").is_visible()
        assert not page.locator("#theme").is_visible()


class TestCurves:
    @pytest.mark.slow
    def test_the_legend_toggles_a_curve_by_mouse_and_by_keyboard(self, opened: Open) -> None:
        page = opened("comparison")
        section = page.locator("#g0-curves")
        curves, bands = section.locator(LINES), section.locator(BANDS)
        wait_for(curves, 3)
        wait_for(bands, 3)
        button = section.get_by_role("button", name="fedbn")
        button.click()
        wait_for(curves, 2)
        wait_for(bands, 2)
        assert button.get_attribute("aria-pressed") == "false"
        button.focus()
        page.keyboard.press("Space")
        wait_for(curves, 3)
        assert button.get_attribute("aria-pressed") == "true"

    @pytest.mark.slow
    def test_pointing_at_a_round_shows_all_values_there_the_highest_first(self, opened: Open) -> None:
        page = opened("comparison")
        wait_for(page.locator("#g0-curves").locator(LINES), 3)
        plot = page.locator("#g0-curves .plot")
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 100)
        tip = page.locator("#g0-curves .tip")
        assert tip.locator("strong").inner_text() == f"round {ROUNDS}"
        means = {m: sum(accuracy(m, s, d, ROUNDS - 1, ROUNDS) for s in range(3) for d in range(2)) / 6 for m in METHODS}
        rows = [row.split("\n") for row in tip.locator("div").all_inner_texts()]
        assert [name for name, *_ in rows] == sorted(METHODS, key=lambda m: -means[m])
        for name, value in rows:
            assert value.startswith(f"{100 * means[name]:.1f} ±")
        page.mouse.move(5, 300)
        assert not tip.is_visible()

    @pytest.mark.slow
    def test_a_finger_shows_them_too_and_they_stay_when_it_is_lifted(self, opened: Open) -> None:
        page = opened("comparison", width=390, has_touch=True)
        wait_for(page.locator("#g0-curves").locator(LINES), 3)
        plot = page.locator("#g0-curves .plot")
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        page.touchscreen.tap(box["x"] + box["width"] - 20, box["y"] + 60)
        tip = page.locator("#g0-curves .tip")
        assert tip.locator("strong").inner_text() == f"round {ROUNDS}"
        bounds = tip.bounding_box()
        assert bounds["x"] >= 0
        assert bounds["x"] + bounds["width"] <= 390
        page.locator("h3").first.tap()
        assert not tip.is_visible()

    @pytest.mark.slow
    def test_the_arrow_keys_read_the_values(self, opened: Open) -> None:
        page = opened("comparison")
        wait_for(page.locator("#g0-curves").locator(LINES), 3)
        plot = page.locator("#g0-curves [role=slider]")
        plot.focus()
        page.keyboard.press("End")
        assert plot.get_attribute("aria-valuetext").startswith(f"round {ROUNDS}: ")
        page.keyboard.press("ArrowLeft")
        text = plot.get_attribute("aria-valuetext")
        assert text.startswith(f"round {ROUNDS - 1}: ")
        assert all(method in text for method in METHODS)
        page.keyboard.press("Escape")
        assert not page.locator("#g0-curves .tip").is_visible()

    @pytest.mark.slow
    def test_another_metric_keeps_what_was_hidden(self, opened: Open) -> None:
        page = opened("comparison")
        section = page.locator("#g0-curves")
        wait_for(section.locator(LINES), 3)
        section.get_by_role("button", name="greg").click()
        section.get_by_role("combobox", name="Show").select_option(label="Test accuracy, sketch")
        section.get_by_text("Test accuracy, sketch, %").wait_for()
        wait_for(section.locator(LINES), 2)
        plot = section.locator("[role=slider]")
        plot.focus()
        page.keyboard.press("Home")
        mean = sum(accuracy("fedavg", s, 1, 0, ROUNDS) for s in range(3)) / 3
        assert f"fedavg {100 * mean:.1f} ±" in plot.get_attribute("aria-valuetext")

    @pytest.mark.slow
    def test_a_run_that_stopped_says_of_how_many_seeds_a_value_is(self, browser: Any, tmp_path: Path) -> None:
        make_run(tmp_path / "r" / "a", seed=0)
        make_run(tmp_path / "r" / "b", seed=1, done=3)
        page = browser.new_page()
        page.goto(report.write([tmp_path / "r"]).as_uri())
        wait_for(page.locator("#g0-curves").locator(LINES), 1)
        plot = page.locator("#g0-curves [role=slider]")
        plot.focus()
        page.keyboard.press("End")
        assert "(1 of 2 seeds)" in plot.get_attribute("aria-valuetext")
        page.keyboard.press("Home")
        assert "seeds)" not in plot.get_attribute("aria-valuetext")
        page.close()

    @pytest.mark.slow
    def test_of_forty_ten_are_drawn_and_all_can_be(self, opened: Open) -> None:
        page = opened("forty")
        section = page.locator("#g0-curves")
        wait_for(section.locator(LINES), 10)
        section.get_by_role("button", name="all", exact=True).click()
        wait_for(section.locator(LINES), 40)
        looks = section.locator(LINES).evaluate_all(
            "nodes => nodes.map((n) => n.getAttribute('stroke') + n.getAttribute('stroke-dasharray'))"
        )
        assert len(set(looks)) == 40, "no two curves look the same"
        section.get_by_role("button", name="none", exact=True).click()
        wait_for(section.locator(LINES), 0)
        assert section.locator(".plot.none").is_visible(), "where it is said that nothing is chosen"

    @pytest.mark.slow
    def test_ctrl_and_the_wheel_zoom_a_double_click_goes_back_and_the_wheel_alone_scrolls(self, opened: Open) -> None:
        page = opened("comparison")
        section = page.locator("#g0-curves")
        wait_for(section.locator(LINES), 3)
        ticks = section.locator(".role-axis-label > text")
        before = sorted(ticks.all_text_contents())
        section.locator(".plot").scroll_into_view_if_needed()
        box = section.locator(".plot").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.keyboard.down("Control")
        page.mouse.wheel(0, -400)
        page.keyboard.up("Control")
        texts = "[...document.querySelectorAll('#g0-curves .role-axis-label > text')].map((t) => t.textContent)"
        shown = f"old => JSON.stringify({texts}.sort())"
        page.wait_for_function(f"{shown} !== JSON.stringify(old)", arg=before)
        page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_function(f"{shown} === JSON.stringify(old)", arg=before)
        top = page.evaluate("scrollY")
        page.mouse.wheel(0, 200)
        page.wait_for_function("top => scrollY > top", arg=top)
        assert sorted(ticks.all_text_contents()) == before

    @pytest.mark.slow
    @pytest.mark.parametrize(("kind", "begins"), [("SVG", b"<svg"), ("PNG", b"\x89PNG")])
    def test_a_figure_is_saved_with_its_legend_and_without_what_is_hidden(
        self, opened: Open, kind: str, begins: bytes
    ) -> None:
        page = opened("comparison", dark=True)
        section = page.locator("#g0-curves")
        wait_for(section.locator(LINES), 3)
        section.get_by_role("button", name="greg").click()
        with page.expect_download() as saving:
            section.get_by_role("button", name=f"Save as {kind}").click()
        saved = Path(saving.value.path()).read_bytes()
        assert saved.startswith(begins)
        assert saving.value.suggested_filename.endswith(f".{kind.lower()}")
        if kind == "SVG":
            assert "mark-line" in saved.decode()
            assert "fedbn" in saved.decode(), "the legend"
            assert COLOURS["light"][0] in saved.decode(), "paper is light"


@pytest.mark.slow
def test_bars_begin_at_zero_and_are_as_long_as_their_means_with_a_dot_for_every_seed(opened: Open) -> None:
    page = opened("comparison")
    section = page.locator("#g0-domains")
    section.scroll_into_view_if_needed()
    wait_for(section.locator(BARS), 4 * len(METHODS))
    widths = section.locator(BARS).evaluate_all("nodes => nodes.map((n) => n.getBBox().width)")
    photo = widths[1 :: len(DOMAINS) + 1]  # a method after the other, each with the average and its domains
    means = [sum(accuracy(m, s, 0, ROUNDS - 1, ROUNDS) for s in range(3)) for m in METHODS]
    assert [w / photo[0] for w in photo] == pytest.approx([mean / means[0] for mean in means], rel=1e-2)
    assert section.locator(".plot .mark-symbol > path").count() == 3 * 4 * len(METHODS)
    before = section.locator(".plot svg").bounding_box()["height"]
    section.get_by_role("button", name="greg").click()
    wait_for(section.locator(BARS), 4 * (len(METHODS) - 1))
    assert section.locator(".plot svg").bounding_box()["height"] < before, "what is hidden leaves no gap"


class TestDiagnostics:
    @pytest.mark.slow
    def test_every_kind_is_drawn_for_two_runs_side_by_side_on_one_scale(self, opened: Open) -> None:
        page = opened("comparison")
        page.evaluate("drawEverything()")
        article = page.locator(".diagnostic", has_text="A figure of every kind")
        assert article.locator("h6").all_inner_texts() == ["fedavg, seed 0", "greg, seed 0"]
        for side in (0, 1):
            figures = article.locator(".beside > div").nth(side).locator(":scope > figure")
            assert figures.count() == 5
            wait_for(figures.nth(0).locator(LINES), 3)
            wait_for(figures.nth(1).locator(BARS), 5)  # one of six values is missing
            wait_for(figures.nth(2).locator(CELLS), 8)  # and one of nine
            wait_for(figures.nth(3).locator(POINTS), 120)
            assert figures.nth(4).locator("tbody tr").count() == 3
        ticks = [
            article.locator(".beside > div").nth(side).locator("figure").first.locator(".role-axis-label > text")
            for side in (0, 1)
        ]
        assert ticks[0].all_text_contents() == ticks[1].all_text_contents() != []
        article.get_by_label("beside").select_option(label="nothing")
        assert article.locator(".beside > div").count() == 1

    @pytest.mark.slow
    def test_a_class_and_a_domain_can_be_hidden(self, opened: Open, pages: dict[str, Path]) -> None:
        page = opened("odd")
        page.evaluate("drawEverything()")
        article = page.locator(".diagnostic", has_text="A figure of every kind")
        figure = article.locator("figure", has_text="Features in two dimensions")
        points = figure.locator(POINTS)
        wait_for(points, 120)
        article.get_by_role("button", name="horse").click()
        document = json.loads((pages["odd"].parent / "a" / "diagnostics" / "every-kind.json").read_text())
        recorded = next(figure for figure in document["figures"] if figure["kind"] == "points")
        kinds = list(zip(recorded["class"], recorded["domain"], strict=True))
        wait_for(points, sum(name != "horse" for name, _ in kinds))
        figure.get_by_role("button", name="sketch").click()
        wait_for(points, sum(name != "horse" and domain != "sketch" for name, domain in kinds))

    @pytest.mark.slow
    def test_the_circumstances_are_folded_and_drawn_when_they_are_opened_or_printed(self, opened: Open) -> None:
        page = opened("comparison")
        bars = page.locator("details.question").locator(BARS)
        assert not bars.first.is_visible()
        page.locator("details.question > summary").click()
        bars.first.wait_for()
        again = opened("comparison")
        again.evaluate("dispatchEvent(new Event('beforeprint'))")
        again.locator("details.question").locator(BARS).first.wait_for()

    @pytest.mark.slow
    @pytest.mark.parametrize("width", [360, 1200])
    def test_what_they_say_in_numbers_and_words_comes_first(self, opened: Open, width: int) -> None:
        page = opened("comparison", width=width)
        keys = page.locator(".keys table")
        assert keys.locator("tbody th").all_inner_texts() == ["accuracy, %", "gradient norm \u2193"]
        assert keys.is_visible()
        assert page.locator(".finding").first.inner_text().startswith("Gradient norm: ")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    @pytest.mark.slow
    def test_behind_every_figure_is_its_table(self, opened: Open) -> None:
        page = opened("comparison")
        page.locator("details.question > summary").click()
        plots = page.locator(".plot").count()
        assert page.locator("details.behind").count() == plots > 8
        for details in page.locator("details.behind").all():
            details.locator("summary").click()
            details.locator("tbody tr").first.wait_for()  # made when it is opened
        curve = page.locator("#g0-curves details.behind")
        assert curve.locator("tbody tr").count() == ROUNDS
        assert curve.locator("tbody th").first.inner_text() == "1", "rounds as the command line counts them"


class TestOddNames:
    @pytest.mark.slow
    def test_they_are_shown_as_they_are(self, opened: Open) -> None:
        page = opened("odd")
        assert ODD in page.locator("#g0-table tbody th").first.inner_text().replace("\n", "")
        assert page.locator("#g0-table thead th").nth(1).inner_text().startswith(ODD_DOMAIN[:10])
        assert page.locator("img").count() == 0

    @pytest.mark.slow
    def test_a_very_long_one_leaves_the_numbers_in_view(self, opened: Open) -> None:
        page = opened("odd")
        cell = page.locator("#g0-table tbody th").nth(1).bounding_box()
        assert cell["width"] < 320


@pytest.mark.slow
def test_runs_that_do_not_go_together_have_parts_of_their_own(opened: Open) -> None:
    page = opened("mixed")
    assert page.locator(".part").count() == 2
    assert page.get_by_text("their numbers are not compared").is_visible()
    wait_for(page.locator("#g0-curves").locator(LINES), 2)


# -- colours -----------------------------------------------------------------------------------------------------------
def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_text_and_curves_stand_out_in_both_themes(opened: Open, dark: bool) -> None:
    page = opened("forty", dark=dark)
    card = page.locator("#g0-curves").evaluate("node => getComputedStyle(node).backgroundColor")
    assert (luminance(card) < 0.05) is dark
    for place in ("h1", ".lead", "#g0-table td", "#g0-curves .what", "summary", "nav a", ".note", ".spread", "footer"):
        if page.locator(place).count():
            colour = page.locator(place).first.evaluate("node => getComputedStyle(node).color")
            assert contrast(colour, card) >= 4.5, place
    hidden = page.locator(".legend button[aria-pressed=false]").first
    assert hidden.evaluate("node => getComputedStyle(node).opacity") == "1"
    assert contrast(hidden.evaluate("node => getComputedStyle(node).color"), card) >= 4.5
    wait_for(page.locator("#g0-curves").locator(LINES), 10)
    label = page.locator("#g0-curves svg text").first.evaluate("node => getComputedStyle(node).fill")
    assert contrast(label, card) >= 4.5
    strokes = (
        page.locator("#g0-curves").locator(LINES).evaluate_all("nodes => nodes.map((n) => getComputedStyle(n).stroke)")
    )
    assert len(set(strokes)) == 10
    assert min(contrast(stroke, card) for stroke in strokes) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_numbers_can_be_read_on_every_shade_of_a_matrix(browser: Any, tmp_path: Path, dark: bool) -> None:
    shades = [round(i / 20, 2) for i in range(21)]
    names, values = [str(shade) for shade in shades], [[shade] for shade in shades]
    figure = {"kind": "matrix", "title": "t", "rows": names, "columns": ["value"], "values": values}
    make_run(tmp_path / "a")
    (tmp_path / "a" / "diagnostics").mkdir()
    (tmp_path / "a" / "diagnostics" / "m.json").write_text(json.dumps({"name": "m", "figures": [figure]}))
    page = browser.new_page(color_scheme="dark" if dark else "light")
    page.goto(report.write([tmp_path / "a"]).resolve().as_uri())
    page.evaluate("drawEverything()")
    figure = page.locator(".diagnostic")
    wait_for(figure.locator(CELLS), 21)
    fills = figure.locator(CELLS).evaluate_all("nodes => nodes.map((n) => getComputedStyle(n).fill)")
    texts = figure.locator(".plot .mark-text.role-mark > text").evaluate_all(
        "nodes => nodes.map((n) => [getComputedStyle(n).fill, getComputedStyle(n).opacity])"
    )
    page.close()
    assert len(fills) == len(texts) == 21
    assert len(set(fills)) == 21, "every value has its shade"
    for fill, (text, opacity) in zip(fills, texts, strict=True):
        assert contrast(fill, text) > 3.8
        assert opacity == "1"


@pytest.mark.slow
def test_the_theme_follows_the_system_until_it_is_chosen(opened: Open) -> None:
    page = opened("comparison", dark=True)
    background = "getComputedStyle(document.body).backgroundColor"
    assert luminance(page.evaluate(background)) < 0.05
    button = page.locator("#theme")
    assert button.inner_text() == "Light"
    button.click()
    assert luminance(page.evaluate(background)) > 0.8
    assert button.inner_text() == "Dark"
    page.emulate_media(color_scheme="light")
    button.click()
    assert luminance(page.evaluate(background)) < 0.05
    curve = page.locator("#g0-curves").locator(LINES).first
    curve.wait_for()
    page.wait_for_function(
        "c => document.querySelector('#g0-curves .mark-line > path')?.getAttribute('stroke') === c",
        arg=COLOURS["dark"][0],
    )


@pytest.mark.slow
def test_on_paper_it_is_light_and_without_controls(opened: Open) -> None:
    page = opened("comparison", dark=True)
    page.emulate_media(media="print")
    assert luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) > 0.9
    assert luminance(page.locator("h1").evaluate("node => getComputedStyle(node).color")) < 0.1
    for place in (".top", "#g0-curves .controls", ".copies"):
        assert not page.locator(place).first.is_visible()
    page.locator("#g0-curves .plot svg").first.wait_for()
    assert page.pdf(format="A4").startswith(b"%PDF")


@pytest.mark.slow
def test_the_page_is_printed_as_docs_report_md_says(pages: dict[str, Path], browser: Any, tmp_path: Path) -> None:
    del browser  # playwright must be there
    (block,) = (block for block in BY_PAGE["docs/report.md"] if block.kind == "run by")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(pages["comparison"].parent)
    typed = [sys.executable, "-m", *shlex.split(block.text, comments=True)]
    subprocess.run(typed, cwd=tmp_path, check=True)  # two of its engines cannot run in one thread
    assert (tmp_path / "demo.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(FedkeelError, match="is a directory"):
        report.write_pdf(pages["comparison"], tmp_path)
