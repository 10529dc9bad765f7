"""A site: its own images, its own memory, and what it answers to the server's requests.

Nothing here knows Flower. A request is a small table (what to do, in which session, at which step) with the bytes of
a `Broadcast`; a reply is a small table with the bytes of an `Update` or of an answer's tensors. What the site
remembers between rounds stays in a file of its own and never travels.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedkeel
from fedkeel.config import Config, from_dict
from fedkeel.data.federation import Federation
from fedkeel.data.site import load_site
from fedkeel.engine.flower.memory import Memory
from fedkeel.engine.flower.roster import Description
from fedkeel.engine.local import ClientFailure, Worker
from fedkeel.engine.setup import build_model, choose_device, load_federation
from fedkeel.errors import FedkeelError
from fedkeel.messages import BadMessage, broadcast_from_bytes, pack, update_to_bytes
from fedkeel.method import Composition
from fedkeel.methods import build as build_method
from fedkeel.shortage import shortage
from fedkeel.stopping import Stopped
from fedkeel.store import KEPT_CHECKPOINTS

log = logging.getLogger("fedkeel")

Table = dict[str, Any]
Read = Callable[[Config, Sequence[str] | None], Federation]


def own_folder(folder: Path, name: str) -> Read:
    """A site whose images are in `folder/<class>/`."""
    return lambda config, classes: load_site(folder.resolve(), name, config, classes)


def share_of_data_set(position: int) -> Read:
    """One client of the data set that the configuration names: a node of a simulation."""

    def read(config: Config, classes: Sequence[str] | None) -> Federation:
        whole = data_set(config)
        training = len(whole.clients)
        count = training + len(whole.unseen)
        if position >= count:
            raise FedkeelError(
                f"This is node {position}, counted from 0, and '{config.data}' has {count} clients: "
                f"start {count} nodes."
            )
        trains = position < training
        mine = whole.clients[position] if trains else whole.unseen[position - training]
        one = replace(whole, clients=(mine,) if trains else (), unseen=() if trains else (mine,))
        return one if classes is None else relabelled(one, classes)

    return read


@lru_cache(maxsize=1)
def data_set(config: Config) -> Federation:
    """Read once for all the nodes of a simulation that share a process."""
    return load_federation(config)


def relabelled(federation: Federation, classes: Sequence[str]) -> Federation:
    """The same images with the labels that the federation gives to these names of classes."""
    if tuple(classes) == federation.classes:
        return federation
    places = torch.tensor([list(classes).index(label) for label in federation.classes])
    return replace(federation, labels=places[federation.labels], classes=tuple(classes))


@dataclass
class Site:
    """Answers requests, one at a time.

    Attributes:
        read: how it reads its own images; what the configuration names otherwise never reaches its disk.
        state: where its memory is kept; None keeps it nowhere, for methods that need none.
        name: what it calls itself, where it is not a node of a simulation.
        device: of this site, whatever the server's.
        position: of its client among those of a simulation.
        model: in place of the one that the configuration names.
    """

    read: Read
    state: Path | None
    name: str = ""
    device: str = "auto"
    position: int | None = None
    model: nn.Module | None = None
    _latest: tuple[str, tuple[int, int, int]] = field(default=("", (0, 0, 0)), init=False)
    _session: str = field(default="", init=False)
    _worker: Worker | None = field(default=None, init=False)

    def reply(self, request: Table, message: bytes) -> tuple[Table, bytes]:
        """What to send back; a failure is told in one sentence, without anything of the data in it."""
        try:
            return self._act(request, message)
        except (ClientFailure, FedkeelError) as failure:
            log.warning("The request '%s' failed: %s", request.get("do"), failure)
            return self._failure(str(failure).rstrip("."))
        except BadMessage as bad:
            return self._failure(f"the server's message cannot be used: {bad}")
        except Stopped:
            return self._failure("it is being stopped")
        except Exception as error:
            if lack := shortage(error):
                return self._failure(lack.rstrip("."))
            # Texts of unknown errors may quote paths or values, which are this site's own business.
            log.exception("The request '%s' failed.", request.get("do"))
            return self._failure(f"it failed with a {type(error).__name__}; its own log says where")

    def _failure(self, reason: str) -> tuple[Table, bytes]:
        return {"failure": reason, "name": self.name}, b""

    def _act(self, request: Table, message: bytes) -> tuple[Table, bytes]:
        session, do = request["session"], request["do"]
        if session["version"] != fedkeel.__version__:
            raise FedkeelError(f"it runs fedkeel {fedkeel.__version__}, and the server {session['version']}")
        if do == "describe":
            return {"description": asdict(self._describe(from_dict(session["config"])))}, b""
        worker, broadcast = self._worker_of(session), broadcast_from_bytes(message)
        name = next(iter(worker.federation)).name
        place = None if worker.config.stateless else self.state
        memory = Memory(place, session["run"], keep=KEPT_CHECKPOINTS * worker.config.checkpoint_every + 1)
        step, counted = (int(request["step"][0]), int(request["step"][1])), request["after"]
        self._refuse_overtaken(session["run"], (int(request["start"]), *step))
        remembered = memory.after((int(counted[0]), int(counted[1])) if counted else None)
        if do == "train":
            update, kept = worker.train(name, broadcast, remembered)
            memory.keep(step, kept)
            return {}, update_to_bytes(update)
        if do == "ask":
            answer, kept = worker.answer(name, broadcast, remembered, str(request["question"]))
            memory.keep(step, kept)
            return {"samples": answer.samples}, pack({}, tensors=answer.tensors)
        if do == "evaluate":
            splits = [split for split in request["splits"] if split in ("test", "validation")]
            return {"evaluations": [asdict(e) for e in worker.evaluate(name, broadcast, remembered, splits)]}, b""
        raise BadMessage(f"there is no request '{do}'")

    def _refuse_overtaken(self, run: str, moment: tuple[int, int, int]) -> None:
        """A request that a later one of the same run has overtaken must not undo what that one made remembered."""
        known, latest = self._latest
        if known == run and moment < latest:
            raise BadMessage("it was overtaken by a later one")
        self._latest = run, moment

    def _describe(self, config: Config) -> Description:
        federation = self.read(config, None)
        (site,) = federation
        x = federation.test_transform(federation.images[:1], torch.full((1, federation.test_transform.draws), 0.5))
        _, channels, height, width = x.shape
        return Description(
            name=site.name,
            domain=site.domain,
            classes=federation.classes,
            shape=(channels, height, width),
            train=len(site.train),
            validation=len(site.validation),
            test=len(site.test),
            version=fedkeel.__version__,
            position=self.position,
        )

    def _worker_of(self, session: Table) -> Worker:
        """The model and data of this session, made once."""
        key = json.dumps(session, sort_keys=True)
        if self._worker is None or key != self._session:
            config = from_dict(session["config"]).replace(
                device=self.device, executor="serial", compile=False, weights=""
            )
            method = Composition.of(build_method(config.method))
            if method.stateful_parts and self.state is None:
                raise FedkeelError(
                    f"'{method.stateful_parts[0]}' needs sites that remember: give this site a folder for it"
                )
            federation = self.read(config, session["classes"])
            network = build_model(config, federation, method, self.model)
            self._worker = Worker(config, federation, method, network, choose_device(config))
            self._session = key
        return self._worker
