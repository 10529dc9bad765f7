"""What clients remember, where they were last trained; the driver knows where that is.

An object in the store of a node is fetched for a checkpoint, and read by whoever trains the client next: on the same
node without moving it, on another one once. When a node dies, the last checkpoint has what its clients remembered then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedkeel.core.state import Tensors
from fedkeel.engine.executors.ray.parcels import packed, unpacked
from fedkeel.engine.memory import ClientMemory, LostMemory


@dataclass(frozen=True)
class Kept:
    """A client's memory on a node."""

    object: Any  # Ray's reference to it
    node: str
    nbytes: int


class RemoteMemory(ClientMemory):
    """What each client remembers between rounds, wherever that lies."""

    _held: dict[str, Any]

    def of(self, client: str) -> Tensors:
        return self.look(client)

    def present(self, client: str) -> Any:
        return self._held[client] if client in self._held else super().look(client)

    def look(self, client: str) -> Tensors:
        import ray

        kept = self._held.get(client)
        if not isinstance(kept, Kept):
            return super().look(client)
        try:
            return unpacked(ray.get(kept.object)).get("memory", {})
        except ray.exceptions.RayError:
            return self.recovered(client, kept)

    def keep(self, client: str, tensors: Mapping[str, torch.Tensor] | Kept) -> None:
        if self._stateless:
            return
        self._held.pop(client, None)
        self._changed.pop(client, None)
        if not tensors:
            self._files.forget(client)
            return
        self._held[client] = tensors
        self._changed[client] = None

    def _write(self, client: str) -> None:
        self._files.put(client, self.look(client))
        del self._changed[client]

    def node(self, client: str) -> str:
        """Where the client's memory lies; nothing if that is all the same."""
        kept = self._held.get(client)
        return kept.node if isinstance(kept, Kept) else ""

    def recovered(self, client: str, kept: Any) -> Tensors:
        """What may be lost with its node, from the last checkpoint; where that is older, the run cannot go on."""
        if not isinstance(kept, Kept):
            return kept  # type: ignore[no-any-return]
        if self._held.get(client) is not kept or client in self._changed:
            raise LostMemory(
                f"What '{client}' remembered was lost with its node, and is newer than the last checkpoint."
            )
        del self._held[client]
        return super().look(client)


def given(kept: Any) -> Any:
    """What an actor is sent: a reference, or None for a client that remembers nothing."""
    import ray

    if isinstance(kept, Kept):
        return kept.object
    return ray.put(packed({"memory": kept})) if kept else None
