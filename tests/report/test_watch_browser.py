"""The page of `fedkeel watch` in a real browser: it grows with the run, outlives its server, can be read by all."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fedkeel.report import watch
from fedkeel.runs import live
from tests import tiny
from tests.report.samples import make_comparison, make_run
from tests.report.test_browser import IN_CHROMIUM, LINES, browser, listen, wait_for

__all__ = ["browser"]  # the fixture
pytestmark = [*IN_CHROMIUM, pytest.mark.slow]
ODD = "<img src=x onerror=alert(1)>"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int, Callable[[], None]]]]:
    """Serves a directory; returns the port and what ends it."""
    monkeypatch.setattr(watch, "SOONEST", 0.05)
    monkeypatch.setattr(watch, "SHARE", 100.0)
    monkeypatch.setattr(watch, "OVER", 0.05)
    with ExitStack() as stack:

        def serve(directory: Path, port: int = 0) -> tuple[int, Callable[[], None]]:
            server = watch.Server(directory, port)
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()

            def end() -> None:
                if thread.is_alive():
                    server.shutdown()
                    thread.join()
                    server.server_close()

            stack.callback(end)
            return int(server.server_address[1]), end

        yield serve


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens the page; when the test ends, nothing was complained about and nobody else was asked."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def open_page(port: int, width: int = 1200, **options: Any) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, **options))
        page, address = contexts[-1].new_page(), f"http://127.0.0.1:{port}/"
        # A server that ends is seen as a connection refused, reset or lost, by when it ends: what it answers counts.
        listen(page, complaints, lambda url: url.startswith(address), quiet="Failed to load resource: net::ERR_")
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def says(page: Any, place: str, text: str) -> None:
    pytest.importorskip("playwright.sync_api").expect(page.locator(place)).to_contain_text(text, timeout=120_000)


def one_more_round(run: Path, place: Path) -> None:
    """What a run of the same method would have recorded next."""
    done = sum('"kind": "round"' in line for line in (run / "metrics.jsonl").read_text().splitlines())
    longer = make_run(place / f"{done}", done=done + 1)
    (run / "metrics.jsonl").write_bytes((longer / "metrics.jsonl").read_bytes())


def test_it_grows_with_the_run_and_what_was_chosen_stays(
    tmp_path: Path, served: Callable[..., Any], opened: Callable[..., Any]
) -> None:
    run = make_run(tmp_path / "run", done=2)
    now = live.Live(run, tiny.Notes())
    now._set(round=2, done=1, clients=3)
    page = opened(served(run)[0])
    says(page, "#told", "Round 3 of 8.")
    says(page, "#tiles", "1 of 3 clients have trained")
    wait_for(page.locator(LINES), 5)  # average, three domains; test loss
    page.locator("#curves .legend button", has_text="sketch").click()
    wait_for(page.locator(LINES), 4)
    page.locator("#curves select").nth(1).select_option(label="Training loss")
    page.locator("#curves summary").first.click()
    before = page.locator(LINES).first.get_attribute("d")
    one_more_round(run, tmp_path)
    now.note("Something is odd.")
    now._set(round=3, done=0)
    now._write()
    says(page, "#told", "Round 4 of 8.")
    says(page, "#notes", "Something is odd.")
    says(page, "#curves table >> nth=0", "3")
    wait_for(page.locator("#curves table tbody tr"), 3)
    page.wait_for_function("d => document.querySelector('.plot .mark-line > path').getAttribute('d') !== d", arg=before)
    wait_for(page.locator(LINES), 4)  # what was hidden still is
    assert page.locator("#curves select").nth(1).input_value() == "1"
    assert page.title().startswith("37 %")


def test_it_waits_for_a_first_run_outlives_its_server_and_says_when_all_is_over(
    tmp_path: Path, served: Callable[..., Any], opened: Callable[..., Any]
) -> None:
    place = tmp_path / "runs"
    place.mkdir()
    port, end = served(place)
    page = opened(port)
    says(page, "#told", "This page waits. A run or a comparison with")
    assert page.locator("#report").is_hidden()
    make_run(place / "run", done=3)
    says(page, "#told", "Stopped after 3 of 8 rounds.")
    end()
    says(page, "#lost", "does not answer")
    assert page.locator("#told").inner_text().startswith("Stopped")
    (place / "run").rename(tmp_path / "before")
    make_run(place / "run")
    served(place, port)
    says(page, "#told", "Finished after 8 rounds")
    page.locator("#lost").wait_for(state="hidden")
    page.locator("#report").click()
    says(page, "h1", "fedavg on digits-shift")
    assert page.locator("#g0-table").is_visible()


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1400, False)])
def test_a_comparison_fits_the_screen_and_its_table_keeps_its_order(
    tmp_path: Path, served: Callable[..., Any], opened: Callable[..., Any], width: int, dark: bool
) -> None:
    place = make_comparison(tmp_path / "c", ("fedavg", "fedbn", "gn" * 60), seeds=2)
    comparison = json.loads((place / "comparison.json").read_text())
    comparison["runs"] += [{"method": ODD, "seed": 0, "directory": "row9/seed0"}]
    (place / "comparison.json").write_text(json.dumps(comparison))
    page = opened(served(place)[0], width, color_scheme="dark" if dark else "light")
    says(page, "#tables", ODD)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#tables thead button", has_text="run").click()
    page.locator("#tables thead button", has_text="run").click()
    first = page.locator("#tables tbody th").first.inner_text()
    (place / "row1/seed1/summary.json").unlink()
    says(page, "#told", "5 of 7 runs are finished")
    assert page.locator("#tables tbody th").first.inner_text() == first
    assert page.locator("#tables th[aria-sort=descending]").count() == 1
    assert page.locator("#told").get_attribute("aria-live") == "polite"
