"""Advice on federations whose answer is known: which shift they have is known because they were made so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedkeel
from fedkeel import data
from fedkeel.data.federation import Federation
from fedkeel.engine.local import Worker
from fedkeel.experiments.advice import SITUATIONS, Advice, verdict
from fedkeel.experiments.heterogeneity import moments
from tests import tiny

SEEDS = range(3)
LABEL_SHIFT = {"data": "digits", "partition": "dirichlet(alpha=0.1, clients=5)"}
FEATURE_SHIFT = {"data": "digits-shift"}
BOTH = {"data": "digits-shift", "partition": "dirichlet(alpha=0.3, clients=2)"}
NEITHER = {"data": "digits", "partition": "even(clients=5)"}
TINY: dict[str, Any] = {"model": "simple_cnn(width=2)", "executor": "serial", "device": "cpu", "pilot": False}
CHANCE, MUCH = "differ no more than by chance", "differ much"


def advised(**options: Any) -> Advice:
    """Without a pilot, on a narrow network: a fraction of a second."""
    return fedkeel.advise(**{**TINY, "model": "simple_cnn(width=4)", **options})


def sizes(advice: Advice) -> tuple[str, str]:
    return verdict(advice.labels), verdict(advice.looks)


# -- made federations ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("shift", "found", "methods", "calibrate"),
    [
        (LABEL_SHIFT, (MUCH, CHANCE), ["fedavg", "hbn", "univarfl"], "no"),
        (FEATURE_SHIFT, (CHANCE, MUCH), ["fedavg", "greg", "fedwon", "fedbn"], "yes"),
        (BOTH, (MUCH, MUCH), ["fedavg", "fedprox+greg", "hbn", "fedwon"], "try"),
        (NEITHER, (CHANCE, CHANCE), ["fedavg"], "no"),
        # Twenty images a client, whose labels and looks differ a good deal by chance alone.
        ({**NEITHER, "subsample": 20}, (CHANCE, CHANCE), ["fedavg"], "no"),
    ],
)
def test_the_shift_is_found_and_its_methods_are_suggested(
    shift: dict[str, Any], found: tuple[str, str], methods: list[str], calibrate: str, seed: int
) -> None:
    advice = advised(**shift, seed=seed)
    assert sizes(advice) == found
    assert [*advice.methods] == methods
    assert advice.calibrate.partition(",")[0] == calibrate


def made(labels: list[list[int]], shades: list[float], images: int = 40) -> Federation:
    """A client for each list of classes, whose images are noise around a shade; classes are patterns."""
    random, count = np.random.default_rng(0), max(map(max, labels)) + 1
    patterns = random.uniform(0, 60, size=(count, 3, 8, 8))
    x, y, who = [], [], []
    for name, (classes, shade) in enumerate(zip(labels, shades, strict=True)):
        mine = np.resize(classes, images)
        x.append(patterns[mine] + shade + random.normal(0, 25, size=(images, 3, 8, 8)))
        y.append(mine)
        who += [f"site{name}"] * images
    pixels = np.concatenate(x).clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
    return data.federation(pixels, np.concatenate(y), clients=who)


def test_sites_with_one_class_each_and_looks_of_their_own_cannot_be_told_apart() -> None:
    advice = fedkeel.advise(made([[0], [1], [2]], [20, 90, 160]), **TINY)
    assert advice.looks is None
    assert sizes(advice) == (MUCH, "cannot be compared")
    assert advice.calibrate == "no, looks cannot be compared"
    assert "no class is at two clients" in repr(advice)


# -- what clients can do ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "methods"),
    [
        ({**LABEL_SHIFT, "stateless": True}, ["fedavg", "fixbn", "univarfl"]),
        ({**LABEL_SHIFT, "batch_size": 1}, ["fedavg", "fedwon", "univarfl"]),
        ({**FEATURE_SHIFT, "batch_size": 4}, ["fedavg", "fedwon", "greg", "fedbn"]),
        ({**FEATURE_SHIFT, "model": "simple_cnn(norm=false)"}, ["fedavg", "fedwon", "fedrdn"]),
        ({**NEITHER, "model": "simple_cnn(norm=false)"}, ["fedavg"]),
        ({**FEATURE_SHIFT, "unseen": "street"}, ["fedavg", "fedcoda", "greg", "ga"]),
    ],
)
def test_what_clients_cannot_do_is_left_out(options: dict[str, Any], methods: list[str]) -> None:
    assert [*advised(**options).methods] == methods


def test_each_that_is_left_out_has_its_reason() -> None:
    advice = advised(**LABEL_SHIFT, stateless=True)
    assert "needs clients that remember" in advice.left_out["hbn"]
    assert "not hbn: 'hbn' needs clients that remember" in repr(advice)
    assert "no batch norm" in advised(**FEATURE_SHIFT, model="simple_cnn(norm=false)").calibrate


def test_local_privacy_gets_methods_that_hide_a_sample() -> None:
    pytest.importorskip("opacus")
    advice = advised(**FEATURE_SHIFT, dp="local")
    assert [*advice.methods] == ["fedwon"]  # batch norm mixes samples, so that FedAvg is refused too
    assert "batch norm mixes" in advice.left_out["fedavg"]
    with pytest.raises(fedkeel.FedkeelError, match="--weighting uniform"):
        advised(**NEITHER, dp="central")


def test_every_method_of_the_table_is_there() -> None:
    for situation in SITUATIONS:
        for method in situation.methods:
            fedkeel.methods.build(method)


# -- the pilot -------------------------------------------------------------------------------------------------------
PILOT: dict[str, Any] = {"model": tiny.model(), "executor": "serial", "device": "cpu", "batch_size": 4}


def test_nothing_is_trained_but_the_pilot_which_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[str, int]] = []
    original = Worker.train

    def train(self: Worker, name: str, broadcast: Any, *rest: Any, **more: Any) -> Any:
        trained.append((name, broadcast.round))
        return original(self, name, broadcast, *rest, **more)

    monkeypatch.setattr(Worker, "train", train)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    observer = tiny.Notes()
    advice = fedkeel.advise(tiny.federation(), rounds=2, observer=observer, **PILOT)
    assert sorted(trained) == sorted((name, round) for name in tiny.SIZES for round in range(2))
    assert observer.rounds == [0, 1]
    assert [*tmp_path.iterdir()] == []
    assert advice.accuracy is not None
    assert f"FedAvg gets {100 * advice.accuracy:.1f} %" in advice.sentences[-1]
    assert "guessing gets 25.0 %" in advice.sentences[-1]
    trained.clear()
    assert fedkeel.advise(tiny.federation(), pilot=False, **PILOT).accuracy is None
    assert trained == []


def test_the_same_seed_gives_the_same_advice() -> None:
    one, two = (fedkeel.advise(tiny.federation(), rounds=1, seed=3, **PILOT).to_dict() for _ in range(2))
    assert one == two
    json.dumps(one, allow_nan=False)


def test_moments_are_those_that_batch_norm_sees() -> None:
    """Averaged over images, mean and second moment about it are the layer's batch statistics."""
    federation, model = tiny.federation(), tiny.model().eval()
    images = torch.arange(40)
    found = moments(federation, images, model).mean(0)
    with torch.no_grad():
        x = model.encoder[0](federation.test_transform(federation.images[images], torch.zeros(40, 0)))  # type: ignore[index]
    torch.testing.assert_close(found[:4], x.double().mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[4:], x.double().var((0, 2, 3), correction=0), rtol=1e-4, atol=1e-6)
    assert not model.encoder[1]._forward_pre_hooks  # type: ignore[index, union-attr]


# -- mistakes --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"data": "digit"}, "did you mean 'digits'"),
        ({"rounds": 0}, "'rounds' is 0"),
        ({"method": "greg"}, "advice is about methods and sets it itself"),
        ({"learning_rat": 0.1}, "did you mean 'learning_rate'"),
        ({"federation": "digits"}, "the name of a data set as data='...'"),
        ({"model": 3}, "give a network, or its name"),
        ({"federation": tiny.federation({"ward": 14})}, "has one client"),
        ({"federation": tiny.federation(), "data": "digits"}, "keep one"),
    ],
)
def test_mistakes_are_told_before_anything_trains(
    options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "train", lambda *_: pytest.fail("it trained"))
    with pytest.raises(fedkeel.FedkeelError) as caught:
        fedkeel.advise(**{"executor": "serial", "device": "cpu", **options})
    assert told in str(caught.value)
