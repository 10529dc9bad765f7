"""Ray in one process, for tests: actors are objects, and what they do is done when somebody wants to know.

Who is ready first is drawn, so that a test sees many orders; actors and nodes die when a test says so. What lay on a
node is lost with it, and what an actor has put somewhere, with that actor. Calls have the names and the manners of
Ray's own.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from fedkeel.engine.executors.ray import crew, station


class RayError(Exception): ...


class RayActorError(RayError): ...


class RayTaskError(RayError): ...


class ObjectLostError(RayError): ...


class GetTimeoutError(RayError): ...


class LocalRayletDiedError(RayError): ...


Fate = Callable[[str, str], str]
"""Of a node and what is done there: "" for nothing, "actor" or "node" for what dies just before, or "raylet" for a
node that dies under an actor, which lives on until it asks for something that lies there."""


class Ref:
    def __init__(self, world: PretendRay, value: Any, node: str, owner: Actor | None = None) -> None:
        self.world, self.value, self.node, self.owner = world, value, node, owner


class Stream:
    """What a call yields, one after another."""

    def __init__(self, actor: Actor, items: Iterator[Any]) -> None:
        self.actor, self._items, self._broken = actor, items, False

    def __next__(self) -> Ref:
        if self._broken:
            raise StopIteration
        world = self.actor.world
        try:
            with world.on(self.actor, "work"):
                return Ref(world, next(self._items), self.actor.node)
        except RayError as error:
            self._broken = True
            return Ref(world, error, "")


class Method:
    def __init__(self, actor: Actor, name: str, streaming: bool = False) -> None:
        self._actor, self._name, self._streaming = actor, name, streaming

    def options(self, num_returns: str) -> Method:
        return Method(self._actor, self._name, num_returns == "streaming")

    def remote(self, *arguments: Any, **named: Any) -> Any:
        actor, world = self._actor, self._actor.world
        arguments = tuple(world.get(one) if isinstance(one, Ref) else one for one in arguments)
        if self._streaming:
            return Stream(actor, getattr(actor.made, self._name)(*arguments, **named))
        try:
            with world.on(actor, self._name):
                return Ref(world, getattr(actor.made, self._name)(*arguments, **named), actor.node)
        except RayError as error:
            return Ref(world, error, "")


class Actor:
    def __init__(self, world: PretendRay, kind: type, node: str) -> None:
        self.world, self.node, self.dead = world, node, False
        self.made = kind()

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


class PretendRay:
    def __init__(self, nodes: Sequence[str], fate: Fate, seed: int) -> None:
        self.cores = dict.fromkeys(nodes, 1)
        self.gone: set[str] = set()
        self.dying: set[str] = set()
        self.actors: list[Actor] = []
        self.store = 10**9
        self.hanging: list[Actor] = []
        self.silences = 0  # times that nobody had anything to say
        self.fate = fate
        self.cloudpickle = cloudpickle
        self.exceptions = SimpleNamespace(
            **{kind.__name__: kind for kind in RayError.__subclasses__()}, RayError=RayError
        )
        self._random, self._lock, self._where = random.Random(seed), threading.RLock(), threading.local()

    # -- what the executor calls -----------------------------------------------------------------------------
    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": name,
                "Alive": name not in self.gone,
                "NodeManagerHostname": name,
                "Resources": {"CPU": cores, "object_store_memory": self.store},
            }
            for name, cores in self.cores.items()
        ]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: self._here)

    @property
    def _here(self) -> str:
        return getattr(self._where, "node", next(iter(self.cores)))

    def put(self, value: Any) -> Ref:
        return Ref(self, value, self._here, getattr(self._where, "actor", None))

    def get(self, what: Any, timeout: float | None = None) -> Any:
        if isinstance(what, list):
            return [self.get(one) for one in what]
        if self._here in self.dying:
            raise BrokenPipeError("Broken pipe")
        if isinstance(what.value, RayError):
            raise what.value
        if what.node in self.gone or (what.owner is not None and what.owner.dead):
            raise ObjectLostError(what.node)
        return what.value

    def wait(self, streams: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        going = [stream for stream in streams if stream.actor not in self.hanging]
        if not going:
            self.silences += 1
            return [], streams
        chosen = self._random.choice(going)
        return [chosen], [one for one in streams if one is not chosen]

    def remote(self, kind: type) -> Any:
        def options(*, scheduling_strategy: Any, **_: Any) -> Any:
            node = scheduling_strategy if scheduling_strategy != "SPREAD" else self._random.choice(list(self.cores))

            def remote() -> Actor:
                if node in self.gone:
                    raise RayActorError(f"{node} is gone")
                self.actors.append(Actor(self, kind, node))
                return self.actors[-1]

            return SimpleNamespace(remote=remote)

        return SimpleNamespace(options=options)

    def kill(self, actor: Actor) -> None:
        actor.dead = True
        self.gone |= self.dying & {actor.node}

    # -- what a test does ------------------------------------------------------------------------------------
    def on(self, actor: Actor, what: str) -> Any:
        """Around something that an actor does; it may not live to see it."""
        world = self

        class Doing:
            def __enter__(self) -> None:
                end = world.fate(actor.node, what) if not actor.dead else ""
                if end == "node":
                    world.gone.add(actor.node)
                if end == "raylet":
                    world.dying.add(actor.node)
                elif end or actor.dead or actor.node in world.gone:
                    actor.dead = True
                    raise RayActorError(f"the actor on {actor.node} died")
                world._lock.acquire()
                self._before, world._where.node, world._where.actor = world._here, actor.node, actor

            def __exit__(self, *_: Any) -> None:
                world._where.node, world._where.actor = self._before, None
                world._lock.release()

        return Doing()


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    nodes: Sequence[str] = ("alpha", "beta"),
    fate: Fate = lambda _node, _what: "",
    seed: int = 0,
) -> PretendRay:
    """From now on `import ray` is this."""
    world = PretendRay(nodes, fate, seed)
    strategies = ModuleType("ray.util.scheduling_strategies")
    strategies.NodeAffinitySchedulingStrategy = lambda node, **_: node  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", world)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    monkeypatch.setattr(station, "own_process", lambda _: None)
    return world


def wait_for_all(monkeypatch: pytest.MonkeyPatch) -> list[crew.Crew]:
    """From now on all actors that can be are there when a run begins, also of the real Ray; the crews of runs."""
    crews: list[crew.Crew] = []
    plain = crew.Crew.wait

    def wait(self: crew.Crew) -> None:
        crews.append(self)
        plain(self)
        while self._starting:
            self.attend()

    monkeypatch.setattr(crew.Crew, "wait", wait)
    return crews
