"""Over a channel, every method gives what it gives in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from fedkeel import methods
from fedkeel.method import Composition
from fedkeel.run import Run
from tests import tiny
from tests.engine.flower.loop import over_network

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
@pytest.mark.parametrize("method", OVER_A_NETWORK)
def test_a_method_over_a_network_gives_what_it_gives_in_one_process(tmp_path: Path, method: str) -> None:
    wanted = tiny.run(tmp_path / "serial", method)
    assert_same(over_network(tmp_path / "flower", method), wanted)
