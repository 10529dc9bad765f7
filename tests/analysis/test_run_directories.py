"""Diagnostics of what lies in a directory: whole runs, runs with gaps, unfinished ones, and ones written by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fedkeel
from fedkeel import FedkeelError, analysis
from fedkeel.analysis.diagnostic import DIAGNOSTICS
from fedkeel.config import Config
from fedkeel.engine.setup import prepare
from fedkeel.runs.run import Run
from tests import tiny
from tests.analysis.by_hand import lines_of, matrix_of
from tests.engine.test_scale import crowd
from tests.engine.test_scale import run as crowded_run

EVERY = [entry.name for entry in DIAGNOSTICS]


def written(directory: Path, records: list[dict[str, Any]], timing: list[dict[str, Any]] = (), **options: Any) -> Run:  # type: ignore[assignment]
    """A run directory with these lines and no model."""
    directory.mkdir()
    (directory / "config.toml").write_text(Config(**options).to_toml())
    for name, lines in (("metrics.jsonl", records), ("timing.jsonl", timing)):
        (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run(directory)


def scores(round: int, domains: dict[str, float], unseen: float | None = None) -> dict[str, Any]:
    average = sum(domains.values()) / len(domains)
    found = {"domains": domains, "average": average, "samples": average, "unseen": unseen, "loss": 1.0 / (round + 1)}
    return {"kind": "scores", "round": round, "split": "test", "statistics": "global", **found}


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [n for entry in value for n in numbers(entry)]
    return [value] if isinstance(value, float) else []


class TestByHand:
    def test_rounds_that_were_not_evaluated_leave_a_gap(self, tmp_path: Path) -> None:
        domains = [{"a": 0.25, "b": 0.5}, {"a": 0.5, "b": 0.5}, {"a": 0.75, "b": 1.0}]
        records = [scores(round, table) for round, table in zip((0, 4, 9), domains, strict=True)]
        records += [
            {"kind": "round", "round": r, "loss": 2.0 - r / 10, "bytes_up": 10, "bytes_down": 20} for r in (0, 4, 5)
        ]
        run = written(tmp_path / "run", records)
        document = analysis.run("convergence", run)
        assert lines_of(document, 0)["average"] == {0: 0.375, 4: 0.5, 9: 0.875}
        assert lines_of(document, 1) == {"a": {0: 0.25, 4: 0.5, 9: 0.75}, "b": {0: 0.5, 4: 0.5, 9: 1.0}}
        assert lines_of(document, 2)["training"] == {0: 2.0, 4: 1.6, 5: 1.5}
        assert lines_of(document, 2)["test"] == pytest.approx({0: 1.0, 4: 0.2, 9: 0.1})
        assert "unseen domains" not in lines_of(document, 0)

    def test_fairness_leaves_unseen_domains_out_of_the_spread(self, tmp_path: Path) -> None:
        domains = {"a": 0.9, "b": 0.5, "c": 0.7, "far": 0.1}
        run = written(tmp_path / "run", [scores(3, domains, unseen=0.1)], unseen="far")
        document = analysis.run("fairness", run)
        assert lines_of(document, 0)["standard deviation"][3] == pytest.approx(0.2)
        assert {name: line[3] for name, line in lines_of(document, 1).items()} == {"worst": 0.5, "best": 0.9}
        rows = {row[0]: row[1:] for row in document["figures"][2]["rows"]}
        assert rows["a"] == pytest.approx([90, 40])
        assert rows["far"] == pytest.approx([10, -40])
        assert document["figures"][2]["note"] == "The worst training domain is b."

    def test_of_damaged_records_the_rest_is_shown(self, tmp_path: Path) -> None:
        """A line that is no record, a loss that is not a number, an accuracy that is missing, a last line cut short."""
        records = [scores(round, {"a": 0.25, "b": 0.5}) for round in range(4)]
        records += [{"kind": "round", "round": 0, "loss": float("nan"), "bytes_up": 1, "bytes_down": 2}]
        run = written(tmp_path / "run", records)
        path = run.directory / "metrics.jsonl"
        lines = path.read_text().splitlines()
        lines[1] = "12"
        lines[2] = lines[2].replace('"b": 0.5', '"b": NaN')
        path.write_bytes("\n".join([*lines, '{"kind": "sc\u00e9']).encode()[:-1])
        document = analysis.run("convergence", run)
        assert lines_of(document, 1) == {"a": {0: 0.25, 2: 0.25, 3: 0.25}, "b": {0: 0.5, 2: None, 3: 0.5}}
        assert lines_of(document, 2)["training"] == {0: None}
        assert lines_of(analysis.run("fairness", run), 1)["best"] == {0: 0.5, 2: 0.25, 3: 0.5}
        assert lines_of(analysis.run("cost", run)) == {"up": {0: 1}, "down": {0: 2}}

    def test_files_that_cannot_be_read_at_all_are_one_sentence(self, tmp_path: Path) -> None:
        run = written(tmp_path / "run", [scores(0, {"a": 0.5})])
        (run.directory / "summary.json").write_text('{"accuracy": ')
        with pytest.raises(FedkeelError, match=r"summary\.json' cannot be read"):
            analysis.run("fairness", run)
        (run.directory / "metrics.jsonl").unlink()
        (run.directory / "metrics.jsonl").mkdir()
        with pytest.raises(FedkeelError, match=r"metrics\.jsonl' cannot be read"):
            analysis.run("convergence", run)

    def test_a_single_domain_has_no_spread(self, tmp_path: Path) -> None:
        document = analysis.run("fairness", written(tmp_path / "run", [scores(0, {"a": 0.5})]))
        assert lines_of(document, 0)["standard deviation"] == {0: None}

    def test_cost_counts_a_round_that_was_done_again_once(self, tmp_path: Path) -> None:
        rounds = [{"kind": "round", "round": r, "loss": 1.0, "bytes_up": 100 + r, "bytes_down": 200} for r in (0, 1)]
        timing = [
            {"round": r, "train": t, "aggregate": 0.5, "evaluate": 0.25} for r, t in ((0, 3.0), (1, 9.0), (1, 5.0))
        ]
        document = analysis.run("cost", written(tmp_path / "run", rounds, timing))
        assert lines_of(document, 0) == {"up": {0: 100, 1: 101}, "down": {0: 200, 1: 200}}
        assert lines_of(document, 1)["train"] == {0: 3.0, 1: 5.0}
        rows = {row[0]: row[1:] for row in document["figures"][2]["rows"]}
        assert rows["bytes up"] == [100.5, 201]
        assert rows["seconds: train"] == [4.0, 8.0]

    def test_cost_without_timing_still_tells_the_bytes(self, tmp_path: Path) -> None:
        run = written(tmp_path / "run", [{"kind": "round", "round": 0, "loss": 1.0, "bytes_up": 1, "bytes_down": 2}])
        (run.directory / "timing.jsonl").unlink()
        assert [figure["kind"] for figure in analysis.run("cost", run)["figures"]] == ["lines", "table"]

    def test_a_model_alone_is_enough_to_look_at_it(self, tmp_path: Path) -> None:
        """The embedded data, a network with random weights, no metrics and no checkpoint."""
        run = written(tmp_path / "run", [], data="digits-shift", subsample=20, rounds=7)
        worker = prepare(run.config.replace(device="cpu", executor="serial")).worker
        save_file(
            {name: t.contiguous().clone() for name, t in worker.model.state_dict().items()},
            run.directory / "model.safetensors",
        )
        (line,) = analysis.run("singular-values", run)["figures"][0]["series"]
        assert line["name"] == "round 7"
        head = worker.model.head.weight.detach().double().numpy()
        np.testing.assert_allclose(line["y"], np.sqrt(np.linalg.eigvalsh(head @ head.T)[::-1]), rtol=1e-6)
        counts = matrix_of(analysis.run("label-distribution", run))
        assert {name: sum(row.values()) for name, row in counts.items()} == dict.fromkeys(counts, 20)

    def test_a_model_of_another_configuration_is_refused(self, tmp_path: Path) -> None:
        run = written(tmp_path / "run", [], subsample=20)
        save_file({"head.weight": torch.zeros(10, 128)}, run.directory / "model.safetensors")
        with pytest.raises(FedkeelError, match=r"lacks 'encoder\.conv1\.weight'"):
            analysis.run("singular-values", run)

    def test_nothing_trained_yet(self, tmp_path: Path) -> None:
        run = written(tmp_path / "run", [])
        for name in ("nmi", "convergence", "fairness", "cost"):
            with pytest.raises(FedkeelError, match=str(run.directory)) as error:
                analysis.run(name, run)
            assert str(error.value).count(".") == 1
        assert not (run.directory / "diagnostics").exists()


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("runs") / "digits"
    options = {"rounds": 2, "subsample": 30, "executor": "serial", "device": "cpu", "evaluate_every": 2}
    return fedkeel.simulate(directory=directory, data="digits-shift", **options)


class TestRuns:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", [name for name in EVERY if name not in ("mixing-factors", "clipping")])
    def test_of_the_embedded_data_every_diagnostic_writes_its_file(self, digits: Run, name: str) -> None:
        document = analysis.run(name, digits)
        stored = json.loads((digits.directory / "diagnostics" / f"{name}.json").read_text())
        assert stored == document
        assert stored["name"] == name
        assert all(stored[key] for key in ("title", "what", "paper", "figures"))
        assert all(math.isfinite(n) for n in numbers(stored["figures"]))
        for figure in stored["figures"]:
            assert figure["title"]
            if figure["kind"] == "lines":
                assert all(len(line["x"]) == len(line["y"]) > 0 for line in figure["series"])
            elif figure["kind"] == "bars":
                assert all(len(s["values"]) == len(figure["categories"]) for s in figure["series"])
            elif figure["kind"] == "matrix":
                assert [len(row) for row in figure["values"]] == [len(figure["columns"])] * len(figure["rows"])

    def test_a_look_leaves_the_run_as_it_was(self, digits: Run) -> None:
        before = tiny.result(digits)
        again = [json.dumps(analysis.run("loss-gap", digits, save=False)) for _ in range(2)]
        assert again[0] == again[1]
        assert tiny.result(digits) == before

    def test_the_accuracy_of_the_final_model_is_that_of_the_run(self, digits: Run) -> None:
        figure = analysis.run("statistics-accuracy", digits)["figures"][0]
        found = dict(zip(figure["categories"], figure["series"][0]["values"], strict=True))
        assert found.pop("average") == pytest.approx(digits.accuracy)
        assert found == pytest.approx(digits.domains)

    def test_of_an_unfinished_run_the_last_checkpoint_is_looked_at(self, tmp_path: Path) -> None:
        def stop(round: int) -> None:
            if round == 1:
                raise KeyboardInterrupt

        whole = tiny.run(tmp_path / "whole", rounds=2)
        with pytest.raises(KeyboardInterrupt):
            tiny.run(tmp_path / "run", rounds=5, observer=tiny.Notes(stop))
        objects: dict[str, Any] = {"federation": tiny.federation(), "model": tiny.model()}
        found = analysis.run("singular-values", tmp_path / "run", **objects)["figures"][0]["series"]
        assert found == analysis.run("singular-values", whole, **objects)["figures"][0]["series"]

    @pytest.mark.parametrize("method", ["fedbn", "gn"])
    def test_also_of_one_whose_statistics_never_travel(self, tmp_path: Path, method: str) -> None:
        def stop(round: int) -> None:
            if round == 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tiny.run(tmp_path / "run", method, rounds=5, observer=tiny.Notes(stop))
        objects: dict[str, Any] = {"federation": tiny.federation(), "model": tiny.model()}
        (line,) = analysis.run("singular-values", tmp_path / "run", **objects)["figures"][0]["series"]
        assert line["name"] == "round 2"

    def test_personal_layers_are_those_of_each_client(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run", "fedbn", on=tiny.federation(unseen=6), learning_rate=0.3)
        objects: dict[str, Any] = {"federation": tiny.federation(unseen=6), "model": tiny.model()}
        figure = analysis.run("statistics-accuracy", run, **objects)["figures"][0]
        found = dict(zip(figure["categories"], figure["series"][0]["values"], strict=True))
        assert {name: found[name] for name in run.domains} == pytest.approx(run.domains)
        for path in (run.directory / "checkpoints").glob("*/*"):
            path.unlink()  # what clients keep is then read from personal/
        assert analysis.run("statistics-accuracy", run, **objects)["figures"][0] == figure

    def test_objects_given_in_python_must_be_given_again(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run", rounds=1)
        for name in ("nmi", "label-distribution"):
            with pytest.raises(FedkeelError, match=r"given in Python.*federation="):
                analysis.run(name, run)
        with pytest.raises(FedkeelError, match=r"given in Python.*model="):
            analysis.run("nmi", run, federation=tiny.federation())

    def test_a_model_without_batch_norm_has_no_statistics_to_show(self, tmp_path: Path) -> None:
        def network() -> Any:
            return tiny.model(norm=False)

        run = tiny.run(tmp_path / "run", network=network(), rounds=1)
        for name in ("bn-statistics", "statistics-divergence", "loss-gap", "probability-floor", "statistics-accuracy"):
            with pytest.raises(FedkeelError, match="batch norm"):
                analysis.run(name, run, federation=tiny.federation(), model=network())
        assert analysis.run("nmi", run, federation=tiny.federation(), model=network())["figures"]

    def test_options_ask_for_more_than_was_recorded(self, tmp_path: Path) -> None:
        objects: dict[str, Any] = {"federation": tiny.federation(), "model": tiny.model()}
        run = tiny.run(tmp_path / "run", record="representation-divergence", record_every=1)
        assert len(analysis.run("representation-divergence", run, **objects)["figures"]) == 2
        (figure,) = analysis.run("representation-divergence(eps=10)", run, **objects)["figures"]
        largest = max(max(row) for row in figure["values"])
        assert largest < max(max(row) for row in analysis.run("representation-divergence", run)["figures"][0]["values"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedbn", "hbn"])
def test_of_a_hundred_thousand_clients_those_of_the_round_or_a_hundred_are_looked_at(
    tmp_path: Path, method: str
) -> None:
    record = "statistics-divergence,prototype-similarity,representation-divergence"
    run = crowded_run(tmp_path / "run", method, record=record, record_every=1, rounds=2)
    assert tiny.result(run) == tiny.result(crowded_run(tmp_path / "plain", method, rounds=2))
    objects: dict[str, Any] = {"federation": crowd(), "model": tiny.model()}
    took_part = [r["client"] for r in run.records("client") if r["round"] == 1]
    assert matrix_of(analysis.run("prototype-similarity", run), 2).keys() == set(took_part)
    afterwards = Run(tmp_path / "plain")
    assert len(analysis.run("prototype-similarity", afterwards, **objects)["figures"][1]["rows"]) == 100
    assert analysis.run("representation-divergence", afterwards, **objects)["figures"][0]["rows"][-1] == "foreign"
    figure = analysis.run("label-distribution", afterwards, **objects)["figures"][0]
    assert [sum(row) for row in figure["values"]] == [6] * 100
    assert figure["note"] == "100 of 100,000 clients, drawn at random."


class TestNotebooks:
    def test_a_plot_of_the_accuracy(self, tmp_path: Path) -> None:
        run = written(tmp_path / "run", [scores(0, {"a": 0.25, "b": 0.5}), scores(4, {"a": 0.5, "b": 0.75})])
        drawn = {row["name"]: (row["x"], row["y"]) for row in run.plot().spec["data"]["values"]}
        assert drawn == {"average": ([1, 5], [37.5, 62.5]), "a": ([1, 5], [25, 50]), "b": ([1, 5], [50, 75])}
        assert [row["name"] for row in run.plot(domains=False).spec["data"]["values"]] == ["average"]
        assert run.plot().spec["title"] == {"text": "fedavg on digits-shift", "subtitle": "test accuracy, %"}
        named = Run(tmp_path / "run")
        named.config = named.config.replace(method="fedprox(mu=0.1)", data="folder(root=images, size=64)")
        assert named.plot().spec["title"]["text"] == "fedprox(mu=0.1) on folder"

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
