"""A hundred thousand clients: a round costs what its sampled clients cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedkeel
from fedkeel.core.evaluation import Evaluation
from fedkeel.data.federation import Client, Federation
from fedkeel.data.partition import build
from fedkeel.data.population import ClientGroup, Population
from fedkeel.engine.local import Worker
from fedkeel.runs.run import Run
from tests import tiny

DRAWN = "dirichlet(alpha=0.5, clients=50000, samples=6)"


def crowd(partition: str = DRAWN, *, unseen: int = 4) -> Federation:
    """The images of two of the tiny federation's sites, cut into very many clients each."""
    sites = tiny.federation({"ward": 40, "clinic": 30}, unseen=unseen)
    groups = []
    for site in sites.clients:
        shares = build(partition).shares(site.domain, sites.labels[site.train].numpy(), 2)
        groups.append(ClientGroup(site.domain, shares, site.train, site.validation, site.test))
    return replace(sites, clients=Population(groups))


def participation(federation: Federation, count: int) -> float:
    return count / len(federation.clients)


def run(path: Path, method: str = "fedavg", *, on: Federation | None = None, **options: Any) -> Run:
    on = on or crowd()
    share = {} if method == "central" else {"participation": participation(on, 5)}
    return tiny.run(path, method, on=on, **share, **{"rounds": 3, **options})


def tensors(run: Run) -> dict[str, torch.Tensor]:
    import safetensors.torch

    return safetensors.torch.load_file(run.directory / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedcoda", "central"])
def test_no_round_makes_more_clients_than_it_samples(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, made = crowd(), []
    plain = Client.__init__

    def counted(self: Client, *given: Any, **named: Any) -> None:
        plain(self, *given, **named)
        made.append(self.name)

    monkeypatch.setattr(Client, "__init__", counted)
    options = {"evaluate_clients": 10} if method == "fedbn" else {}
    done = run(tmp_path / "r", method, on=federation, **options)
    sampled = 1 if method == "central" else 5
    assert len(done.records("client")) == 3 * sampled
    # Those that are sampled, those that are tested, and one of each domain.
    assert len(set(made)) <= 3 * sampled + options.get("evaluate_clients", 0) + 2
    assert len(made) <= 3 * len(set(made))


@pytest.mark.slow
@pytest.mark.parametrize("partition", [DRAWN, "even(clients=10)"])
@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_executors_agree_on_clients_that_are_made_on_demand(tmp_path: Path, method: str, partition: str) -> None:
    tested = {"evaluate_clients": 9} if method == "fedbn" else {}
    serial, processes = (
        run(tmp_path / executor, method, on=crowd(partition), **tiny.by(executor), **tested)
        for executor in ("serial", "processes")
    )
    for key in ("kind", "round", "client", "domain", "samples"):
        assert [r.get(key) for r in serial.records()] == [r.get(key) for r in processes.records()]
    for name, tensor in tensors(serial).items():
        torch.testing.assert_close(tensors(processes)[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_listed_or_made_on_demand_it_is_the_same_run(tmp_path: Path, method: str) -> None:
    lazy = crowd("dirichlet(alpha=0.5, clients=30, samples=6)")
    listed = replace(lazy, clients=list(lazy.clients))
    runs = [run(tmp_path / name, method, on=on) for name, on in (("lazy", lazy), ("listed", listed))]
    assert tiny.result(runs[0]) == tiny.result(runs[1])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_a_resumed_run_of_very_many_is_the_run_that_was_never_stopped(tmp_path: Path, method: str) -> None:
    options: dict[str, Any] = {"rounds": 4}
    options |= {"evaluate_clients": 10} if method == "fedbn" else {}
    whole = run(tmp_path / "whole", method, **options)

    def stop(round: int) -> None:
        if round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r", method, observer=tiny.Notes(stop), **options)
    assert tiny.result(fedkeel.resume(tmp_path / "r", federation=crowd(), model=tiny.model())) == tiny.result(whole)


# -- evaluation of personal methods --------------------------------------------------------------------------
def evaluated(run: Run, round: int, split: str = "test") -> list[dict[str, Any]]:
    return [r for r in run.records("evaluation") if r["round"] == round and r["split"] == split]


def test_a_personal_method_is_tested_on_a_sample_that_stays_and_on_every_unseen_client(tmp_path: Path) -> None:
    notes = tiny.Notes()
    done = run(tmp_path / "r", "fedbn", evaluate_clients=10, observer=notes)
    names = [r["client"] for r in evaluated(done, 0)]
    assert len(names) == 11
    assert names[-1] == "stranger"
    assert names[:10] == sorted(names[:10], key=lambda name: (name.startswith("dark"), name))
    assert all([r["client"] for r in evaluated(done, round)] == names for round in (1, 2))
    said = "'fedbn' is tested on 10 of the 100,000 clients, drawn once for the whole run (evaluate_clients)."
    assert notes.notes == [said]
    other = run(tmp_path / "other", "fedbn", evaluate_clients=10, seed=1)
    assert [r["client"] for r in evaluated(other, 0)] != names


def test_a_domain_with_a_single_client_among_very_many_is_tested_too(tmp_path: Path) -> None:
    sites = crowd("clients(bright=1)", unseen=0)
    assert isinstance(sites.clients, Population)
    large = crowd(unseen=0).clients
    assert isinstance(large, Population)
    on = replace(sites, clients=Population([sites.clients.groups[0], large.groups[1]]))
    done = run(tmp_path / "r", "fedbn", on=on, evaluate_clients=4)
    assert set(done.domains) == {"bright", "dark"}
    assert [r["client"] for r in evaluated(done, 0)][-1] == "bright"
    assert len(evaluated(done, 0)) == 5


@pytest.mark.slow
@pytest.mark.parametrize("most", [0, 30, 1000])
def test_of_few_clients_all_are_tested(tmp_path: Path, most: int) -> None:
    notes = tiny.Notes()
    on = crowd("dirichlet(alpha=0.5, clients=15, samples=6)")
    done = run(tmp_path / "r", "fedbn", on=on, evaluate_clients=most, observer=notes)
    assert [r["client"] for r in evaluated(done, 0)] == [client.name for client in on]
    assert notes.notes == []


def test_clients_that_never_trained_are_tested_once_and_the_numbers_are_those_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    plain = Worker.evaluate

    def counted(self: Worker, name: str, *rest: Any, detailed: bool) -> list[Evaluation]:
        asked.extend([] if detailed else [name])  # once more at the end, for the measures by class
        return plain(self, name, *rest, detailed=detailed)

    monkeypatch.setattr(Worker, "evaluate", counted)
    on = crowd("dirichlet(alpha=0.5, clients=15, samples=6)")
    everyone = run(tmp_path / "all", "fedbn", on=on, evaluate_clients=0)
    assert len(asked) == 3 * 31
    asked.clear()
    sampled = run(tmp_path / "sampled", "fedbn", on=on, evaluate_clients=29)
    assert len(asked) < 3 * 29
    expected = {(r["round"], r["split"], r["client"]): r for r in everyone.records("evaluation")}
    records = sampled.records("evaluation")
    assert len(records) == 3 * (29 * 2 + 1)
    assert all(expected[r["round"], r["split"], r["client"]] == r for r in records)


def test_under_one_global_model_each_domain_is_tested_once(tmp_path: Path) -> None:
    done = run(tmp_path / "r")
    assert [r["client"] for r in evaluated(done, 2)] == ["bright-00000", "dark-00000", "stranger"]
    assert [r["client"] for r in evaluated(done, 2, "validation")] == ["bright-00000", "dark-00000"]
