"""Where the moving average of the global statistics begins, which GReg and HBN leave open.

A new network's are mean 0 and variance 1, and with a small share of the new most of that is left for many rounds. So
the moments of the first round that has enough clients to count are taken whole, unless the run starts from statistics
that mean something.
"""

from typing import Literal

import torch

from fedkeel.core.state import untouched
from fedkeel.methods import LocalClient, Server, Tensors

WarmStart = Literal["auto"] | bool  # "auto": unless weights are given, or the statistics are no longer (0, 1)
LATE = "late"  # in a broadcast that is not the first, though no round before it has counted


def wanted(choice: WarmStart, party: LocalClient | Server, statistics: Tensors) -> bool:
    """Whether the first moments are taken whole, with these statistics before them."""
    of_norms = {name: t for name, t in statistics.items() if name.endswith((".running_mean", ".running_var"))}
    return choice if choice != "auto" else not party.config.weights and untouched(of_norms)


def has_none(client: LocalClient) -> bool:
    """Whether the broadcast statistics are not of any round yet."""
    return client.round == 0 or LATE in client.extras


def tell_clients(server: Server) -> Tensors:
    """The extras from which a client of a later round knows that none has counted."""
    return {LATE: torch.ones(())} if server.round > 0 and not server.memory else {}


def is_first(server: Server) -> bool:
    """Whether this is the first round that counts; asked once in each."""
    first = not server.memory
    server.memory = {"counted": torch.ones(())}
    return first
