"""Why a method wins: key numbers of the diagnostics by method, and sentences that say no more than they show."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from fedkeel import report
from fedkeel.report.collect import Group, collect
from fedkeel.report.figures import first_shown
from fedkeel.report.why import explanations, readings, rivals, sentence
from tests.report.samples import make_run
from tests.report.test_page import Outline, page_of


def add_key(directory: Path, name: str, label: str, value: float, better: str | None = None, **more: Any) -> None:
    key = {"label": label, "value": value, "better": better, **more}
    figure = {"kind": "lines", "title": name, "series": [{"name": "a", "x": [0, 1], "y": [1.0, value]}], "key": key}
    folder = directory / "diagnostics"
    folder.mkdir(exist_ok=True)
    document = {"name": name, "title": f"About {name}", "what": "What.", "paper": "none", "figures": [figure]}
    (folder / f"{name}.json").write_text(json.dumps(document))


def with_accuracy(directory: Path, method: str, seed: int, value: float) -> Path:
    make_run(directory, method, seed=seed)
    path = directory / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "accuracy": value}))
    return directory


GAPS = {"central": (0.0, 0.1, 0.2), "fedavg": (1.0, 1.2, 1.1), "greg": (0.25, 0.35, 0.3), "gn": (0.9, 1.3, 1.1)}
ACCURACY = {"central": 0.95, "fedavg": 0.6, "greg": 0.8, "gn": 0.7}


@pytest.fixture
def group(tmp_path: Path) -> Group:
    """`greg` wins; its loss gap is lower, its NMI is the same but for the seeds, its rank is lower."""
    for method, gaps in GAPS.items():
        for seed, gap in enumerate(gaps):
            run = with_accuracy(tmp_path / f"{method}{seed}", method, seed, ACCURACY[method])
            add_key(run, "loss-gap", "loss gap", gap, "low")
            add_key(run, "nmi", "NMI", 0.5 + 0.1 * seed + 0.01 * (method == "greg") * seed, "high")
            add_key(run, "singular-values", "rank", {"greg": 3.0}.get(method, 9.0) + seed, "high")
            add_key(run, "gradient-norms", "norm", 2.0 + seed)
            add_key(run, "fairness", "spread", 0.25, "low", percent=True)
    (group,) = collect([tmp_path]).groups
    return group


def test_a_reading_is_the_mean_and_spread_over_the_seeds(group: Group) -> None:
    found = {reading.diagnostic: reading for reading in readings(group)}
    for method, gaps in GAPS.items():
        cell = found["loss-gap"].methods[method]
        assert cell.mean == pytest.approx(statistics.mean(gaps))
        assert cell.std == pytest.approx(statistics.stdev(gaps))
    assert found["fairness"].text("greg") == "25.0 \u00b10.0"
    assert found["fairness"].heading == "spread, points \u2193"
    assert found["nmi"].heading == "NMI \u2191"
    assert found["gradient-norms"].heading == "norm"


def test_the_best_is_held_against_fedavg_and_central_is_no_rival(group: Group) -> None:
    pair = rivals(group.results)
    assert pair is not None
    assert [row.method for row in pair] == ["greg", "fedavg"]


def test_without_fedavg_it_is_the_last_that_it_is_held_against(tmp_path: Path) -> None:
    for method, value in (("gn", 0.5), ("greg", 0.9), ("fedbn", 0.7)):
        with_accuracy(tmp_path / method, method, 0, value)
    pair = rivals(collect([tmp_path]).groups[0].results)
    assert pair is not None
    assert [row.method for row in pair] == ["greg", "gn"]
    assert rivals(collect([tmp_path / "gn"]).groups[0].results) is None


def test_of_a_best_method_that_recorded_nothing_the_next_is_spoken_of(group: Group, tmp_path: Path) -> None:
    with_accuracy(tmp_path / "fedwon", "fedwon", 0, 0.9)
    (more,) = collect([tmp_path]).groups
    assert sentence(readings(more)[1], more.results) == sentence(readings(group)[1], group.results)
    assert explanations(more) == []


def test_each_sentence_says_what_its_numbers_say(group: Group) -> None:
    told = {reading.diagnostic: sentence(reading, group.results) for reading in readings(group)}
    assert told["loss-gap"] == ("Loss gap: greg 0.3 \u00b10.05, fedavg 1.1 \u00b10.1; lower is better: greg is ahead.")
    assert told["nmi"].endswith("; higher is better: undecided.")
    assert told["singular-values"].endswith("; higher is better: greg is behind.")
    assert told["gradient-norms"] == "Norm: greg 3 \u00b11, fedavg 3 \u00b11."


def test_the_top_of_the_page_lists_what_goes_with_the_lead_and_what_does_not(group: Group) -> None:
    assert explanations(group) == [
        "What goes with the lead of greg over fedavg: loss gap (0.3 against 1.1).",
        "What speaks against it: rank (4 against 10).",
    ]


def test_where_accuracy_is_undecided_there_is_no_lead_to_explain(tmp_path: Path) -> None:
    for method, values in {"fedavg": (0.5, 0.6, 0.7), "greg": (0.52, 0.62, 0.68)}.items():
        for seed, value in enumerate(values):
            run = with_accuracy(tmp_path / f"{method}{seed}", method, seed, value)
            add_key(run, "loss-gap", "loss gap", GAPS[method][seed], "low")
    (level,) = collect([tmp_path]).groups
    assert explanations(level) == []
    assert sentence(readings(level)[0], level.results).endswith("; lower is better: greg is ahead.")
    assert "highest, undecided: greg" in page_of(tmp_path)


def test_the_page_has_the_table_the_sentences_and_the_questions_in_order(group: Group, tmp_path: Path) -> None:
    page = page_of(tmp_path)
    table = page[page.index('<div class="keys">') :].partition("</table>")[0]
    heads = [text for tag, text in Outline(table.partition("</thead>")[0]).texts if tag in ("span", "th")]
    assert [head for head in heads if head.strip()] == ["greg", "fedavg", "central", "gn"]
    row = table[table.index("loss gap") :].partition("</tr>")[0]
    assert [text for tag, text in Outline(row).texts if tag == "b" and text.strip()] == ["0.3"], (
        "the best of those that compete"
    )
    questions = [text for tag, text in Outline(page).texts if tag == "h4"]
    assert questions[:4] == [
        "Is every domain served?",
        "Do the global statistics fit?",
        "Do features of one class meet?",
        "How did the training go?",
    ]
    assert page.count('class="finding"') == len(readings(group)) == 5
    article = page[page.index("About loss-gap") :].partition("</article>")[0]
    chosen = [text for tag, text in Outline(article).texts if tag == "option"]
    selected = [attributes["value"] for tag, attributes in Outline(article).tags if "selected" in attributes]
    assert [chosen[int(value or 0)] for value in selected[:1]] == ["greg, seed 0"]
    assert [chosen[len(chosen) // 2 + 1 + int(value or 0)] for value in selected[1:]] == ["fedavg, seed 0"]


def test_a_single_run_has_its_number_in_words(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    add_key(run, "loss-gap", "loss gap", 0.123456, "low")
    page = page_of(run)
    assert '<p class="finding">Loss gap: 0.123; lower is better.</p>' in page
    assert 'class="keys"' not in page


def test_what_is_the_same_for_all_runs_is_shown_once(tmp_path: Path) -> None:
    for method in ("fedavg", "greg"):
        add_key(make_run(tmp_path / method, method), "label-distribution", "labels", 1.0)
    (group,) = collect([tmp_path]).groups
    assert list(group.diagnostics[0].runs) == ["all runs"]
    assert report.write([tmp_path], tmp_path / "page.html").exists()


@pytest.mark.parametrize("key", ["text", {"label": "a", "value": None}, {"value": 1.0}, {"label": "a", "better": "up"}])
def test_a_key_that_is_none_is_told(tmp_path: Path, key: Any) -> None:
    run = make_run(tmp_path / "a")
    add_key(run, "mine", "a", 1.0)
    path = run / "diagnostics" / "mine.json"
    document = json.loads(path.read_text())
    document["figures"][0]["key"] = key
    path.write_text(json.dumps(document))
    (notice,) = collect([run]).notices
    assert "mine.json" in notice


def test_many_options_of_the_baselines_leave_room_for_the_best(tmp_path: Path) -> None:
    for i in range(12):
        with_accuracy(tmp_path / f"fedavg{i}", "fedavg", 0, 0.3 + i / 100)
        path = tmp_path / f"fedavg{i}" / "config.toml"
        path.write_text(path.read_text().replace("learning_rate = ", f"learning_rate = {i + 1}"))
    with_accuracy(tmp_path / "greg", "greg", 0, 0.9)
    (group,) = collect([tmp_path]).groups
    rows = {row.method: row for row in group.results.rows}
    shown = first_shown(group)
    assert len(shown) == 10
    assert shown == set(sorted(rows, key=lambda label: -rows[label].average.mean)[:10])
