"""Fedkeel as a plain Flower app: a ServerApp that runs the ordinary round loop, a ClientApp that is one site.

`flwr run` reads the options of a run from `[tool.flwr.app.config]`, by the names they have everywhere in Fedkeel, with
three more: `out` (the run directory; one that holds a run is resumed), `sites` (how many to wait for) and `wait` (for
how many seconds). A node's own configuration has `data` (its folder of images), `name`, `state`, `device` and `accept`
(the file of its policy); a node of a simulation has none of these and is one client of the data set that the options
name.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedkeel.config import from_dict
from fedkeel.data.site import OWN
from fedkeel.deploy.grid import GridChannel, from_records, to_records
from fedkeel.deploy.policy import Policy
from fedkeel.deploy.serving import train
from fedkeel.deploy.site import Site, own_folder, share_of_data_set
from fedkeel.engine.executors.flower.roster import Enrolment
from fedkeel.errors import FedkeelError

server_app = ServerApp()
"""The round loop as a Flower app. No example: `flwr run` starts it, from a pyproject.toml that names it."""
client_app = ClientApp()
"""One site as a Flower app, likewise."""


def main(grid: Grid, context: Context) -> None:
    """The ServerApp: the ordinary round loop over the nodes of the grid."""
    given: dict[str, Any] = {name.replace("-", "_"): value for name, value in context.run_config.items()}
    out, sites, wait = str(given.pop("out", "")), int(given.pop("sites", 0)), float(given.pop("wait", 600))
    train(Enrolment(GridChannel(grid), sites, wait), from_dict(given), out=out or None)


def answer(message: Message, context: Context) -> Message:
    """One request. The site stays in this process for the next one, where there is a next one."""
    simulated = "partition-id" in context.node_config and "data" not in context.node_config
    out = str(context.run_config.get("out", "")) if simulated else ""
    site = site_of(tuple(sorted(context.node_config.items())), out)
    return Message(to_records(*site.reply(*from_records(message.content))), reply_to=message)


@lru_cache(maxsize=16)
def site_of(node_config: tuple[tuple[str, Any], ...], out: str) -> Site:
    """From a node's configuration: its own folder, or one client of the data set that the server names."""
    node = dict(node_config)
    state, device = node.get("state"), str(node.get("device", "auto"))
    if "data" in node:
        folder = Path(str(node["data"])).expanduser()
        name = str(node.get("name", "")) or folder.resolve().name
        policy = Policy.read(Path(str(node["accept"])).expanduser()) if "accept" in node else Policy()
        own = {option: node[option] for option in OWN if option in node}
        return Site(own_folder(folder, name, **own), Path(str(state)) if state else None, name, device, policy=policy)
    if "partition-id" in node:
        # Nodes of a simulation share a disk with the server, or at least its run directory.
        position = int(node["partition-id"])
        place = Path(out) / "sites" / str(position) if Path(out).is_absolute() else None
        return Site(share_of_data_set(position), place, device=device, position=position, policy=None)
    raise FedkeelError("A node needs its images: give 'data' in its node configuration, the folder of its classes.")


server_app.main()(main)
for kind in (client_app.train, client_app.evaluate, client_app.query):
    kind()(answer)
