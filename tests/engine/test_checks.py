"""What is given in Python where something else belongs is told in one sentence, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedkeel
from fedkeel import analysis, data, methods, models, report
from fedkeel.errors import FedkeelError
from fedkeel.experiments.reproduce import reproduce
from fedkeel.methods import METHODS
from tests import tiny


class Images(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, 8, 8), 0


class Network(nn.Module):
    def __init__(self, last: nn.Module | None = None) -> None:
        super().__init__()
        self.last = last or nn.Linear(192, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(x.flatten(1))
        return logits


def lazy() -> Network:
    return Network(nn.LazyLinear(4))


def simulate(*arguments: Any, **options: Any) -> Any:
    return fedkeel.simulate(*arguments, **{**tiny.OPTIONS, **options})


def on_tiny(**options: Any) -> Any:
    return simulate(**{"federation": tiny.federation(), "model": tiny.model(), **options})


def compare(methods: Any = ("fedavg",), **options: Any) -> Any:
    return fedkeel.compare(methods, **{"rounds": 1, **options})


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a dataset of torch": (lambda: simulate(federation=Images()), "'federation' is an Images: give a fedkeel.data.Fed"),
    "a data set's name": (lambda: simulate(federation="pacs"), "or the name of a data set as data="),
    "a class of data": (lambda: simulate(federation=data.Federation), "'federation' is the class Federation"),
    "several methods": (lambda: on_tiny(method=["fedavg", "gn"]), "give a fedkeel.Method, or its name where"),
    "method objects": (lambda: on_tiny(method=[methods.build("gn")]), "'method' is a list: give a fedkeel.Method"),
    "a registry entry": (lambda: on_tiny(method=METHODS.entry("fedbn")), "give a fedkeel.Method, or its name"),
    "a method's class": (
        lambda: on_tiny(method=type(methods.build("gn"))),
        "is the class GroupNorm: give a fedkeel.Method",
    ),
    "a number": (lambda: on_tiny(method=3), "'method' is 3: give a fedkeel.Method, or its name"),
    "the method first": (lambda: simulate("fedbn"), "The configuration 'fedbn' cannot be read"),
    "no such file": (lambda: simulate("none.toml"), "'none.toml' cannot be read"),
    "the federation first": (lambda: simulate(tiny.federation()), "The configuration is a Federation: give a Config"),
    "a list first": (lambda: simulate(["fedavg"]), "The configuration is ['fedavg']"),
    "a table of the wrong kind": (
        lambda: fedkeel.simulate({"rounds": "ten"}),
        "'rounds' is 'ten', which is not a whole",
    ),
    "a table with numbers": (lambda: simulate({1: 2}), "There is no option '1'"),
    "data that is an object": (lambda: simulate(data=tiny.federation()), "'data' is a Federation, which is not text."),
    "a network's class": (lambda: on_tiny(model=Network), "'model' is the class Network: give a network"),
    "a model's entry": (lambda: on_tiny(model=models.MODELS.entry("resnet10")), "give a network, or its name where"),
    "weights as a model": (lambda: on_tiny(model=tiny.model().state_dict()), "'model' is an OrderedDict"),
    "a bare network": (lambda: on_tiny(model=Network()), "wrap it with fedkeel.models.wrap"),
    "a lazy network": (lambda: on_tiny(model=lazy()), "The layer 'last' of Network is lazy"),
    "a lazy head": (
        lambda: on_tiny(model=models.Classifier(nn.Flatten(), nn.LazyLinear(4), 192, 4)),
        "The layer 'head' of Classifier is lazy",
    ),
    "other classes": (lambda: on_tiny(model=tiny.model(classes=7)), "The model has 7 outputs"),
    "nothing to train": (
        lambda: on_tiny(model=models.Classifier(nn.Flatten(), nn.Identity(), 192, 192)),
        "Classifier has no parameters",
    ),
    "a function to observe": (lambda: on_tiny(observer=print), "derived from fedkeel.Observer"),
    "a number as a place": (lambda: on_tiny(directory=3), "'directory' is 3: give a path."),
    "no place": (lambda: on_tiny(directory="a\0b"), "give a path."),
    "one method to compare": (lambda: compare("fedavg"), "What to compare is 'fedavg': give a list"),
    "a class to compare": (lambda: compare([type(methods.build("gn"))]), "What to compare has the class GroupNorm"),
    "half a seed": (lambda: compare(seeds=2.5), "'seeds' is 2.5"),
    "no seeds": (lambda: compare(seeds=None), "'seeds' is None"),
    "seeds as text": (lambda: compare(seeds=["0", "1"]), "'seeds' is "),
    "a truth as seeds": (lambda: compare(seeds=True), "'seeds' is True"),
    "jobs as text": (lambda: compare(jobs="2"), "'jobs' is '2': give a whole number"),
    "jobs below one": (lambda: compare(jobs=-1), "'jobs' is -1: give a whole number"),
    "half a job": (lambda: compare(jobs=1.5), "'jobs' is 1.5"),
    "an observer of a run": (lambda: compare(observer=fedkeel.Observer()), "'observer' is an Observer"),
    "a tracker's number": (lambda: compare(track=5), "no tracker named '5'"),
    "a place of a comparison": (lambda: compare(directory=3), "'directory' is 3"),
    "nothing to resume": (lambda: fedkeel.resume(None), "'directory' is None: give a path."),  # type: ignore[arg-type]
    "no run": (lambda: fedkeel.Run(7), "'directory' is 7: give a path."),  # type: ignore[arg-type]
    "no data": (lambda: data.load(None), "The data set is None: give its name as text."),  # type: ignore[arg-type]
    "data already": (lambda: data.load(tiny.federation()), "The data set is a Federation"),  # type: ignore[arg-type]
    "a root's number": (lambda: data.load("folder", root=3), "'root' is 3: give a path."),
    "a partition's number": (lambda: data.load("digits-shift", partition=3), "A name is 3, which is not text"),  # type: ignore[arg-type]
    "an unseen number": (lambda: data.load("digits-shift", unseen=3), "There is no domain named '3'"),  # type: ignore[arg-type]
    "no model": (lambda: models.build(None, num_classes=4), "The model is None: give its name as text."),  # type: ignore[arg-type]
    "a width of letters": (
        lambda: models.build("simple_cnn", num_classes=4, width="x"),
        "The 'width' of simple_cnn is 'x', which is not a whole number.",
    ),
    "no width": (lambda: models.build("simple_cnn", num_classes=4, width=0), "a layer of the model without weights"),
    "true for a share": (
        lambda: data.load("folder", root=".", tolerate=True),
        "The 'tolerate' of folder is True, which is not a number: give a number from 0, below 1.",
    ),
    "no method": (lambda: methods.build(None), "A name is None, which is not text"),  # type: ignore[arg-type]
    "a list of methods": (lambda: methods.build(["gn"]), "join names by '+'"),  # type: ignore[arg-type]
    "no network to wrap": (lambda: models.wrap(None), "What is to be wrapped is None"),  # type: ignore[arg-type]
    "a class to wrap": (lambda: models.wrap(Network), "What is to be wrapped is the class Network"),  # type: ignore[arg-type]
    "a lazy one to wrap": (lambda: models.wrap(lazy(), "last"), "The layer 'last' of Network is lazy"),
    "a layer as head": (lambda: models.wrap(Network(), nn.Linear(2, 2)), "'head' is a Linear"),  # type: ignore[arg-type]
    "a decorator without a name": (lambda: fedkeel.register(Network), "write @register('name') above"),  # type: ignore[arg-type]
    "a network as a method": (lambda: fedkeel.register("mine")(Network), "The method 'mine' is the class Network"),  # type: ignore[type-var]
    "one place to report": (lambda: report.write("runs"), "What to report is 'runs': give a list"),
    "nothing to report": (lambda: report.write(None), "What to report is None"),  # type: ignore[arg-type]
    "a recipe that is a number": (lambda: reproduce(3), "The recipe is 3: give its name"),  # type: ignore[arg-type]
    "no labels": (lambda: reproduce("hbn/table1", only=3), "is 3: give a list of labels"),  # type: ignore[arg-type]
    "a diagnostic of letters": (
        lambda: analysis.build("tsne(samples=x)"),
        "The 'samples' of tsne is 'x', which is not a whole number: give at least",
    ),
    "liars of letters": (
        lambda: on_tiny(robust="krum(liars=x)"),
        "The 'liars' of krum is 'x', which is not a whole number: give at least",
    ),
    "dropout of letters": (
        lambda: models.build_spec("alexnet(dropout=x)", num_classes=4),
        "The 'dropout' of alexnet is 'x', which is not a number.",
    ),
    "a number to report": (lambda: report.write([3]), "'directory' is 3"),  # type: ignore[list-item]
}


@pytest.mark.parametrize("name", WRONG)
def test_one_sentence_says_what_to_give(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, expected = WRONG[name]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedkeelError) as error:
        call()
    sentence = str(error.value)
    assert expected in sentence
    assert "\n" not in sentence
    assert len(sentence) < 300 or "choose from" in sentence
    assert not list(tmp_path.iterdir())


def test_a_lazy_network_that_was_called_once_trains(tmp_path: Path) -> None:
    network = lazy()
    network(torch.zeros(1, 3, 8, 8))
    run = tiny.run(tmp_path / "run", network=models.wrap(network, "last"), rounds=1)
    assert run.finished
