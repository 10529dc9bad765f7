"""A site: its own images, its own memory, and what it answers to the server's requests.

Nothing here knows a network. A request is a small table (what to do, in which session, at which step) with the bytes of
a `Broadcast`; a reply is a small table with the bytes of an `Update` or of an answer's tensors. What the site
remembers between rounds stays in a file of its own and never travels.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

import fedkeel
from fedkeel.config import Config
from fedkeel.core.composition import Composition
from fedkeel.core.messages import BadMessage, Broadcast, broadcast_from_bytes, pack, update_to_bytes
from fedkeel.core.naming import visible
from fedkeel.core.state import Tensors
from fedkeel.data.federation import Federation
from fedkeel.data.site import load_site
from fedkeel.deploy.policy import Policy
from fedkeel.deploy.requests import Session, check_message, check_network, check_privacy
from fedkeel.deploy.site_models import SiteModels, forget_other_runs
from fedkeel.engine.batches import probe
from fedkeel.engine.evaluation import SPLITS
from fedkeel.engine.executors.sites.channel import STEPS, Reply, Table, plain
from fedkeel.engine.executors.sites.roster import Description
from fedkeel.engine.local import ClientFailure, Worker
from fedkeel.engine.measuring import completed
from fedkeel.engine.memory import ClientMemory
from fedkeel.engine.metrics import asked
from fedkeel.engine.setup import build_model, choose_device
from fedkeel.engine.tasks import fetched
from fedkeel.errors import FedkeelError, shortage
from fedkeel.methods import build as build_method
from fedkeel.runs.store import KEPT_CHECKPOINTS
from fedkeel.stopping import Stopped
from fedkeel.trust import privacy

log = logging.getLogger("fedkeel")
PATH = re.compile(r"'[^']*[/\\].*?'(?=[\s,.;:)]|$)")  # as sentences quote one: the site's own business

Read = Callable[[Config, Sequence[str] | None], Federation]


def own_data(path: Path, name: str, **own: Any) -> Read:
    """A site's folders of images, or its table, and what it says of them itself: see `load_site`."""
    return lambda config, classes: load_site(path.resolve(), name, config, classes, **own)


@dataclass
class Site:
    """Answers requests, one at a time.

    Attributes:
        read: how it reads its own data; what the configuration names otherwise never reaches its disk.
        state: the folder for its memory.
        name: as its kit has it.
        device: of this site, whatever the server's.
        model: in place of the one that the configuration names.
        policy: what it lets a server ask of it.
        models: where it keeps the models that runs end with, if it wants them.
    """

    read: Read
    state: Path
    name: str
    device: str = "auto"
    model: nn.Module | None = None
    policy: Policy = field(default_factory=Policy)
    models: SiteModels | None = None
    _made: tuple[Session, Worker] | None = field(default=None, init=False)

    def reply(self, request: Table, message: bytes) -> Reply:
        """What to send back; a failure is told in one sentence, without anything of the data in it."""
        try:
            return self._act(request, message)
        except (ClientFailure, FedkeelError) as failure:
            reason = visible(str(failure)[:400]).rstrip(".")
            log.warning("The request '%s' is not done: %s.", plain(request.get("do")), reason)
            reason = PATH.sub("a file or folder of its own", reason)
        except BadMessage as bad:
            reason = f"the server's message cannot be used: {bad}"
        except Stopped:
            reason = "it is being stopped"
        except Exception as error:
            # Texts of unknown errors may quote paths or values, which are this site's own business.
            log.exception("The request '%s' failed.", plain(request.get("do")))
            reason = shortage(error).rstrip(".") or f"it failed with a {type(error).__name__}; its own log says where"
        return {"failure": reason}, b""

    def _act(self, request: Table, message: bytes) -> Reply:
        do, given = request["do"], request["session"]
        if do == "sit out":
            log.warning("This site sits out: %s.", plain(request["reason"]))
            return {}, b""
        if given["version"] != fedkeel.__version__:
            raise FedkeelError(f"it runs fedkeel {fedkeel.__version__}, and the server {plain(given['version'])[:40]}")
        session = Session.read(given, self.policy)
        if do == "describe":
            return {"description": asdict(self._describe(session))}, b""
        worker, broadcast = self._worker_of(session), broadcast_from_bytes(message)
        check_message(request, broadcast, worker)
        memory = ClientMemory(self.state / session.run, stateless=session.config.stateless)
        memory.restore(request["after"])  # what came later was not accepted, or the server repeats it
        remembered = fetched(memory.look(self.name))
        if do == "evaluate":
            return {"evaluations": self._evaluate(request, session, worker, broadcast, remembered)}, b""
        if do == "train":
            update, kept = worker.train(self.name, broadcast, remembered)
            reply: Reply = {}, update_to_bytes(update)
        elif do == "answer":
            answer, kept = worker.answer(self.name, broadcast, remembered, str(request["question"])[:100])
            reply = {"samples": answer.samples}, pack({}, tensors=answer.tensors)
        else:
            raise BadMessage(f"there is no request '{do}'")
        forget_other_runs(self.state / session.run)
        memory.keep(self.name, kept)
        memory.commit(request["step"])
        # As far back as the server's checkpoints can go.
        memory.release((broadcast.round - KEPT_CHECKPOINTS * session.config.checkpoint_every - 1) * STEPS)
        return reply

    def _evaluate(
        self, request: Table, session: Session, worker: Worker, broadcast: Broadcast, remembered: Tensors
    ) -> list[Table]:
        detailed = request["detailed"] is True
        if detailed and self.models is not None:
            self.models.keep(session.run, worker, broadcast, remembered)
        self.policy.require("evaluation", self.policy.evaluation, "to evaluate a model")
        splits, detailed = [split for split in SPLITS if split in request["splits"]], detailed and self.policy.by_class
        found = worker.evaluate(self.name, broadcast, remembered, splits, detailed=detailed)
        told = (completed(one, asked(worker.config), detailed=detailed) for one in found)
        return [asdict(replace(one, outputs=None)) for one in told]

    def _describe(self, session: Session) -> Description:
        federation = self._read(session.config, None)
        (site,) = federation
        counts = {part: len(getattr(site, part)) for part in ("train", "validation", "test")}
        shape = tuple(probe(federation).shape[1:])
        return Description(
            site.name, site.domain, **counts, classes=federation.classes, shape=shape, version=fedkeel.__version__
        )

    def _read(self, config: Config, classes: Sequence[str] | None) -> Federation:
        """Its data, if the policy lets them be used so: only they decide how large the network gets, and what the run
        tells of them."""
        federation = self.read(config, classes)
        check_privacy(config, federation, self.policy)
        if self.model is None:
            check_network(config, federation)
        return federation

    def _worker_of(self, session: Session) -> Worker:
        """The model and data of this session, made once."""
        if self._made is None or session != self._made[0]:
            config = session.config.replace(device=self.device, executor="serial")
            method, federation = Composition.of(build_method(config.method)), self._read(config, session.classes)
            network = build_model(config, federation, method, self.model)
            privacy.refuse_network(config, network)
            # Noise of this site alone, and not of the server, which knows the seed.
            rule = privacy.choose_rules(config, secret=True).gradients
            worker = Worker(config, federation, method, network, choose_device(config), gradient_rule=rule)
            self._made = session, worker
        return self._made[1]
