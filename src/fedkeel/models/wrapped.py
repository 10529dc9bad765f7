"""Any network of the user's as a classifier: name its last layer and methods can act on features and head."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fedkeel.core.types import Classifier, Output
from fedkeel.errors import FedkeelError, first_line, nearest
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
        features, result = _run(self.network, self.head_name, x)
        return Output(features, _logits(result))


class _EncoderView(nn.Module):
    """Images -> features by running the wrapped network; its parameters are those outside the head."""

    def __init__(self, model: Wrapped) -> None:
        super().__init__()
        self.network = model.network
        self.head_name = model.head_name

    def forward(self, x: Tensor) -> Tensor:
        return _run(self.network, self.head_name, x)[0]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        in_head = {id(p) for p in self.network.get_submodule(self.head_name).parameters()}
        return ((n, p) for n, p in super().named_parameters(*args, **kwargs) if id(p) not in in_head)


def wrap(
    module: nn.Module,
    head: str = "fc",
    num_classes: int | None = None,
    *,
    feature_dim: int | None = None,
    example: tuple[int, ...] | Tensor | None = None,
) -> Wrapped:
    """Give a network the interface of every model here: `Output(features, logits)`, `head`, `feature_dim`.

    `head` is the dotted name of its last layer as in `named_modules()`. `example`, a batch of images or the shape of
    one image such as `(3, 32, 32)`, lets the network be tried at once; without it, a network that never calls its head
    is found at the first forward.

    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5))
    >>> model = wrap(network, head="3", example=(3, 2, 2))
    >>> model.feature_dim, model(torch.zeros(1, 3, 2, 2)).logits.shape
    (8, torch.Size([1, 5]))
    """
    if not isinstance(module, nn.Module):
        raise FedkeelError(
            f"What is to be wrapped is {described(module)}: give a network, an object of torch.nn.Module."
        )
    if not isinstance(head, str):
        raise FedkeelError(f"'head' is {described(head)}: give the dotted name of the last layer, as text.")
    refuse_lazy(module)
    modules = dict(module.named_modules())
    if not head or head not in modules:
        ending = nearest(head, filter(None, modules))
        raise FedkeelError(f"{type(module).__name__} has no module named '{head}': {ending}")
    inputs, outputs = _widths(modules[head])
    if example is not None:
        tried_inputs, tried_outputs = _try(module, head, example)
        if feature_dim is not None and feature_dim != tried_inputs:
            raise FedkeelError(f"feature_dim is {feature_dim} but the head '{head}' receives {tried_inputs} features.")
        if outputs not in (None, tried_outputs):
            raise FedkeelError(
                f"The head '{head}' has {outputs} outputs but {type(module).__name__} returns {tried_outputs}: "
                "give the dotted name of the layer that makes the logits."
            )
        inputs, outputs = tried_inputs, tried_outputs
    feature_dim = feature_dim or inputs
    if feature_dim is None:
        raise FedkeelError(f"How many features the head '{head}' receives is not known: give feature_dim or example.")
    num_classes = outputs if num_classes is None else num_classes
    if num_classes is None:
        raise FedkeelError(f"How many classes the head '{head}' separates is not known: give num_classes or example.")
    if outputs not in (None, num_classes):
        raise FedkeelError(
            f"num_classes is {num_classes} but the head '{head}' has {outputs} outputs: replace it before wrapping."
        )
    return Wrapped(module, head, feature_dim, num_classes)


def refuse_lazy(network: nn.Module) -> None:
    """Of a layer whose weights are not there yet nothing can be averaged; nor are they drawn from the run's seed."""
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            layer = name.rpartition(".")[0]
            raise FedkeelError(
                f"The layer '{layer}' of {type(network).__name__} is lazy, its weights are not there yet: call the "
                "network once with a batch of images before it is given."
            )


def _run(network: nn.Module, head_name: str, x: Tensor) -> tuple[Tensor, Any]:
    """The features that entered the head (of its last call, if it is called more than once) and the result."""
    seen: list[Tensor] = []

    def remember(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[:] = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)][:1]

    # Hooked for this call alone: nothing to copy, to pickle, or to lose when surgery replaces the head.
    hook = network.get_submodule(head_name).register_forward_pre_hook(remember, with_kwargs=True)
    try:
        result = network(x)
    finally:
        hook.remove()
    if not seen:
        raise FedkeelError(
            f"The forward of {type(network).__name__} never calls its module '{head_name}': "
            "give the dotted name of the layer that makes the logits."
        )
    return seen[0].flatten(1), result


def _logits(result: Any) -> Tensor:
    """The logits in what a network returned: a tensor, something with `logits`, or a tuple that starts with them."""
    if isinstance(result, Mapping):
        result = result.get("logits")
    elif hasattr(result, "logits"):
        result = result.logits
    elif isinstance(result, tuple | list) and result:
        result = result[0]
    if not isinstance(result, Tensor):
        raise FedkeelError("The wrapped network returns no logits: let its forward return a tensor (N, classes).")
    return result


def _widths(head: nn.Module) -> tuple[int | None, int | None]:
    """Inputs and outputs of a head, where its layers say so."""
    inputs: int | None = None
    outputs: int | None = None
    for layer in head.modules():
        if isinstance(layer, nn.Linear):
            inputs, outputs = inputs or layer.in_features, layer.out_features
        elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            inputs, outputs = inputs or layer.in_channels, layer.out_channels
    return inputs or None, outputs


def _try(module: nn.Module, head: str, example: tuple[int, ...] | Tensor) -> tuple[int, int]:
    """Pass an example through in evaluation mode, so that nothing in the network changes."""
    reference = next((p for p in module.parameters() if p.is_floating_point()), torch.zeros(()))
    if not isinstance(example, Tensor):
        example = torch.zeros(2, *example, device=reference.device, dtype=reference.dtype)
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            features, result = _run(module, head, example)
    except FedkeelError:
        raise
    except Exception as error:
        shape = tuple(example.shape)
        message = f"{type(module).__name__} does not run on an example of shape {shape} ({first_line(error)})."
        raise FedkeelError(message) from error
    finally:
        for part, training in modes:
            part.training = training
    logits = _logits(result)
    if logits.ndim != 2:
        shape = tuple(logits.shape)
        raise FedkeelError(f"The wrapped network returns logits of shape {shape}: (N, classes) is needed.")
    return features.shape[1], logits.shape[1]
