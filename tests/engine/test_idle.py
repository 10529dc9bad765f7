"""What is set and does nothing is refused, with what to do about it; what was run once can be run again."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import fedkeel
from fedkeel import analysis
from fedkeel.config import Config
from fedkeel.engine.executors.processes import ProcessesExecutor
from fedkeel.engine.executors.ray import RayExecutor
from fedkeel.engine.executors.serial import SerialExecutor
from fedkeel.engine.idle import idle, settled, without_idle
from fedkeel.errors import FedkeelError
from fedkeel.experiments.recipes import load, names
from fedkeel.experiments.reproduce import reproduce
from tests import tiny

Options = dict[str, Any]
DP = {"dp": "central", "weighting": "uniform"}
SITE = {"evaluate_with": "site"}
NOTHING: Options = {}

# The option, what it has no effect beside, where that is not the default, what the sentence says, and what helps.
REFUSED: list[tuple[Options, Options, str, Options]] = [
    ({"dp_clip": 0.1}, NOTHING, "is of differential privacy, and there is none: give --dp central", DP),
    ({"dp_noise": 5.0}, NOTHING, "is of differential privacy", DP),
    ({"dp_delta": 1e-3}, NOTHING, "is of differential privacy", {"dp": "local"}),
    ({"drop_last": True}, {"dp": "local"}, "is of whole batches", DP),
    ({"compile": True}, {"dp": "local"}, "is of steps of whole batches", NOTHING),
    ({"momentum": 0.5}, {"optimizer": "adam"}, "give --optimizer sgd", {"optimizer": "rmsprop"}),
    ({"momentum": 0.5}, {"optimizer": "adam(amsgrad=true)"}, "of optimizers that have one", {"optimizer": "sgd"}),
    ({"weight_decay": 0.1}, {"optimizer": "rprop"}, "of optimizers that have one", {"optimizer": "adam"}),
    ({"decay": 0.9}, NOTHING, "give --schedule exponential", {"schedule": "exponential"}),
    ({"decay": 0.9}, {"schedule": "cosine"}, "'exponential'", {"schedule": "warmup(then=exponential)"}),
    ({"decay": 0.9}, {"schedule": "exponential(decay=0.5)"}, "brackets have none", {"schedule": "exponential"}),
    ({"decay": 0.9}, {"schedule": "warmup(then='exponential(decay=1)')"}, "'exponential'", {"schedule": "exponential"}),
    ({"site_images": 8}, {"evaluate_with": "both"}, "is of a calibration", SITE),
    ({"site_prior": 8.0}, NOTHING, "give --evaluate-with site", SITE),
    ({"site_always": True}, NOTHING, "is of a calibration", {"evaluate_with": "all"}),
    ({"select_by": "auc"}, NOTHING, "chooses a round, and none is chosen", {"result": "best-validation"}),
    ({"select_by": "loss"}, NOTHING, "chooses a round", {"patience": 2}),
    ({"min_delta": 0.1}, NOTHING, "is what 'patience' asks for", {"patience": 2}),
    ({"record_every": 2}, NOTHING, "give --record", {"record": "fairness"}),
    ({"ray_address": "auto"}, NOTHING, "give --executor ray", {"executor": "ray"}),
    ({"ray_cores": 2}, {"executor": "serial"}, "is of a Ray cluster", {"executor": "ray"}),
    ({"ray_gpus": 0.5}, NOTHING, "is of a Ray cluster", {"executor": "ray"}),
    ({"ray_actors": 2}, NOTHING, "is of a Ray cluster", {"executor": "ray"}),
    ({"round_timeout": 5.0}, NOTHING, "is of sites over a network and of actors of Ray", {"executor": "ray"}),
    ({"memory_limit": 5}, {"executor": "ray"}, "these stay where clients run", {"executor": "serial"}),
    ({"workers": 2}, {"executor": "serial"}, "choose one with --executor", {"executor": "processes"}),
    ({"workers": 2}, {"device": "cpu", "threads": 2}, "choose one with --executor", {"device": "cpu"}),
    ({"precision": "bf16"}, {"device": "cpu"}, "only a GPU computes in", {"executor": "ray"}),
    ({"robust": "norm-clip"}, {"method": "central"}, "'central' makes one of all", {"method": "fedavg"}),
    ({"participation": 0.5}, {"method": "central"}, "'central' makes one of all", {"method": "fedavg"}),
    ({"weighting": "uniform"}, {"method": "central"}, "is of several clients", NOTHING),
    ({"evaluate_clients": 5}, {"method": "fedavg"}, "and here all have one", {"method": "fedbn+fedprox"}),
    ({"evaluate_clients": 5}, {"method": "fedprox"}, "of clients with models of their own", SITE),
    ({"partition": "even"}, {"data": "digits(partition=iid)"}, "brackets of 'data'", {"data": "digits"}),
    ({"unseen": "b"}, {"data": "digits(unseen=a)"}, "keep one of them", {"data": "digits"}),
    ({"subsample": 3}, {"data": "digits(subsample=5)"}, "keep one of them", {"data": "digits"}),
]  # fmt: skip
OVER_NETWORK: list[tuple[Options, str]] = [
    ({"evaluate_on": "validation"}, "sites are tested on what they hold out for it"),
    ({"predictions": True}, "these stay at the sites"),
    ({"record": "fairness"}, "these stay at the sites"),
    ({"workers": 2}, "this run has none of them"),
    ({"compile": True}, "is of steps of whole batches on this machine"),
    ({"memory_limit": 5}, "these stay where clients run"),
    ({"ray_cores": 2}, "is of a Ray cluster"),
    ({"dp_noise": 5.0}, "is of differential privacy"),
]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(RayExecutor, "cannot_run", lambda *_: "")


@pytest.mark.parametrize(("option", "beside", "words", "remedy"), REFUSED, ids=lambda value: ",".join(value) or "-")
def test_an_option_without_effect_is_refused_and_says_what_helps(
    option: Options, beside: Options, words: str, remedy: Options
) -> None:
    (name,) = option
    sentence = idle(Config(**option, **beside))[name]
    assert sentence.startswith(f"'{name}' ")
    assert words in sentence
    assert name not in idle(Config(**option, **remedy))
    assert name not in idle(Config(**beside))  # which are not refused for what nobody set


@pytest.mark.parametrize(("option", "words"), OVER_NETWORK, ids=lambda value: ",".join(value))
def test_over_a_network_the_same_rule_holds(option: Options, words: str) -> None:
    (name,) = option
    assert words in idle(Config(**option), network=True)[name]


def test_what_a_site_or_both_sides_have_is_not_refused_over_a_network() -> None:
    both = Config(data="folder(unseen=a)", unseen="b", precision="bf16", device="cpu", round_timeout=5.0, threads=2)
    both = both.replace(executor="serial")  # as a simulation of it has
    assert idle(both, network=True) == {}


def test_every_option_that_needs_something_stands_in_these_tables() -> None:
    told = {name for option, *_ in [*REFUSED, *OVER_NETWORK] for name in option}
    assert told == {entry.name for entry in fields(Config) if entry.metadata["needs"]}


def test_arithmetic_of_a_gpu_that_was_typed_is_refused_on_a_cpu() -> None:
    assert "only a GPU computes in" in idle(Config(device="cpu"), typed=["precision"])["precision"]
    assert idle(Config(device="cpu", precision="float32"), typed=["precision"]) == {}


@pytest.mark.parametrize(
    "true",
    [
        {"precision": "float32"},  # which is what a CPU computes in
        {"momentum": 0.0, "optimizer": "adam"},
        {"workers": 1, "executor": "serial"},
    ],
)
def test_what_says_how_it_is_passes(true: Options) -> None:
    assert idle(Config(device="cpu", **true)) == {}


def test_several_workers_are_had_where_there_is_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeel.engine.executors.processes.available_cores", lambda: 1)
    assert ProcessesExecutor.rank(Config(workers=2)) > SerialExecutor.rank(Config()) > ProcessesExecutor.rank(Config())


def test_nothing_is_read_before_that(tmp_path: Path) -> None:
    with pytest.raises(FedkeelError, match="'dp_noise' is of differential privacy"):
        fedkeel.simulate(data="folder(root=/nowhere)", dp_noise=5.0, directory=tmp_path / "run")
    with pytest.raises(FedkeelError, match="'momentum' is of optimizers"):
        fedkeel.advise(data="folder(root=/nowhere)", momentum=0.5, optimizer="adam")
    assert not (tmp_path / "run").exists()


def test_the_configuration_of_a_run_can_be_run_again(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", momentum=0.5)
    config = run.config.replace(data="digits-shift", model="simple_cnn", method="fedavg")
    (tmp_path / "again.toml").write_text(config.to_toml())
    assert idle(fedkeel.config.from_dict(fedkeel.config.read(tmp_path / "again.toml"))) == {}


def test_a_run_made_before_can_be_gone_on_with_but_not_be_given_more(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", rounds=1)
    text = (run.directory / "config.toml").read_text().replace("ray_cores = 0", "ray_cores = 3")
    (run.directory / "config.toml").write_text(text)
    objects = {"federation": tiny.federation(), "model": tiny.model()}
    assert fedkeel.extend(run.directory, rounds=2, **objects).rounds_done == 2
    with pytest.raises(FedkeelError, match="'ray_actors' is of a Ray cluster"):
        fedkeel.extend(run.directory, rounds=3, ray_actors=2, **objects)


# -- several runs ----------------------------------------------------------------------------------------------------
def test_what_is_set_for_all_is_left_out_of_the_rows_that_have_no_use_for_it() -> None:
    rows = {"a": Config(momentum=0.5), "b": Config(momentum=0.5, optimizer="adam", learning_rate=0.1)}
    assert settled(rows) == {"a": rows["a"], "b": Config(optimizer="adam", learning_rate=0.1)}
    with pytest.raises(FedkeelError, match="'momentum' is of optimizers"):
        settled({"b": rows["b"]})
    with pytest.raises(FedkeelError, match="'momentum' is of optimizers"):
        settled(rows, lambda label: {"b": ["momentum"]}.get(label, []))
    assert without_idle(rows["b"]).momentum == Config.momentum


def compare(tmp_path: Path, methods: list[str], **options: Any) -> fedkeel.Comparison:
    objects = {"federation": tiny.federation(), "model": tiny.model()}
    return fedkeel.compare(methods, directory=tmp_path / "c", seeds=1, rounds=1, **objects, **options)


def test_a_comparison_refuses_what_none_of_its_rows_uses(tmp_path: Path) -> None:
    with pytest.raises(FedkeelError, match="'dp_clip' is of differential privacy"):
        compare(tmp_path, ["fedavg", "fedprox"], dp_clip=0.1)
    with pytest.raises(FedkeelError, match="'momentum' is of optimizers"):
        compare(tmp_path, ["fedavg", "fedavg@optimizer=adam,momentum=0.5"])
    with pytest.raises(FedkeelError, match=r"'workers' is of the executors .* nor has one beside others, with --jobs"):
        compare(tmp_path, ["fedavg", "fedprox"], workers=2, jobs=2, device="cpu")
    assert not (tmp_path / "c").exists()


def test_a_comparison_runs_where_some_rows_use_it(tmp_path: Path) -> None:
    both = compare(tmp_path, ["fedavg", "fedavg@optimizer=adam"], momentum=0.5)
    assert [run.config.momentum for run in both.runs] == [0.5, Config.momentum]
    assert not both.failures


def test_every_cell_of_every_recipe_uses_all_that_it_sets() -> None:
    for recipe in map(load, names()):
        read = [recipe.reading(row, column).get("read", "") for row in recipe.rows for column in recipe.columns]
        wanted = [name for name in {*recipe.diagnostics, *read} if name in analysis.DIAGNOSTICS.names()]
        record = ",".join(name for name in wanted if not analysis.build(name).of_records)
        for config in {recipe.config(row, column).replace(record=record) for row, column in recipe.cells()}:
            assert idle(config) == {}, recipe.name


def test_a_reproduction_refuses_what_no_cell_uses(tmp_path: Path) -> None:
    with pytest.raises(FedkeelError, match="'dp_noise' is of differential privacy"):
        reproduce("hbn/table1", directory=tmp_path, dp_noise=5.0)
