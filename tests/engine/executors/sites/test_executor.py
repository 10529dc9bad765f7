"""Over a channel, every method gives what it gives in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fedkeel import methods, models
from fedkeel.core.composition import Composition
from fedkeel.deploy.serving import NetworkSetup
from fedkeel.engine.setup import Setup
from fedkeel.errors import FedkeelError
from fedkeel.runs.run import Run
from fedkeel.trust import privacy
from fedkeel.trust.rules import Rules
from tests import tiny, vectors
from tests.deploy.loop import in_one_process, over_network
from tests.methods.together import VARIANTS
from tests.trust.test_privacy import needs_opacus

pytestmark = pytest.mark.slow

OVER_A_NETWORK = [name for name in methods.METHODS.names() if not Composition.of(methods.build(name)).is_pooled]


def assert_same(given: Run, wanted: Run) -> None:
    """The same scores in every round and the same model, to float tolerance."""
    ours, theirs = (safetensors.torch.load_file(run.directory / "model.safetensors") for run in (given, wanted))
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    assert given.records()[0]["kind"] == "client"
    assert len(given.records()) == len(wanted.records())
    for one, other in zip(given.records(), wanted.records(), strict=True):
        assert one == {key: near(value) for key, value in other.items()}


def near(value: object) -> object:
    if isinstance(value, dict):
        return {key: near(entry) for key, entry in value.items()}
    return pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value


@pytest.mark.slow
@pytest.mark.parametrize("method", [*OVER_A_NETWORK, *VARIANTS])
def test_a_method_over_a_network_gives_what_it_gives_in_one_process(tmp_path: Path, method: str) -> None:
    wanted = in_one_process(tmp_path / "serial", method)
    assert_same(over_network(tmp_path / "sites", method), wanted)


def test_on_one_machine_a_sentence_says_what_it_is_for(tmp_path: Path) -> None:
    with pytest.raises(FedkeelError, match="The executor 'sites' is that of a federation over a network: start one"):
        tiny.run(tmp_path / "run", executor="sites")
    assert not (tmp_path / "run").exists()


def test_who_comes_late_starts_from_the_same_factors_as_in_one_process(tmp_path: Path) -> None:
    options: dict[str, Any] = {"rounds": 5, "participation": 0.4}
    wanted = in_one_process(tmp_path / "serial", "hbn(variant=released)", **options)
    first = {record["client"]: record["round"] for record in reversed(wanted.records("client"))}
    assert max(first.values()) > 0, "somebody comes late"
    assert_same(over_network(tmp_path / "sites", "hbn(variant=released)", **options), wanted)


@pytest.mark.parametrize(
    "robust",
    ["norm-clip", "median", "trimmed-mean(share=0.34)", "krum(liars=0)", "norm-clip+krum(liars=0)"],
)
def test_robust_rules_protect_a_network_as_they_do_one_process(tmp_path: Path, robust: str) -> None:
    wanted = in_one_process(tmp_path / "serial", robust=robust)
    assert_same(over_network(tmp_path / "sites", robust=robust), wanted)
    plain = tiny.run(tmp_path / "plain")
    assert plain.records("evaluation")[-1]["loss"] != pytest.approx(wanted.records("evaluation")[-1]["loss"], rel=1e-5)


def test_a_rule_that_needs_more_sites_than_came_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedkeelError, match="'krum' with these options needs 5 clients in a round, and there are 3"):
        over_network(tmp_path, robust="krum")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@needs_opacus
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedavg", {"dp": "central", "weighting": "uniform", "participation": 0.6, "seed": 3, "rounds": 4}),
        ("gn", {"dp": "local"}),
    ],
)
def test_noise_and_epsilon_over_a_network_are_those_of_one_process(
    tmp_path: Path, method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it not for the system's randomness, from which a server draws what the seed must not tell."""
    usual = privacy.private_stream
    monkeypatch.setattr(privacy, "private_stream", lambda config, _, *purpose: usual(config, False, *purpose))
    monkeypatch.setattr(Rules, "secret", property(lambda _: False))  # nor does it say so
    monkeypatch.setattr(NetworkSetup, "noise_from", Setup.noise_from)
    wanted = in_one_process(tmp_path / "serial", method, **options)
    assert_same(over_network(tmp_path / "sites", method, **options), wanted)
    assert all(record["epsilon"] > 0 for record in wanted.records("round"))
    took_part = [record["clients"] for record in wanted.records("round")]
    assert (min(took_part) < 3) == (options["dp"] == "central")


@needs_opacus
def test_local_noise_is_the_site_s_own(tmp_path: Path) -> None:
    """The same run twice is two runs."""
    runs = [tiny.run(tmp_path / "plain", "gn", dp="local", rounds=1)]
    for place in ("one", "other"):
        runs.append(over_network(tmp_path / place, "gn", dp="local", rounds=1))
    assert len({(run.directory / "model.safetensors").read_bytes() for run in runs}) == 3
    assert [run.summary["randomness"] for run in runs if run.summary] == ["seed", "sites", "sites"]


@pytest.mark.parametrize("method", ["fedavg", "hbn", "greg", "fedwon"])
def test_vectors_travel_as_images_do(tmp_path: Path, method: str) -> None:
    torch.manual_seed(0)
    given: dict[str, Any] = {"network": models.build_for("mlp(hidden=8)", 3, (6,)), "on": vectors.federation()}
    wanted = in_one_process(tmp_path / "serial", method, **given)
    assert_same(over_network(tmp_path / "sites", method, **given), wanted)
