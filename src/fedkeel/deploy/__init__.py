"""A real federation on Flower: a server, and sites that keep their images.

The round loop is the one that runs everywhere (`engine.rounds`); its executor (`engine.executors.flower`) sends
Broadcasts over a channel, and a site answers with Updates.

    site.py         a site: its images, its `memory` and what it spent of its privacy, what it replies to a request
    policy.py       what a site lets a server ask of it, by `request_checks`
    serving.py      a run: the sites that enrol, then the rounds, over Flower's `grid`
    deployment.py   `fedkeel server` and `fedkeel join`: Flower's `processes`, `certificates`, `addresses`, `keys`
    superlink.py    Flower's SuperLink, guarded: who may ask for what, how much (`quota`), how long (`connections`)
    supernode.py    Flower's SuperNode, by the server's `clock`
    apps.py         a plain Flower app; `flower_*` have all that is not Flower's public API
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from fedkeel.errors import FedkeelError

if TYPE_CHECKING:
    from fedkeel.deploy.apps import client_app, server_app

__all__ = ["client_app", "server_app"]


def need_flower() -> None:
    """One sentence where the extra is missing."""
    if importlib.util.find_spec("flwr") is None:
        raise FedkeelError("A federation over a network runs on Flower: install it with pip install 'fedkeel[flower]'.")


def __getattr__(name: str) -> Any:
    if name not in ("client_app", "server_app"):
        raise AttributeError(f"module 'fedkeel.deploy' has no attribute '{name}'")
    need_flower()
    return getattr(importlib.import_module("fedkeel.deploy.apps"), name)
