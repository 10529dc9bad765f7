"""Where the moving average of the global statistics begins, which GReg and HBN leave open.

A new network's are mean 0 and variance 1, and with a small share of the new most of that is left for many rounds. So
the moments of the first round are taken whole, unless the run starts from statistics that mean something.
"""

from typing import Literal

from fedkeel.core.state import Tensors, untouched
from fedkeel.methods import LocalClient, Server

WarmStart = Literal["auto"] | bool  # "auto": unless weights are given, or the statistics are no longer (0, 1)


def begins(choice: WarmStart, party: LocalClient | Server, statistics: Tensors) -> bool:
    """Whether this round's moments are taken whole, with these statistics before them."""
    of_norms = {name: t for name, t in statistics.items() if name.endswith((".running_mean", ".running_var"))}
    return party.round == 0 and choice if choice != "auto" else not party.config.weights and untouched(of_norms)
