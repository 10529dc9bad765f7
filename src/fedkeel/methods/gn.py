"""Group norm in place of batch norm: Wu & He, "Group Normalization", ECCV 2018; for federated learning
Hsieh et al., "The Non-IID Data Quagmire of Decentralized Machine Learning", ICML 2020.

It normalises each sample by itself, so there are no statistics that clients could disagree about.
HBN's experiments use two groups everywhere; FedWon's use 32, or 8 below 32 channels, or 24 for 144, and 64 in the last
layers of its own networks (Tables 6 and 7).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedkeel.core.method import Method, Traits
from fedkeel.core.state import batch_norms
from fedkeel.data.source import names
from fedkeel.errors import FedkeelError, nearest
from fedkeel.methods import register
from fedkeel.nn.surgery import to_group_norm


@register("gn")
class GroupNorm(Method):
    """Group norm in place of every batch norm: groups=2 as in HBN, groups=32 as in FedWon."""

    paper = "Wu & He 2018; Hsieh et al. 2020"
    traits = Traits(private=True, needs_batch_norm=True)

    def __init__(self, groups: int = 2, doubled: str | Sequence[str] = ()) -> None:
        """`groups`: into how many the channels are cut. `doubled`: names of layers with twice as many."""
        if groups < 1:
            raise FedkeelError(f"The 'groups' of gn is {groups}: give at least 1.")
        self.groups, self.doubled = groups, names(doubled)

    def prepare(self, model: nn.Module) -> None:
        known = list(batch_norms(model))
        for name in self.doubled:
            if name not in known:
                raise FedkeelError(f"'doubled' of gn names '{name}', no batch norm here: {nearest(name, known)}")
        to_group_norm(model, groups=lambda name, _: self.groups * (2 if name in self.doubled else 1))
