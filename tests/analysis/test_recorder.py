"""Recording while training: it changes no bit, works under every executor, and survives an interruption."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sklearn.cluster import KMeans

import fedkeel
from fedkeel import FedkeelError, analysis
from fedkeel.analysis.diagnostic import DIAGNOSTICS, recorded
from fedkeel.analysis.gradient_norms import GradientNorms
from tests import tiny
from tests.analysis.by_hand import forward, images, lines_of, mutual_information, recorded_run

OF_RECORDS = ["label-distribution", "convergence", "fairness", "cost"]
MEASURED = [entry.name for entry in DIAGNOSTICS if entry.name not in OF_RECORDS]
ON_BATCH_NORM = [name for name in MEASURED if name not in ("mixing-factors", "clipping")]
ON_OWN_STATISTICS = [name for name in ON_BATCH_NORM if name != "statistics-bias"]
ON_HBN = ["mixing-factors", "statistics-divergence", "bn-statistics", "representation-divergence", "gradient-norms"]
ON_HBN += ["statistics-bias", "global-gradient"]
ON_ANY_MODEL = ["representation-divergence", "prototype-similarity", "gradient-norms", "nmi", "tsne", "singular-values"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "names", "executor"),
    [
        ("fedavg", ON_BATCH_NORM, "serial"),
        ("fedavg", ON_BATCH_NORM, "processes"),
        ("fedbn", ON_OWN_STATISTICS, "serial"),
        ("greg", ON_BATCH_NORM, "serial"),
        ("fedcoda", [*ON_BATCH_NORM, "clipping"], "serial"),
        ("fedsam", ON_BATCH_NORM, "serial"),
        ("scaffold+hbn", ON_HBN, "serial"),
        ("scaffold+hbn", ON_HBN, "processes"),
        ("fedwon", ON_ANY_MODEL, "serial"),
        ("standalone", [name for name in ON_OWN_STATISTICS if name != "global-gradient"], "serial"),
        ("central", ON_BATCH_NORM, "serial"),
    ],
)
def test_recording_changes_no_bit_of_the_result(tmp_path: Path, method: str, names: list[str], executor: str) -> None:
    options: dict[str, Any] = {**tiny.by(executor), "momentum": 0.0}
    plain = tiny.run(tmp_path / "plain", method, **options)
    watched = tiny.run(tmp_path / "watched", method, record=",".join(names), record_every=2, **options)
    assert tiny.result(watched) == tiny.result(plain)
    assert sorted(p.stem for p in (watched.directory / "diagnostics").glob("*.json")) == sorted(names)
    for name in names:
        assert [entry.round for entry in recorded(watched.directory, name)] == [0, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("method", "names"), [("fedavg", ON_BATCH_NORM), ("hbn", ON_HBN), ("greg", ON_BATCH_NORM)])
def test_on_a_gpu_recording_changes_no_bit_and_says_what_serial_says(
    tmp_path: Path, method: str, names: list[str]
) -> None:
    options: dict[str, Any] = {"executor": "cuda", "device": "cuda", "rounds": 3, "precision": "float32"}
    plain = tiny.run(tmp_path / "plain", method, **options)
    watched = tiny.run(tmp_path / "watched", method, record=",".join(names), record_every=1, **options)
    assert tiny.result(watched) == tiny.result(plain)
    alone = {**options, "executor": "serial"}
    serial = tiny.run(tmp_path / "serial", method, record=",".join(names), record_every=1, **alone)
    if "gradient-norms" in names:
        found, expected = (lines_of(analysis.run("gradient-norms", run)) for run in (watched, serial))
        for line in expected:
            assert found[line] == pytest.approx(expected[line], rel=1e-3)


@pytest.mark.slow
def test_worker_processes_record_what_one_process_records(tmp_path: Path) -> None:
    names = ["gradient-norms", "loss-gap", "statistics-divergence"]
    for executor in ("serial", "processes"):
        tiny.run(tmp_path / executor, **tiny.by(executor), record=",".join(names), record_every=1)
    for name in names:
        one, other = (recorded(tmp_path / executor, name) for executor in ("serial", "processes"))
        assert [entry.round for entry in one] == [0, 1, 2]
        assert json.dumps(one) == json.dumps(other)


def test_the_first_every_so_many_and_the_last_round_are_recorded(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", rounds=6, record="singular-values", record_every=4)
    document = json.loads((run.directory / "diagnostics" / "singular-values.json").read_text())
    assert [line["name"] for line in document["figures"][0]["series"]] == ["round 1", "round 5", "round 6"]


def test_clients_that_do_not_take_part_have_no_point_in_that_round(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", rounds=5, participation=0.4, record="gradient-norms,loss-gap", record_every=1)
    took_part = {(r["client"], r["round"]) for r in run.records("client")}
    lines = lines_of(analysis.run("gradient-norms", run), 1)
    assert {(name, round) for name, line in lines.items() for round in line} == took_part


@pytest.mark.slow
def test_maps_of_chosen_rounds_are_of_the_same_images_with_the_nmi_by_round(tmp_path: Path) -> None:
    run, seen = recorded_run(tmp_path / "run", "tsne(samples=10)", rounds=7, record_every=1)
    curve, *maps = json.loads((run.directory / "diagnostics" / "tsne.json").read_text())["figures"]
    assert [figure["title"].rpartition(" ")[2] for figure in maps] == ["1", "3", "5", "7"]  # four of seven
    assert all(figure["class"] == maps[0]["class"] and figure["domain"] == maps[0]["domain"] for figure in maps)
    assert all(len(figure["x"]) == len(figure["y"]) == 10 for figure in maps)
    assert [entry.round for entry in recorded(run.directory, "tsne")] == list(range(7))
    (line,) = curve["series"]
    federation = tiny.federation()
    for round, nmi in zip(line["x"], line["y"], strict=True):
        tested = [(*images(federation, client.test), seen.rounds[round - 1].model) for client in federation.clients]
        features = np.concatenate([forward(model, x)[0] for x, _, model in tested])
        labels = np.concatenate([y.numpy() for _, y, _ in tested])
        # The best of many starts, so that the order of the samples does not matter.
        clusters = KMeans(4, n_init=30, random_state=1).fit_predict(features)
        assert nmi == pytest.approx(mutual_information(clusters, labels), abs=1e-6)


@pytest.mark.parametrize("method", ["fedavg", "central"])
@pytest.mark.slow
def test_what_is_made_of_records_can_be_recorded_too(tmp_path: Path, method: str) -> None:
    """With `record`, a report of the run has it without a further command."""
    options: dict[str, Any] = {"data": "digits-shift", "subsample": 20, "model": "simple_cnn(width=2)", "rounds": 3}
    options |= {"checkpoint_every": 3, "executor": "serial", "device": "cpu", "method": method}
    run = fedkeel.simulate(directory=tmp_path / "run", record=",".join(OF_RECORDS), **options)
    written = {path.stem: json.loads(path.read_text()) for path in (run.directory / "diagnostics").glob("*.json")}
    assert sorted(written) == sorted(OF_RECORDS)
    for name, document in written.items():
        if name != "cost":  # seconds are those of the round that was being timed
            assert document == analysis.run(name, run, save=False)
    assert list(lines_of(written["cost"])["up"]) == [0, 1, 2]


def test_an_unseen_domain_given_in_python_stays_out_of_the_recorded_spread(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", on=tiny.federation(unseen=6), record="fairness")
    document = json.loads((run.directory / "diagnostics" / "fairness.json").read_text())
    last = run.scores()[-1]["domains"]
    seen = [value for name, value in last.items() if name != "foreign"]
    assert lines_of(document)["standard deviation"][2] == pytest.approx(np.std(seen, ddof=1))


class Stop(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_every", [1, 2])
def test_a_resumed_run_goes_on_with_its_records_and_doubles_none(tmp_path: Path, checkpoint_every: int) -> None:
    names = ["statistics-divergence", "loss-gap", "gradient-norms"]
    options: dict[str, Any] = {"rounds": 6, "record": ",".join(names), "record_every": 1}
    whole = tiny.run(tmp_path / "whole", **options)

    def stop(round: int) -> None:
        if round == 2:
            raise Stop

    with pytest.raises(Stop):
        tiny.run(tmp_path / "run", observer=tiny.Notes(stop), checkpoint_every=checkpoint_every, **options)
    # Round 2 is recorded; with a checkpoint every other round it will be done again.
    assert [entry.round for entry in recorded(tmp_path / "run", "loss-gap")] == [0, 1, 2]
    with open(tmp_path / "run" / "diagnostics" / "loss-gap.jsonl", "a") as file:
        file.write('{"round": 3, "val')  # killed in the middle of a line
    run = tiny.resume(tmp_path / "run")
    assert tiny.result(run) == tiny.result(whole)
    for name in names:
        files = [place / "diagnostics" / f"{name}.json" for place in (run.directory, whole.directory)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_recording_may_begin_when_a_run_is_resumed(tmp_path: Path) -> None:
    def stop(round: int) -> None:
        if round == 1:
            raise Stop

    whole = tiny.run(tmp_path / "whole", rounds=4)
    with pytest.raises(Stop):
        tiny.run(tmp_path / "run", rounds=4, observer=tiny.Notes(stop))
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace('record = ""', 'record = "loss-gap"').replace("every = 10", "every = 1"))
    assert tiny.result(tiny.resume(tmp_path / "run")) == tiny.result(whole)
    assert [entry.round for entry in recorded(tmp_path / "run", "loss-gap")] == [2, 3]


@pytest.mark.parametrize("kind", [FedkeelError, ValueError, ZeroDivisionError, torch.OutOfMemoryError])
def test_a_measure_that_fails_leaves_a_note_and_not_a_broken_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fails(*_: object) -> dict[str, Any]:
        raise kind("nothing to see.")

    monkeypatch.setattr("fedkeel.analysis.loss_gap.LossGap.measure", fails)
    notes = tiny.Notes()
    run = tiny.run(tmp_path / "run", rounds=1, record="loss-gap,nmi", observer=notes)
    assert run.finished
    assert notes.notes == ["Round 1 has no record of 'loss-gap': nothing to see."]
    assert [p.name for p in (run.directory / "diagnostics").glob("*.json")] == ["nmi.json"]


class TestRefusals:
    """Each in one sentence, before a directory is made."""

    def refused(self, tmp_path: Path, record: str, **options: Any) -> str:
        with pytest.raises(FedkeelError) as error:
            tiny.run(tmp_path / "run", record=record, **options)
        assert not (tmp_path / "run").exists()
        return str(error.value)

    def test_an_unknown_name(self, tmp_path: Path) -> None:
        sentence = self.refused(tmp_path, "statistic-divergence")
        assert sentence == (
            "There is no diagnostic named 'statistic-divergence': did you mean 'statistics-divergence'?"
        )

    def test_an_unknown_option(self, tmp_path: Path) -> None:
        assert "has no option 'client'" in self.refused(tmp_path, "bn-statistics(client=ward)")

    def test_a_map_of_a_domain_that_is_not_there(self, tmp_path: Path) -> None:
        assert "did you mean 'dark'" in self.refused(tmp_path, "tsne(domains='darkk')")

    def test_one_twice(self, tmp_path: Path) -> None:
        assert "twice" in self.refused(tmp_path, "loss-gap,loss-gap")

    def test_an_empty_part(self, tmp_path: Path) -> None:
        assert "empty part" in self.refused(tmp_path, "loss-gap,")

    @pytest.mark.parametrize(
        "name",
        ["statistics-divergence", "bn-statistics", "statistics-accuracy", "loss-gap", "probability-floor"],
    )
    def test_a_model_without_batch_norm(self, tmp_path: Path, name: str) -> None:
        sentence = self.refused(tmp_path, name, network=tiny.model(norm=False))
        assert sentence.count(".") == 1
        assert "batch norm" in sentence

    def test_factors_of_a_method_that_learns_none(self, tmp_path: Path) -> None:
        assert "'hbn'" in self.refused(tmp_path, "mixing-factors")

    def test_a_client_and_a_layer_that_are_not_there(self, tmp_path: Path) -> None:
        assert "did you mean 'ward'" in self.refused(tmp_path, "bn-statistics(clients='wart')")
        assert "did you mean 'encoder.1'" in self.refused(tmp_path, "bn-statistics(layers='encoder.9')")

    def test_in_a_comparison_before_anything_trains(self, tmp_path: Path) -> None:
        with pytest.raises(FedkeelError, match="did you mean 'loss-gap'"):
            fedkeel.compare(["fedavg"], directory=tmp_path / "all", record="lossgap")
        with pytest.raises(FedkeelError, match="'gn' has none"):
            fedkeel.compare(["fedavg", "gn"], directory=tmp_path / "all", record="loss-gap", subsample=20)
        assert not (tmp_path / "all").exists()


def test_a_diagnostic_of_ones_own(tmp_path: Path) -> None:
    from fedkeel.analysis import Diagnostic, Measured, Snapshot, diagnostic
    from fedkeel.analysis.figures import by_round

    @diagnostic("weight-norm")
    class WeightNorm(Diagnostic):
        title, paper = "Norm of the global weights", "none"
        what = "The L2 norm of all weights of the global model."

        def measure(self, snapshot: Snapshot) -> dict[str, Any]:
            return {"norm": float(sum(w.double().square().sum() for w in snapshot.model.weights.values()) ** 0.5)}

        def figures(self, measured: Sequence[Measured]) -> list[dict[str, Any]]:
            return [by_round(self.title, "norm", {entry.round: entry.values for entry in measured})]

    try:
        run = tiny.run(tmp_path / "run", record="weight-norm", record_every=1)
        document = analysis.run("weight-norm", run)
    finally:
        del DIAGNOSTICS._entries["weight-norm"]
    weights = load_file(run.directory / "model.safetensors")
    expected = sum(
        float(w.double().square().sum()) for name, w in weights.items() if "run" not in name and "num" not in name
    )
    assert lines_of(document)["norm"][2] == pytest.approx(expected**0.5)


def test_a_norm_that_is_not_finite_does_not_have_the_update_dropped() -> None:
    layer = torch.nn.Linear(2, 1)
    watch = GradientNorms(layer, lambda _: True)
    watch.begin()
    layer.weight.grad, layer.bias.grad = torch.full((1, 2), float("inf")), torch.zeros(1)
    watch.computed()
    layer.weight.grad = torch.ones(1, 2)
    watch.used()
    told = watch.metrics(0)
    assert told == {"used_gradient_norm": pytest.approx(2**0.5), "clipped_steps": 1, "clipped_gradients": 1}
    assert GradientNorms(layer, lambda round: round == 4).metrics(3) == {}
