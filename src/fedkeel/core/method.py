"""A method: what happens at the few moments of a round where methods differ. And how methods compose.

Every hook has a default that does nothing, so FedAvg is the empty method.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedkeel.core.checking import Expected
from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import Update
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.core.types import Classifier, Output
from fedkeel.errors import MethodError
from fedkeel.options import check_fields


@dataclass(frozen=True)
class Traits:
    """What the engine must know of a method beforehand.

    Attributes:
        needs_memory: the client must keep state between rounds; a stateless federation refuses it.
        needs_batch_norm: without batch norm in the model there is nothing to act on.
        personal: a client is evaluated with the tensors that it keeps to itself. None: if it learns one of them.
        replaces: what ignores that which earlier parts made of it: server rules ("weights", "statistics") that do not
            start from what they are given, "gradients" that are computed anew, the clients' "shares" in the mean; or
            what `prepare` puts others in the place of: "norms", a "head"; or "clients", whose data become one's.
        private: kinds of differential privacy that hold with it. "local": nothing that a client sends depends on its
            samples but through the gradients of the task loss, so that noise on these hides a sample; "central": its
            rule for the weights looks at their mean and not at the updates themselves.
        capturable: the hooks of a step (`inputs`, `forward`, `loss`, `gradients`) ask the host nothing and read their
            tensors from the model, the broadcast, `extras` or `scratch`: a CUDA graph of them can be replayed. What
            else they depend on is a plain value in `scratch`: one graph is kept for each.

    >>> Traits(needs_batch_norm=True).needs_memory
    False
    """

    needs_memory: bool = False
    needs_batch_norm: bool = False
    personal: bool | None = None
    replaces: Collection[str] = ()
    private: Collection[str] = ()
    capturable: bool = False


class Method:
    """The hooks of a method, in the order in which a round calls them.

    A method with options is a dataclass of them: `mu: Annotated[float, Range(0)] = 0.01`; `traits` declares what the
    engine must know of it beforehand; `kept` are the entries of `state_dict()` that never travel, if `prepare` says so.

    >>> class Damped(Method):
    ...     'Goes half of the way to the mean.'
    ...
    ...     def weights(self, server, updates, mean):
    ...         return {name: (server.weights[name] + new) / 2 for name, new in mean.items()}
    >>> Damped().overrides("weights"), Damped().overrides("loss")
    (True, False)

    With `@fedkeel.register("damped")` above the class, `fedkeel run --import FILE --method damped+greg` knows it.
    """

    name: str = ""
    paper: ClassVar[str] = ""
    traits: ClassVar[Traits] = Traits()
    kept: Collection[str] = ()

    def __post_init__(self) -> None:
        """Of a method that is a dataclass: its options are what they say they are."""
        check_fields(self, f"The '{{}}' of {self.name or type(self).__name__}")

    # -- before anything trains ------------------------------------------------------------------------------
    def prepare(self, model: Classifier) -> Callable[[], object] | None:
        """Surgery on the model, once, the same on server and client. Those that replace norms or the head go first, the
        others in the order written; what it returns is done when all have prepared, to see what they have left."""
        return None

    # -- on the server, before the broadcast -----------------------------------------------------------------
    def before_training(self, server: Server) -> None:
        """May ask the round's clients something before they train, and put what it learnt in `server.extras`.

        The server here is what is broadcast: other `server.weights` are what clients start from, and no more than that.
        """

    # -- on the client ---------------------------------------------------------------------------------------
    def start(self, client: LocalClient) -> None:
        """The global model is loaded, nothing is trained yet."""

    def inputs(self, client: LocalClient, x: Tensor) -> Tensor:
        """The batch, before the model sees it."""
        return x

    def forward(self, client: LocalClient, x: Tensor) -> Output:
        """The forward pass; at most one part of a composition may replace it."""
        output: Output = client.model(x)
        return output

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        """A term to add to the loss that the run trains on, the cross-entropy by default."""
        return 0.0

    def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
        """After backward, before the optimiser. `recompute()` does forward and backward at the present weights."""

    def finish(self, client: LocalClient) -> Tensors:
        """Local training is over: the extras to upload."""
        return {}

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        """What a client replies to `server.ask(clients, question, tensors)`."""
        raise MethodError(f"'{self.name}' was asked '{question}', which it does not know.")

    # -- on the server, each receives what the rules before it made ------------------------------------------
    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        """The extras of an update, or the answer to a question, that the server's rules can work with.

        An update or answer that is otherwise is dropped before any rule sees it. None accepts whatever is finite:
        the default of a method that sends something and does not say what.
        """
        return None if question or self.overrides("finish") else {}

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        """The new global weights."""
        return mean

    def statistics(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        """The new global statistics (and counters)."""
        return mean

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        """The method's own tensors of the next broadcast. `server.extras` holds the last ones."""
        return server.extras

    def before_evaluation(self, server: Server) -> None:
        """May change `server.weights` and `server.statistics` of a copy that is only tested.

        After the last round that copy is the result.
        """

    def overrides(self, hook: str) -> bool:
        """Whether this method does anything at that moment."""
        return getattr(type(self), hook) is not getattr(Method, hook)
