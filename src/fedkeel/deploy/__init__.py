"""A real federation on Flower: a server, and sites that keep their images.

The round loop is the one that runs everywhere (`engine.rounds`); here its executor sends Broadcasts as Flower
messages, and a site answers with Updates.

    site.py        a site: its images, its memory (`memory.py`), what it replies to a request
    policy.py      what a site lets a server ask of it, against which `asked.py` holds requests
    account.py     what a site has spent of its privacy
    roster.py      who takes part, and who sits out because something differs
    gathering.py   the channel, and asking nodes who they are
    executor.py    the executor over a channel, whatever carries it
    federation.py  gather the sites, then run the rounds
    grid.py        the channel over Flower's grid
    apps.py        Flower's ServerApp and ClientApp
    runtime.py     both of them inside `fedkeel server` and `fedkeel join`
    deployment.py  Flower's processes, with TLS (`certificates.py`, `addresses.py`) and the sites' keys (`keys.py`)
    link.py        Flower's SuperLink, guarded: who may ask for what, how much (`limits.py`, `quota.py`) and for how
                   long (`door.py`)
    node.py        Flower's SuperNode, by the server's clock (`clock.py`)
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from fedkeel.errors import FedkeelError

if TYPE_CHECKING:
    from fedkeel.deploy.apps import client_app, server_app

__all__ = ["client_app", "need_flower", "server_app"]


def need_flower() -> None:
    """One sentence where the extra is missing."""
    if importlib.util.find_spec("flwr") is None:
        raise FedkeelError("A federation over a network runs on Flower: install it with pip install 'fedkeel[flower]'.")


def __getattr__(name: str) -> Any:
    if name not in ("client_app", "server_app"):
        raise AttributeError(f"module 'fedkeel.deploy' has no attribute '{name}'")
    need_flower()
    from fedkeel.deploy import apps

    return getattr(apps, name)
