"""Mistakes of other libraries, each stated as what is true here (see STYLE.md)."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fedkeel.core.messages import Update
from fedkeel.core.method import Method
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.errors import MethodError
from fedkeel.formulas.aggregation import weighted_mean
from fedkeel.stopping import RENAMED
from tests import tiny
from tests.processes import exit_code, forked, until, wait_here


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_the_mean_of_identical_clients_is_that_client(tmp_path: Path, executor: str) -> None:
    """PFLlib #84 #260, secretflow #1009: every entry, the integer counter included and still int64."""
    worker = tiny.setup().worker
    update, _ = worker.train("ward", tiny.broadcast(worker), {})
    trained = {**update.weights, **update.statistics}
    mean = weighted_mean([trained] * 7, [1, 5, 3, 7, 11, 2, 9])
    assert all(torch.equal(mean[name], t) and mean[name].dtype == t.dtype for name, t in trained.items())
    assert mean["encoder.1.num_batches_tracked"].dtype == torch.int64
    run = tiny.run(tmp_path / "r", rounds=2, **tiny.by(executor))
    stored = safetensors.torch.load_file(run.directory / "model.safetensors")
    assert stored["encoder.1.num_batches_tracked"].dtype == torch.int64


def test_running_statistics_travel_and_are_averaged(tmp_path: Path) -> None:
    """PFLlib #260, FedScale #57, FL-bench #72: `parameters()` leaves them out."""
    run = tiny.run(tmp_path / "r", rounds=1)
    stored = safetensors.torch.load_file(run.directory / "model.safetensors")
    assert stored.keys() == tiny.model().state_dict().keys()
    assert not torch.equal(stored["encoder.1.running_mean"], torch.zeros(4))


@pytest.mark.parametrize("method", ["fedbn", "silobn", "gn", "ln", "fedprox+fedbn"])
def test_a_method_for_batch_norm_refuses_a_model_without(tmp_path: Path, method: str) -> None:
    """PFLlib #42: FedBN silently equal to FedAvg."""
    with pytest.raises(MethodError, match="acts on batch norm, and there is none to act on"):
        tiny.run(tmp_path / "r", method, network=tiny.model(norm=False))
    assert not (tmp_path / "r").exists()


class ServerMomentum(Method):
    """A server optimiser as people write it: over everything it is given."""

    name = "servermomentum"

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        return {name: server.weights[name] + 3 * (t - server.weights[name]) for name, t in mean.items()}


def test_a_server_optimiser_leaves_statistics_and_counters_alone(tmp_path: Path) -> None:
    """NVFlare #1718."""
    plain, stepped = tiny.run(tmp_path / "a", rounds=1), tiny.run(tmp_path / "b", ServerMomentum(), rounds=1)
    left, right = (safetensors.torch.load_file(r.directory / "model.safetensors") for r in (plain, stepped))
    for name in left:
        is_weight = "running" not in name and "num_" not in name
        assert torch.equal(left[name], right[name]) is not is_weight, name


@pytest.mark.slow
def test_the_order_of_clients_is_the_federations_under_every_executor(tmp_path: Path) -> None:
    """Flower #3328, #1845: there it is the order in which they happened to finish."""
    sizes = {"slow": 60, "quick": 3, "middle": 20, "a": 5}
    orders = []
    for name, executor, workers in (("s", "serial", 0), ("p", "processes", 2), ("q", "processes", 4)):
        run = tiny.run(tmp_path / name, on=tiny.federation(sizes), executor=executor, workers=workers, rounds=2)
        orders.append([(r["kind"], r["round"], r.get("client")) for r in run.records()])
        assert [r["client"] for r in run.records("client")] == [*sizes, *sizes]
    assert orders[0] == orders[1] == orders[2]


def test_the_result_does_not_depend_on_which_client_is_listed_first(tmp_path: Path) -> None:
    on = tiny.federation()
    runs = [
        tiny.run(tmp_path / str(i), on=replace(on, clients=on.clients[::step]), rounds=2)
        for i, step in enumerate((1, -1))
    ]
    left, right = (safetensors.torch.load_file(r.directory / "model.safetensors") for r in runs)
    for name, tensor in left.items():
        torch.testing.assert_close(right[name], tensor, rtol=1e-4, atol=1e-6)


def test_the_number_of_test_samples_is_that_of_the_split(tmp_path: Path) -> None:
    """PFLlib #16: a loader that drops the last incomplete batch of the test set."""
    run = tiny.run(tmp_path / "r", rounds=1, evaluation_batch=3, drop_last=True)
    assert {r["split"]: r["samples"] for r in run.records("evaluation")} == {"test": 8, "validation": 4}


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_ctrl_c_keeps_the_run_and_it_resumes(tmp_path: Path, executor: str) -> None:
    """Flower #599; FL-bench deletes the run."""
    directory, ready, said = tmp_path / "r", tmp_path / "ready", tmp_path / "said"
    options: dict[str, Any] = {"rounds": 5, **tiny.by(executor)}

    def act() -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        wait_here(RENAMED, "checkpoints/round-000002", ready)
        tiny.run(directory, "fedbn", **options)

    child = forked(act, said)
    until(ready.exists)
    os.killpg(child, signal.SIGINT)  # as a terminal does: the workers get it too
    assert exit_code(child) != 0
    assert said.read_text().rstrip().endswith("KeyboardInterrupt")
    notes = tiny.Notes()
    resumed = tiny.resume(directory, observer=notes)
    assert notes.first == 3
    whole = tiny.run(tmp_path / "whole", "fedbn", **options)
    assert tiny.result(resumed) == tiny.result(whole)
