from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeel import methods
from fedkeel.core.client import LocalClient
from fedkeel.core.composition import Composition
from fedkeel.core.messages import Broadcast, Update
from fedkeel.core.method import Method
from fedkeel.core.state import Tensors
from fedkeel.data.federation import Federation
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.formulas.robust import clipped, krum_scores, median, trimmed_mean, trimmed_number
from fedkeel.trust.robust import ROBUST, Defence
from tests import tiny
from tests.engine.test_local import Spoils

TEN = {f"site{i}": 12 for i in range(10)}
ROWS = st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3), min_size=1, max_size=9)


# -- the formulas, against brute force --
@settings(deadline=None)
@given(ROWS)
def test_the_median_is_that_of_every_entry(rows: list[list[float]]) -> None:
    given_tensors = [torch.tensor(row) for row in rows]
    expected = np.median(np.array(rows, dtype=np.float64), axis=0)
    np.testing.assert_allclose(median(given_tensors).numpy(), expected, rtol=1e-6, atol=1e-30)


@settings(deadline=None)
@given(ROWS, st.floats(0.01, 0.49))
def test_the_trimmed_mean_leaves_out_the_extremes_of_every_entry(rows: list[list[float]], share: float) -> None:
    cut = trimmed_number(share, len(rows))
    expected = []
    for column in zip(*rows, strict=True):
        left = sorted(column)
        for _ in range(cut):
            left.remove(max(left))
            left.remove(min(left))
        expected.append(sum(left) / len(left))
    result = trimmed_mean([torch.tensor(row) for row in rows], cut).numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-3)


def test_a_share_of_a_round_number_of_clients_is_that_many() -> None:
    assert [trimmed_number(share, 10) for share in (0.1, 0.2, 0.3, 0.29, 0.09)] == [1, 2, 3, 2, 0]


def test_equal_clients_give_that_client_bit_for_bit_and_counters_stay_integers() -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for clients in (3, 4, 10):
        assert torch.equal(median([x] * clients), x)
        assert torch.equal(trimmed_mean([x] * clients, 1), x)
    counters = [torch.tensor(n) for n in (3, 9, 2**39, 5, 4)]
    assert torch.equal(trimmed_mean(counters, 1), torch.tensor(9))
    assert torch.equal(median(counters), torch.tensor(5))


@pytest.mark.parametrize(("clients", "liars"), [(5, 1), (7, 2), (9, 0), (4, 3), (2, 0)])
def test_krums_scores_are_sums_over_the_nearest_neighbours(clients: int, liars: int) -> None:
    rng = np.random.default_rng(clients)
    a, b = rng.normal(size=(clients, 2, 3)), rng.normal(size=(clients, 4))
    states = [{"a": torch.tensor(a[i]), "b": torch.tensor(b[i]), "n": torch.tensor(i)} for i in range(clients)]
    vectors = np.concatenate([a.reshape(clients, -1), b], axis=1)
    expected = []
    for i in range(clients):
        distances = sorted(float(((vectors[i] - vectors[j]) ** 2).sum()) for j in range(clients) if j != i)
        expected.append(sum(distances[: max(clients - liars - 2, 1)]))
    np.testing.assert_allclose(krum_scores(states, liars).numpy(), expected, rtol=1e-5)


def test_distances_are_not_lost_beside_a_huge_row() -> None:
    rows = [torch.full((4,), 1e12), *[torch.full((4,), 1e-3 * i) for i in range(1, 6)]]
    scores = krum_scores([{"w": row} for row in rows], liars=1)
    assert scores[1:].max() < 1e-3
    assert int(scores.argmin()) == 3  # the middle one of the five


def test_clipping_keeps_the_direction_and_leaves_what_is_near_alone() -> None:
    origin = {"w": torch.tensor([1.0, 1.0]), "v": torch.tensor([0.0]), "n": torch.tensor(3)}
    near = {"w": torch.tensor([1.1, 1.0]), "v": torch.tensor([0.1]), "n": torch.tensor(4)}
    far = {"w": torch.tensor([31.0, 1.0]), "v": torch.tensor([-40.0]), "n": torch.tensor(9)}
    first, second = clipped([near, far], origin, norm=5.0)
    assert first is near
    torch.testing.assert_close(second["w"], torch.tensor([4.0, 1.0]))  # a change of length 50 becomes one of 5
    torch.testing.assert_close(second["v"], torch.tensor([-4.0]))
    assert int(second["n"]) == 9


def test_without_a_norm_clipping_is_to_the_median_change() -> None:
    origin = {"w": torch.zeros(1)}
    result = clipped([{"w": torch.tensor([x])} for x in (1.0, -2.0, 50.0)], origin)
    assert [float(state["w"]) for state in result] == [1.0, -2.0, 2.0]


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(0, 1e6, width=32), min_size=2, max_size=2), min_size=3, max_size=9))
def test_a_variance_stays_one_under_every_rule(rows: list[list[float]]) -> None:
    states = [{"bn.running_var": torch.tensor(row)} for row in rows]
    updates = [Update(str(i), 1, {"w": torch.zeros(1)}, given_state) for i, given_state in enumerate(states)]
    broadcast = Broadcast(0, 1, {"w": torch.zeros(1)}, {"bn.running_var": torch.ones(2)})
    for entry in ROBUST:
        defence = Defence.of(entry.name)
        chosen = [update.statistics for update in defence.select(broadcast, updates)]
        assert bool((defence.mean(chosen, [1.0] * len(chosen))["bn.running_var"] >= 0).all()), entry.name


# -- the rules --
def update(name: str, value: float, statistic: float = 0.0) -> Update:
    return Update(name, 1, {"w": torch.tensor([value, -value])}, {"bn.running_mean": torch.tensor([statistic])})


BROADCAST = Broadcast(0, 1, {"w": torch.zeros(2)}, {"bn.running_mean": torch.zeros(1)})


def test_krum_keeps_one_and_multi_krum_all_but_the_liars() -> None:
    updates = [update("a", 1.0), update("b", 1.1), update("liar", -50.0), update("c", 0.9), update("d", 1.3)]
    assert [u.client for u in Defence.of("krum").select(BROADCAST, updates)] == ["a"]
    assert [u.client for u in Defence.of("multi-krum").select(BROADCAST, updates)] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_a_liar_cannot_hide_its_weights_behind_statistics_nor_the_other_way_round(scale: float) -> None:
    values = [1.0, 1.1, 0.9, 1.2, 0.8]
    honest = [update(str(i), value, scale * value) for i, value in enumerate(values)]
    for lie in (update("liar", -9.0, scale), update("liar", 1.0, -9 * scale)):
        chosen = Defence.of("multi-krum").select(BROADCAST, [*honest, lie])
        assert "liar" not in {u.client for u in chosen}


def test_rules_that_select_come_before_the_one_that_averages() -> None:
    updates = [update("a", 1.0), update("b", 3.0), update("liar", 1e9)]
    defence = Defence.of("norm-clip(norm=1.0)+median")
    weights = [u.weights for u in defence.select(BROADCAST, updates)]
    assert max(float(w["w"].norm()) for w in weights) <= 1 + 1e-6
    assert float(defence.mean(weights, [1, 1, 1])["w"].norm()) <= 1 + 1e-6


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"robust": "mediam"}, "There is no robust rule named 'mediam': did you mean 'median'?"),
        ({"robust": "median(share=0.2)"}, "has no option 'share': it takes none."),
        ({"robust": "trimmed-mean(share=0.5)"}, "The 'share' of trimmed-mean is 0.5: give a number above 0, below"),
        ({"robust": "trimmed-mean(share=x)"}, "The 'share' of trimmed-mean is 'x', which is not a number: give"),
        ({"robust": "norm-clip(norm=0)"}, "The 'norm' of norm-clip is 0: give a number above 0."),
        ({"robust": "krum(liars=-1)"}, "The 'liars' of krum is -1: give at least 0."),
        ({"robust": "median+trimmed-mean"}, "'median' and 'trimmed-mean' both take the place of the mean"),
        ({"robust": "krum"}, "'krum' with these options needs 5 clients in a round, and there are 3: let more"),
        ({"robust": "multi-krum(liars=2)"}, "'multi-krum' with these options needs 7 clients in a round"),
        ({"robust": "trimmed-mean"}, "'trimmed-mean' with these options needs 5 clients in a round, and there are 3"),
        ({"robust": "median", "participation": 0.5}, "'median' with these options needs 3 clients in a round, and th"),
        (
            {"robust": "norm-clip", "participation": 0.1},
            "'norm-clip' with these options needs 2 clients in a round, and there are 1",
        ),
        ({"robust": "multi-krum(liars=0)"}, "'multi-krum' with liars=0 leaves out no update: give at least one liar"),
        ({"robust": "norm-clip", "method": "standalone"}, "'robust' is of what clients send, and with 'standalone'"),
        ({"robust": "krum(liars=0)", "method": "standalone"}, "nothing travels: leave it out"),
        ({"weighting": "uniform", "method": "standalone"}, "nothing travels: leave it out"),
        ({"robust": "median", "method": "hbn"}, "'hbn' makes the global model otherwise than from the clients' mean"),
        (
            {"robust": "norm-clip+median", "method": "fedprox+fbn"},
            "'fbn' makes the global model otherwise than from the clients' mean",
        ),
        (
            {"robust": "median", "method": "fedheal"},
            "'fedheal' makes the global model otherwise than from the clients' mean",
        ),
        ({"robust": "median", "method": "ga"}, "'ga' makes the global model otherwise than from the clients' mean"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(FedkeelError) as caught:
        tiny.setup(**options)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


# -- one liar among ten --
class Liar(Method):
    """One client sends the opposite of what it learnt, many times over."""

    name = "liar"

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def finish(self, client: LocalClient) -> Tensors:
        if client.name == "site4":
            entries = client.model.state_dict()
            for name, sent in {**client.broadcast.weights, **client.broadcast.statistics}.items():
                if name.endswith("running_var"):
                    entries[name].mul_(abs(self.scale))
                elif sent.dtype.is_floating_point:
                    entries[name].copy_(sent + self.scale * (entries[name] - sent))
        return {}


def ten_sites() -> Federation:
    """Ten sites of one look, sixteen images each, all with the same test set."""
    whole = tiny.federation({"ward": 160}, test=40, augment="")
    parts = zip(TEN, whole.clients[0].train.split(16), strict=True)
    return replace(whole, clients=[replace(whole.clients[0], name=name, train=part) for name, part in parts])


def accuracy(directory: Path, method: Method | str, robust: str) -> float:
    return tiny.run(directory, method, on=ten_sites(), robust=robust, rounds=8, learning_rate=0.1).accuracy


@pytest.mark.slow
@pytest.mark.parametrize("scale", [-100.0, 1000.0])
def test_one_liar_among_ten_ruins_the_mean_and_not_the_robust_rules(tmp_path: Path, scale: float) -> None:
    assert accuracy(tmp_path / "honest", "fedavg", "") > 0.95
    assert accuracy(tmp_path / "mean", Liar(scale), "") < 0.3  # of four classes
    for rule in ("median", "trimmed-mean(share=0.1)", "multi-krum"):
        assert accuracy(tmp_path / rule, Liar(scale), rule) > 0.95, rule
    for rule in ("krum", "norm-clip"):  # of one client's update, or of as many as before: slower, but it learns
        assert accuracy(tmp_path / rule, Liar(scale), rule) > 0.5, rule


@pytest.mark.slow
def test_a_liar_that_is_larger_still_ends_a_run_with_the_mean_alone(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="No client had a usable update"):
        accuracy(tmp_path / "mean", Liar(-1e6), "")
    assert accuracy(tmp_path / "median", Liar(-1e6), "median") > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "hbn", "scaffold", "fedcoda"])
def test_where_multi_krum_finds_the_liar_all_is_as_if_it_had_sent_nothing(tmp_path: Path, method: str) -> None:
    """Also what the method itself makes of updates, extras and answers."""
    options: dict[str, Any] = {"rounds": 3, "learning_rate": 0.02}
    lying = Composition([methods.build(method), Liar(-1000.0)])
    silent = Composition([methods.build(method), Spoils({"site4"})])
    runs = [
        tiny.run(tmp_path / "lying", lying, on=ten_sites(), robust="multi-krum", **options),
        tiny.run(tmp_path / "silent", silent, on=ten_sites(), **options),
    ]
    assert [r["client"] for r in runs[0].records("not chosen")] == ["site4"] * 3
    assert tiny.result(runs[0])["model.safetensors"] == tiny.result(runs[1])["model.safetensors"]


def test_an_update_that_is_not_chosen_is_as_if_it_had_not_come(tmp_path: Path) -> None:
    from fedkeel.engine.rounds import Federated
    from fedkeel.runs.store import Store

    on = tiny.federation(TEN)
    setup = tiny.setup(Composition([methods.build("scaffold"), Liar(-100.0)]), on=on, robust="multi-krum")
    run = Federated(setup, setup.executor(), Store.create(tmp_path / "r", setup.config), tiny.Notes())
    run.round(0)
    assert run.memory.look("site4") == {}
    assert "site4" not in run.server.participants
    for name, mean in run.server.extras.items():
        own = [run.memory.look(client) for client in TEN if client != "site4"]
        expected = sum(memory[name].double() for memory in own) / 10
        torch.testing.assert_close(mean.double(), expected, rtol=1e-4, atol=1e-6)


def test_without_a_rule_there_is_the_plain_mean() -> None:
    defence, updates = Defence.of(""), [update("a", 1.0), update("b", 4.0)]
    assert defence.select(BROADCAST, updates) == updates
    torch.testing.assert_close(defence.mean([u.weights for u in updates], [2, 1])["w"], torch.tensor([2.0, -2.0]))


@pytest.mark.slow
def test_a_run_with_a_robust_rule_is_the_same_under_other_executors(tmp_path: Path) -> None:
    runs = [
        tiny.run(tmp_path / executor, on=tiny.federation(TEN), robust="norm-clip+trimmed-mean", executor=executor)
        for executor in ("serial", "processes")
    ]
    assert tiny.result(runs[0]) == tiny.result(runs[1])


def test_the_docs_say_of_every_method_what_it_reveals() -> None:
    page = (Path(__file__).parents[2] / "docs" / "robust.md").read_text()
    table = page.partition("## What each method reveals")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall("`([a-z]+)`", row)]
    assert sorted(named) == methods.METHODS.names()


def test_updates_themselves_are_never_changed() -> None:
    updates = [update("a", 1.0), update("b", 3.0), update("c", 90.0)]
    before = [replace(u, weights={n: t.clone() for n, t in u.weights.items()}) for u in updates]
    Defence.of("norm-clip").select(BROADCAST, updates)
    assert all(torch.equal(u.weights["w"], b.weights["w"]) for u, b in zip(updates, before, strict=True))
