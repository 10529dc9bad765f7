"""HBN as its authors' code does it (Hongyao-Chen/HybridBN), which the paper's tables are of: `hbn(variant=released)`.

The pass of Eq. 7 sees the first 64 samples in the order of their classes, augmented, as one batch, and N_k of Eq. 8 is
64 at most. The factors alpha are averaged beside the weights, and a client that has none yet begins with the mean.
Their clipping and their schedule are options of the run: clip_norm=10, schedule=exponential(decay=0.998).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch

from fedkeel.core import state
from fedkeel.formulas.aggregation import weighted_mean
from fedkeel.methods import Batch, Expected, LocalClient, Server, Tensors, Update
from fedkeel.methods.hbn import HBN, PASS_BATCH

SEEN = "seen"  # in the memory of a client that has factors of its own


class ReleasedHBN(HBN):
    usual_momentum = 0.002
    usual_start = False

    def start(self, client: LocalClient) -> None:
        self._take_factors(client)
        super().start(client)

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        self._take_factors(client)
        return super().answer(client, question, tensors)

    def _take_factors(self, client: LocalClient) -> None:
        """The engine has loaded the client's own; one that has none yet gets the mean of the last round's."""
        if SEEN not in client.memory:
            state.load(client.model, client.extras)

    def batches(self, client: LocalClient) -> Iterator[Batch]:
        return islice(client.data.passes(PASS_BATCH, augment=True, by_class=True), 1)

    def pool(self, sent: Sequence[Tensors], samples: Sequence[int]) -> Tensors:
        return super().pool(sent, [min(n, PASS_BATCH) for n in samples] if self.has_pass else samples)

    def finish(self, client: LocalClient) -> Tensors:
        client.memory = {SEEN: torch.ones((), device=client.device)}
        return super().finish(client) | {name: client.model.get_parameter(name).detach().clone() for name in self.kept}

    def before_training(self, server: Server) -> None:
        """The factors are there from the first broadcast on, so that it keeps its shape."""
        server.extras = server.extras or {name: torch.zeros_like(p) for name, p in self._factors(server).items()}

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        return weighted_mean([update.extras for update in updates], [server.share(update) for update in updates])

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        if question:
            return super().expects(server, question)
        return {name: Expected.like(name, factor) for name, factor in self._factors(server).items()}

    def _factors(self, server: Server) -> Tensors:
        """A tensor of the shape and on the device of each: the mean of its layer."""
        return {name: server.statistics[mean] for name, (mean, _) in zip(self.kept, self.moments, strict=True)}


HBN.released = ReleasedHBN
