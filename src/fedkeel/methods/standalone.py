"""Standalone: every client trains alone. What federation must beat on each client's own domain."""

from __future__ import annotations

from fedkeel.core.method import Method, Traits
from fedkeel.methods import register


@register("standalone")
class Standalone(Method):
    """Each client trains on its own data alone and nothing travels: the lower bound of a federation."""

    paper = "baseline of FedWon, Table 1"
    traits = Traits(needs_memory=True, personal=True)
    unseen = "initial"

    def is_local(self, name: str) -> bool:
        return True
