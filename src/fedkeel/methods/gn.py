"""Group norm in place of batch norm: Wu & He, "Group Normalization", ECCV 2018; for federated learning
Hsieh et al., "The Non-IID Data Quagmire of Decentralized Machine Learning", ICML 2020.

It normalises each sample by itself, so there are no statistics that clients could disagree about.
HBN's experiments use two groups everywhere; FedWon's use 32, or 8 below 32 channels, or 24 for 144, and 64 in the last
layers of its own networks (Tables 6 and 7).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fedkeel.core.state import batch_norms
from fedkeel.errors import FedkeelError, nearest
from fedkeel.methods import Method, Traits, register
from fedkeel.nn.surgery import to_group_norm
from fedkeel.options import Count
from fedkeel.spec import names


@register("gn")
@dataclass
class GroupNorm(Method):
    """Group norm in place of every batch norm: groups=2 as in HBN, groups=32 as in FedWon."""

    paper = "Wu & He 2018; Hsieh et al. 2020"
    traits = Traits(private={"local"}, needs_batch_norm=True, replaces={"norms"})

    groups: Count = 2  # into how many the channels are cut
    doubled: str | Sequence[str] = ()  # names of layers with twice as many

    def prepare(self, model: nn.Module) -> None:
        doubled = names(self.doubled)
        if strange := min({*doubled} - {*(known := batch_norms(model))}, default=""):
            raise FedkeelError(f"'doubled' of gn names '{strange}', no batch norm here: {nearest(strange, known)}")
        to_group_norm(model, groups=lambda name, _: self.groups * (2 if name in doubled else 1))
