"""Layer norm in place of batch norm: Ba et al., "Layer Normalization", 2016; for federated learning
Du et al., "Rethinking Normalization Methods in Federated Learning", 2022.

As both papers that compare with it do, a group norm of a single group over all channels.
"""

from torch import nn

from fedkeel.methods import Method, Traits, register
from fedkeel.nn.surgery import to_group_norm


@register("ln")
class LayerNorm(Method):
    """Layer norm (a single group over all channels) in place of every batch norm."""

    paper = "Ba et al. 2016; Du et al. 2022"
    traits = Traits(private={"local"}, needs_batch_norm=True, replaces={"norms"})

    def prepare(self, model: nn.Module) -> None:
        to_group_norm(model, groups=1)
