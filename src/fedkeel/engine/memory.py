"""What clients remember between rounds, however many there are."""

from collections.abc import Iterator
from typing import Any

import torch

from fedkeel.core.state import Tensors, nbytes, to_device
from fedkeel.engine.memory_files import MemoryFiles
from fedkeel.errors import TrainingError


class LostMemory(TrainingError):
    """What a client remembered is gone: the run goes on from its last checkpoint."""


class ClientMemory:
    """What each client remembers between rounds. A federation of stateless clients remembers nothing.

    Beyond `limit` bytes, what has not been used for longest moves to files, and is read from there when it is needed.
    Only `keep` moves anything: what `of` gave stays valid on a GPU while other clients are at work there.
    """

    def __init__(
        self,
        stateless: bool = False,
        *,
        limit: int | None = None,
        files: MemoryFiles | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._stateless = stateless
        self._limit = limit
        self._files = files or MemoryFiles()
        self._device = torch.device(device)
        self._held: dict[str, Tensors] = {}  # least recently used first
        self._changed: dict[str, None] = {}  # of those held, the ones that are not in the files like this
        self._bytes = 0

    def of(self, client: str) -> Tensors:
        if client in self._held:
            self._held[client] = self._held.pop(client)
        return self.look(client)

    def present(self, client: str) -> Any:
        """What `keep` takes to put a client back to what it remembers now."""
        return self.of(client)

    def look(self, client: str) -> Tensors:
        """What a client remembers, without that it counts as used."""
        if client in self._held:
            return self._held[client]
        return to_device(self._files.get(client), self._device) if client in self._files else {}

    def keep(self, client: str, tensors: Tensors) -> None:
        if self._stateless:
            return
        self._bytes -= nbytes(self._held.pop(client, {}))
        self._changed.pop(client, None)
        if not tensors:
            self._files.forget(client)
            return
        self._held[client] = tensors
        self._changed[client] = None
        self._bytes += nbytes(tensors)
        if self._limit is None or self._bytes <= self._limit:
            return
        self._wait()
        while self._bytes > self._limit:
            oldest = next(iter(self._held))
            if oldest in self._changed:
                self._write(oldest)
            self._bytes -= nbytes(self._held.pop(oldest))

    def write_files(self) -> None:
        """Write what changed since it was last written, e.g. for a checkpoint."""
        self._wait()
        for client in list(self._changed):
            self._write(client)

    def _write(self, client: str) -> None:
        self._files.put(client, self._held[client])
        del self._changed[client]

    def _wait(self) -> None:
        """Clients may have written these tensors, or still be reading them, on other streams than the present one."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def __contains__(self, client: object) -> bool:
        return client in self._held or client in self._files

    def __iter__(self) -> Iterator[str]:
        """The names of those who remember something."""
        yield from [*self._held, *(client for client in self._files if client not in self._held)]

    def items(self) -> Iterator[tuple[str, Tensors]]:
        """Each client's memory, one at a time; none of them counts as used."""
        return ((client, self.look(client)) for client in self)
