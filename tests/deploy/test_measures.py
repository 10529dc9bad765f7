"""Measures over a network: the numbers of one process, made at the sites, which tell counts and nothing of an image."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedkeel.core.messages import BadMessage
from fedkeel.deploy.policy import Policy
from fedkeel.engine.executors.sites.channel import Reply, Table
from fedkeel.engine.executors.sites.replies import evaluations_of
from fedkeel.engine.metrics import requested
from fedkeel.errors import FedkeelError
from fedkeel.runs.measures import Measures
from fedkeel.runs.run import Run
from tests import tiny
from tests.deploy.loop import Loop, in_one_process, over_network, sites_of


def told(run: Run) -> Any:
    return json.loads((run.directory / "measures.json").read_bytes())


@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_measures_are_those_of_one_process(tmp_path: Path, method: str) -> None:
    options = {"metrics": "auc, brier", "result": "best-validation", "select_by": "f1", "rounds": 2}
    on = tiny.federation(unseen=12)
    network = over_network(tmp_path / "network", method, on=on, **options)
    alone = in_one_process(tmp_path / "alone", method, on=on, **options)
    assert network.summary is not None
    assert alone.summary is not None
    assert network.summary["round"] == alone.summary["round"]
    assert [r.get("auc") for r in network.records("evaluation")] == [r["auc"] for r in alone.records("evaluation")]
    if method == "fedavg" or network.summary["round"] == 1:
        assert told(network) == told(alone)


def test_what_sites_keep_of_an_earlier_round_is_not_there_to_be_tested(tmp_path: Path) -> None:
    """Only they have it, and the last round's: numbers of a mixture would be nobody's."""
    notes = tiny.Notes()
    options = {"result": "best-validation", "rounds": 4, "learning_rate": 2.0, "observer": notes}
    run = over_network(tmp_path / "r", "fedbn", **options)
    assert run.summary is not None
    assert run.summary["round"] < 3
    assert not run.has_measures
    assert any("the layers of the best round were not kept" in note for note in notes.notes)


def test_no_logit_leaves_a_site(tmp_path: Path) -> None:
    on = tiny.federation()
    loop = Loop(sites_of(on, tmp_path / "sites", tiny.model()))
    run = over_network(tmp_path / "r", loop=loop, metrics="auc", rounds=1)
    asked = [request for _, request in loop.requests if request["do"] == "evaluate"]
    assert [request["detailed"] for request in asked] == [False] * 3 + [True] * 3
    assert run.measure("auc").keys() == {"bright", "dark", "tinted"}
    for carried in loop.carried:
        assert b"logits" not in carried
        assert b"outputs" not in carried or b'"outputs": null' in carried


def test_a_site_whose_policy_does_not_tell_by_class_is_left_out(tmp_path: Path) -> None:
    sites = sites_of(tiny.federation(), tmp_path / "sites", tiny.model())
    first = next(iter(sites))
    sites[first] = replace(sites[first], policy=Policy(by_class=False))
    run = over_network(tmp_path / "r", loop=Loop(sites), metrics="f1", rounds=1)
    assert run.measure("recall").keys() == {"dark", "tinted"}
    assert all(record["f1"] is not None for record in run.records("evaluation"))


def test_sites_that_have_gone_cost_the_tables_and_not_the_run(tmp_path: Path) -> None:
    loop, notes = Loop(sites_of(tiny.federation(), tmp_path / "sites", tiny.model())), tiny.Notes()

    def refuse(_: int, request: Table, reply: Reply) -> Reply | str:
        return "it is gone" if request.get("detailed") else reply

    loop.spoil = refuse
    run = over_network(tmp_path / "r", loop=loop, rounds=1, observer=notes)
    assert run.finished
    assert not run.has_measures
    assert any(note.startswith("There are no measures by site and class: No client evaluated") for note in notes.notes)


@pytest.mark.parametrize(
    "option", [{"predictions": True}, {"evaluate_on": "validation"}, {"record": "nmi"}, {"dp_noise": 5.0}]
)
def test_an_option_without_effect_at_sites_is_refused_before_any_is_waited_for(
    tmp_path: Path, option: dict[str, Any]
) -> None:
    with pytest.raises(FedkeelError, match=f"'{next(iter(option))}' does nothing .*leave it out"):
        over_network(tmp_path / "r", **option)


CELLS = [[0, 0, 3], [1, 0, 1], [2, 2, 4]]
HOSTILE: list[Any] = [
    3,
    {"confusion": [[0, 0, 8]], "measures": {}},
    {"confusion": [[0, 4, 1], *CELLS[1:]], "measures": {}},
    {"confusion": [[-1, 0, 1], *CELLS], "measures": {}},
    {"confusion": [[0, 0, 3.5], [1, 0, 0.5], [2, 2, 4]], "measures": {}},
    {"confusion": CELLS, "measures": {"html": [1.0, 1.0, 1.0]}},
    {"confusion": CELLS, "measures": {"auc": [1.0, 0.0, 1.0, [[1.0, 0.0, 1.0]]]}},
    {"confusion": CELLS, "measures": {"auc": [1.0, 0.0, {}]}},
]


@pytest.mark.parametrize("details", HOSTILE)
def test_a_site_cannot_send_tables_that_are_none(details: Any) -> None:
    given = {"split": "test", "statistics": "global", "correct": 7, "samples": 8, "loss_sum": 1.0, "details": details}
    with pytest.raises((BadMessage, TypeError, ValueError)):  # whatever else is raised, `reading` makes a `BadMessage`
        evaluations_of("a", "a", [given], {}, 4)


def test_numbers_that_are_none_are_not_known() -> None:
    given = {"split": "test", "statistics": "global", "correct": 7, "samples": 8, "loss_sum": 1.0}
    details = {"confusion": CELLS, "measures": {"auc": [1e999, None, 0.5, [[0.5, 0.1, 0.9]] * 4]}}
    (found,) = evaluations_of("a", "a", [given | {"details": details, "values": {"f1": None}}], requested("f1"), 4)
    assert found.details == {"confusion": CELLS, "measures": {"auc": [None, None, 0.5, [[0.5, 0.1, 0.9]] * 4]}}
    assert found.metrics["f1"] != found.metrics["f1"]
    document = {"classes": list("abcd"), "unseen": [], "lower_is_better": [], "sites": [{"client": "a", "domain": "a"}]}
    document["sites"] = [{"client": "a", "domain": "a", **found.details}]
    assert Measures.read(json.dumps(document).encode()).sites[0].samples == 8
