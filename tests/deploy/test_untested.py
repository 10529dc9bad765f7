"""A site whose loss is no number, or that has no test images, costs the others nothing and is in the table."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedkeel.engine.executors.sites.channel import Reply
from fedkeel.experiments.comparison import collect_runs
from tests import tiny
from tests.deploy.loop import over_network
from tests.deploy.test_faults import loop_of, spoiling


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_site_that_sends_a_loss_that_is_not_finite_changes_nothing_for_the_others(
    tmp_path: Path, loss: float
) -> None:
    def spoil(reply: Reply) -> Reply:
        told = [{**evaluation, "loss_sum": loss} for evaluation in reply[0]["evaluations"]]
        return {**reply[0], "evaluations": told}, reply[1]

    honest = over_network(tmp_path / "honest", rounds=2)
    loop = spoiling(loop_of(tmp_path / "lies"), "evaluate", spoil)
    run = over_network(tmp_path / "lies", rounds=2, loop=loop)
    assert run.finished
    for domain in ("bright", "tinted"):
        assert run.domains[domain] == honest.domains[domain]
    assert run.summary is not None
    assert math.isfinite(run.summary["loss"])
    # Its accuracy may count or not, but that something was wrong there is said.
    assert "dark" in run.summary["diverged_domains"] + run.summary["untested_domains"]


def test_a_site_without_test_images_is_in_the_table_with_a_dash(tmp_path: Path) -> None:
    federation = tiny.federation()
    empty = torch.empty(0, dtype=torch.int64)
    clients = [replace(c, test=empty) if c.name == "clinic" else c for c in federation.clients]
    notes = tiny.Notes()
    run = over_network(tmp_path, on=replace(federation, clients=clients), rounds=1, observer=notes)
    assert [note for note in notes.notes if "'dark' has no test samples" in note]
    results = collect_runs([run.directory]).results
    assert results.cells(results.rows[0])[results.domains.index("dark")] is None
    assert "Not tested, –: dark." in results.text()
