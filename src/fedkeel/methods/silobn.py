"""SiloBN: Andreux et al., "Siloed Federated Learning for Multi-Centric Histopathology Datasets", 2020.

The statistics of batch norm describe one site's images, its scale and shift serve the task: so statistics
stay local, scale and shift are averaged. Clients that never trained: as in FedBN.
"""

from __future__ import annotations

from torch import nn

from fedkeel.core.method import Method, Traits
from fedkeel.methods import register
from fedkeel.methods.fedbn import Unseen, batch_norm_entries, check_unseen


@register("silobn")
class SiloBN(Method):
    """Each client keeps its batch-norm statistics to itself; scale and shift are averaged with the rest."""

    paper = "Andreux et al. 2020"
    traits = Traits(needs_memory=True, needs_batch_norm=True, personal=True)

    def __init__(self, unseen: Unseen = "batch") -> None:
        check_unseen(unseen)
        self.unseen = unseen
        self._local: set[str] = set()

    def prepare(self, model: nn.Module) -> None:
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._local = batch_norm_entries(model) - parameters

    def is_local(self, name: str) -> bool:
        return name in self._local
