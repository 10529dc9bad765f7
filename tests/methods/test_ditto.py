from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedkeel.core.state import select
from fedkeel.engine.tasks import fetched
from fedkeel.errors import MethodError
from tests import tiny
from tests.methods.by_hand import FULL, SIZES, assert_near, initial, mean, trained
from tests.methods.small import started

LAMBDA = 0.5


def test_personal_models_are_those_of_the_paper_and_the_global_one_is_fedavgs(tmp_path: Path) -> None:
    runs = {
        text: started(text, tmp_path / text[:6], local_epochs=2, **FULL)
        for text in ("fedavg", f"ditto(lambda_={LAMBDA})")
    }
    w, v = initial(), dict.fromkeys(SIZES, initial())
    fedavg, ditto = runs.values()
    for round in range(3):

        def near(now, w=w):
            return LAMBDA / 2 * sum((now[name] - w[name]).square().sum() for name in w)

        v = {k: trained(k, v[k], 2, near) for k in SIZES}
        w = mean([trained(k, w, 2) for k in SIZES], list(SIZES.values()))
        for run in (fedavg, ditto):
            run.round(round)
        assert_near(ditto.server.weights, w)
        for name, tensor in fedavg.server.weights.items():
            assert torch.equal(ditto.server.weights[name], tensor), name
        for k in SIZES:
            assert_near(select(fetched(ditto.memory.look(k)), "ditto/tested"), v[k])


def test_each_client_is_tested_with_its_own_and_a_stranger_with_the_global_one(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", "ditto", rounds=4, learning_rate=0.3)
    tested = {r["client"]: r["accuracy"] for r in run.records("evaluation") if (r["split"], r["round"]) == ("test", 3)}
    data = tiny.federation()
    models = {client: run.model(client).state_dict() for client in tiny.SIZES}
    for client, model in models.items():
        network = tiny.model()
        network.load_state_dict(model)
        test = data[client].test
        with torch.no_grad():
            right = network.eval()(data.test_transform(data.images[test], torch.empty(len(test), 0))).logits.argmax(1)
        assert tested[client] == pytest.approx((right == data.labels[test]).float().mean().item())
    names = list(tiny.SIZES)
    assert not torch.equal(models[names[0]]["head.weight"], models[names[1]]["head.weight"])
    worker = tiny.setup("ditto").worker
    sent = tiny.broadcast(worker)
    _, memory = worker.train("ward", sent, {})
    worker.load_tested(sent, memory)
    assert torch.equal(worker.entries["head.weight"], memory["ditto/tested/head.weight"])
    worker.load_tested(sent, {})
    assert torch.equal(worker.entries["head.weight"], sent.weights["head.weight"])


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MethodError, match="'ditto' takes steps of SGD, and the optimiser is 'adamw'"):
        tiny.run(tmp_path / "a", "ditto", optimizer="adamw")
    with pytest.raises(MethodError, match="'hbn' has one for all"):
        tiny.run(tmp_path / "b", "ditto+hbn")
    with pytest.raises(MethodError, match="'ditto' needs clients that remember"):
        tiny.setup("ditto", stateless=True)
