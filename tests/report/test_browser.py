"""The pages in a real browser: they open in silence, tables sort, curves are chosen, and all can read them."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedkeel import report
from fedkeel.report import watch
from tests.report.samples import DOMAINS, accuracy, add_diagnostics, make_comparison, make_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
METHODS = ("fedbn", "fedavg", "greg")
ROUNDS = 20
ODD = "fedprox(note='<script>alert(1)</script>')"
ODD_DOMAIN = '"><img src=x onerror=alert(2)>'
LONG = "fedprox(mu=0.1)+" + "a_method_whose_name_does_not_end_" * 8

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
Open = Callable[..., Any]
LINES, BARS, POINTS = ".mark-line.role-mark path", ".mark-rect.role-mark path", ".mark-symbol.role-mark path"


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
    make_run(root / "odd" / "a", ODD, domains=(ODD_DOMAIN, "b" * 150, "日本語"))
    add_diagnostics(root / "odd" / "a")
    make_run(root / "odd" / "b", LONG, domains=(ODD_DOMAIN, "b" * 150, "日本語"))
    make_comparison(root / "forty", tuple(f"fedprox(mu={i / 10})" for i in range(40)), seeds=1, rounds=10)
    make_run(root / "mixed" / "a")
    make_run(root / "mixed" / "b", "fedbn", done=4, skipped=(1,))
    make_run(root / "mixed" / "c", "fedbn", data="pacs", domains=("art",))
    make_run(root / "empty" / "a", done=0)
    return {place.name: report.write([place]) for place in sorted(root.iterdir())}


@pytest.fixture
def opened(browser: Any, pages: dict[str, Path]) -> Iterator[Open]:
    """Opens a report by name, or an address; when the test ends, nothing was complained about or asked of others."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def open_page(name: str, *, width: int = 1200, dark: bool = False, **options: Any) -> Any:
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, **options)
        contexts.append(context)
        page, address = context.new_page(), pages[name].resolve().as_uri() if name in pages else name
        # A server that ends is seen as a connection refused.
        page.on("console", lambda m: "net::ERR_" in m.text or complaints.append(f"{m.type}: {m.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append("a dialog"), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith(address) or complaints.append(request.url))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def draw(page: Any, part: str) -> Any:
    section = page.locator(part)
    page.evaluate("part => Promise.all(all(part + ' .chart').map(draw))", part)
    return section


@pytest.mark.parametrize("name", ["comparison", "odd", "forty", "mixed", "empty"])
@pytest.mark.parametrize("width", [320, 1200])
def test_it_opens_in_silence_and_is_no_wider_than_the_screen(opened: Open, name: str, width: int) -> None:
    page = opened(name, width=width)
    assert page.locator("h1").is_visible()
    page.evaluate("Promise.all(all('.chart').map(draw))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map((node) => Number(node.tagName[1]))")
    assert all(after <= before + 2 for before, after in itertools.pairwise(levels))
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((node) => node.id)")
    assert len(ids) == len(set(ids))
    anchors = page.evaluate("[...document.querySelectorAll('nav a')].map((node) => node.getAttribute('href').slice(1))")
    assert set(anchors) <= set(ids)


def test_a_table_sorts_both_ways_by_a_number_and_by_name(opened: Open) -> None:
    page = opened("comparison")
    table = page.locator("#g0-table table")
    methods = table.locator("tbody th")
    assert methods.all_inner_texts() == list(METHODS)
    last = {m: sum(accuracy(m, s, 0, ROUNDS - 1, ROUNDS) for s in range(3)) for m in METHODS}
    best_first = sorted(METHODS, key=lambda method: -last[method])
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


def test_tables_are_there_without_javascript(opened: Open) -> None:
    page = opened("comparison", java_script_enabled=False)
    assert page.locator("#g0-table tbody tr").count() == len(METHODS)
    assert not page.locator("#theme").is_visible()


def test_the_legend_chooses_a_curve_and_pointing_at_a_round_reads_its_values(opened: Open) -> None:
    page = opened("comparison")
    section = draw(page, "#g0-curves")
    wait_for(section.locator(LINES), 3)
    section.scroll_into_view_if_needed()
    section.locator(".role-legend-label text", has_text="fedbn").click()
    wait_for(section.locator(LINES), 1)
    box = section.locator("svg").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 100)
    mean = sum(accuracy("fedbn", s, d, ROUNDS - 1, ROUNDS) for s in range(3) for d in range(2)) / 6
    tip = page.locator("#vg-tooltip-element")
    tip.wait_for()
    assert re.search(rf"fedbn\s+{100 * mean:.1f} ±", tip.inner_text())


def test_another_metric_is_drawn_when_it_is_chosen_and_its_numbers_are_below(opened: Open) -> None:
    page = opened("comparison")
    section = draw(page, "#g0-curves")
    section.get_by_role("combobox", name="Show").select_option(label="Test accuracy, sketch")
    section.scroll_into_view_if_needed()
    section.get_by_text("Test accuracy, sketch, %").first.wait_for()
    section.locator(".behind summary").click()
    wait_for(section.locator(".behind tbody tr"), ROUNDS)
    assert section.locator(".behind tbody th").first.inner_text() == "1", "rounds as the command line counts them"


def test_of_forty_ten_are_drawn_in_colours_of_their_own(opened: Open) -> None:
    section = draw(opened("forty"), "#g0-curves")
    wait_for(section.locator(LINES), 10)
    strokes = section.locator(LINES).evaluate_all("nodes => nodes.map((n) => n.getAttribute('stroke'))")
    assert len(set(strokes)) == 10


def test_bars_are_as_long_as_their_means_with_a_dot_for_every_seed(opened: Open) -> None:
    section = draw(opened("comparison"), "#g0-domains")
    wait_for(section.locator(BARS), 4 * len(METHODS))
    widths = section.locator(BARS).evaluate_all("nodes => nodes.map((n) => n.getBBox().width)")
    photo = widths[1 :: len(DOMAINS) + 1]  # a method after the other, each with the average and its domains
    means = [sum(accuracy(m, s, 0, ROUNDS - 1, ROUNDS) for s in range(3)) for m in METHODS]
    assert [w / photo[0] for w in photo] == pytest.approx([mean / means[0] for mean in means], rel=1e-2)
    assert section.locator(POINTS).count() == 3 * 4 * len(METHODS)


def test_diagnostics_of_two_runs_are_side_by_side_with_one_axis(opened: Open) -> None:
    section = draw(opened("comparison"), "#g0-diagnostics")
    places = section.locator(".beside").first.locator(".choice")
    assert places.count() == 2
    ticks = []
    for side in (0, 1):
        figures = places.nth(side).locator("figure")
        assert figures.count() == 5
        wait_for(figures.nth(0).locator(LINES), 3)
        wait_for(figures.nth(3).locator(POINTS), 120)
        assert figures.nth(4).locator("tbody tr").count() == 3
        ticks.append(figures.nth(0).locator(".role-axis-label text").all_text_contents())
    assert ticks[0] == ticks[1] != []


@pytest.mark.parametrize("kind", ["SVG", "PNG"])
def test_a_figure_is_saved(opened: Open, kind: str) -> None:
    page = opened("comparison")
    section = draw(page, "#g0-curves")
    wait_for(section.locator(LINES), 3)
    with page.expect_download() as saving:
        section.get_by_text(f"Save as {kind}").click()
    assert saving.value.suggested_filename.endswith(f".{kind.lower()}")


# -- colours -----------------------------------------------------------------------------------------------------------
def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_curves_stand_out_in_both_themes(opened: Open, dark: bool) -> None:
    page = opened("forty", dark=dark)
    section = draw(page, "#g0-curves")
    card = section.evaluate("node => getComputedStyle(node).backgroundColor")
    assert (luminance(card) < 0.05) is dark
    for place in (
        "h1",
        "#g0-table td",
        "#g0-curves .what",
        "summary",
        "nav a",
        ".note",
        "footer",
        "#g0-curves svg text",
    ):
        style = "fill" if "svg" in place else "color"
        colour = page.locator(place).first.evaluate(f"node => getComputedStyle(node).{style}")
        assert contrast(colour, card) >= 4.5, place
    wait_for(section.locator(LINES), 10)
    strokes = section.locator(LINES).evaluate_all("nodes => nodes.map((n) => getComputedStyle(n).stroke)")
    assert min(contrast(stroke, card) for stroke in strokes) >= 3


def test_the_theme_follows_the_system_until_it_is_chosen(opened: Open) -> None:
    page = opened("comparison", dark=True)
    background = "getComputedStyle(document.body).backgroundColor"
    assert luminance(page.evaluate(background)) < 0.05
    page.locator("#theme").click()
    assert luminance(page.evaluate(background)) > 0.8
    assert page.locator("#theme").inner_text() == "Dark"


# -- watch -------------------------------------------------------------------------------------------------------------
def test_a_watched_run_grows_what_was_chosen_stays_and_a_server_that_is_gone_is_told(
    tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SOONEST", 0.05)
    run = make_run(tmp_path / "run", done=2, domains=(ODD_DOMAIN, "sketch"))
    with watch.Server(run, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        page = opened(server.address, width=400)
        page.get_by_text("2 of 8").wait_for()
        page.locator("#parts select").first.select_option(label="Test accuracy, sketch")
        before = page.locator(LINES).first.get_attribute("d")
        longer = make_run(tmp_path / "longer", done=5, domains=(ODD_DOMAIN, "sketch"))
        (run / "metrics.jsonl").write_bytes((longer / "metrics.jsonl").read_bytes())
        page.get_by_text("5 of 8").wait_for()
        page.wait_for_function(f"d => document.querySelector('{LINES}').getAttribute('d') !== d", arg=before)
        assert page.locator("#parts select").first.locator("option:checked").inner_text() == "Test accuracy, sketch"
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert json.dumps(page.title()).startswith('"62 %')
        server.shutdown()
        thread.join()
    page.get_by_text("does not answer").wait_for()
