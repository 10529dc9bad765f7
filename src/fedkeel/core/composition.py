"""Several methods as one: how their hooks run together, and which of them cannot."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

from torch import Tensor, nn

from fedkeel.core.checking import check_expected, check_finite
from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import BadMessage, Update, scoped_updates
from fedkeel.core.method import Method
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors, batch_norms, prefixed, select
from fedkeel.core.types import Classifier, Output
from fedkeel.errors import MethodError, nearest

RESERVED = ("local", "question")  # what the engine itself calls its share of a client's memory and of the extras
STEP = ("inputs", "forward", "loss", "gradients")  # the hooks of a local step
# What only one of two parts can make, if the later one starts from anew.
MADE = {
    "shares": "the clients' shares",
    "weights": "the global weights",
    "statistics": "the global statistics",
    "gradients": "the gradients",
    "forward": "the forward pass",
}
# The hooks that are about what travels.
SHARING = ("start", "loss", "weights", "statistics", "extras", "finish", "before_training", "before_evaluation")


class Composition(Method):
    """Several methods as one: hooks run in the order written, each part with its own memory and extras."""

    def __init__(self, parts: Sequence[Method]) -> None:
        self.parts = list(parts)
        for part in self.parts:
            part.name = part.name or type(part).__name__.lower()  # its memory and extras go by its name
        self.name = "+".join(part.name for part in self.parts)
        self._keepers: set[str] = set()  # parts that keep a learnable tensor on the client: seen when they are prepared
        self._acting = {hook: [part for part in self.parts if part.overrides(hook)] for hook in STEP}
        self._refuse_contradictions()

    @staticmethod
    def of(method: Method) -> Composition:
        return method if isinstance(method, Composition) else Composition([method])

    # -- what the parts need ---------------------------------------------------------------------------------
    @property
    def stateful_parts(self) -> list[str]:
        return [part.name for part in self.parts if part.traits.needs_memory or part.name in self._keepers]

    @property
    def is_personal(self) -> bool:
        """Whether each client is tested with what it keeps. Known once the network is prepared."""
        return bool(self._personal)

    @property
    def may_be_personal(self) -> bool:
        """As far as it is known before the network is prepared."""
        says = [(part.traits.personal, part.kept or part.overrides("prepare")) for part in self.parts]
        return any(changes if personal is None else personal for personal, changes in says)

    @property
    def _personal(self) -> list[Method]:
        """Parts that say so, and those that say nothing and keep a learnable tensor."""
        declared = ((part, part.traits.personal) for part in self.parts)
        return [part for part, says in declared if (part.name in self._keepers if says is None else says)]

    @property
    def is_pooled(self) -> bool:
        return any("clients" in part.traits.replaces for part in self.parts)

    def tested(self, memory: Tensors) -> Tensors:
        """What a client with this memory is tested with, in the place of the global model's entries: those that it
        keeps, and what a part has put into its memory as `tested/...`."""
        if not self.is_personal:
            return {}
        own = [select(memory, f"{part.name}/tested") for part in self.parts]
        return {name: tensor for entries in (select(memory, "local"), *own) for name, tensor in entries.items()}

    def is_stranger(self, local: Tensors) -> bool:
        """Whether a client that keeps these layers has none, and is tested by batch for it; see `methods.fedbn`."""
        return not local and any(getattr(part, "unseen", None) == "batch" for part in self._personal)

    @property
    def uncapturable(self) -> list[str]:
        """Parts whose steps cannot be captured in a CUDA graph."""
        return [part.name for part in self.parts if not part.traits.capturable and any(map(part.overrides, STEP))]

    # -- what cannot be --------------------------------------------------------------------------------------
    def _refuse_contradictions(self) -> None:
        names = [part.name for part in self.parts]
        for name in names:
            if name in RESERVED or "/" in name:
                raise MethodError(f"A method cannot be called '{name}', which the engine uses: give it another name.")
            if names.count(name) > 1:
                raise MethodError(f"'{self.name}' names '{name}' twice: keep one.")
        for what, made in MADE.items():
            overriding = [] if what == "shares" else [part for part in self.parts if part.overrides(what)]
            acting = [part for part in self.parts if part in overriding or what in part.traits.replaces]
            for earlier, later in itertools.pairwise(acting):
                if what == "forward" or what in later.traits.replaces:
                    # Of two that act on batch norm, the other order fails too: one takes it from the other.
                    both = earlier.traits.needs_batch_norm and later.traits.needs_batch_norm
                    keep_one = both or what == "forward" or what in earlier.traits.replaces
                    advice = "keep one of them." if keep_one else f"write '{later.name}' before '{earlier.name}'."
                    raise MethodError(
                        f"'{earlier.name}' and '{later.name}' both make {made}, and '{later.name}' would discard what "
                        f"'{earlier.name}' made: {advice}"
                    )
        self._refuse_pooled()

    def _refuse_pooled(self) -> None:
        if self.is_pooled and self._personal:
            raise MethodError(
                "'central' pools the data of all clients, so there is nothing that "
                f"'{self._personal[0].name}' could keep on each: use one of them alone."
            )

    def _refuse_without_batch_norm(self, part: Method, model: nn.Module) -> None:
        if part.traits.needs_batch_norm and not batch_norms(model):
            others = [other.name for other in self.parts if other is not part and other.overrides("prepare")]
            why = f"'{'+'.join(others)}' took it out" if others else "the model has none"
            raise MethodError(
                f"'{part.name}' acts on batch norm, and there is none to act on ({why}): "
                f"choose a model with batch norm, or leave '{part.name}' out."
            )

    def _see_what_stays(self, model: nn.Module) -> None:
        entries, learnable = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
        for part in self.parts:
            for name in (name for name in part.kept if name not in entries):
                near = nearest(name, entries, "give names as in its state_dict().")
                raise MethodError(f"'{part.name}' keeps '{name}', which the model does not have: {near}")
            others = [other for other in self.parts if other is not part and any(map(other.overrides, SHARING))]
            if others and entries.keys() <= {*part.kept}:
                raise MethodError(
                    f"Nothing travels in '{part.name}', so '{others[0].name}' has nothing to act on: use one of them "
                    "alone."
                )
        self._keepers = {part.name for part in self.parts if learnable.keys() & {*part.kept}}
        self._refuse_pooled()

    # -- hooks -----------------------------------------------------------------------------------------------
    def overrides(self, hook: str) -> bool:
        return any(part.overrides(hook) for part in self.parts)

    def prepare(self, model: Classifier) -> None:
        prepared: list[tuple[Method, Callable[[], object] | None]] = []
        for part in sorted(self.parts, key=lambda part: not {"norms", "head"} & {*part.traits.replaces}):
            self._refuse_without_batch_norm(part, model)
            prepared.append((part, part.prepare(model)))
        for part, then in prepared:
            if then or part.traits.personal or not part.overrides("prepare"):  # acts on what all have left
                self._refuse_without_batch_norm(part, model)
            if then:
                then()
        self._see_what_stays(model)

    @property
    def kept(self) -> Collection[str]:  # type: ignore[override]
        return {name for part in self.parts for name in part.kept}

    def start(self, client: LocalClient) -> None:
        client.views = {part.name: client.scoped(part.name) for part in self.parts}
        for part in self.parts:
            part.start(client.views[part.name])

    def inputs(self, client: LocalClient, x: Tensor) -> Tensor:
        for part in self._acting["inputs"]:
            x = part.inputs(client.views[part.name], x)
        return x

    def forward(self, client: LocalClient, x: Tensor) -> Output:
        for part in self._acting["forward"]:
            return part.forward(client.views[part.name], x)
        return super().forward(client, x)

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        total: Tensor | float = 0.0
        for part in self._acting["loss"]:
            term = part.loss(client.views[part.name], batch, output)
            total = total + term if isinstance(total, Tensor) or total else term
        return total

    def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
        for part in self._acting["gradients"]:
            part.gradients(client.views[part.name], recompute)

    def finish(self, client: LocalClient) -> Tensors:
        extras: Tensors = {}
        for part in self.parts:
            view = client.views[part.name]
            extras |= prefixed(part.finish(view), part.name)
            _keep(client, part, view)
        return extras

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        part, rest = self._asked(question)
        if part is None:
            raise MethodError(f"'{self.name}' was asked '{question}', which none of its parts knows.")
        view = client.scoped(part.name)
        reply = part.answer(view, rest, tensors)
        _keep(client, part, view)
        return reply

    def _asked(self, question: str) -> tuple[Method | None, str]:
        name, _, rest = question.partition("/")
        return next((part for part in self.parts if part.name == name), None), rest

    def check_extras(self, server: Server, extras: Tensors) -> None:
        """Raise `BadMessage` unless these extras of an update are what the parts expect."""
        names = tuple(f"{part.name}/" for part in self.parts)
        if strange := [name for name in extras if not name.startswith(names)]:
            raise BadMessage(f"its extras do not match: missing [], not expected {strange[:3]}")
        for part in self.parts:
            if (expected := part.expects(server.scoped(part.name))) is not None:
                check_expected(select(extras, part.name), expected)

    def check_answer(self, server: Server, question: str, tensors: Tensors) -> None:
        """Raise `BadMessage` unless this is an answer that the part that asked can use."""
        check_finite(tensors)
        part, rest = self._asked(question)
        if part is not None and (expected := part.expects(server.scoped(part.name), rest)) is not None:
            check_expected(tensors, expected)

    def before_training(self, server: Server) -> None:
        self._on_server(server, "before_training")

    def before_evaluation(self, server: Server) -> None:
        self._on_server(server, "before_evaluation")

    def _on_server(self, server: Server, hook: str) -> None:
        for part in self.parts:
            view = server.scoped(part.name)
            getattr(part, hook)(view)
            server.weights, server.statistics, server.shares = view.weights, view.statistics, view.shares
            server.extras = _without(server.extras, part.name) | prefixed(view.extras, part.name)
            _keep(server, part, view)

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        return self._in_turn("weights", server, updates, mean)

    def statistics(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        return self._in_turn("statistics", server, updates, mean)

    def _in_turn(self, rule: str, server: Server, updates: Sequence[Update], made: Tensors) -> Tensors:
        """Each part makes its own of what the parts before it made."""
        for part in self.parts:
            if part.overrides(rule):
                view = server.scoped(part.name)
                made = getattr(part, rule)(view, scoped_updates(updates, part.name), made)
                _keep(server, part, view)
        return made

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        result: Tensors = {}
        for part in self.parts:
            view = server.scoped(part.name)
            seen = scoped_updates(updates, part.name) if part.overrides("extras") else ()
            result |= prefixed(part.extras(view, seen), part.name)
            _keep(server, part, view)
        return result


def _keep(party: LocalClient | Server, part: Method, view: LocalClient | Server) -> None:
    """What the part has put into its own memory."""
    party.memory = _without(party.memory, part.name) | prefixed(view.memory, part.name)


def _without(tensors: Tensors, part: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{part}/")}
