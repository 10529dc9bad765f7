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
    ({"dp_clip": 0.1}, NOTHING, "does nothing without --dp central or --dp local", DP),
    ({"dp_noise": 5.0}, NOTHING, "does nothing without --dp central", DP),
    ({"dp_delta": 1e-3}, NOTHING, "does nothing without --dp central", {"dp": "local"}),
    ({"drop_last": True}, {"dp": "local"}, "with --dp local", DP),
    ({"momentum": 0.5}, {"optimizer": "adam"}, "with this --optimizer, which has none", {"optimizer": "rmsprop"}),
    ({"momentum": 0.5}, {"optimizer": "adam(amsgrad=true)"}, "with this --optimizer", {"optimizer": "sgd"}),
    ({"weight_decay": 0.1}, {"optimizer": "rprop"}, "with this --optimizer", {"optimizer": "adam"}),
    ({"site_images": 8}, {"evaluate_with": "both"}, "without --evaluate-with site", SITE),
    ({"site_prior": 8.0}, NOTHING, "without --evaluate-with site", SITE),
    ({"site_always": True}, NOTHING, "without --evaluate-with site", {"evaluate_with": "all"}),
    ({"select_by": "auc"}, NOTHING, "without --result best-validation", {"result": "best-validation"}),
    ({"select_by": "loss"}, NOTHING, "without --result best-validation", {"patience": 2}),
    ({"min_delta": 0.1}, NOTHING, "without --patience", {"patience": 2}),
    ({"record_every": 2}, NOTHING, "without --record", {"record": "nmi"}),
    ({"ray_address": "auto"}, NOTHING, "without --executor ray", {"executor": "ray"}),
    ({"ray_cores": 2}, {"executor": "serial"}, "without --executor ray", {"executor": "ray"}),
    ({"ray_actors": 2}, NOTHING, "without --executor ray", {"executor": "ray"}),
    ({"round_timeout": 5.0}, NOTHING, "without --executor ray or a network", {"executor": "ray"}),
    ({"workers": 2}, {"executor": "serial"}, "without --executor processes", {"executor": "processes"}),
    ({"workers": 2}, {"device": "cpu", "threads": 2}, "without --executor processes", {"device": "cpu"}),
    ({"precision": "bf16"}, {"device": "cpu"}, "on the CPU", {"executor": "ray"}),
    ({"robust": "norm-clip"}, {"method": "central"}, "which makes one client of all", {"method": "fedavg"}),
    ({"clients_per_round": 2}, {"participation": 0.5}, "beside --participation", {"method": "fedavg"}),
    ({"local_steps": 5}, {"local_epochs": 2}, "beside --local-epochs", NOTHING),
    ({"participation": 0.5}, {"method": "central"}, "which makes one client of all", {"method": "fedavg"}),
    ({"weighting": "uniform"}, {"method": "central"}, "decides what clients count for", NOTHING),
    ({"weighting": "uniform"}, {"method": "fedprox+ga"}, "the method or 'robust' decides", NOTHING),
    ({"weighting": "uniform"}, {"method": "fedheal"}, "the method or 'robust' decides", {"method": "fednova"}),
    ({"weighting": "uniform"}, {"robust": "norm-clip+median"}, "or 'robust' decides", {"robust": "norm-clip"}),
    ({"weighting": "uniform"}, {"robust": "trimmed-mean(share=0.3)"}, "or 'robust' decides", NOTHING),
    ({"weighting": "uniform"}, {"robust": "krum"}, "or 'robust' decides", {"robust": "multi-krum"}),
    ({"evaluate_clients": 5}, {"method": "fedavg"}, "all clients have the same model", {"method": "fedbn+fedprox"}),
    ({"evaluate_clients": 5}, {"method": "fedprox"}, "all clients have the same model", SITE),
    ({"partition": "even"}, {"data": "digits(partition=iid)"}, "beside the brackets of 'data'", {"data": "digits"}),
    ({"unseen": "b"}, {"data": "digits(unseen=a)"}, "leave it out", {"data": "digits"}),
    ({"subsample": 3}, {"data": "digits(subsample=5)"}, "leave it out", {"data": "digits"}),
]  # fmt: skip
OVER_NETWORK: list[tuple[Options, str]] = [
    ({"evaluate_on": "validation"}, "sites are tested on what they hold out"),
    ({"predictions": True}, "images stay at the sites"),
    ({"record": "nmi"}, "images stay at the sites"),
    ({"workers": 2}, "without --executor processes"),
    ({"ray_cores": 2}, "without --executor ray"),
    ({"dp_noise": 5.0}, "does nothing without --dp central"),
]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(RayExecutor, "cannot_run", lambda *_: "")
    monkeypatch.setattr("fedkeel.engine.executors.processes.has_shared_memory", lambda: True)


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
    assert "which computes in float32" in idle(Config(device="cpu"), typed=["precision"])["precision"]
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
    with pytest.raises(FedkeelError, match="'dp_noise' does nothing without --dp"):
        fedkeel.simulate(data="folder(root=/nowhere)", dp_noise=5.0, directory=tmp_path / "run")
    with pytest.raises(FedkeelError, match="'momentum' does nothing with this --optimizer"):
        fedkeel.advise(data="folder(root=/nowhere)", momentum=0.5, optimizer="adam")
    assert not (tmp_path / "run").exists()


def test_the_configuration_of_a_run_can_be_run_again(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", momentum=0.5)
    config = run.config.replace(data="digits-shift", model="simple_cnn", method="fedavg")
    (tmp_path / "again.toml").write_text(config.to_toml())
    assert idle(fedkeel.config.from_dict(fedkeel.config.read(tmp_path / "again.toml"))) == {}


def test_a_run_that_goes_on_is_not_given_what_does_nothing(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", rounds=1)
    with pytest.raises(FedkeelError, match="'ray_actors' does nothing without --executor ray"):
        tiny.resume(run.directory, rounds=3, ray_actors=2)


# -- several runs ----------------------------------------------------------------------------------------------------
def test_what_is_set_for_all_is_left_out_of_the_rows_that_have_no_use_for_it() -> None:
    rows = {"a": Config(momentum=0.5), "b": Config(momentum=0.5, optimizer="adam", learning_rate=0.1)}
    assert settled(rows) == {"a": rows["a"], "b": Config(optimizer="adam", learning_rate=0.1)}
    with pytest.raises(FedkeelError, match="'momentum' does nothing with this --optimizer"):
        settled({"b": rows["b"]})
    with pytest.raises(FedkeelError, match="'momentum' does nothing with this --optimizer"):
        settled(rows, lambda label: {"b": ["momentum"]}.get(label, []))
    assert without_idle(rows["b"]).momentum == Config.momentum


def compare(tmp_path: Path, methods: list[str], **options: Any) -> fedkeel.Comparison:
    objects = {"federation": tiny.federation(), "model": tiny.model()}
    return fedkeel.compare(methods, directory=tmp_path / "c", seeds=1, rounds=1, **objects, **options)


def test_a_comparison_refuses_what_none_of_its_rows_uses(tmp_path: Path) -> None:
    with pytest.raises(FedkeelError, match="'dp_clip' does nothing without --dp"):
        compare(tmp_path, ["fedavg", "fedprox"], dp_clip=0.1)
    with pytest.raises(FedkeelError, match="'momentum' does nothing with this --optimizer"):
        compare(tmp_path, ["fedavg", "fedavg@optimizer=adam,momentum=0.5"])
    with pytest.raises(FedkeelError, match=r"'workers' does nothing .* in runs beside others, of --jobs"):
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
        record = ",".join(name for name in wanted if name != "label-distribution")
        for config in {recipe.config(row, column).replace(record=record) for row, column in recipe.cells()}:
            assert idle(config) == {}, recipe.name


def test_a_reproduction_refuses_what_no_cell_uses(tmp_path: Path) -> None:
    with pytest.raises(FedkeelError, match="'dp_noise' does nothing without --dp"):
        reproduce("hbn/table1", directory=tmp_path, dp_noise=5.0)
