"""Several methods as one: how their hooks run together, and which of them cannot."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from fedkeel.core.checking import check_expected, check_finite
from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import BadMessage, Update, scoped_updates
from fedkeel.core.method import Method
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors, batch_norms, prefixed, select
from fedkeel.core.types import Classifier, Output
from fedkeel.errors import MethodError, nearest

T = TypeVar("T")
RESERVED = ("local", "question")  # what the engine itself calls its share of a client's memory and of the extras


class Composition(Method):
    """Several methods as one: hooks run in the order written, each part with its own memory and extras."""

    def __init__(self, parts: Sequence[Method]) -> None:
        self.parts = list(parts)
        for part in self.parts:
            part.name = part.name or type(part).__name__.lower()  # its memory and extras go by its name
        self.name = "+".join(part.name for part in self.parts)
        self._keepers: set[str] = set()  # parts that keep a learnable tensor on the client: seen when they are prepared
        self._refuse_contradictions()
        self._acting = {
            hook: [part for part in self.parts if part.overrides(hook)]
            for hook in ("inputs", "forward", "loss", "gradients")
        }

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

    def is_stranger(self, local: Tensors) -> bool:
        """Whether a client that keeps these layers has none, and is tested by batch for it; see `methods.fedbn`."""
        rules = [getattr(part, "unseen", None) for part in self._personal]
        return "batch" in rules and not local

    @property
    def uncapturable(self) -> list[str]:
        """Parts whose steps cannot be captured in a CUDA graph."""
        acting = {part.name: part for parts in self._acting.values() for part in parts}
        return [name for name, part in acting.items() if not part.traits.capturable]

    def _refuse_contradictions(self) -> None:
        names = [part.name for part in self.parts]
        for name in names:
            if name in RESERVED or "/" in name:
                raise MethodError(f"A method cannot be called '{name}', which the engine uses: give it another name.")
            if names.count(name) > 1:
                raise MethodError(f"'{self.name}' names '{name}' twice: keep one.")
        for rule in ("shares", "weights", "statistics", "gradients", "forward"):
            overriding = [] if rule == "shares" else [part for part in self.parts if part.overrides(rule)]
            acting = [part for part in self.parts if part in overriding or rule in part.traits.replaces]
            for earlier, later in itertools.pairwise(acting):
                if rule == "forward":
                    raise MethodError(
                        f"'{earlier.name}' and '{later.name}' both replace the forward pass and cannot be combined: "
                        "keep one of them."
                    )
                if rule in later.traits.replaces:
                    # Of two that act on batch norm, the other order fails too: one takes it from the other.
                    both = earlier.traits.needs_batch_norm and later.traits.needs_batch_norm
                    keep_one = both or rule in earlier.traits.replaces
                    advice = "keep one of them." if keep_one else f"write '{later.name}' before '{earlier.name}'."
                    others = {"gradients": "change the gradients", "shares": "make the clients' shares"}
                    made = others.get(rule, f"make the global {rule}")
                    raise MethodError(
                        f"'{earlier.name}' and '{later.name}' both {made}, and '{later.name}' would "
                        f"discard what '{earlier.name}' made: {advice}"
                    )
        self._refuse_pooled()

    def _refuse_pooled(self) -> None:
        if self.is_pooled and self._personal:
            raise MethodError(
                "'central' pools the data of all clients, so there is nothing that "
                f"'{self._personal[0].name}' could keep on each: use one of them alone."
            )

    def _refuse_nothing_shared(self, entries: Collection[str]) -> None:
        alone = next((part for part in self.parts if {*entries} <= {*part.kept}), None)
        hooks = ("start", "loss", "weights", "statistics", "extras", "finish", "before_training", "before_evaluation")
        for part in self.parts:
            if alone is not None and part is not alone and any(part.overrides(hook) for hook in hooks):
                raise MethodError(
                    f"Nothing travels in '{alone.name}', so '{part.name}' has nothing to act on: use one of them alone."
                )

    # -- hooks -----------------------------------------------------------------------------------------------
    def prepare(self, model: Classifier) -> None:
        def keeps_layers(part: Method) -> bool:
            return not {"norms", "head"} & {*part.traits.replaces}

        afterwards: list[tuple[Method, Callable[[], object]]] = []
        for part in sorted(self.parts, key=keeps_layers):
            self._refuse_without_batch_norm(part, model)
            if then := part.prepare(model):
                afterwards.append((part, then))
        for part, then in afterwards:
            self._refuse_without_batch_norm(part, model)
            then()
        for part in self.parts:
            if not part.overrides("prepare") or part.traits.personal:
                self._refuse_without_batch_norm(part, model)
        self._see_what_stays(model)

    def _see_what_stays(self, model: nn.Module) -> None:
        entries, learnable = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
        for part in self.parts:
            for name in (name for name in part.kept if name not in entries):
                near = nearest(name, entries, "give names as in its state_dict().")
                raise MethodError(f"'{part.name}' keeps '{name}', which the model does not have: {near}")
        self._keepers = {part.name for part in self.parts if learnable.keys() & {*part.kept}}
        self._refuse_pooled()
        self._refuse_nothing_shared(entries)

    def _refuse_without_batch_norm(self, part: Method, model: nn.Module) -> None:
        if part.traits.needs_batch_norm and not batch_norms(model):
            others = [other.name for other in self.parts if other is not part and other.overrides("prepare")]
            why = f"'{'+'.join(others)}' took it out" if others else "the model has none"
            raise MethodError(
                f"'{part.name}' acts on batch norm, and there is none to act on ({why}): "
                f"choose a model with batch norm, or leave '{part.name}' out."
            )

    @property
    def kept(self) -> Collection[str]:  # type: ignore[override]
        return {name for part in self.parts for name in part.kept}

    def before_training(self, server: Server) -> None:
        self._on_server(server, lambda part, view: part.before_training(view))

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
            self._keep(client, part, view)
        return extras

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        part, rest = self._asked(question)
        if part is None:
            raise MethodError(f"'{self.name}' was asked '{question}', which none of its parts knows.")
        view = client.scoped(part.name)
        reply = part.answer(view, rest, tensors)
        self._keep(client, part, view)
        return reply

    def check_extras(self, server: Server, extras: Tensors) -> None:
        """Raise `BadMessage` unless these extras of an update are what the parts expect."""
        for name in extras:
            if name.partition("/")[0] not in {part.name for part in self.parts} or "/" not in name:
                raise BadMessage(f"its extras do not match: missing [], not expected {[name]}")
        # A part that sends nothing expects nothing.
        for part in (part for part in self.parts if extras or part.overrides("finish") or part.overrides("expects")):
            if (expected := part.expects(server.scoped(part.name))) is not None:
                check_expected(select(extras, part.name), expected)

    def check_answer(self, server: Server, question: str, tensors: Tensors) -> None:
        """Raise `BadMessage` unless this is an answer that the part that asked can use."""
        check_finite(tensors)
        part, rest = self._asked(question)
        if part is not None and (expected := part.expects(server.scoped(part.name), rest)) is not None:
            check_expected(tensors, expected)

    def _asked(self, question: str) -> tuple[Method | None, str]:
        name, _, rest = question.partition("/")
        return next((part for part in self.parts if part.name == name), None), rest

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        return self._in_turn("weights", server, updates, mean)

    def statistics(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        return self._in_turn("statistics", server, updates, mean)

    def _in_turn(self, rule: str, server: Server, updates: Sequence[Update], made: T) -> T:
        """Each part makes its own of what the parts before it made."""
        for part in self.parts:
            if part.overrides(rule):
                view = server.scoped(part.name)
                made = getattr(part, rule)(view, scoped_updates(updates, part.name), made)
                self._keep(server, part, view)
        return made

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        result: Tensors = {}
        for part in self.parts:
            view = server.scoped(part.name)
            seen = scoped_updates(updates, part.name) if part.overrides("extras") else ()
            result |= prefixed(part.extras(view, seen), part.name)
            self._keep(server, part, view)
        return result

    def before_evaluation(self, server: Server) -> None:
        self._on_server(server, lambda part, view: part.before_evaluation(view))

    def overrides(self, hook: str) -> bool:
        return any(part.overrides(hook) for part in self.parts)

    # -- each part its own memory ----------------------------------------------------------------------------
    def _on_server(self, server: Server, act: Callable[[Method, Server], None]) -> None:
        for part in self.parts:
            view = server.scoped(part.name)
            act(part, view)
            server.weights, server.statistics, server.shares = view.weights, view.statistics, view.shares
            server.extras = _without(server.extras, part.name) | prefixed(view.extras, part.name)
            self._keep(server, part, view)

    @staticmethod
    def _keep(party: LocalClient | Server, part: Method, view: Any) -> None:
        party.memory = _without(party.memory, part.name) | prefixed(view.memory, part.name)


def _without(tensors: Tensors, part: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{part}/")}
