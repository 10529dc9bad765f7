"""Whole runs: stopped, killed, resumed, made of the user's own objects, and read again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import fedkeel
from fedkeel.cli import main
from fedkeel.config import Config
from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.errors import FedkeelError
from fedkeel.methods import METHODS, register
from fedkeel.methods.fedbn import FedBN
from fedkeel.models import Output, wrap
from fedkeel.runs.run import PYTHON_OBJECT, Run
from fedkeel.stopping import Stopped, stop_requested
from tests import tiny
from tests.data.made_up import tree

ROOT = Path(__file__).parents[2]


# -- a run and its directory ---------------------------------------------------------------------------------
def test_the_metrics_of_two_equal_runs_are_equal_and_hold_no_times(tmp_path: Path) -> None:
    runs = [tiny.run(tmp_path / name, "fedprox", rounds=2) for name in ("a", "b")]
    assert tiny.result(runs[0]) == tiny.result(runs[1])
    assert runs[0].config == runs[1].config
    text = (runs[0].directory / "metrics.jsonl").read_text()
    assert "seconds" not in text
    kinds = {json.loads(line)["kind"] for line in text.splitlines()}
    assert kinds == {"client", "evaluation", "scores", "round"}


def test_a_run_fits_on_a_screen_and_nothing_in_it_is_markup(tmp_path: Path) -> None:
    many = {f"<b>{number}</b>": 4 for number in range(30)}
    run = tiny.run(tmp_path / "r", rounds=1, on=tiny.federation(many))
    assert repr(run).startswith(f"Run('{run.directory}'): fedavg on tiny, seed 0, ")
    assert len(repr(run).splitlines()) == 23
    assert "and 10 more" in repr(run)
    assert "&lt;b&gt;0&lt;/b&gt;" in run._repr_html_()
    assert "<b>" not in run._repr_html_()


def test_a_finished_run_is_read_again(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", rounds=2)
    again = Run(run.directory)
    assert again.finished
    assert again.accuracy == run.accuracy == run.scores()[-1]["average"]
    assert run.summary is not None
    assert run.summary["executor"] == "serial"
    assert fedkeel.resume(run.directory).accuracy == run.accuracy


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    run = interrupted(tmp_path / "r")
    assert not run.finished
    assert "unfinished" in repr(run)
    with pytest.raises(FedkeelError, match="is not finished: continue it with 'fedkeel resume"):
        _ = run.accuracy
    with open(run.directory / "metrics.jsonl", "a") as file:
        file.write('{"kind": "rou')
    assert len(run.records("round")) == 2


NAMED: dict[str, Any] = {
    **tiny.OPTIONS,
    "data": "digits-shift",
    "subsample": 12,
    "rounds": 1,
    "model": "simple_cnn(width=2)",
}


def test_the_model_of_a_named_run_comes_back(tmp_path: Path) -> None:
    run = fedkeel.simulate(NAMED, directory=tmp_path / "r", method="fedavg")
    stored = safetensors.torch.load_file(run.directory / "model.safetensors")
    model = run.model()
    assert not model.training
    assert all(torch.equal(t, stored[name]) for name, t in model.state_dict().items())
    repeated = fedkeel.simulate(run.directory / "config.toml", directory=tmp_path / "again")
    assert tiny.result(repeated) == tiny.result(run)


@pytest.mark.parametrize("method", ["fedbn", "silobn", "fedrdn", "fedprox+fedbn"])
def test_a_method_with_personal_layers_has_no_model_that_is_nobody_s(tmp_path: Path, method: str) -> None:
    run = fedkeel.simulate(NAMED, directory=tmp_path / "r", method=method)
    with pytest.raises(
        FedkeelError, match=r"keeps layers on its clients.*\(client=\.\.\. in Python\), one of 'paper', 'scan'"
    ):
        run.model()
    with pytest.raises(FedkeelError, match="There is no model of a client 'scam': did you mean 'scan'"):
        run.model("scam")
    federation = fedkeel.data.load("digits-shift", subsample=12)
    for name in ("scan", "street"):
        client = federation[name]
        x = federation.test_transform(federation.images[client.test], torch.empty(len(client.test), 0))
        with torch.no_grad():
            right = run.model(client=name)(x).logits.argmax(1) == federation.labels[client.test]
        assert right.float().mean().item() == pytest.approx(run.accuracy_of(name), abs=1e-6)
    untrained = safetensors.torch.load_file(run.directory / "model.safetensors")
    kept = safetensors.torch.load_file(run.directory / "personal" / "scan.safetensors")
    assert not untrained.keys() & kept.keys(), "nobody can take what was never trained for a part of a model"


@pytest.mark.parametrize("stopped", [False, True])
def test_the_model_of_the_best_round_has_the_personal_layers_of_that_round(
    tmp_path: Path, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spoilt(FedBN):
        """From round 3 on the global model knows nothing any more."""

        def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
            return {name: tensor * (server.round < 3) for name, tensor in mean.items()}

    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    register("spoilt")(Spoilt)
    on = tiny.federation(validation=8)
    options: dict[str, Any] = {**tiny.OPTIONS, "rounds": 6, "result": "best-validation"}

    def stop(round: int) -> None:
        if stopped and round == 4:
            raise KeyboardInterrupt

    objects: dict[str, Any] = {"federation": on, "observer": tiny.Notes(stop)}
    with pytest.raises(KeyboardInterrupt) if stopped else nullcontext():
        fedkeel.simulate(options, directory=tmp_path / "r", method="spoilt", model="simple_cnn(width=2)", **objects)
    run = fedkeel.resume(tmp_path / "r", federation=on)
    assert run.summary is not None
    assert run.summary["round"] < 3
    for client in on.clients:
        with torch.no_grad():
            logits = run.model(client.name)(on.test_transform(on.images[client.test], torch.empty(8, 0))).logits
        right = logits.argmax(1) == on.labels[client.test]
        assert right.float().mean().item() == pytest.approx(run.accuracy_of(client.name), abs=1e-6)
        losses = [r["loss"] for r in run.records("evaluation") if r["client"] == client.name and r["split"] == "test"]
        loss = nn.functional.cross_entropy(logits, on.labels[client.test]).item()
        assert loss == pytest.approx(losses[run.summary["round"]], rel=1e-4)


@pytest.mark.slow
def test_a_run_directory_that_was_copied_elsewhere_needs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the images, nor the weights it started from, nor the folder in which it began."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path / "cache"))
    tree(Path("messy"), ["a", "b"], ["cat", "dog"], 8)
    seen = "resize(size=24)+normalise"
    data = f"folder(root=./messy, size=32, train_transform='{seen}', test_transform='{seen}')"
    given = {**NAMED, "data": data, "subsample": 0}
    first = fedkeel.simulate(given, directory="first")
    weights = str(first.directory / "model.safetensors")
    for number, method in enumerate(("fedavg", "hbn", "central")):
        run = fedkeel.simulate(given, directory=f"here{number}", method=method, weights=weights)
        (tmp_path / "else" / "where").mkdir(parents=True, exist_ok=True)
        shutil.move(run.directory, tmp_path / "else" / "where" / method)
    shutil.rmtree("messy")
    shutil.rmtree("first")
    shutil.rmtree("cache", ignore_errors=True)
    monkeypatch.chdir(tmp_path / "else")
    for method in ("fedavg", "hbn", "central"):
        there = Run(f"where/{method}")
        network, federation = there.network()
        assert network(torch.zeros(2, 3, 24, 24)).logits.shape == (2, 2)
        assert (federation.classes, federation.image_shape) == (("cat", "dog"), (3, 32, 32))
        for words in (["show", str(there.directory)], ["report", str(there.directory)]):
            assert main(words) == 0
        assert main(["export", str(there.directory), "--out", f"{method}.pt2", "--with-transform"]) == 0
        assert torch.export.load(f"{method}.pt2").module()(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)).shape == (1, 2)


def test_a_federation_given_in_python_with_a_named_model_is_rebuilt_too(tmp_path: Path) -> None:
    given = {"federation": tiny.federation(), "model": "simple_cnn(width=2)", "directory": tmp_path / "r"}
    run = fedkeel.simulate({**tiny.OPTIONS, "rounds": 1}, **given)
    assert run.config.data == PYTHON_OBJECT
    network, outline = run.network()
    assert outline.classes == tiny.CLASSES
    stored = safetensors.torch.load_file(run.directory / "model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in network.state_dict().items())
    own = tiny.run(tmp_path / "own", rounds=1)
    assert not own.model().training  # it was made in this process
    with pytest.raises(FedkeelError, match=r"was given in Python: load it with fedkeel\.load\(DIR, "):
        Run(own.directory).model()
    (run.directory / "federation.json").unlink()
    with pytest.raises(FedkeelError, match=r"lacks federation\.json, of which its network is built"):
        run.model()


# -- refused before it begins --------------------------------------------------------------------------------
class Late(fedkeel.Observer):
    """Says no when everything is ready, as a tracker may."""

    def started(self, config: Config, first_round: int) -> None:
        raise FedkeelError("It is too late.")


REFUSED: list[dict[str, Any]] = [
    {"method": "fedprox(nu=1)"},
    {"method": "nosuch"},
    {"model": "alexnet"},
    {"record": "mixing-factors"},
    {"record": "nosuch"},
    {"min_clients": 99},
    {"executor": "nosuch"},
    {"unseen": "nosuch"},
    {"partition": "dirichlet(clients=100000)"},
    {"robust": "nosuch"},
    {"stateless": True, "method": "scaffold"},
    {"observer": Late()},
]


@pytest.mark.parametrize("given", REFUSED)
def test_a_refused_run_leaves_no_directory(tmp_path: Path, given: dict[str, Any]) -> None:
    options = {**NAMED, **given}
    with pytest.raises(FedkeelError):
        fedkeel.simulate(**options, directory=tmp_path / "not" / "there" / "yet")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with pytest.raises(FedkeelError):
        fedkeel.simulate(**options, directory=tmp_path / "mine")
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"], "what was there before stays, and stays empty"
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(FedkeelError):
        fedkeel.simulate(**options, directory=tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == [tmp_path / "mine" / "notes.txt"]


def test_a_run_that_fails_later_stays(tmp_path: Path) -> None:
    run = interrupted(tmp_path / "r")
    with pytest.raises(FedkeelError, match="It is too late"):
        tiny.resume(run.directory, observer=Late())
    assert tiny.resume(run.directory).finished


def test_options_override_a_table_a_file_and_a_configuration(tmp_path: Path) -> None:
    from fedkeel.simulation import _settings

    (tmp_path / "c.toml").write_text("rounds = 5\nbatch-size = 3\n")
    for given in (tmp_path / "c.toml", {"rounds": 5, "batch_size": 3}, Config(rounds=5, batch_size=3)):
        assert _settings(given, {"rounds": 7}) == Config(rounds=7, batch_size=3)
    with pytest.raises(FedkeelError, match="no option 'round'"):
        fedkeel.simulate(round=3)


def test_a_free_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedkeel.simulation import free_directory

    monkeypatch.chdir(tmp_path)
    config = Config(method="fedprox(mu=0.1)+gn", data="folder(root=/x/y)")
    assert str(free_directory(config)) == "runs/folder-fedprox-mu=0.1-+gn-seed0"
    free_directory(config).mkdir(parents=True)
    assert str(free_directory(config)) == "runs/folder-fedprox-mu=0.1-+gn-seed0-2"
    for data in ("../../etc", "/etc/passwd", "..", "x" * 300):
        assert free_directory(Config(data=data)).parent == Path("runs")


# -- stopping ------------------------------------------------------------------------------------------------
def interrupted(path: Path, method: str | Method = "fedbn", at: int = 1, **options: Any) -> Run:
    def stop(round: int) -> None:
        if round == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.run(path, method, rounds=4, observer=tiny.Notes(stop), **options)
    return Run(path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedprox(mu=0.5)", "fedbn", "silobn", "standalone", "central"])
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path: Path, method: str) -> None:
    options: dict[str, Any] = {"result": "best-validation", "momentum": 0.9}
    options |= {} if method == "central" else {"participation": 0.7}
    whole = tiny.run(tmp_path / "whole", method, rounds=4, **options)
    for at in (0, 2, 3):
        run = interrupted(tmp_path / str(at), method, at=at, **options)
        notes = tiny.Notes()
        assert tiny.result(tiny.resume(run.directory, observer=notes)) == tiny.result(whole)
        assert notes.first == at + 1
        assert {k: v for k, v in run.summary.items() if k != "seconds"} == {  # type: ignore[union-attr]
            k: v
            for k, v in whole.summary.items()  # type: ignore[union-attr]
            if k != "seconds"
        }


def test_a_run_goes_on_under_other_options_of_the_machine_and_no_others(tmp_path: Path) -> None:
    whole = tiny.run(tmp_path / "whole", "fedbn", rounds=4, executor="serial")
    run = interrupted(tmp_path / "r", "fedbn", at=1, executor="serial")
    with pytest.raises(FedkeelError, match="'batch_size' cannot change when a run is resumed: give only executor"):
        tiny.resume(run.directory, batch_size=8)
    done = tiny.resume(run.directory, executor="processes", workers=2)
    assert tiny.result(done) == tiny.result(whole)
    assert done.summary is not None
    assert done.summary["executor"] == "processes"
    assert done.config.executor == "serial"  # as it began


def test_what_a_run_took_counts_its_earlier_starts(tmp_path: Path) -> None:
    run = interrupted(tmp_path / "r", "fedavg", at=1)
    timing = run.directory / "timing.jsonl"
    assert len(timing.read_text().splitlines()) == 2
    with open(timing, "a") as file:
        file.write('{"round": 2, "train": 1000.0, "aggregate": 20.0, "evaluate": 3.0}\n{"round": 3, "tra')
    lines = map(json.loads, timing.read_text().splitlines()[:3])
    before = sum(line[part] for line in lines for part in ("train", "aggregate", "evaluate"))
    began = time.perf_counter()
    done = tiny.resume(run.directory)
    assert done.summary is not None
    assert 1023 < before < done.summary["seconds"] <= before + time.perf_counter() - began


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_a_request_to_stop_ends_the_run_after_the_step_and_keeps_it(tmp_path: Path, executor: str) -> None:
    options: dict[str, Any] = tiny.by(executor)
    whole = tiny.run(tmp_path / "whole", "fedbn", rounds=4, **options)

    def stop(round: int) -> None:
        if round == 1:
            stop_requested.set()

    try:
        with pytest.raises(Stopped):
            tiny.run(tmp_path / "r", "fedbn", rounds=4, observer=tiny.Notes(stop), **options)
    finally:
        stop_requested.clear()
    assert tiny.result(tiny.resume(tmp_path / "r")) == tiny.result(whole)


def test_checkpoints_may_be_rarer_than_rounds(tmp_path: Path) -> None:
    whole = tiny.run(tmp_path / "whole", "fedbn", rounds=4)
    run = interrupted(tmp_path / "r", at=2, checkpoint_every=2)
    notes = tiny.Notes()
    assert tiny.result(tiny.resume(run.directory, observer=notes)) == tiny.result(whole)
    assert notes.first == 2


# -- objects of the user's -----------------------------------------------------------------------------------
class Momentum(Method):
    """A method with everything: memory on clients and server, extras both ways, a loss, a server rule."""

    name = "mymomentum"
    traits = Traits(needs_memory=True)

    def __init__(self, beta: float = 0.5) -> None:
        self.beta = beta

    def start(self, client: LocalClient) -> None:
        client.memory["visits"] = client.memory.get("visits", torch.zeros(())) + 1
        client.scratch["pull"] = client.extras.get("pull", torch.zeros(()))

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor:
        return 0.01 * client.scratch["pull"] * output.logits.square().mean() * client.memory["visits"]

    def finish(self, client: LocalClient) -> Tensors:
        return {"visits": client.memory["visits"]}

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        velocity = {
            name: self.beta * server.memory.get(name, torch.zeros_like(t)) + (t - server.weights[name])
            for name, t in mean.items()
        }
        server.memory.update(velocity)
        return {name: server.weights[name] + v for name, v in velocity.items()}

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        return {"pull": torch.stack([update.extras["visits"] for update in updates]).mean()}


def user_network() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6), nn.Linear(6, 4)]
    return wrap(nn.Sequential(*layers), head="5")


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_objects_of_the_user_train_and_resume(tmp_path: Path, executor: str) -> None:
    options: dict[str, Any] = {**tiny.by(executor), "participation": 0.7}
    whole = tiny.run(tmp_path / "whole", Momentum(0.3), network=user_network(), rounds=4, **options)
    assert whole.config.method == whole.config.model == whole.config.data == PYTHON_OBJECT
    run = interrupted(tmp_path / "r", Momentum(0.3), network=user_network(), **options)
    with pytest.raises(FedkeelError, match=r"The data of '.*' was given in Python.*federation=\.\.\."):
        fedkeel.resume(run.directory)
    with pytest.raises(FedkeelError, match=r"The method of '.*' was given in Python.*method=\.\.\."):
        tiny.resume(run.directory, network=user_network())
    resumed = tiny.resume(run.directory, network=user_network(), method=Momentum(0.3))
    assert tiny.result(resumed) == tiny.result(whole)
    other = tiny.run(tmp_path / "other", Momentum(0.0), network=user_network(), rounds=4, **options)
    assert tiny.result(other) != tiny.result(whole)
    with pytest.raises(FedkeelError, match=r"The m.* of '.*' was given in Python"):
        Run(whole.directory).model()
    trained = Run(whole.directory).network(model=user_network(), method=Momentum(0.3))[0]
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), whole.model().parameters(), strict=True))


def test_a_registered_method_is_known_by_name_and_composes(tmp_path: Path) -> None:
    register("mymomentum")(Momentum)
    try:
        named = tiny.run(tmp_path / "named", "mymomentum(beta=0.3)", rounds=2)
        given = tiny.run(tmp_path / "given", Momentum(0.3), rounds=2)
        assert tiny.result(named) == tiny.result(given)
        assert tiny.run(tmp_path / "composed", "fedprox+mymomentum+fedbn", rounds=2).finished
        with pytest.raises(FedkeelError, match="'mymomentum' needs clients that remember"):
            tiny.run(tmp_path / "stateless", "mymomentum", stateless=True)
    finally:
        METHODS._entries.pop("mymomentum")


# -- imports -------------------------------------------------------------------------------------------------
def imported_by(code: str) -> set[str]:
    program = f"{code}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ}
    )
    return set(done.stdout.split())


def test_importing_the_package_does_not_import_torch() -> None:
    modules = imported_by("import fedkeel; fedkeel.__version__; dir(fedkeel)")
    assert "torch" not in modules
    assert "numpy" not in modules


@pytest.mark.slow
def test_a_run_imports_only_what_it_needs() -> None:
    modules = imported_by(
        "import fedkeel.simulation, fedkeel; fedkeel.simulate, fedkeel.Method, fedkeel.register, fedkeel.data"
    )
    heavy = {
        "sklearn",
        "scipy.optimize",
        "matplotlib",
        "pyarrow",
        "timm",
        "torchvision",
        "flwr",
        "torch._dynamo",
    }
    assert not heavy & modules
    assert "torch" in modules


def test_every_public_name_is_there() -> None:
    for name in ("simulate", "resume", "Run", "Config", "Method", "register", "Observer", "FedkeelError"):
        assert getattr(fedkeel, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        fedkeel.simulat  # noqa: B018
