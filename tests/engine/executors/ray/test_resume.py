from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from fedkeel.runs.origin import Origin
from fedkeel.stopping import Stopped
from tests import tiny
from tests.engine.executors.ray.pretend import pretend


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the threads of the process that runs the rounds: those of an actor are one, unless an option says."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    pretend(monkeypatch)
    whole = tiny.run(tmp_path / "whole", "scaffold", executor="ray")

    def stop(round: int) -> None:
        if round == 1:
            raise Stopped

    with pytest.raises(Stopped):
        tiny.run(tmp_path / "stopped", "scaffold", executor="ray", observer=tiny.Notes(stop))
    origin = Origin.load(tmp_path / "stopped")
    assert origin is not None
    assert origin.threads == 1
    assert tiny.result(tiny.resume(tmp_path / "stopped")) == tiny.result(whole)


def test_images_that_were_given_in_python_go_through_the_object_store_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch).cores["alpha"] = 0  # the node of the process that has them
    with caplog.at_level(logging.WARNING, "fedkeel"):
        tiny.run(tmp_path / "run", executor="ray", rounds=1)
    told = [record.getMessage() for record in caplog.records if "object store" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("Node 'beta': ")
    assert told[0].endswith("they have no name.")
