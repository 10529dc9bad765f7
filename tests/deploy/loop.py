"""A channel that is a function call: sites in this process, with everything that travels made into bytes and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedkeel.config import Config
from fedkeel.data.federation import Federation
from fedkeel.deploy.serving import Waiting, train
from fedkeel.deploy.site import Read, Site
from fedkeel.engine.executors.sites.channel import Reply, Table
from fedkeel.runs.run import Run
from tests import tiny


class Loop:
    """Sites by name. `spoil(site, request, reply)` may change a reply, raise `TimeoutError` to swallow it, or say what
    went wrong."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self.at = dict(sites)
        self.away: set[str] = set()
        self.requests: list[tuple[str, Table]] = []
        self.carried: list[bytes] = []
        self.spoil: Callable[[str, Table, Reply], Reply | str] = lambda _site, _request, reply: reply

    def sites(self) -> list[str]:
        return [name for name in self.at if name not in self.away]

    def exchange(
        self, requests: Mapping[str, Table], message: bytes, timeout: float
    ) -> Iterator[tuple[str, Reply | str]]:
        # The last one replies first: the order of replies must not matter.
        for name, request in reversed(list(requests.items())):
            self.requests.append((name, request))
            table, data = self.at[name].reply(json.loads(json.dumps(request)), message)
            reply = json.loads(json.dumps(table)), data
            self.carried += [json.dumps(request).encode(), message, json.dumps(table).encode(), data]
            try:
                yield name, self.spoil(name, request, reply)
            except TimeoutError:
                continue


def relabelled(federation: Federation, classes: Sequence[str]) -> Federation:
    """The same images with the labels that the federation gives to these names of classes."""
    if tuple(classes) == tuple(federation.classes):
        return federation
    places = torch.tensor([list(classes).index(label) for label in federation.classes])
    return replace(federation, labels=places[federation.labels], classes=tuple(classes))


def by_name(federation: Federation) -> Federation:
    """Its clients in the order in which a network has them."""
    return replace(federation, clients=sorted(federation.clients, key=lambda client: client.name))


def in_one_process(directory: Path, method: str = "fedavg", *, on: Federation | None = None, **options: Any) -> Run:
    """What `over_network` does, without one."""
    return tiny.run(directory, method, on=by_name(on or tiny.federation()), **options)


def one_of(federation: Federation, name: str) -> Read:
    """The reader of a site that has only its own client of a federation."""
    mine = federation[name]
    trains = any(client.name == name for client in federation.clients)
    one = replace(federation, clients=(mine,) if trains else (), unseen=() if trains else (mine,))

    def read(_: Config, classes: Sequence[str] | None) -> Federation:
        return one if classes is None else relabelled(one, classes)

    return read


def sites_of(federation: Federation, state: Path, model: nn.Module) -> dict[str, Site]:
    return {
        client.name: Site(one_of(federation, client.name), state / client.name, client.name, "cpu", model)
        for client in federation
    }


def data_of(federation: Federation) -> str:
    """As a server would be told to have them read."""
    shape = federation.image_shape
    return f"folder(size={shape[1]}, test_transform='')" if len(shape) == 3 else "table"


def over_network(
    directory: Path, method: str = "fedavg", *, loop: Loop | None = None, on: Federation | None = None, **options: Any
) -> Run:
    """What `tests.tiny.run` does, with each client as a site of its own."""
    network, on = options.pop("network", None) or tiny.model(), on or tiny.federation()
    observer = options.pop("observer", None)
    loop = loop or Loop(sites_of(on, directory / "sites", network))
    given = {"sites": len(loop.at)} | {name: options.pop(name) for name in ("sites", "named") if name in options}
    waiting = Waiting(seconds=options.pop("wait", 600), **given)
    unseen = ",".join(client.domain for client in on.unseen)
    config = Config(**{**tiny.OPTIONS, "data": data_of(on), "method": method, "unseen": unseen, **options})
    return train(loop, config, directory / "run", waiting, observer or tiny.Notes(), network)
