from __future__ import annotations

import numpy as np
import pytest
import torch

from fedkeel import methods
from fedkeel.core.messages import Update
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors, select
from fedkeel.engine.rounds import Federated
from tests import tiny
from tests.methods.small import broadcast, names, started


class ByHand:
    """Both rules in float64, entry by entry, for one flat vector of weights and a few clients."""

    def __init__(self, tau: float, beta: float) -> None:
        self.tau, self.beta = tau, beta
        self.falls: dict[str, list[list[bool]]] = {}  # of each client and round, for each entry
        self.share: dict[str, float] = {}
        self.delta: dict[str, float] = {}
        self.dropped = 0

    def mask(self, client: str, u: np.ndarray) -> np.ndarray:
        past = self.falls.setdefault(client, [])
        kept = []
        for i, value in enumerate(u):
            same = [round[i] == (value >= 0) for round in past]
            kept.append(not past or sum(same) / len(past) > self.tau)
        past.append([bool(value >= 0) for value in u])
        self.dropped += len(kept) - sum(kept)
        return np.array(kept, dtype=float)

    def step(self, old: dict[str, np.ndarray], trained: dict[str, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        updates = {client: {n: old[n] - w[n] for n in old} for client, w in trained.items()}
        masks: dict[str, dict[str, np.ndarray]] = {}
        for client, u in updates.items():
            flat = self.mask(client, np.concatenate([u[n].ravel() for n in old]))
            cuts = np.split(flat, np.cumsum([old[n].size for n in old])[:-1])
            masks[client] = {n: cut.reshape(old[n].shape) for n, cut in zip(old, cuts, strict=True)}
        d = {c: sum(np.sqrt(np.sum((masks[c][n] * u[n]) ** 2)) for n in old) for c, u in updates.items()}
        first = sum(self.share.values()) / len(self.share) if self.share else 1 / len(updates)
        for c in updates:
            self.delta[c] = (1 - self.beta) * self.delta.get(c, 0) + self.beta * d[c] / sum(d.values())
            self.share[c] = self.share.get(c, first) + self.delta[c]
        p = {c: self.share[c] / sum(self.share[j] for j in updates) for c in updates}
        new = {}
        for n in old:
            weight = sum(p[c] * masks[c][n] for c in updates)
            move = sum(p[c] * masks[c][n] * updates[c][n] for c in updates)
            new[n] = old[n] - np.divide(move, weight, out=np.zeros_like(move), where=weight > 0)
        return new


def arrays(tensors: Tensors) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def memory_of(run: Federated, client: str) -> Tensors:
    return select(run.memory.look(client), "fedheal")


@pytest.mark.slow
@pytest.mark.parametrize(("tau", "beta", "participation"), [(0.3, 0.4, 1.0), (0.6, 0.9, 1.0), (0.5, 0.5, 0.67)])
def test_every_round_is_that_of_the_formulas(tmp_path, tau, beta, participation):
    run = started(f"fedheal(tau={tau}, beta={beta})", tmp_path, participation=participation, rounds=5)
    expected = ByHand(tau, beta)
    for round in range(5):
        old = arrays(run.server.weights)
        trained = {}
        run._sample(round)
        for name in run.server.participants:
            update, _ = run.setup.worker.train(name, broadcast(run, round), run.memory.look(name))
            trained[name] = arrays(update.weights)
        run.round(round)
        wanted = expected.step(old, trained)
        for name, tensor in run.server.weights.items():
            np.testing.assert_allclose(tensor.double().numpy(), wanted[name], rtol=1e-4, atol=1e-6, err_msg=name)
        shares = {n: float(a) for n, a in select(run.server.memory, "fedheal/share").items()}
        assert shares == pytest.approx(expected.share, rel=1e-4)
    assert expected.dropped > 0


def test_a_client_that_comes_late_counts_for_as_much_as_the_others_did():
    method = methods.build("fedheal")
    server = fake_server({"w": torch.zeros(3)})
    known = [fake_update(name, [1.0, 0, 0]) for name in ("a", "b")]
    for _ in range(20):
        method.weights(server, known, {})
    before = float(server.memory["share/a"])
    assert before > 5
    method.weights(server, [*known, fake_update("late", [1.0, 0, 0])], {})
    assert float(server.memory["share/late"]) == pytest.approx(before + 0.4 / 3)


def test_an_entry_that_nobody_counts_stays_and_one_that_one_counts_is_taken_whole():
    method = methods.build("fedheal")
    server = fake_server({"w": torch.tensor([5.0, 5.0, 5.0])})
    updates = [fake_update("a", [1, 2, 3], [True, False, False]), fake_update("b", [7, 8, 9], [True, True, False])]
    new = method.weights(server, updates, {})["w"]
    assert new[1:].tolist() == [8, 5]
    assert 1 < float(new[0]) < 7


def test_the_history_stays_on_the_client_and_counts_its_own_rounds(tmp_path):
    run = started("fedheal", tmp_path, participation=0.34, rounds=6)
    trained = dict.fromkeys(names(run), 0)
    for round in range(6):
        run.round(round)
        for name in run.server.participants:
            trained[name] += 1
    assert sorted(trained.values())[0] < 6
    for name, rounds in trained.items():
        kept = memory_of(run, name)
        assert (int(kept["rounds"]) if kept else 0) == rounds
        assert all(int(t.min()) >= 0 and int(t.max()) <= rounds for n, t in kept.items() if n.startswith("falls/"))
    server = {name for name, tensor in run.server.memory.items() if tensor.numel() > 1}
    assert server == set()  # two numbers for each client, no history


def fake_server(weights: Tensors) -> Server:
    setup = tiny.setup("fedheal")
    return Server(0, 1, weights, {}, [], 2, setup.worker.layout, setup.config, setup.worker.model)


def fake_update(client: str, weights: list[float], mask: list[bool] | None = None) -> Update:
    w = torch.tensor(weights, dtype=torch.float32)
    return Update(client, 1, {"w": w}, {}, {"w": torch.tensor(mask) if mask else torch.ones_like(w, dtype=torch.bool)})
