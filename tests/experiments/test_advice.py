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
from fedkeel.data.federation import Client, Federation
from fedkeel.engine.local import Worker
from fedkeel.experiments.advice import Advice
from fedkeel.experiments.advice.suggestions import NOTHING
from fedkeel.experiments.advice.survey import apart, early_layer, moments, verdict
from fedkeel.experiments.situations import FEATURE, LABEL, SITUATIONS, read_evidence
from fedkeel.models import build
from fedkeel.simulation import simulate
from tests import tiny, vectors

SEEDS = range(4)
LABEL_SHIFT = {"data": "digits", "partition": "dirichlet(alpha=0.1, clients=5)"}
FEATURE_SHIFT = {"data": "digits-shift"}
BOTH = {"data": "digits-shift", "partition": "dirichlet(alpha=0.3, clients=2)"}
NEITHER = {"data": "digits", "partition": "even(clients=5)"}
TINY: dict[str, Any] = {"model": "simple_cnn(width=2)", "executor": "serial", "device": "cpu", "pilot": False}


def advised(**options: Any) -> Advice:
    """Without a pilot, on a narrow network: a fraction of a second."""
    small = {"model": "simple_cnn(width=4)", "pilot": False, "executor": "serial", "device": "cpu"}
    return fedkeel.advise(**{**small, **options})


def sizes(advice: Advice) -> tuple[str, str | None]:
    look = advice.measures.look
    return verdict(advice.measures.labels), verdict(look) if look else None


# -- made federations ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", SEEDS)
def test_pure_label_shift(seed: int) -> None:
    advice = advised(**LABEL_SHIFT, seed=seed)
    assert sizes(advice) == ("much", "no more than chance")
    assert advice.methods == ["fedavg", "hbn", "univarfl"]
    assert advice.calibrate.verdict == "no"
    number = f"labels lie {apart(advice.measures.labels):.2f} apart"
    assert all(number in suggestion.reason for suggestion in advice.suggestions[1:])


@pytest.mark.parametrize("seed", SEEDS)
def test_pure_feature_shift(seed: int) -> None:
    advice = advised(**FEATURE_SHIFT, seed=seed)
    assert sizes(advice) == ("no more than chance", "much")
    assert advice.methods == ["fedavg", "greg", "fedwon", "fedbn"]
    assert advice.calibrate.verdict == "yes"
    assert advice.measures.look is not None
    assert f"looks lie {apart(advice.measures.look):.2f} apart" in advice.suggestions[1].reason


@pytest.mark.parametrize("seed", SEEDS)
def test_both_shifts_ask_for_methods_of_both_kinds(seed: int) -> None:
    advice = advised(**BOTH, seed=seed)
    assert sizes(advice) == ("much", "much")
    assert advice.methods == ["fedavg", "fedprox+greg", "hbn", "fedwon"]
    assert advice.calibrate.verdict == "try"
    assert "labels lie" in advice.suggestions[1].reason
    assert "looks lie" in advice.suggestions[1].reason


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("few", [{}, {"subsample": 20}])
def test_without_a_shift_the_plain_mean_should_do(seed: int, few: dict[str, int]) -> None:
    """Also with 20 images a client, whose labels and looks differ a good deal by chance alone."""
    advice = advised(**NEITHER, **few, seed=seed)
    assert sizes(advice) == ("no more than chance", "no more than chance")
    assert advice.methods == ["fedavg"]
    assert "hardly differ (labels lie 0.00 apart, looks lie 0.00 apart)" in advice.suggestions[0].reason
    assert advice.calibrate.verdict == "no"
    assert advice.next[0].startswith("fedkeel compare central fedavg ")


def test_the_same_clients_at_twenty_images_each_differ_by_chance() -> None:
    """What the test above rests on: without the deals these would pass for shifted."""
    found = advised(**NEITHER, subsample=20).measures.look
    assert found is not None
    assert found.distance > 0.4
    assert found.chance > 0.4


@pytest.mark.parametrize("seed", range(10))
def test_clients_that_were_dealt_their_images_do_not_differ(seed: int) -> None:
    """Eight images each: their shares of the classes lie half of the way to the farthest they could be."""
    random = np.random.default_rng(seed)
    x, y = random.integers(0, 256, size=(80, 8, 8, 3), dtype=np.uint8), random.integers(0, 5, 80)
    federation = data.federation(x, y, clients=[f"site{number}" for number in random.permutation(np.arange(80) // 8)])
    advice = fedkeel.advise(federation, **TINY)
    assert advice.measures.labels.distance > 0.2
    assert sizes(advice) == ("no more than chance", "no more than chance")


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
    assert advice.measures.look is None
    assert advice.measures.comparable == 0
    assert verdict(advice.measures.labels) == "much"
    assert advice.calibrate.verdict == "not known"
    assert any("no class is at two clients" in sentence for sentence in advice.unknown)
    assert "no class is at two clients" in repr(advice)


def test_sites_with_one_class_that_others_have_too_can() -> None:
    alike = fedkeel.advise(made([[0], [0], [1], [1]], [20, 20, 20, 20]), **TINY)
    other = fedkeel.advise(made([[0], [0], [1], [1]], [20, 90, 20, 90]), **TINY)
    assert sizes(alike) == ("much", "no more than chance")
    assert sizes(other) == ("much", "much")


def test_few_images_that_can_be_compared_are_told() -> None:
    advice = fedkeel.advise(made([[0], [1], [2] * 9 + [0]], [20, 90, 20]), **TINY)
    assert 0 < advice.measures.comparable < 1
    half = fedkeel.advise(made([[0] * 19 + [4], [1], [2] * 19 + [4], [3]], [20, 90, 20, 20]), **TINY)
    assert any("How far looks differ for most images" in sentence for sentence in half.unknown)


def test_images_that_are_all_the_same_do_not_differ() -> None:
    x, y = np.full((60, 8, 8, 3), 9, dtype=np.uint8), np.arange(60) % 2
    advice = fedkeel.advise(data.federation(x, y, clients=[f"site{number // 20}" for number in range(60)]), **TINY)
    assert advice.measures.look is not None
    assert advice.measures.look.distance == 0
    assert advice.methods == ["fedavg"]


def test_two_clients_are_no_sample() -> None:
    advice = fedkeel.advise(made([[0, 1], [0, 1]], [20, 90]), **TINY)
    assert sizes(advice)[1] == "much"
    assert any("2 clients are no sample" in sentence for sentence in advice.unknown)


def test_a_large_population_is_sampled_and_says_so() -> None:
    advice = advised(data="digits", partition="dirichlet(alpha=0.1, clients=300, samples=20)")
    assert (advice.measures.clients, advice.measures.looked_at) == (300, 100)
    assert any("100 of 300" in sentence for sentence in advice.unknown)
    assert sizes(advice) == ("much", "no more than chance")


def test_a_folder_of_photographs(tmp_path: Path) -> None:
    from PIL import Image

    random = np.random.default_rng(0)
    for town, shade in (("north", 30), ("south", 150)):
        for sign in ("stop", "yield"):
            folder = tmp_path / town / sign
            folder.mkdir(parents=True)
            for number in range(20):
                pixels = (shade + random.normal(0, 30, size=(12, 12, 3))).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    advice = advised(data=f"folder(root='{tmp_path}', size=16)")
    assert sizes(advice) == ("no more than chance", "much")
    assert str(tmp_path) in advice.next[0]


# -- what clients can do ---------------------------------------------------------------------------------------------
def test_stateless_clients_get_no_method_that_remembers() -> None:
    advice = advised(**LABEL_SHIFT, stateless=True)
    assert advice.methods == ["fedavg", "fixbn", "univarfl"]
    assert "needs clients that remember" in advice.left_out["hbn"]
    assert "fedbn" not in advised(**FEATURE_SHIFT, stateless=True).methods
    assert "not hbn: it needs clients that remember their last round" in repr(advice)


def test_batches_of_one_image_get_no_batch_norm(caplog: pytest.LogCaptureFixture) -> None:
    for shift in (LABEL_SHIFT, FEATURE_SHIFT, NEITHER):
        advice = advised(**shift, batch_size=1)
        assert advice.methods[1:3] == ["fedwon", "gn"]
        assert "a batch of 1 sample has no statistics" in advice.suggestions[1].reason
        assert not {"greg", "hbn", "fixbn", "fedbn", "silobn", "univarfl"} & {*advice.methods}
    by_label = advised(**LABEL_SHIFT, batch_size=1).suggestions[2]
    assert by_label.method == "gn"
    assert by_label.evidence == [one.sentence for one in read_evidence() if one.shift == LABEL and one.is_of(["gn"])]
    assert len([record for record in caplog.records if "batch size is 1" in record.message]) == 4  # once for each


def test_local_privacy_gets_methods_that_hide_a_sample() -> None:
    pytest.importorskip("opacus")
    for shift in (LABEL_SHIFT, FEATURE_SHIFT, NEITHER):
        advice = advised(**shift, dp="local")
        assert advice.methods[:2] == ["fedwon", "gn"]  # batch norm mixes samples, so that FedAvg is refused too
        assert advice.calibrate.verdict == "no"
        assert "batch norm mixes" in advice.left_out["fedavg"]
        assert all(fedkeel.methods.build(method).traits.private for method in advice.methods)
        assert any("the pilot has none" in sentence for sentence in advice.unknown)
    with pytest.raises(fedkeel.FedkeelError, match="--weighting uniform"):
        advised(**NEITHER, dp="central")


def test_small_batches_put_methods_without_batch_norm_first() -> None:
    assert advised(**FEATURE_SHIFT, batch_size=4).methods == ["fedavg", "fedwon", "greg", "fedbn"]


def test_a_model_without_batch_norm() -> None:
    advice = advised(**FEATURE_SHIFT, model="simple_cnn(norm=false)")
    assert not advice.measures.batch_norm
    assert advice.methods == ["fedavg", "fedwon", "fedrdn"]
    assert advice.calibrate.verdict == "no"
    assert "no batch norm" in advice.calibrate.reason
    assert advised(**NEITHER, model="simple_cnn(norm=false)").methods == ["fedavg"]


def test_vectors() -> None:
    advice = fedkeel.advise(vectors.federation(), pilot=False, model="mlp", executor="serial", device="cpu")
    assert sizes(advice)[1] == "much"
    x, labels, _ = vectors.arrays(seed=1)
    plain = np.random.default_rng(0).permutation(np.repeat(["a", "b", "c"], 40))
    same = data.federation((x - x.mean(0)) / x.std(0), labels, clients=plain)
    assert sizes(fedkeel.advise(same, pilot=False, model="mlp", device="cpu"))[1] == "no more than chance"


def test_a_held_out_domain_asks_for_methods_that_generalise() -> None:
    advice = advised(**FEATURE_SHIFT, unseen="street")
    assert advice.methods == ["fedavg", "fedcoda", "greg", "ga"]
    assert "street" in advice.suggestions[1].reason
    assert not any("--unseen" in sentence for sentence in advice.unknown)


def test_every_suggestion_can_be_run(tmp_path: Path) -> None:
    """What advice has checked, `simulate` does not refuse."""
    for number, options in enumerate(({**BOTH, "robust": "median"}, {**FEATURE_SHIFT, "stateless": True})):
        advice = advised(**options)
        for method in advice.methods:
            given: Any = {**options, "rounds": 1, "subsample": 12, "model": "simple_cnn(width=2)", "device": "cpu"}
            given |= {"partition": "domains", "executor": "serial", "method": method}
            simulate(given, directory=tmp_path / f"{number}-{method}", verbose=False)


# -- the pilot -------------------------------------------------------------------------------------------------------
PILOT: dict[str, Any] = {"model": tiny.model(), "executor": "serial", "device": "cpu", "batch_size": 4}


def test_nothing_is_trained_but_the_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[str, int]] = []
    original = Worker.train

    def train(self: Worker, name: str, broadcast: Any, *rest: Any, **more: Any) -> Any:
        trained.append((name, broadcast.round))
        return original(self, name, broadcast, *rest, **more)

    monkeypatch.setattr(Worker, "train", train)
    observer = tiny.Notes()
    fedkeel.advise(tiny.federation(), rounds=2, observer=observer, **PILOT)
    assert sorted(trained) == sorted((name, round) for name in tiny.SIZES for round in range(2))
    assert observer.rounds == [0, 1]
    trained.clear()
    fedkeel.advise(tiny.federation(), pilot=False, **PILOT)
    assert trained == []


def test_the_pilot_leaves_nothing_behind_unless_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    advice = fedkeel.advise(tiny.federation(), rounds=1, **PILOT)
    assert [*(tmp_path / "here").iterdir(), *(tmp_path / "temporary").iterdir()] == []
    kept = fedkeel.advise(tiny.federation(), rounds=1, directory=tmp_path / "kept", **PILOT)
    run = fedkeel.Run(tmp_path / "kept")
    assert (run.config.method, run.rounds_done, run.config.evaluate_with) == ("fedavg", 1, "both")
    assert kept.measures.pilot is not None
    assert kept.measures.pilot.accuracy == run.accuracy
    assert kept.to_dict() == advice.to_dict()


def test_the_pilots_numbers_are_those_of_its_run(tmp_path: Path) -> None:
    federation = tiny.federation(unseen=8)
    advice = fedkeel.advise(federation, rounds=2, directory=tmp_path / "run", **PILOT)
    pilot, run = advice.measures.pilot, fedkeel.Run(tmp_path / "run")
    assert pilot is not None
    assert pilot.domains == run.scores()[-1]["domains"]
    assert pilot.with_batch_statistics == run.scores(statistics="batch")[-1]["average"]
    assert pilot.test_samples == 24  # of the three that train
    assert pilot.guessing == 0.25
    assert advice.measures.held_out == ("foreign",)


def test_the_same_seed_gives_the_same_advice() -> None:
    one, two = (fedkeel.advise(tiny.federation(), rounds=1, seed=3, **PILOT).to_dict() for _ in range(2))
    assert one == two
    json.dumps(one, allow_nan=False)


def test_a_pilot_that_has_not_learned_is_told() -> None:
    advice = fedkeel.advise(tiny.federation(), rounds=1, learning_rate=1e-8, **PILOT)
    assert advice.measures.pilot is not None
    assert not advice.measures.pilot.has_learned
    assert any("no better than guessing" in sentence for sentence in advice.unknown)


def test_one_that_has_is_not() -> None:
    federation = tiny.federation({"ward": 60, "clinic": 60, "hospital": 60}, test=40)
    advice = fedkeel.advise(federation, rounds=8, **{**PILOT, "learning_rate": 0.05})
    assert advice.measures.pilot is not None
    assert advice.measures.pilot.has_learned
    assert not any("guessing" in sentence for sentence in advice.unknown)


def test_moments_are_those_that_batch_norm_sees() -> None:
    """Averaged over images, mean and second moment about it are the layer's batch statistics."""
    federation, model = tiny.federation(), tiny.model().eval()
    _, layer = early_layer(model)
    images = torch.arange(40)
    found = moments(federation, images, model, layer).mean(0)
    with torch.no_grad():
        x = model.encoder[0](federation.test_transform(federation.images[images], torch.zeros(40, 0)))  # type: ignore[index]
    torch.testing.assert_close(found[:4], x.double().mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[4:], x.double().var((0, 2, 3), correction=0), rtol=1e-4, atol=1e-6)
    assert not model.encoder[1]._forward_pre_hooks  # type: ignore[index, union-attr]


def test_what_is_looked_at() -> None:
    assert early_layer(build("resnet18", num_classes=3))[0] == "encoder.bn1"
    assert early_layer(build("simple_cnn", norm=False, num_classes=3))[0] == "encoder.conv1"
    assert early_layer(torch.nn.Identity()) == ("", None)


# -- the ledger ------------------------------------------------------------------------------------------------------
def test_each_suggestion_has_the_ledgers_lines_or_says_that_there_are_none() -> None:
    advice = advised(**FEATURE_SHIFT)
    known = {one.sentence for one in read_evidence() if one.shift == FEATURE}
    for suggestion in advice.suggestions[1:]:
        assert suggestion.evidence == [NOTHING] or {*suggestion.evidence} <= known
        assert any(one.is_of([suggestion.method]) for one in read_evidence()) == (suggestion.evidence != [NOTHING])
    assert any(suggestion.evidence != [NOTHING] for suggestion in advice.suggestions)


def test_every_method_of_the_table_is_there() -> None:
    for situation in SITUATIONS:
        for method in situation.methods:
            fedkeel.methods.build(method)


# -- what to type next -----------------------------------------------------------------------------------------------
def test_the_next_commands_carry_the_options_that_were_given() -> None:
    advice = advised(**LABEL_SHIFT, batch_size=16, stateless=True)
    assert advice.next[0] == (
        "fedkeel compare fedavg fixbn univarfl --data digits --partition 'dirichlet(alpha=0.1, clients=5)' "
        "--model 'simple_cnn(width=4)' --stateless --batch-size 16 --executor serial --device cpu --seeds 3"
    )
    assert advice.next[1].startswith("fedkeel tune fedavg fixbn univarfl --data digits ")
    objects = fedkeel.advise(tiny.federation(), pilot=False, **PILOT).next[0]
    assert objects.startswith("fedkeel.compare(['fedavg', ")
    assert "federation=federation, model=model, batch_size=4" in objects


# -- mistakes --------------------------------------------------------------------------------------------------------
def one_client() -> Federation:
    federation = tiny.federation({"ward": 14})
    assert isinstance(federation.clients[0], Client)
    return federation


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"data": "digit"}, "did you mean 'digits'"),
        ({"rounds": 0}, "'rounds' is 0"),
        ({"rounds": "many"}, "'rounds' is 'many'"),
        ({"method": "greg"}, "methods are what advice is about"),
        ({"evaluate_with": "batch"}, "the pilot sets it itself"),
        ({"learning_rat": 0.1}, "did you mean 'learning_rate'"),
        ({"federation": "digits"}, "the name of a data set as data='...'"),
        ({"model": 3}, "give a network, or its name"),
        ({"partition": "even(clients=0)"}, "clients"),
        ({"federation": one_client()}, "nothing federated to advise on"),
        ({"federation": tiny.federation(), "data": "digits"}, "keep one"),
        ({"directory": 3}, "directory"),
    ],
)
def test_mistakes_are_told_before_anything_trains(
    options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "train", lambda *_: pytest.fail("it trained"))
    with pytest.raises(fedkeel.FedkeelError) as caught:
        fedkeel.advise(**{"executor": "serial", "device": "cpu", **options})
    assert told in str(caught.value)
