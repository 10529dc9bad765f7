"""A site inside of a job of NVFlare's: `execute` hands each task to `Site.reply`."""

import logging
from pathlib import Path
from typing import Any

from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fedkeel.config import from_one
from fedkeel.core import imports
from fedkeel.core.messages import BadMessage
from fedkeel.deploy.channel import content_of, packed
from fedkeel.deploy.kits import SETTINGS, read_json, verify
from fedkeel.deploy.policy import Policy
from fedkeel.deploy.site import Site, own_data
from fedkeel.deploy.site_models import SiteModels
from fedkeel.engine.executors.sites.channel import STEPS, Table, plain

LOG = "site.log"  # in the site's state: what 'fedkeel join' shows
log = logging.getLogger("fedkeel")


class FedkeelExecutor(Executor):
    """Its settings are `fedkeel.json` in the site's own `local/`: nothing that comes with a job changes them."""

    def __init__(self) -> None:
        super().__init__()
        self._site: Site | None = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        if self._site is None:
            local = Path(fl_ctx.get_engine().get_workspace().get_site_config_dir())
            verify(local.parent)
            self._site = site_of(read_json(local / SETTINGS))
        try:
            table, message = content_of(shareable)
        except BadMessage as bad:
            return packed({"failure": f"the server's message cannot be used: {bad}"}, b"")
        log.info(summary(table))
        return packed(*self._site.reply(table, message))


def site_of(settings: dict[str, Any]) -> Site:
    """As `fedkeel join` was told."""
    state = Path(settings["state"])
    handler = logging.FileHandler(state / LOG, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    for one in settings["imports"]:
        imports.load(one)
    policy = Policy.read(Path(settings["accept"])) if settings["accept"] else Policy()
    read = own_data(Path(settings["data"]), settings["name"], **settings["own"])
    models = SiteModels(state / "models", settings["calibrate"])
    return Site(read, state / "memory", settings["name"], settings["device"], policy=policy, models=models)


def summary(request: Table) -> str:
    """What a server asks for, as a line of the site's log: the words are a stranger's."""
    step = request.get("step")
    return f"{plain(request.get('do'))[:40]}" + (f", round {from_one(step // STEPS)}" if type(step) is int else "")
