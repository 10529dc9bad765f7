"""Fedkeel as a plain Flower app: a ServerApp that runs the ordinary round loop, a ClientApp that is one site.

`flwr run` reads the options of a run from `[tool.flwr.app.config]`, by the names they have everywhere in Fedkeel, with
four more: `out` (the run directory; one that holds a run is resumed), `sites` (how many to wait for), `wait` (for how
many seconds), and, for a node, `data` (its folder of images), `name`, `state` and `device` in its node configuration.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedkeel.config import Config, from_dict
from fedkeel.engine.flower.federation import carry_out
from fedkeel.engine.flower.grid import GridChannel, from_records, to_records
from fedkeel.engine.flower.site import Site, own_folder, share_of_data_set
from fedkeel.errors import FedkeelError

log = logging.getLogger("fedkeel")
server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    given = {name.replace("-", "_"): value for name, value in context.run_config.items()}
    out, wait = given.pop("out", ""), given.pop("wait", 600)
    sites = int(given.pop("sites", 0))  # type: ignore[arg-type]
    config = from_dict(typed(given))
    channel = GridChannel(grid)
    carry_out(channel, config, out=str(out) or None, sites=sites, wait=float(wait))  # type: ignore[arg-type]


def typed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Flower's own flags give whole numbers where a float is meant, and nothing else differs."""
    floats = {entry.name for entry in fields(Config) if isinstance(entry.default, float)}
    return {name: float(value) if name in floats else value for name, value in options.items()}


@client_app.train()
def train(message: Message, context: Context) -> Message:
    return answer(message, context)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return answer(message, context)


@client_app.query()
def query(message: Message, context: Context) -> Message:
    return answer(message, context)


_sites: dict[str, Site] = {}


def answer(message: Message, context: Context) -> Message:
    """One request. The site stays in this process for the next one, where there is a next one."""
    key = repr(sorted(context.node_config.items()))
    if key not in _sites:
        _sites.clear()
        _sites[key] = site_of(context.node_config)
    table, data = from_records(message.content)
    return Message(to_records(*_sites[key].reply(table, data)), reply_to=message)


def site_of(node: Mapping[str, Any]) -> Site:
    """From a node's configuration: its own folder, or one client of the data set that the server names."""
    state = node.get("state")
    device = str(node.get("device", "auto"))
    if "data" in node:
        folder = Path(str(node["data"])).expanduser()
        name = str(node.get("name", "")) or folder.resolve().name
        return Site(own_folder(folder, name), Path(str(state)) if state else None, name, device)
    if "partition-id" in node:
        position = int(node["partition-id"])
        place = Path(str(state) if state else os.environ.get("FEDKEEL_STATE", "runs/.sites"))
        return Site(share_of_data_set(position), place / str(position), device=device, position=position)
    raise FedkeelError("A node needs its images: give 'data' in its node configuration, the folder of its classes.")
