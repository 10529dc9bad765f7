"""A site: its own images, its own memory, and what it answers to the server's requests.

Nothing here knows Flower. A request is a small table (what to do, in which session, at which step) with the bytes of
a `Broadcast`; a reply is a small table with the bytes of an `Update` or of an answer's tensors. What the site
remembers between rounds stays in a file of its own and never travels.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedkeel
from fedkeel.config import Config, from_one
from fedkeel.core.composition import Composition
from fedkeel.core.messages import BadMessage, Broadcast, broadcast_from_bytes, pack, update_to_bytes
from fedkeel.core.state import Tensors
from fedkeel.data.federation import Federation
from fedkeel.data.site import load_site
from fedkeel.deploy.memory import KEPT_RUNS, PrivacyLedger, SiteMemory
from fedkeel.deploy.policy import Policy, Refused
from fedkeel.deploy.request_checks import Session, check_message, check_network, check_privacy
from fedkeel.deploy.site_models import SiteModels
from fedkeel.engine.batches import probe
from fedkeel.engine.evaluation import SPLITS, split_indices
from fedkeel.engine.executors.sites.channel import Reply, Table, plain
from fedkeel.engine.executors.sites.roster import Description
from fedkeel.engine.local import ClientFailure, Worker
from fedkeel.engine.measuring import completed
from fedkeel.engine.metrics import asked
from fedkeel.engine.setup import build_model, choose_device, load_federation
from fedkeel.errors import FedkeelError, shortage
from fedkeel.methods import build as build_method
from fedkeel.runs.store import KEPT_CHECKPOINTS
from fedkeel.stopping import Stopped
from fedkeel.trust import privacy

log = logging.getLogger("fedkeel")
LONGEST_QUESTION = 100
PATH = re.compile(r"'[^']*[/\\].*?'(?=[\s,.;:)]|$)")  # as sentences quote one: the site's own business

Read = Callable[[Config, Sequence[str] | None], Federation]


def own_folder(folder: Path, name: str, **own: Any) -> Read:
    """A site whose images are in `folder/<class>/`, and what it says of them itself: see `load_site`."""
    return lambda config, classes: load_site(folder.resolve(), name, config, classes, **own)


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
        policy: what it lets a server ask of it; None where server and site are one, in a simulation.
        models: where it keeps the models of runs with its own statistics, if it wants them.
    """

    read: Read
    state: Path | None
    name: str = ""
    device: str = "auto"
    position: int | None = None
    model: nn.Module | None = None
    policy: Policy | None = field(default_factory=Policy)
    models: SiteModels | None = None
    _latest: tuple[str, tuple[int, int, int]] = field(default=("", (0, 0, 0)), init=False)
    _agreed: dict[str, Session] = field(default_factory=dict, init=False)
    _session: Session | None = field(default=None, init=False)
    _worker: Worker | None = field(default=None, init=False)

    def reply(self, request: Table, message: bytes) -> Reply:
        """What to send back; a failure is told in one sentence, without anything of the data in it."""
        try:
            return self._act(request, message)
        except Refused as refused:
            log.warning("The site refuses %s%s.", refused, f" ({refused.line})" if refused.line else "")
            reason = f"it refuses {refused}"
        except (ClientFailure, FedkeelError) as failure:
            log.warning("The request '%s' failed: %s", plain(request.get("do")), failure)
            reason = PATH.sub("a file or folder of its own", str(failure)).rstrip(".")
        except BadMessage as bad:
            reason = f"the server's message cannot be used: {bad}"
        except Stopped:
            reason = "it is being stopped"
        except Exception as error:
            reason = shortage(error).rstrip(".")
            if not reason:
                # Texts of unknown errors may quote paths or values, which are this site's own business.
                log.exception("The request '%s' failed.", plain(request.get("do")))
                reason = f"it failed with a {type(error).__name__}; its own log says where"
        return {"failure": reason, "name": self.name}, b""

    def _act(self, request: Table, message: bytes) -> Reply:
        if request["do"] == "sit out":
            log.warning("This site sits out: %s.", plain(request["reason"]))
            return {}, b""
        version = request["session"]["version"]
        if version != fedkeel.__version__:
            raise FedkeelError(f"it runs fedkeel {fedkeel.__version__}, and the server {plain(version)[:40]}")
        do, session = request["do"], self._agree(Session.read(request["session"], self.policy))
        if do == "describe":
            return {"description": asdict(self._describe(session))}, b""
        self._refuse_by_policy(do)
        worker, broadcast = self._worker_of(session), broadcast_from_bytes(message)
        step = check_message(request, broadcast, worker)
        (site,) = worker.federation
        place = None if worker.config.stateless else self.state
        memory = SiteMemory(place, session.run, keep=KEPT_CHECKPOINTS * worker.config.checkpoint_every + 1)
        counted = request["after"]
        self._refuse_overtaken(session.run, (int(request["start"]), *step))
        remembered = memory.after((int(counted[0]), int(counted[1])) if counted else None)
        if do == "train":
            self._charge(worker)
            update, kept = worker.train(site.name, broadcast, remembered)
            memory.keep(step, kept)
            self._keep_model(request, session, broadcast, remembered)
            return {}, update_to_bytes(update)
        if do == "answer":
            answer, kept = worker.answer(site.name, broadcast, remembered, str(request["question"])[:LONGEST_QUESTION])
            memory.keep(step, kept)
            return {"samples": answer.samples}, pack({}, tensors=answer.tensors)
        if do == "evaluate":
            splits, detailed = [split for split in SPLITS if split in request["splits"]], self._tells(request)
            found = worker.evaluate(site.name, broadcast, remembered, splits, detailed=detailed)
            metrics = asked(worker.config)
            told = (completed(one, metrics, detailed=detailed) for one in found)
            self._keep_model(request, session, broadcast, remembered)
            return {"evaluations": [asdict(replace(one, outputs=None)) for one in told]}, b""
        raise BadMessage(f"there is no request '{do}'")

    def _keep_model(self, request: Table, session: Session, broadcast: Broadcast, remembered: Tensors) -> None:
        """By its own choice: a server neither knows of it nor can ask for it."""
        worker, last = self._worker_of(session), from_one(broadcast.round) == broadcast.rounds
        if self.models is None or not (last or request.get("detailed") is True):
            return
        (site,) = worker.federation
        told = self.policy is None or self.policy.evaluation
        if request["do"] == "evaluate":
            self.models.keep(session.run, worker, broadcast, remembered, "tested")
        elif not (told and any(len(split_indices(site, split)) for split in SPLITS)):
            # It will not be sent the model that comes of this round.
            self.models.keep(session.run, worker, broadcast, remembered, "to be trained")

    def _tells(self, request: Table) -> bool:
        """Whether to tell of its test set in detail."""
        return request.get("detailed") is True and (self.policy is None or self.policy.by_class)

    def _agree(self, session: Session) -> Session:
        """The options of a run are those of its first message: under others, the same data would tell more."""
        first = self._agreed.setdefault(session.run, session)
        if session.fingerprint != first.fingerprint:
            raise Refused("other options in the midst of a run")
        if session.classes is not None:
            if first.classes not in (None, session.classes):
                raise Refused("other classes in the midst of a run")
            self._agreed[session.run] = session
        while len(self._agreed) > KEPT_RUNS:
            del self._agreed[next(iter(self._agreed))]
        return session

    def _refuse_by_policy(self, do: object) -> None:
        if self.policy is None:
            return
        if do == "answer":
            self.policy.allows("questions", "to answer a question")
        if do == "evaluate":
            self.policy.allows("evaluation", "to evaluate a model")

    def _charge(self, worker: Worker) -> None:
        """Count what a private training spends; without a folder there is no ledger, and no limit can be kept."""
        if worker.config.dp != "local" or self.policy is None:
            return
        if self.state is None:
            if self.policy.epsilon:
                raise self.policy.refusal("epsilon", "a run without a folder for what was spent")
            return
        (site,) = worker.federation
        PrivacyLedger(self.state).charge(worker.config, site.samples, self.policy)

    def _refuse_overtaken(self, run: str, moment: tuple[int, int, int]) -> None:
        """A request that a later one of the same run has overtaken must not undo what that one made remembered."""
        known, latest = self._latest
        if known == run and moment < latest:
            raise BadMessage("it was overtaken by a later one")
        self._latest = run, moment

    def _describe(self, session: Session) -> Description:
        federation = self._read(session.config, None)
        (site,) = federation
        counts = {part: len(getattr(site, part)) for part in ("train", "validation", "test")}
        return Description(
            name=site.name,
            domain=site.domain,
            classes=federation.classes,
            shape=tuple(probe(federation).shape[1:]),
            version=fedkeel.__version__,
            position=self.position,
            **counts,
        )

    def _read(self, config: Config, classes: Sequence[str] | None) -> Federation:
        """Its images, if the policy lets them be used so: only the data decide how large the network gets, and what the
        run tells of them."""
        federation = self.read(config, classes)
        if self.policy is not None:
            check_privacy(config, federation, self.policy)
            if self.model is None:
                check_network(config, federation, self.policy)
        return federation

    def _worker_of(self, session: Session) -> Worker:
        """The model and data of this session, made once."""
        if self._worker is None or session != self._session:
            config = session.config.replace(device=self.device, executor="serial")
            method, device = Composition.of(build_method(config.method)), choose_device(config)
            federation = self._read(config, session.classes)
            network = build_model(config, federation, method, self.model)
            if method.stateful_parts and self.state is None:
                raise FedkeelError(
                    f"'{method.stateful_parts[0]}' needs sites that remember: give this site a folder for it"
                )
            privacy.refuse_network(config, network)
            # Noise of this site alone, and not of the server, which knows the seed; a simulation is all one.
            rule = privacy.choose_rules(config, secret=self.position is None).gradients
            self._worker = Worker(config, federation, method, network, device, gradient_rule=rule)
            self._session = session
        return self._worker
