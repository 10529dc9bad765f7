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
from fedkeel.errors import FedkeelError
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


def charts_in(page: str) -> list[dict[str, Any]]:
    """The figures as Vega-Lite, in the order of the page."""
    found = re.search(r'<script type="application/json" id="numbers">(.*?)</script>', page, re.S)
    assert found is not None
    return [figure["spec"] for figure in json.loads(found[1])["figures"] if "spec" in figure]


def rows_of(page: str, description: str) -> list[dict[str, Any]]:
    chart = next(chart for chart in charts_in(page) if chart["description"].startswith(description))
    return list(chart["data"]["values"])


def test_nothing_is_asked_of_any_network(tmp_path: Path) -> None:
    make_comparison(tmp_path / "c", ("fedavg", "fedbn"))
    for tag, attributes in Outline(page_of(tmp_path / "c")).tags:
        for name in ("src", "srcset", "href", "data", "action", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:,")), (tag, name, value)
    style, script = (resources.files("fedkeel.report").joinpath(f"page.{kind}").read_text() for kind in ("css", "js"))
    assert not any(word in style for word in ("url(", "@import"))
    assert not any(word in script for word in ("XMLHttpRequest", "import(", "eval(", "new Function", "document.write"))
    assert len(script.splitlines()) <= 150


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
    own = {name for _, attributes in outline.tags for name in attributes}
    assert not any(name == "style" or name.startswith("on") for name in own)


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
    assert any(ODD in text for tag, text in outline.texts if tag == "h1")
    (row,) = rows_of(page, "accuracy, %")
    assert row["name"] == ODD
    assert row["x"][1] == ODD_DOMAIN


def test_the_bars_have_the_mean_the_spread_and_every_seed(tmp_path: Path) -> None:
    make_comparison(tmp_path / "c", ("fedavg",), seeds=2, rounds=4, unseen=("clipart",))
    (row,) = rows_of(page_of(tmp_path / "c"), "accuracy, %")
    values = [100 * accuracy("fedavg", seed, 0, 3, 4) for seed in (0, 1)]
    assert row["x"] == ["average of trained", "photo", "sketch", "clipart (unseen)"]
    assert row["seeds"][1] == pytest.approx(values, abs=1e-2)
    assert row["y"][1] == pytest.approx(sum(values) / 2, abs=1e-2)
    assert row["spread"][1] == pytest.approx(abs(values[0] - values[1]) / 2**0.5, rel=1e-2)


def test_a_single_seed_has_the_error_that_its_test_images_leave(tmp_path: Path) -> None:
    make_run(tmp_path / "a", rounds=2)
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        for domain, samples in (("photo", 100), ("sketch", 25)):
            record = {"kind": "evaluation", "round": 1, "client": domain, "domain": domain, "split": "test"}
            file.write(json.dumps({**record, "statistics": "global", "samples": samples, "accuracy": 0.5}) + "\n")
    page = page_of(tmp_path / "a")
    (row,) = rows_of(page, "accuracy, %")
    share, z, n = accuracy("fedavg", 0, 0, 1, 2), 1.959964, 100
    half = z * (share * (1 - share) / n + z**2 / (4 * n**2)) ** 0.5 / (1 + z**2 / n)  # Wilson (1927)
    assert row["high"][1] - row["low"][1] == pytest.approx(200 * half, abs=0.02)
    assert row["low"][3] == row["high"][3] == pytest.approx(row["y"][3], abs=0.01), "of how many is not known"
    table = page[page.index('id="g0-domains"') :].partition("</table>")[0]
    assert f">{100 * half:.1f}<" in table
    assert ">100<" in table


def test_the_table_has_every_method_and_domain_with_the_best_in_bold(tmp_path: Path) -> None:
    make_comparison(tmp_path / "c", ("fedavg", "fedbn"), seeds=3)
    page = page_of(tmp_path / "c")
    mean = max(sum(accuracy(m, seed, 0, 7, 8) for seed in range(3)) / 3 for m in ("fedavg", "fedbn"))
    assert f"<b>{100 * mean:.1f}</b>" in page
    assert "Bold: no other is ahead of it, paired over seeds" in page
    assert all(kind in page for kind in ("As Markdown", "As LaTeX", "As CSV"))
    config = tmp_path / "c" / "row0" / "seed0" / "config.toml"
    assert f"fedkeel compare fedavg fedbn --seeds 0,1,2, --config {config}" in page


def test_one_seed_makes_nothing_bold_and_nobody_the_best(tmp_path: Path) -> None:
    make_comparison(tmp_path / "c", ("fedavg", "fedbn"), seeds=1)
    page = page_of(tmp_path / "c")
    table = page[page.index('id="g0-table"') :].partition("</table>")[0]
    assert "<b>" not in table
    assert "Bold:" not in page
    assert "highest, undecided:" in page


def test_of_forty_methods_ten_are_shown_at_first_the_best_and_fedavg(tmp_path: Path) -> None:
    methods = ("fedavg", *(f"fedprox(mu={i})" for i in range(39)))
    make_comparison(tmp_path / "c", methods, seeds=1, rounds=3)
    curves, bars = (
        c for c in charts_in(page_of(tmp_path / "c")) if c["description"].startswith(("Test accuracy, mean", "acc"))
    )
    names = curves["encoding"]["color"]["scale"]["domain"]
    assert len(names) == len(curves["data"]["values"]) == 40
    (param,) = (p for layer in curves["layer"] for p in layer.get("params", ()) if p["name"] == "chosen_name")
    shown = [choice["name"] for choice in param["value"]]
    assert shown == names[:10], "those shown first differ in colour"
    results = {m: sum(accuracy(m, 0, d, 2, 3) for d in range(3)) for m in methods}
    assert {"fedavg", max(results, key=lambda m: results[m])} <= {*shown}
    assert bars["encoding"]["color"]["scale"]["domain"] == names, "a method has one colour in all figures"


def test_what_clients_gave_and_lost_is_counted(tmp_path: Path) -> None:
    make_run(tmp_path / "a", rounds=2)
    given = {"kind": "client", "client": "<b>one", "samples": 40, "loss": 1.25}
    lost = {"kind": "dropped", "round": 1, "client": "two", "reason": "it has <i>NaN"}
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        for record in ({**given, "round": 0}, {**given, "round": 1}, lost):
            file.write(json.dumps(record) + "\n")
    with open(tmp_path / "a" / "timing.jsonl", "a") as file:
        for round, seconds in enumerate((3.25, 4.25)):
            file.write(json.dumps({"round": round, "train": 5.0, "clients": {"<b>one": seconds}}) + "\n")
    page = page_of(tmp_path / "a")
    section = page[page.index('id="g0-clients"') :].partition("</section>")[0]
    assert ("td", "3.75") in Outline(section).texts, "its seconds, on average"
    assert "1 updates dropped" in section
    assert "it has &lt;i&gt;NaN" in section
    assert Outline(section).texts.count(("td", "2")) == 1, "updates of the first client"
    assert report.collect([tmp_path / "a"]).members[0].clients["<b>one"].bytes_up == pytest.approx(2 * 500_000 / 3)


@pytest.mark.slow
def test_a_large_comparison_stays_a_few_megabytes(tmp_path: Path) -> None:
    make_comparison(tmp_path / "c", tuple(f"fedprox(mu={i})" for i in range(40)), seeds=1, rounds=500)
    for row in range(40):
        add_diagnostics(tmp_path / "c" / f"row{row}" / "seed0", points=3000)
    assert report.write([tmp_path / "c"]).stat().st_size < 8_000_000


class TestWriting:
    def test_of_one_directory_it_lies_there_and_is_written_over(self, tmp_path: Path) -> None:
        make_run(tmp_path / "a")
        assert report.write([tmp_path / "a"]) == tmp_path / "a" / "report.html"
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
        for place in (None, tmp_path):
            with pytest.raises(FedkeelError, match="is not a report"):
                report.write([tmp_path / "a"], place)
        assert (tmp_path / "a" / "report.html").read_text() == "<p>My own notes.</p>"

    def test_a_domain_whose_name_is_not_unicode_does_not_cost_the_page(self, tmp_path: Path) -> None:
        make_run(tmp_path / "a", domains=("caf\udce9", "plain"))
        assert report.write([tmp_path / "a"]).read_bytes()


class TestCommandLine:
    def test_page_and_tables(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        make_comparison(tmp_path / "c", ("fedavg", "fedbn"))
        out, tables = tmp_path / "pages" / "one.html", tmp_path / "t"
        assert main(["report", str(tmp_path / "c"), "-o", str(out), "--tables", str(tables), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        names = ["one.html", "table.csv", "table.md", "table.tex"]
        assert document["page"] == str(out)
        assert sorted(Path(path).name for path in document["written"]) == names
        assert "\\toprule" in (tables / "table.tex").read_text()
        assert (tables / "table.md").read_text().startswith("| method | photo |")

    def test_tables_of_different_data_are_different_files(self, tmp_path: Path) -> None:
        make_run(tmp_path / "r" / "a")
        make_run(tmp_path / "r" / "b", data="pacs", domains=("art",))
        written = report.write_tables(report.collect([tmp_path / "r"]), tmp_path / "t")
        assert {path.name for path in written} == {f"table-{i}.{e}" for i in (1, 2) for e in ("md", "tex", "csv")}

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (["-o", "{}/file/x"], "choose another place with -o."),
            (["--tables", "{}/file/x"], "choose another place with --tables."),
            (["--figures", "{}/file/x"], "choose another place with --figures."),
            (["--figures", "{}/f", "--format", "pfd"], "pdf"),
            (["--format", "pdf"], "give --figures"),
            (["--metric", "brier"], "measures.json"),
        ],
    )
    def test_wrong_inputs_are_a_sentence(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
    ) -> None:
        (tmp_path / "file").write_text("")
        make_run(tmp_path / "a")
        assert main(["report", str(tmp_path / "a"), *(word.format(tmp_path) for word in words)]) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1

    def test_no_table_of_runs_that_are_not_finished(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        make_run(tmp_path / "a", done=2)
        assert main(["report", str(tmp_path / "a"), "--tables", str(tmp_path / "t")]) == 2
        assert "there is no table yet" in capsys.readouterr().err
