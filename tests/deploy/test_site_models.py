"""A site that wants to keeps the model that a run ends with, with its own statistics, and nobody else knows of it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import fedkeel
from fedkeel.config import Config
from fedkeel.core.client import Batch
from fedkeel.data.federation import Federation
from fedkeel.deploy import site_models
from fedkeel.deploy.memory import KEPT_RUNS, is_memory
from fedkeel.deploy.policy import Policy
from fedkeel.deploy.serving import Waiting, train
from fedkeel.deploy.site_models import SiteModels
from fedkeel.engine.batches import probe
from fedkeel.errors import FedkeelError
from fedkeel.nn.calibration import Calibrator
from fedkeel.runs.run import Run
from fedkeel.runs.trained import as_tested
from tests import tiny
from tests.blocks.pages import ROOT, blocks_of
from tests.deploy.loop import Loop, over_network, sites_of

SIZES = {"ward": 24, "clinic": 18, "hospital": 30}


def keeping(on: Federation, place: Path, network: nn.Module | None = None, **own: Any) -> Loop:
    """Sites that keep models, each in a folder of its own."""
    sites = sites_of(on, place / "sites", network or tiny.model())
    return Loop({n: replace(s, models=SiteModels(place / "kept" / s.name), **own) for n, s in sites.items()})


def kept(place: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    (file,) = (place / "kept" / name).glob("*/calibrated.safetensors")
    return safetensors.torch.load_file(file), json.loads(file.with_name(f"{file.name}.json").read_text())


def expected(run: Run, on: Federation, name: str) -> dict[str, Tensor]:
    """The run's model, calibrated here on the images of the site."""
    network, site = run.remember(model=tiny.model()).model(), on[name]
    images = as_tested(on.test_transform, on.images[site.train if len(site.train) else site.test])
    Calibrator(network, lambda x: network(x).logits).calibrate(lambda: iter([Batch(images, torch.zeros(len(images)))]))
    return network.state_dict()


@pytest.mark.parametrize("options", [{}, {"result": "best-validation", "learning_rate": 0.5}, {"patience": 1}])
def test_each_site_has_the_result_of_the_run_with_its_own_statistics(tmp_path: Path, options: dict[str, Any]) -> None:
    on = tiny.federation(SIZES, unseen=12)
    run = over_network(tmp_path, on=on, loop=keeping(on, tmp_path), rounds=4, **options)
    for site in on:
        tensors, card = kept(tmp_path, site.name)
        torch.testing.assert_close(tensors, dict(expected(run, on, site.name)), rtol=1e-5, atol=1e-6)
        assert (card["site"], card["sent_to_be"]) == (site.name, "tested")
        assert card["calibration"]["images"] == len(site.train) or site.name == "stranger"
    # They share the weights and not the statistics.
    ward, clinic = kept(tmp_path, "ward")[0], kept(tmp_path, "clinic")[0]
    assert torch.equal(ward["head.weight"], clinic["head.weight"])
    assert not torch.equal(ward["encoder.1.running_mean"], clinic["encoder.1.running_mean"])


@pytest.mark.parametrize(("method", "kept_anyway"), [("fedbn", True), ("fedavg", False)])
def test_a_personal_method_leaves_each_site_its_model_unasked(tmp_path: Path, method: str, kept_anyway: bool) -> None:
    on = tiny.federation(SIZES)
    loop = keeping(on, tmp_path)
    for site in loop.at.values():
        assert site.models is not None
        site.models.calibrate = False
    run = over_network(tmp_path, method, on=on, loop=loop)
    assert (tmp_path / "kept" / "ward").exists() == kept_anyway
    if kept_anyway:
        tensors, card = kept(tmp_path, "ward")
        assert card["calibration"] == {}
        shared = safetensors.torch.load_file(run.directory / "model.safetensors")
        assert torch.equal(tensors["head.weight"], shared["head.weight"])


def test_the_run_is_as_without_and_nothing_travels(tmp_path: Path) -> None:
    on = tiny.federation(SIZES)
    plain, loop = Loop(sites_of(on, tmp_path / "plain" / "sites", tiny.model())), keeping(on, tmp_path / "kept")
    runs = [over_network(tmp_path / name, on=on, loop=used) for name, used in (("plain", plain), ("kept", loop))]
    assert tiny.result(runs[0]) == tiny.result(runs[1])
    assert [len(carried) for carried in plain.carried] == [len(carried) for carried in loop.carried]
    assert not any(b"calibrat" in carried for carried in loop.carried)


def test_a_large_site_is_calibrated_on_some_of_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_models, "MOST_IMAGES", 20)
    on = tiny.federation(SIZES)
    over_network(tmp_path, on=on, loop=keeping(on, tmp_path))
    assert [kept(tmp_path, name)[1]["calibration"]["images"] for name in SIZES] == [20, 18, 20]


def test_a_head_that_a_site_keeps_is_in_it_and_was_trained(tmp_path: Path) -> None:
    on = tiny.federation(SIZES)
    over_network(tmp_path, "fedper", on=on, loop=keeping(on, tmp_path))
    ward, clinic = (kept(tmp_path, name)[0]["head.weight"] for name in ("ward", "clinic"))
    assert not torch.equal(ward, tiny.model().head.weight)
    assert not torch.equal(ward, clinic)


def test_layers_of_its_own_are_in_it(tmp_path: Path) -> None:
    on = tiny.federation(SIZES)
    run = over_network(tmp_path, "fedbn", on=on, loop=keeping(on, tmp_path))
    for name in SIZES:
        tensors, card = kept(tmp_path, name)
        assert card["method"] == "fedbn"
        assert "encoder.1.weight" in tensors
    local = [kept(tmp_path, name)[0]["encoder.1.weight"] for name in ("ward", "clinic")]
    assert not torch.equal(*local)
    assert run.finished


@pytest.mark.parametrize("reason", ["policy", "no test images"])
def test_a_site_that_is_not_tested_has_the_model_that_it_was_sent_to_train(tmp_path: Path, reason: str) -> None:
    on, empty = tiny.federation(SIZES), torch.empty(0, dtype=torch.int64)
    if reason == "no test images":
        clients = [replace(c, test=empty, validation=empty) if c.name == "ward" else c for c in on.clients]
        on = replace(on, clients=clients)
    loop = keeping(on, tmp_path)
    if reason == "policy":
        loop.at = {n: replace(s, policy=Policy(evaluation=s.name != "ward")) for n, s in loop.at.items()}
    over_network(tmp_path, on=on, loop=loop)
    assert [kept(tmp_path, name)[1]["sent_to_be"] for name in SIZES] == ["to be trained", "tested", "tested"]


def test_without_statistics_it_is_said_once_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    on = tiny.federation(SIZES)
    with caplog.at_level(logging.WARNING, "fedkeel"):
        assert over_network(tmp_path, "gn", on=on, loop=keeping(on, tmp_path)).finished
    said = [record.getMessage() for record in caplog.records if "is not kept" in record.getMessage()]
    assert len(said) == len(SIZES)
    assert all("has no layer with running statistics" in sentence for sentence in said)
    assert not (tmp_path / "kept").exists()


def test_a_folder_that_cannot_be_written_costs_the_run_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on = tiny.federation(SIZES)
    (tmp_path / "kept").write_text("a file in the way")
    with caplog.at_level(logging.WARNING, "fedkeel"):
        run = over_network(tmp_path, on=on, loop=keeping(on, tmp_path))
    assert run.finished
    assert run.records("dropped") == []
    assert any("The model for this site is not kept" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("method", ["fedavg", "hbn"])
def test_what_was_kept_is_loaded_as_the_page_says_and_predicting_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    on = tiny.federation(SIZES, side=16)
    sites = {n: replace(s, model=None) for n, s in keeping(on, tmp_path).at.items()}
    config = Config(**{**tiny.OPTIONS, "rounds": 1, "model": "simple_cnn", "method": method})
    run = train(Loop(sites), config, tmp_path / "run", Waiting(len(sites)), tiny.Notes())
    tensors, _ = kept(tmp_path, "ward")
    monkeypatch.chdir(next((tmp_path / "kept" / "ward").glob("*/calibrated.safetensors")).parent)
    (block,) = (b.text for b in blocks_of((ROOT / "docs/deploy.md").read_text(), "") if "load_state_dict" in b.text)
    names = {"json": json, "Path": Path, "fedkeel": fedkeel, "safetensors": safetensors}
    exec(block, names)
    network = names["network"]
    with torch.no_grad():
        assert network(probe(on)).logits.isfinite().all()
    assert all(torch.equal(t, tensors[n]) for n, t in network.state_dict().items()), "predicting changed it"
    weights = run.model().state_dict()
    assert torch.equal(network.head.weight, weights["head.weight"])


def test_where_a_run_is_that_sites_transformed_for_its_input_is_taken_as_it_is(tmp_path: Path) -> None:
    on = tiny.federation(SIZES)
    run = over_network(tmp_path, on=on, loop=Loop(sites_of(on, tmp_path / "sites", tiny.model())))
    run.remember(model=tiny.model())
    images = on.images[on["ward"].train]
    with pytest.raises(FedkeelError, match="since it was done at its sites"):
        fedkeel.calibrate(run, images)
    site = fedkeel.calibrate(run, as_tested(on.test_transform, images))
    assert site.trained is None
    torch.testing.assert_close(site.model.state_dict(), expected(run, on, "ward"), rtol=1e-5, atol=1e-6)


def test_models_of_the_latest_runs_stay(tmp_path: Path) -> None:
    on = tiny.federation(SIZES)
    loop = keeping(on, tmp_path)
    for number in range(KEPT_RUNS + 2):
        over_network(tmp_path / str(number), on=on, loop=loop, rounds=1)
        if number == 0:
            (tmp_path / "kept" / "ward" / "mine").mkdir()
            (tmp_path / "kept" / "ward" / "mine" / "notes.txt").write_text("somebody's own")
    folders = list((tmp_path / "kept" / "ward").iterdir())
    assert sum(map(is_memory, folders)) == KEPT_RUNS
    assert (tmp_path / "kept" / "ward" / "mine" / "notes.txt").exists()
