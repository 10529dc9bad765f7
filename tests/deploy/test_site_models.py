"""A site that wants to keeps the model that a run ends with, as a run of its own, and nobody else knows of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import fedkeel
from fedkeel.cli import main
from fedkeel.config import Config
from fedkeel.core.client import Batch
from fedkeel.data.federation import Federation
from fedkeel.deploy.serving import Waiting, train
from fedkeel.deploy.site import Site, own_data
from fedkeel.deploy.site_models import KEPT_RUNS, SiteModels
from fedkeel.nn.calibration import Calibrator
from fedkeel.runs.run import Run
from fedkeel.runs.trained import as_tested
from tests import tiny
from tests.deploy.loop import Loop, over_network, sites_of
from tests.deploy.real import SITES, draw_images

pytestmark = pytest.mark.slow
SIZES = {"clinic": 18, "hospital": 30, "ward": 24}


def keeping(on: Federation, place: Path, network: nn.Module | None = None, **own: Any) -> Loop:
    """Sites that keep models, each in a folder of its own."""
    sites = sites_of(on, place / "sites", network or tiny.model())
    return Loop({n: replace(s, models=SiteModels(place / "kept" / s.name), **own) for n, s in sites.items()})


def kept(place: Path, name: str) -> Run:
    (directory,) = (place / "kept" / name).iterdir()
    return Run(directory)


def tensors(run: Run) -> dict[str, Tensor]:
    return safetensors.torch.load_file(run.directory / "model.safetensors")


def expected(run: Run, on: Federation, name: str) -> dict[str, Tensor]:
    """The run's model, calibrated here on the images of the site."""
    network, site = run.remember(model=tiny.model()).model(), on[name]
    images = as_tested(on.test_transform, on.images[site.train])
    Calibrator(network, lambda x: network(x).logits).calibrate(lambda: iter([Batch(images, torch.zeros(len(images)))]))
    return network.state_dict()


@pytest.mark.parametrize("options", [{}, {"result": "best-validation", "learning_rate": 0.5}, {"patience": 1}])
def test_each_site_has_the_result_of_the_run_with_its_own_statistics(tmp_path: Path, options: dict[str, Any]) -> None:
    on = tiny.federation(SIZES)
    run = over_network(tmp_path, on=on, loop=keeping(on, tmp_path), rounds=4, **options)
    for site in on:
        torch.testing.assert_close(tensors(kept(tmp_path, site.name)), dict(expected(run, on, site.name)))
    # They share the weights and not the statistics.
    ward, clinic = (tensors(kept(tmp_path, name)) for name in ("ward", "clinic"))
    assert torch.equal(ward["head.weight"], clinic["head.weight"])
    assert not torch.equal(ward["encoder.1.running_mean"], clinic["encoder.1.running_mean"])


@pytest.mark.parametrize(("method", "kept_anyway"), [("fedper", True), ("fedavg", False)])
def test_a_personal_method_leaves_each_site_its_model_unasked(tmp_path: Path, method: str, kept_anyway: bool) -> None:
    on = tiny.federation(SIZES)
    loop = keeping(on, tmp_path)
    for site in loop.at.values():
        assert site.models is not None
        site.models.calibrate = False
    run = over_network(tmp_path, method, on=on, loop=loop)
    assert (tmp_path / "kept" / "ward").exists() == kept_anyway
    if kept_anyway:
        shared, own = tensors(run), kept(tmp_path, "ward")
        assert torch.equal(tensors(own)["encoder.0.weight"], shared["encoder.0.weight"])
        heads = [kept(tmp_path, name).remember(model=tiny.model()).model(name).head.weight for name in SIZES]
        assert not torch.equal(heads[0], heads[1])
        assert not torch.equal(heads[0], tiny.model().head.weight)


def test_the_run_is_as_without_and_nothing_travels(tmp_path: Path) -> None:
    on = tiny.federation(SIZES)
    plain, loop = Loop(sites_of(on, tmp_path / "plain" / "sites", tiny.model())), keeping(on, tmp_path / "kept")
    runs = [over_network(tmp_path / name, on=on, loop=used) for name, used in (("plain", plain), ("kept", loop))]
    assert tiny.result(runs[0]) == tiny.result(runs[1])
    assert [len(carried) for carried in plain.carried] == [len(carried) for carried in loop.carried]


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


def test_models_of_the_latest_runs_stay(tmp_path: Path) -> None:
    on = tiny.federation(SIZES)
    loop = keeping(on, tmp_path)
    (tmp_path / "kept" / "ward" / "mine").mkdir(parents=True)
    for number in range(KEPT_RUNS + 2):
        over_network(tmp_path / str(number), on=on, loop=loop, rounds=1)
    assert len(list((tmp_path / "kept" / "ward").iterdir())) == KEPT_RUNS + 1


@pytest.mark.parametrize("method", ["fedavg", "hbn", "fedbn"])
def test_the_model_comes_back_to_the_server_and_to_each_site(
    tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same commands work on the server's run directory and on the one that each site keeps."""
    draw_images(tmp_path / "images")
    loop = Loop({})
    for name in SITES:
        models = SiteModels(tmp_path / "kept" / name)
        read = own_data(tmp_path / "images" / name, name)
        loop.at[name] = Site(read, tmp_path / "state" / name, name, "cpu", models=models)
    options = {"method": method, "model": "simple_cnn", "data": "folder(size=16)", "rounds": 1, "batch_size": 8}
    run = train(loop, Config(**options, device="cpu"), tmp_path / "run", Waiting(len(SITES)), tiny.Notes())
    image = next((tmp_path / "images/north/cat").iterdir())
    for directory in (run.directory, kept(tmp_path, "north").directory):
        if method == "fedbn" and directory == run.directory:
            continue  # of a personal method the server has no site's model
        whose = ["--client", "north"] if method == "fedbn" else []
        assert main(["show", str(directory)]) == 0
        assert main(["predict", str(directory), str(image), *whose]) == 0
        out = tmp_path / "model.pt2"
        assert main(["export", str(directory), "--out", str(out), "--with-transform", *whose]) == 0
        assert "cat" in capsys.readouterr().out
        trained = fedkeel.load(directory, client=whose[1] if whose else None)
        pixels = torch.full((1, 3, 16, 16), 99, dtype=torch.uint8)
        exported = torch.export.load(out).module()(pixels)
        torch.testing.assert_close(exported, trained.network(as_tested(trained.transform, pixels)))
