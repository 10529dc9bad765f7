"""What a page shows of a run that was really made: its classes and sites, and test images only where asked for."""

from __future__ import annotations

import base64
import io
import re
from html import unescape
from pathlib import Path

import pytest
from PIL import Image

import fedkeel
from fedkeel import report
from fedkeel.cli import main
from fedkeel.engine.setup import load_federation
from fedkeel.errors import FedkeelError
from fedkeel.runs.run import Run
from tests.report.samples import make_run
from tests.report.test_page import figures_in, page_of

IMAGE = re.compile(r'<img src="data:image/png;base64,([^"]*)" alt="([^"]*)">')


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("runs") / "fedavg"
    options = {"data": "digits-shift", "model": "simple_cnn(width=2)", "unseen": "street", "subsample": 12}
    return fedkeel.simulate(**options, rounds=1, executor="serial", directory=place)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_images_are_shown_only_where_asked_for_as_the_model_has_them(run: Run, tmp_path: Path) -> None:
    assert "<img" not in report.write([run.directory], tmp_path / "none.html").read_text()
    page = report.write([run.directory], tmp_path / "some.html", images=2).read_text()
    shown = IMAGE.findall(page)
    federation = load_federation(run.config)
    assert 0 < len(shown) <= 2 * 2 * len(federation.domains)
    assert page.index('id="g0-images"') < page.index("<img")
    stored = {image.permute(1, 2, 0).numpy().tobytes(): index for index, image in enumerate(federation.images)}
    for data, text in shown:
        pixels = Image.open(io.BytesIO(base64.b64decode(data)))
        index = stored[pixels.tobytes()]
        (said,) = run.predict(federation.images[index]).classes
        truth = federation.classes[int(federation.labels[index])]
        words = unescape(text)
        assert words.startswith(f"{truth}, " if said == truth else f"{truth}, taken for {said}, ")
    assert "--images 2" in page, "the command that made it"


@pytest.mark.slow
def test_classes_and_sites_are_those_of_the_measures(run: Run) -> None:
    page = page_of(run.directory)
    classes = next(f for f in figures_in(page, "bars") if f["data"][0]["category"] == list(run.measures.classes))
    counts = run.measures.confusion()
    wanted = [100 * counts[i, i] / counts[i].sum() for i in range(len(counts))]
    assert classes["data"][0]["value"] == pytest.approx(wanted, abs=0.01)
    under, over = classes["data"][0]["under"], classes["data"][0]["over"]
    assert all(low <= value + 0.01 <= high + 0.02 for low, value, high in zip(under, wanted, over, strict=True))
    titles = [figure.get("title") for figure in figures_in(page, "matrix")]
    assert titles[:2] == ["All trained sites", next(iter(run.measures.domains))]
    assert "street (unseen)" in titles
    whole = figures_in(page, "matrix")[0]["data"]
    assert whole[3]["value"] == pytest.approx([round(100 * n / counts[3].sum(), 1) for n in counts[3]])
    sizes = next(figure for figure in figures_in(page, "matrix") if figure["title"] == "Test samples of each class")
    assert {row["row"]: sum(row["value"]) for row in sizes["data"]} == {
        domain: sum(site.samples for site in sites) for domain, sites in run.measures.domains.items()
    }


@pytest.mark.slow
def test_data_that_are_not_here_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "python", data="(given in Python)")
    make_run(tmp_path / "unfinished", done=1)
    make_run(tmp_path / "gone", data="folder(root='/nowhere/at/all')")
    for name, words in {"python": "are not here", "unfinished": "no run here is finished", "gone": "nowhere"}.items():
        assert main(["report", str(tmp_path / name), "--images", "2"]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
        assert not (tmp_path / name / "report.html").exists()


@pytest.mark.parametrize("number", [-1, 51, 2.5, True, "3"])
def test_a_number_of_images_that_cannot_be_is_one_sentence(tmp_path: Path, number: object) -> None:
    make_run(tmp_path / "a")
    with pytest.raises(FedkeelError, match="give a number from 0 to 50"):
        report.write([tmp_path / "a"], images=number)  # type: ignore[arg-type]
