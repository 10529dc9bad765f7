"""Diagnostics of what lies in a directory, and what a notebook makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedkeel
from fedkeel import FedkeelError, analysis
from fedkeel.analysis import DIAGNOSTICS
from fedkeel.config import Config
from fedkeel.runs.run import Run
from tests import tiny
from tests.analysis.by_hand import last
from tests.engine.test_scale import crowd
from tests.engine.test_scale import run as crowded_run

EVERY = [entry.name for entry in DIAGNOSTICS]


def written(directory: Path, records: list[dict[str, Any]]) -> Run:
    """A run directory with these records and no model."""
    directory.mkdir()
    (directory / "config.toml").write_text(Config().to_toml())
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return Run(directory)


def scores(round: int, domains: dict[str, float]) -> dict[str, Any]:
    average = sum(domains.values()) / len(domains)
    about = {"kind": "scores", "round": round, "split": "test", "statistics": "global"}
    return {**about, "domains": domains, "average": average, "samples": average, "loss": 1.0}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("runs") / "digits"
    options = {"rounds": 2, "subsample": 30, "executor": "serial", "device": "cpu", "evaluate_every": 2}
    return fedkeel.simulate(directory=directory, data="digits-shift", **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in EVERY if name not in ("mixing-factors", "clipping", "gradient-norms")]
)
def test_of_the_embedded_data_every_diagnostic_writes_its_file(digits: Run, name: str) -> None:
    document = analysis.run(name, digits)
    assert json.loads((digits.directory / "diagnostics" / f"{name}.json").read_text()) == document
    assert document["name"] == name
    assert all(document[key] for key in ("title", "what", "paper", "figures"))
    assert [entry["round"] for entry in document["rounds"]] == [1]


def objects() -> dict[str, Any]:
    return {"federation": tiny.federation(), "model": tiny.model()}


def test_a_look_leaves_the_run_as_it_was(digits: Run, tmp_path: Path) -> None:
    before = tiny.result(digits)
    again = [analysis.run("loss-gap", digits, save=save) for save in (False, tmp_path)]
    assert again[0] == again[1] == json.loads((tmp_path / "diagnostics" / "loss-gap.json").read_text())
    assert tiny.result(digits) == before


def test_personal_layers_are_those_of_each_client(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", "fedbn", on=tiny.federation(unseen=6), learning_rate=0.3)
    document = analysis.run("calibration", run, images="all", federation=tiny.federation(unseen=6), model=tiny.model())
    found = {name: analysis.number(document, f"{name} as it is") for name in run.domains}
    assert found == pytest.approx({name: 100 * accuracy for name, accuracy in run.domains.items()})


def test_what_was_recorded_is_shown_and_kept(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", record="representation-divergence", record_every=1)
    recorded = analysis.run("representation-divergence", run)
    assert [entry["round"] for entry in recorded["rounds"]] == [0, 1, 2]
    with pytest.raises(FedkeelError, match="leave its options out, or choose another directory"):
        analysis.run("representation-divergence(eps=10)", run, **objects())
    other = analysis.run("representation-divergence(eps=10)", run, save=tmp_path / "other", **objects())
    assert [entry["round"] for entry in other["rounds"]] == [2]
    assert analysis.run("representation-divergence", run) == recorded


def test_of_a_run_that_cannot_be_looked_at_it_is_said_why(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", rounds=1)
    for given, missing in (({}, "federation="), ({"federation": tiny.federation()}, "model=")):
        with pytest.raises(FedkeelError, match=f"given in Python.*{missing}"):
            analysis.run("nmi", run, **given)
    network = tiny.model(norm=False)
    plain = tiny.run(tmp_path / "plain", network=network, rounds=1)
    with pytest.raises(FedkeelError, match="looks at batch norm"):
        analysis.run("loss-gap", plain, federation=tiny.federation(), model=network)
    assert analysis.run("nmi", plain, federation=tiny.federation(), model=network)["figures"]
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "config.toml").write_text(Config().to_toml())
    with pytest.raises(FedkeelError, match="is not finished"):
        analysis.run("nmi", unfinished)
    assert not (unfinished / "diagnostics").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedbn", "hbn"])
def test_of_a_hundred_thousand_clients_those_of_the_round_or_a_hundred_are_looked_at(
    tmp_path: Path, method: str
) -> None:
    record = "statistics-divergence,prototype-similarity,representation-divergence"
    run = crowded_run(tmp_path / "run", method, record=record, record_every=1, rounds=2)
    assert tiny.result(run) == tiny.result(crowded_run(tmp_path / "plain", method, rounds=2))
    similarity = "cosine similarity by client and client"
    took_part = {r["client"] for r in run.records("client") if r["round"] == 1}
    assert last(analysis.run("prototype-similarity", run), similarity).keys() == took_part
    on: dict[str, Any] = {"federation": crowd(), "model": tiny.model()}
    afterwards = Run(tmp_path / "plain")
    assert len(last(analysis.run("prototype-similarity", afterwards, **on), similarity)) == 100
    domains = last(analysis.run("representation-divergence", afterwards, **on), "divergence by domain and domain")
    assert list(domains)[-1] == "foreign"
    labels = last(analysis.run("label-distribution", afterwards, **on), "training samples by client and class")
    assert [sum(row.values()) for row in labels.values()] == [6] * 100


class TestNotebooks:
    def test_a_plot_of_the_accuracy(self, tmp_path: Path) -> None:
        run = written(tmp_path / "run", [scores(0, {"a": 0.25, "b": 0.5}), scores(4, {"a": 0.5, "b": 0.75})])
        drawn = {row["name"]: (row["x"], row["y"]) for row in run.plot().spec["data"]["values"]}
        assert drawn == {"average": ([1, 5], [37.5, 62.5]), "a": ([1, 5], [25, 50]), "b": ([1, 5], [50, 75])}
        assert [row["name"] for row in run.plot(domains=False).spec["data"]["values"]] == ["average"]
        assert run.plot().spec["title"] == {"text": ["fedavg on digits-shift"], "subtitle": ["test accuracy, %"]}
        named = Run(tmp_path / "run")
        named.config = named.config.replace(method="fedprox(mu=0.1)", data="folder(root=images, size=64)")
        assert named.plot().spec["title"]["text"] == ["fedprox(mu=0.1) on folder"]

    def test_a_frame_of_the_records(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = written(tmp_path / "run", [scores(0, {"a": 0.25}), {"kind": "round", "round": 0, "loss": 2.0}])

        class Pandas:
            DataFrame = staticmethod(list)

        monkeypatch.setitem(__import__("sys").modules, "pandas", Pandas)
        (row,) = run.frame()
        assert row["domains.a"] == 0.25
        assert row["round"] == 0
        assert run.frame("round") == [{"round": 0, "loss": 2.0}]

    def test_what_is_not_installed_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = written(tmp_path / "run", [scores(0, {"a": 0.25})])
        monkeypatch.setitem(__import__("sys").modules, "pandas", None)
        with pytest.raises(FedkeelError, match=r"pandas.*pip install 'fedkeel\[notebook\]'"):
            run.frame()
