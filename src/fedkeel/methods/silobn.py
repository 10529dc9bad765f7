"""SiloBN: Andreux et al., "Siloed Federated Learning for Multi-Centric Histopathology Datasets", 2020.

The statistics of batch norm describe one site's images, its scale and shift serve the task: so statistics
stay local, scale and shift are averaged. Clients that never trained: as in FedBN.
"""

from torch import nn

from fedkeel.methods import register
from fedkeel.methods.fedbn import FedBN, batch_norm_entries


@register("silobn")
class SiloBN(FedBN):
    """Each client keeps its batch-norm statistics to itself; scale and shift are averaged with the rest."""

    paper = "Andreux et al. 2020"

    def prepare(self, model: nn.Module) -> None:
        self.kept = batch_norm_entries(model) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
