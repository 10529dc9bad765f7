from __future__ import annotations

import pytest
import torch

from fedkeel.core.messages import Answer, Update, scoped_updates
from fedkeel.core.server import Server
from fedkeel.core.state import prefixed, select
from tests import tiny


def server(**options: object) -> Server:
    prepared = tiny.setup(**options)  # type: ignore[arg-type]
    return Server(0, 1, {}, {}, [], 3, prepared.worker.layout, prepared.config, prepared.worker.model)


def test_a_part_sees_its_own_tensors_under_their_own_names() -> None:
    tensors = {"a/x": torch.zeros(1), "ab/x": torch.ones(1), "a/b/x": torch.full((1,), 2.0)}
    assert {name: t.item() for name, t in select(tensors, "a").items()} == {"x": 0.0, "b/x": 2.0}
    assert select(prefixed({"x": torch.ones(1)}, "p"), "p")["x"].item() == 1.0
    update = Update("c", 1, {}, {}, extras=tensors)
    assert list(scoped_updates([update], "ab")[0].extras) == ["x"]
    assert update.extras is tensors


def test_the_share_of_a_client_follows_the_weighting() -> None:
    update = Update("c", 17, {}, {})
    assert server().share(update) == 17
    assert server(weighting="uniform").share(update) == 1
    assert server().share(Answer("c", 5, {})) == 5


def test_views_share_the_party_but_not_memory_and_extras() -> None:
    whole = server()
    whole.memory = {"a/m": torch.ones(1), "b/m": torch.zeros(1)}
    whole.extras = {"a/e": torch.ones(1)}
    view = whole.scoped("a")
    assert (list(view.memory), list(view.extras), view.part) == (["m"], ["e"], "a")
    view.memory["new"] = torch.zeros(1)
    assert "a/new" not in whole.memory
    assert view.layout is whole.layout


def test_numbers_noted_of_clients_are_exact_stay_and_are_kept_apart() -> None:
    party = server()
    party.note("share", {"ward/2": 1 / 3, "clinic": 2.0})
    party.note("delta", {"clinic": -1.0})
    party.note("share", {"clinic": 0.1})
    assert party.noted("share") == {"ward/2": 1 / 3, "clinic": 0.1}
    assert party.noted("delta") == {"clinic": -1.0}
    assert party.noted("nothing") == {}


def test_a_server_without_an_executor_cannot_ask() -> None:
    with pytest.raises(RuntimeError, match="no executor"):
        server().ask(["ward"], "anything")


def test_a_clients_generators_differ_by_purpose_client_and_round() -> None:
    worker = tiny.setup().worker
    federated = tiny.federation()
    numbers = set()
    for name in [client.name for client in federated.clients]:
        for round in (0, 1):
            broadcast = tiny.broadcast(worker, round)
            client = worker.arrive(name, broadcast, {})
            for purpose in ("mask", "noise"):
                numbers.add(torch.rand(1, generator=client.generator(purpose)).item())
    assert len(numbers) == 12
    assert client.device.type == "cpu"
    assert client.samples == 21
