"""Recording while training: it changes no bit, works under every executor, and survives an interruption."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fedkeel
from fedkeel import FedkeelError, analysis
from fedkeel.analysis import DIAGNOSTICS
from fedkeel.analysis.diagnostic import recorded
from fedkeel.analysis.gradients import StepNorms
from tests import tiny
from tests.analysis.by_hand import by_round

ALL = [entry.name for entry in DIAGNOSTICS]
ON_BATCH_NORM = [name for name in ALL if name not in ("mixing-factors", "clipping")]
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
        assert list(recorded(watched.directory, name)) == [0, 2]


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
        key = "gradient norm as computed by client"
        found, expected = (by_round(analysis.run("gradient-norms", run), key) for run in (watched, serial))
        for round in expected:
            assert found[round] == pytest.approx(expected[round], rel=1e-3)


@pytest.mark.slow
def test_worker_processes_record_what_one_process_records(tmp_path: Path) -> None:
    names = ["gradient-norms", "loss-gap", "statistics-divergence"]
    for executor in ("serial", "processes"):
        tiny.run(tmp_path / executor, **tiny.by(executor), record=",".join(names), record_every=1)
    for name in names:
        one, other = (recorded(tmp_path / executor, name) for executor in ("serial", "processes"))
        assert list(one) == [0, 1, 2]
        assert one == other


def test_the_first_every_so_many_and_the_last_round_are_recorded(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", rounds=6, record="singular-values", record_every=4)
    assert list(recorded(run.directory, "singular-values")) == [0, 4, 5]


def test_clients_that_do_not_take_part_have_no_point_in_that_round(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", rounds=5, participation=0.4, record="gradient-norms", record_every=1)
    found = by_round(analysis.run("gradient-norms", run), "gradient norm as computed by client")
    took_part = {(r["client"], r["round"]) for r in run.records("client")}
    assert {(name, round) for round, norms in found.items() for name in norms} == took_part


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
    assert list(recorded(tmp_path / "run", "loss-gap")) == [0, 1, 2]
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
    assert list(recorded(tmp_path / "run", "loss-gap")) == [2, 3]


@pytest.mark.parametrize("kind", [FedkeelError, ValueError, ZeroDivisionError, torch.OutOfMemoryError])
def test_a_measure_that_fails_leaves_a_note_and_not_a_broken_run(tmp_path: Path, kind: type[Exception]) -> None:
    @analysis.diagnostic("broken")
    def broken(_: analysis.Snapshot) -> analysis.Numbers:
        raise kind("nothing to see.")

    notes = tiny.Notes()
    try:
        run = tiny.run(tmp_path / "run", rounds=1, record="broken,nmi", observer=notes)
    finally:
        del DIAGNOSTICS._entries["broken"]
    assert run.finished
    (note,) = notes.notes
    assert note.startswith("Round 1 has no record of 'broken': ")
    assert "nothing to see." in note
    assert [p.name for p in (run.directory / "diagnostics").glob("*.json")] == ["nmi.json"]


@pytest.mark.parametrize(
    ("record", "sentence", "options"),
    [
        ("statistic-divergence", "did you mean 'statistics-divergence'?", {}),
        ("tsne(sample=20)", "has no option 'sample'", {}),
        ("loss-gap,loss-gap", "twice", {}),
        *((name, f"'{name}' looks at batch norm", {"method": "gn"}) for name in ("loss-gap", "probability-floor")),
        *((n, "looks at batch-norm statistics", {"method": "gn"}) for n in ("statistics-divergence", "bn-statistics")),
        ("mixing-factors", "looks at factors of 'hbn', and a run of 'fedavg' with this model has none", {}),
        ("statistics-bias", "looks at batch-norm statistics of the server", {"method": "fedbn"}),
        ("clipping", "looks at gradients that are clipped", {}),
        ("clipping", "looks at gradients that are clipped", {"method": "scaffold+fedcoda", "momentum": 0.0}),
        ("global-gradient", "looks at weights of a global model", {"method": "standalone"}),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_directory_is_made(
    tmp_path: Path, record: str, sentence: str, options: dict[str, Any]
) -> None:
    with pytest.raises(FedkeelError, match=re.escape(sentence)) as error:
        tiny.run(tmp_path / "run", record=record, **options)
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_in_a_comparison_before_anything_trains(tmp_path: Path) -> None:
    with pytest.raises(FedkeelError, match="did you mean 'loss-gap'"):
        fedkeel.compare(["fedavg"], directory=tmp_path / "all", record="lossgap")
    with pytest.raises(FedkeelError, match="a run of 'gn' with this model has none"):
        fedkeel.compare(["fedavg", "gn"], directory=tmp_path / "all", record="loss-gap", subsample=20)
    assert not (tmp_path / "all").exists()


def test_a_norm_that_is_not_finite_does_not_have_the_update_dropped() -> None:
    layer = torch.nn.Linear(2, 1)
    watch = StepNorms(layer, lambda _: True)
    watch.begin()
    layer.weight.grad, layer.bias.grad = torch.full((1, 2), float("inf")), torch.zeros(1)
    watch.computed()
    layer.weight.grad = torch.ones(1, 2)
    watch.used()
    assert watch.metrics(0) == {"norm as used": pytest.approx(2**0.5), "clipped steps": 1, "clipped gradients": 1}
    assert StepNorms(layer, lambda round: round == 4).metrics(3) == {}
