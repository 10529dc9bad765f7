"""Group norm in place of batch norm: Wu & He, "Group Normalization", ECCV 2018; for federated learning
Hsieh et al., "The Non-IID Data Quagmire of Decentralized Machine Learning", ICML 2020.

It normalises each sample by itself, so there are no statistics that clients could disagree about.
HBN's experiments use two groups everywhere; FedWon's use 32, or 8 below 32 channels, or 24 for 144.
"""

from __future__ import annotations

from torch import nn

from fedkeel.errors import FedkeelError
from fedkeel.method import Method
from fedkeel.methods import register
from fedkeel.nn.surgery import to_group_norm


@register("gn")
class GroupNorm(Method):
    """Group norm in place of every batch norm: groups=2 as in HBN, groups=32 as in FedWon."""

    paper = "Wu & He 2018; Hsieh et al. 2020"
    private = True
    needs_batch_norm = True

    def __init__(self, groups: int = 2) -> None:
        if groups < 1:
            raise FedkeelError(f"The 'groups' of gn is {groups}: give at least 1.")
        self.groups = groups

    def prepare(self, model: nn.Module) -> None:
        to_group_norm(model, groups=self.groups)
