"""The page as text: one file, nothing from outside, and no name that is read as markup."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from datetime import datetime
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from fedkeel import report
from fedkeel.cli import main
from fedkeel.drawing.show import embedded
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import read_comparison
from fedkeel.experiments.demo import PARTS
from fedkeel.report.page import render
from tests.report.samples import accuracy, add_diagnostics, make_comparison, make_run

ODD = "fedprox(note='</script><script>alert(1)</script>&\"')"
ODD_DOMAIN = '</script><img src=x onerror="alert(2)">'


class Outline(HTMLParser):
    """The tags of a page with their attributes, and the text of scripts, styles and cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags:
            self.texts.append((self.tags[-1][0], data))


def page_of(*directories: Path) -> str:
    return render(report.collect(directories), datetime(2026, 1, 2, 3, 4), "fedkeel report x")


def numbers_in(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="numbers">(.*?)</script>', page, re.S)
    assert found is not None
    return dict(json.loads(found[1]))


def figures_in(page: str, kind: str) -> list[dict[str, Any]]:
    """The figures of a kind, each with its data and its description."""
    document = numbers_in(page)
    found = [figure for figure in document["figures"] if figure["kind"] == kind]
    return [{**f, "data": document["data"][f["data"]], "spec": document["specs"][f["spec"]]} for f in found]


def test_nothing_is_asked_of_any_network(tmp_path: Path) -> None:
    make_comparison(tmp_path / "c", ("fedavg", "fedbn"))
    page = page_of(tmp_path / "c")
    for tag, attributes in Outline(page).tags:
        for name in ("src", "srcset", "href", "data", "action", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:,")), (tag, name, value)
    style = resources.files("fedkeel.report").joinpath("page.css").read_text()
    assert "url(" not in style
    assert "@import" not in style
    script = resources.files("fedkeel.report").joinpath("page.js").read_text()
    for word in ("fetch(", "XMLHttpRequest", "import(", "eval(", "new Function", "innerHTML", "document.write"):
        assert word not in script


def test_the_policy_names_exactly_the_script_and_the_style_that_are_there(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    page = page_of(tmp_path / "a")
    outline = Outline(page)
    policy = next(a["content"] for t, a in outline.tags if a.get("http-equiv") == "Content-Security-Policy") or ""
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert parts["default-src"] == "'none'"
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.S)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    (packed,) = re.findall(r'<script type="text/plain" id="vega">(.*?)</script>', page, re.S)
    vega = gzip.decompress(base64.b64decode(packed)).decode()
    hashes = {text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script, vega)}
    assert parts["script-src"] == f"'sha256-{hashes[script]}' 'sha256-{hashes[vega]}'", "and no 'unsafe-eval'"
    assert parts["style-src"] == f"'sha256-{hashes[style]}'"
    assert not any(
        "style" in attributes or any(n.startswith("on") for n in attributes) for _, attributes in outline.tags
    )


def test_names_that_look_like_markup_stay_names(tmp_path: Path) -> None:
    make_run(tmp_path / "a", ODD, domains=(ODD_DOMAIN, "plain"))
    add_diagnostics(tmp_path / "a")
    path = tmp_path / "a" / "diagnostics" / "every-kind.json"
    document = json.loads(path.read_text())
    document["title"] = document["what"] = document["paper"] = document["figures"][0]["title"] = ODD_DOMAIN
    path.write_text(json.dumps(document))
    page = page_of(tmp_path / "a")
    outline = Outline(page)
    assert [tag for tag, _ in outline.tags].count("script") == 3
    assert not any(tag == "img" for tag, _ in outline.tags)
    assert any(ODD in text for tag, text in outline.texts if tag in ("span", "h1"))
    assert figures_in(page, "lines")[0]["data"][0]["name"] == ODD
    assert figures_in(page, "bars")[0]["data"][0]["category"][1] == ODD_DOMAIN


def test_embedded_json_cannot_end_its_script_and_is_the_same_value() -> None:
    value = {"a": "</script><!--<script>", "b": ["\u2028", None, 1.5]}
    assert "<" not in embedded(value)
    assert json.loads(embedded(value)) == value
    with pytest.raises(ValueError):
        embedded(float("nan"))


def test_the_bars_have_the_mean_the_spread_and_every_seed_and_begin_at_zero(tmp_path: Path) -> None:
    make_comparison(tmp_path / "c", ("fedavg",), seeds=2, rounds=4, unseen=("clipart",))
    bars = figures_in(page_of(tmp_path / "c"), "bars")[0]
    (row,) = bars["data"]
    values = [100 * accuracy("fedavg", seed, 0, 3, 4) for seed in (0, 1)]
    assert row["category"] == ["average of trained", "photo", "sketch", "clipart (unseen)"]
    assert row["seeds"][1] == pytest.approx(values, abs=1e-3)
    assert row["value"][1] == pytest.approx(sum(values) / 2, abs=1e-3)
    assert row["spread"][1] == pytest.approx(abs(values[0] - values[1]) / 2**0.5, rel=1e-2)
    assert (bars["values"]["low"], bars["values"]["high"], bars["values"]["base"]) == (0, 100, 0)
    assert bars["spec"]["layer"][0]["encoding"]["x"]["title"] == "accuracy, %"
    assert "yOffset" not in bars["spec"]["encoding"], "one method needs no names beside its bars"


def test_a_single_seed_has_the_error_that_its_test_images_leave(tmp_path: Path) -> None:
    make_run(tmp_path / "a", rounds=2)
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        for domain, samples in (("photo", 100), ("sketch", 25)):
            record = {"kind": "evaluation", "round": 1, "client": domain, "domain": domain, "split": "test"}
            file.write(json.dumps({**record, "statistics": "global", "samples": samples, "accuracy": 0.5}) + "\n")
    page = page_of(tmp_path / "a")
    (row,) = figures_in(page, "bars")[0]["data"]
    share, z, n = accuracy("fedavg", 0, 0, 1, 2), 1.959964, 100
    half = z * (share * (1 - share) / n + z**2 / (4 * n**2)) ** 0.5 / (1 + z**2 / n)  # Wilson (1927)
    assert row["over"][1] - row["under"][1] == pytest.approx(200 * half, abs=0.02)
    assert row["under"][3] == row["over"][3] == pytest.approx(row["value"][3], abs=0.01), "of how many is not known"
    table = page[page.index("Samples of each domain") :].partition("</table>")[0]
    assert f"±{100 * half:.1f}" in table
    assert ">100<" in table
    assert ">25<" in table


def test_the_table_has_every_method_and_domain_with_the_best_in_bold(tmp_path: Path) -> None:
    make_comparison(tmp_path / "c", ("fedavg", "fedbn"), seeds=3)
    page = page_of(tmp_path / "c")
    mean = max(sum(accuracy(m, seed, 0, 7, 8) for seed in range(3)) / 3 for m in ("fedavg", "fedbn"))
    assert f"<b>{100 * mean:.1f}</b>" in page
    assert "Bold: no other is ahead of it, paired over seeds" in page
    for kind in ("As Markdown", "As LaTeX", "As CSV"):
        assert kind in page
    assert "fedkeel compare fedavg fedbn --seeds 3 --rounds 8" in page


def test_one_seed_makes_nothing_bold(tmp_path: Path) -> None:
    make_comparison(tmp_path / "c", ("fedavg", "fedbn"), seeds=1)
    page = page_of(tmp_path / "c")
    table = page[page.index('id="g0-table"') :].partition("</table>")[0]
    assert "<b>" not in table
    assert "Bold:" not in page


def test_of_forty_methods_ten_are_shown_at_first_the_best_and_fedavg(tmp_path: Path) -> None:
    methods = ("fedavg", *(f"fedprox(mu={i})" for i in range(39)))
    make_comparison(tmp_path / "c", methods, seeds=1, rounds=3)
    curves, bars = (figures_in(page_of(tmp_path / "c"), kind)[0] for kind in ("lines", "bars"))
    names = curves["legend"]["hidden"]
    assert len(names) == len(curves["data"]) == 40
    shown = [name for name in names if name not in curves["values"]["hidden"]]
    assert shown == names[:10], "those shown first differ in colour"
    assert "fedavg" in shown
    results = {m: sum(accuracy(m, 0, d, 2, 3) for d in range(3)) for m in methods}
    assert max(results, key=lambda m: results[m]) in shown
    assert bars["spec"]["encoding"]["color"]["scale"] == curves["spec"]["encoding"]["color"]["scale"]


def test_what_clients_gave_and_lost_is_counted(tmp_path: Path) -> None:
    make_run(tmp_path / "a", rounds=2)
    given = {"kind": "client", "client": "<b>one", "samples": 40, "loss": 1.25}
    lost = {"kind": "dropped", "round": 1, "client": "two", "reason": "it has <i>NaN"}
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        for record in ({**given, "round": 0}, {**given, "round": 1}, lost):
            file.write(json.dumps(record) + "\n")
    with open(tmp_path / "a" / "timing.jsonl", "a") as file:  # an earlier version had no clients there
        for round, known in enumerate(({}, {"clients": {"<b>one": 3.25, "who": 1}}, {"clients": {"<b>one": 4.25}})):
            file.write(json.dumps({"round": round, "train": 5.0, **known}) + "\n")
    page = page_of(tmp_path / "a")
    section = page[page.index('id="g0-clients"') :].partition("</section>")[0]
    assert ("td", "3.75") in Outline(section).texts, "its seconds, on average"
    assert "1 updates dropped" in section
    assert "it has &lt;i&gt;NaN" in section
    assert "&lt;b&gt;one" in section
    assert Outline(section).texts.count(("td", "2")) == 1, "updates of the first client"
    assert report.collect([tmp_path / "a"]).members[0].clients["<b>one"].bytes_up == pytest.approx(2 * 500_000 / 3)


def test_two_federations_with_one_name_are_told_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "r" / "a")
    make_run(tmp_path / "r" / "b", partition="dirichlet(alpha=0.5)")
    outline = Outline(page_of(tmp_path / "r"))
    links = [text for tag, text in outline.texts if tag == "a" and text.startswith("digits-shift")]
    assert links == ["digits-shift", "digits-shift, partition dirichlet(alpha=0.5)"]


@pytest.mark.slow
def test_a_large_comparison_stays_a_few_megabytes(tmp_path: Path) -> None:
    make_comparison(tmp_path / "c", tuple(f"fedprox(mu={i})" for i in range(40)), seeds=1, rounds=500)
    for row in range(40):
        add_diagnostics(tmp_path / "c" / f"row{row}" / "seed0", points=3000)
    path = report.write([tmp_path / "c"])
    assert path.stat().st_size < 6_000_000


class TestWriting:
    def test_of_one_directory_it_lies_there_and_is_written_over(self, tmp_path: Path) -> None:
        make_run(tmp_path / "a")
        assert report.write([tmp_path / "a"]) == tmp_path / "a" / "report.html"
        assert "Norms of the gradients" not in (tmp_path / "a" / "report.html").read_text()
        add_diagnostics(tmp_path / "a")
        assert report.write([tmp_path / "a"]) == tmp_path / "a" / "report.html"
        assert "Norms of the gradients" in (tmp_path / "a" / "report.html").read_text()

    def test_of_several_it_lies_here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        make_run(Path("a"))
        make_run(Path("b"), "fedbn")
        assert report.write(["a", "b"]) == Path("report.html")
        assert "fedkeel report a b" in Path("report.html").read_text()

    def test_a_file_that_is_no_report_is_never_overwritten(self, tmp_path: Path) -> None:
        make_run(tmp_path / "a")
        (tmp_path / "a" / "report.html").write_text("<p>My own notes.</p>")
        with pytest.raises(FedkeelError, match="is not a report"):
            report.write([tmp_path / "a"])
        with pytest.raises(FedkeelError, match="is a directory"):
            report.write([tmp_path / "a"], tmp_path)
        assert (tmp_path / "a" / "report.html").read_text() == "<p>My own notes.</p>"

    def test_a_place_that_cannot_be_written_is_one_sentence(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        make_run(tmp_path / "a")
        (tmp_path / "file").write_text("")
        beyond = str(tmp_path / "file" / "x")
        for words in (["-o", beyond], ["--tables", beyond], ["--figures", beyond]):
            assert main(["report", str(tmp_path / "a"), *words]) == 2
            error = capsys.readouterr().err
            assert error.count("\n") == 1
            assert f"choose another place with {words[0]}." in error

    def test_a_domain_whose_name_is_not_unicode_does_not_cost_the_page(self, tmp_path: Path) -> None:
        make_run(tmp_path / "a", domains=("caf\udce9", "plain"))
        assert b"caf?" in report.write([tmp_path / "a"]).read_bytes()


class TestCommandLine:
    def test_page_and_tables(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        make_comparison(tmp_path / "c", ("fedavg", "fedbn"))
        out = tmp_path / "pages" / "one.html"
        assert main(["report", str(tmp_path / "c"), "-o", str(out), "--tables", str(tmp_path / "t"), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["page"] == str(out)
        assert sorted(Path(path).name for path in document["written"]) == [
            "one.html",
            "table.csv",
            "table.md",
            "table.tex",
        ]
        assert "\\toprule" in (tmp_path / "t" / "table.tex").read_text()
        assert (tmp_path / "t" / "table.md").read_text().startswith("| method | photo |")

    def test_tables_of_different_data_are_different_files(self, tmp_path: Path) -> None:
        make_run(tmp_path / "r" / "a")
        make_run(tmp_path / "r" / "b", data="pacs", domains=("art",))
        written = report.write_tables(report.collect([tmp_path / "r"]), tmp_path / "t")
        assert {path.name for path in written} == {f"table-{i}.{e}" for i in (1, 2) for e in ("md", "tex", "csv")}

    def test_no_table_of_runs_that_are_not_finished(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        make_run(tmp_path / "a", done=2)
        assert main(["report", str(tmp_path / "a"), "--tables", str(tmp_path / "t")]) == 2
        assert "there is no table yet" in capsys.readouterr().err

    def test_a_wrong_format_is_told_before_anything_is_written(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        make_run(tmp_path / "a")
        assert main(["report", str(tmp_path / "a"), "--figures", str(tmp_path / "f"), "--format", "pfd"]) == 2
        assert "did you mean 'pdf'?" in capsys.readouterr().err
        assert not (tmp_path / "a" / "report.html").exists()

    def test_a_format_without_figures_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        make_run(tmp_path / "a")
        assert main(["report", str(tmp_path / "a"), "--format", "pdf"]) == 2
        assert "give --figures" in capsys.readouterr().err


class TestDemo:
    @pytest.fixture
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A demo that is over in no time."""
        place = tmp_path / "demo"
        parts = [read_comparison(make_comparison(place / part.name, ("fedavg", "fedbn"))) for part in PARTS]
        monkeypatch.setattr("fedkeel.experiments.demo.demo", lambda *_, **__: parts)
        return place

    def test_it_ends_with_the_path_of_its_report(self, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["demo", "--quiet", "--out", str(place)]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"The report, with curves: {place / 'report.html'}"
        assert (place / "report.html").exists()

    def test_a_file_of_someone_else_in_its_place_stays_and_the_table_is_printed(
        self, place: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (place / "report.html").write_text("mine")
        assert main(["demo", "--quiet", "--out", str(place)]) == 0
        output = capsys.readouterr()
        assert "fedbn" in output.out
        assert "there is no report" in output.err
        assert (place / "report.html").read_text() == "mine"


@pytest.mark.parametrize(("runs", "shown"), [(3, " open"), (12, "")])
def test_many_commands_are_shown_when_asked_for(tmp_path: Path, runs: int, shown: str) -> None:
    for seed in range(runs):  # of which no command makes a comparison, as each has a learning rate of its own
        make_run(tmp_path / f"run{seed}", seed=seed, learning_rate=0.01 * (1 + seed))
    assert f"<details{shown}><summary>Each run by itself</summary>" in page_of(*sorted(tmp_path.iterdir()))


def test_the_data_of_a_part_is_said_once(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    make_run(tmp_path / "two", data="digits")
    assert 'class="lead">Data <code>digits-shift</code>, model <code>' in page_of(tmp_path / "one")
    assert page_of(tmp_path / "one", tmp_path / "two").count('class="lead">Model <code>') == 2
