"""MOON: Li et al., "Model-Contrastive Federated Learning", CVPR 2021, Eqs. 3-4.

On skewed data a local model learns worse features than the global one it started from. So the features z of each image
are drawn to those of the global model and away from those of this client's own model of its last round:

    l_con = -log( exp(sim(z, z_glob) / tau) / (exp(sim(z, z_glob) / tau) + exp(sim(z, z_prev) / tau)) )     (Eq. 3)
    L = CE + mu l_con                                                                                       (Eq. 4)

Both other models are frozen and in evaluation mode. A client that has not trained before has no last model; there the
authors' code takes the global one for it, which has no gradient, and here the term is left out.

The paper's networks have a projector of two layers before the head, whose output z then is. Compared methods should
have it too, so it belongs to the model: `simple_cnn(projector=256)` puts UniVarFL's there. The option `projector` of
this method puts the paper's own (linear, ReLU, linear).
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedkeel.core import state
from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import Expected
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.core.types import Classifier, Output
from fedkeel.errors import FedkeelError, MethodError
from fedkeel.formulas.losses import model_contrast
from fedkeel.methods import register
from fedkeel.models.encoder import Encoder


@register("moon")
class Moon(Method):
    """Draws features to those of the global model and away from those of the client's own last one."""

    paper = "Li et al. 2021 (MOON)"
    traits = Traits(needs_memory=True, capturable=True)

    def __init__(self, mu: float = 1.0, temperature: float = 0.5, projector: int | None = None) -> None:
        """`mu`: weight of Eq. 3. `temperature`: tau. `projector`: width of the paper's projector, None for none."""
        if mu < 0:
            raise FedkeelError(f"The 'mu' of moon is {mu}: give at least 0.")
        if temperature <= 0:
            raise FedkeelError(f"The 'temperature' of moon is {temperature}: give a number above 0.")
        if projector is not None and projector < 1:
            raise FedkeelError(f"The 'projector' of moon is {projector}: give its width, e.g. 256, or leave it out.")
        self.mu, self.temperature, self.projector = mu, temperature, projector
        # Two frozen networks beside each resident model, at addresses that stay: a captured step refers to them.
        self._others: WeakKeyDictionary[nn.Module, tuple[Classifier, Classifier]] = WeakKeyDictionary()

    def prepare(self, model: nn.Module) -> None:
        if self.projector is None:
            return
        encoder = model.encoder if isinstance(model, Classifier) else None
        if not isinstance(model, Classifier) or not isinstance(encoder, Encoder) or encoder.projector is not None:
            why = "it has one already" if isinstance(encoder, Encoder) else "it is none of this package's networks"
            raise MethodError(f"'moon' cannot put a projector into this model, {why}: leave 'projector' out.")
        width = encoder.feature_dim
        encoder.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, self.projector))
        encoder.feature_dim = model.feature_dim = self.projector
        model.head = nn.Linear(self.projector, model.num_classes)

    def start(self, client: LocalClient) -> None:
        if not client.memory or self.mu == 0:
            return
        if client.model not in self._others:
            self._others[client.model] = (frozen_copy(client.model), frozen_copy(client.model))
        with_global, with_previous = client.scratch["others"] = self._others[client.model]
        # The model as it was just loaded, with what this client keeps of it.
        state.load(with_global, client.model.state_dict())
        state.load(with_previous, client.model.state_dict(), client.memory)

    def step_variant(self, client: LocalClient) -> Hashable:
        return "others" in client.scratch

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        if "others" not in client.scratch:
            return 0.0
        with_global, with_previous = client.scratch["others"]
        with torch.no_grad():
            positives, negatives = with_global(batch.x).features, with_previous(batch.x).features
        return self.mu * model_contrast(output.features, positives, negatives, self.temperature)

    def finish(self, client: LocalClient) -> Tensors:
        """The client remembers its trained model."""
        entries = client.model.state_dict()
        client.memory = state.copies(entries, [name for name in entries if state.is_continuous(entries[name])])
        return {}

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        return {}


def frozen_copy(model: nn.Module) -> Classifier:
    """Another network of the same kind, in evaluation mode."""
    twin: Classifier = copy.deepcopy(model).eval().requires_grad_(False)  # type: ignore[assignment]
    return twin
