"""Any network of the user's as a classifier: name its last layer and methods can act on features and head."""

from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fedkeel.core.types import Classifier, Output
from fedkeel.errors import FedkeelError, nearest
from fedkeel.options import described


class Wrapped(Classifier):
    """A network that runs as it is; what enters its head on the way are the features.

    The network may do anything before and after its head in its own `forward`. Its entries in `state_dict()` keep
    their names behind `network.`.
    """

    def __init__(self, network: nn.Module, head_name: str, feature_dim: int, num_classes: int) -> None:
        nn.Module.__init__(self)
        self.network = network
        self.head_name = head_name
        self.feature_dim = feature_dim
        self.num_classes = num_classes

    # Views into `network`: as members they would appear twice in `state_dict()`.
    @property
    def head(self) -> nn.Module:  # type: ignore[override]
        return self.network.get_submodule(self.head_name)

    @property
    def encoder(self) -> nn.Module:  # type: ignore[override]
        return _EncoderView(self)

    def forward(self, x: Tensor) -> Output:
        """The features are what entered the head, at its last call if there are several."""
        seen: list[Tensor] = []

        def remember(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[:] = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)][:1]

        # Hooked for this call alone: nothing to copy, to pickle, or to lose when surgery replaces the head.
        with self.head.register_forward_pre_hook(remember, with_kwargs=True):
            result = self.network(x)
        if not seen:
            raise FedkeelError(
                f"The network never calls its head '{self.head_name}': name the layer that makes logits."
            )
        return Output(seen[0].flatten(1), _logits(result))


class _EncoderView(nn.Module):
    """Images -> features by running the wrapped network."""

    def __init__(self, model: Wrapped) -> None:
        super().__init__()
        self.network = model.network
        self._model = (model,)  # in a tuple, out of nn.Module's sight

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self._model[0](x).features
        return features


def wrap(module: nn.Module, head: str = "fc", num_classes: int | None = None) -> Wrapped:
    """Give a network the interface of every model here: `Output(features, logits)`, `head`, `feature_dim`.

    `head` is the dotted name of its last layer as in `named_modules()`, a linear one or several modules with one in
    them. A network that never calls its head is refused at its first forward, which `simulate` does before it trains.

    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5))
    >>> model = wrap(network, head="3")
    >>> model.feature_dim, model(torch.zeros(1, 3, 2, 2)).logits.shape
    (8, torch.Size([1, 5]))
    """
    if not isinstance(module, nn.Module):
        raise FedkeelError(f"What is to be wrapped is {described(module)}: give an object of torch.nn.Module.")
    if not isinstance(head, str):
        raise FedkeelError(f"'head' is {described(head)}: give the dotted name of the last layer, as text.")
    refuse_lazy(module)
    modules = {name: part for name, part in module.named_modules() if name}
    if head not in modules:
        raise FedkeelError(f"{type(module).__name__} has no module named '{head}': {nearest(head, modules)}")
    layers = [layer for layer in modules[head].modules() if isinstance(layer, nn.Linear)]
    if not layers or num_classes not in (None, layers[-1].out_features):
        found = f"{layers[-1].out_features} outputs" if layers else "no linear layer"
        raise FedkeelError(f"The head '{head}' has {found}: give the dotted name of the layer that makes the logits.")
    return Wrapped(module, head, layers[0].in_features, layers[-1].out_features)


def refuse_lazy(network: nn.Module) -> None:
    """Of a layer whose weights are not there yet nothing can be averaged; nor are they drawn from the run's seed."""
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            layer = name.rpartition(".")[0]
            raise FedkeelError(f"The layer '{layer}' of {type(network).__name__} is lazy: call it once with a batch.")


def _logits(result: Any) -> Tensor:
    """The logits in what a network returned: a tensor, or something with `logits`, as networks of Hugging Face."""
    logits = getattr(result, "logits", result)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        raise FedkeelError("The wrapped network returns no logits: let its forward return a tensor (N, classes).")
    return logits
