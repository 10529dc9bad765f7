"""What clients remember between rounds, however many there are: in memory, and in a file per client and round.

`memory/<client>/<round>.safetensors` is what the client remembered after that round; the newest that a checkpoint knows
counts, so the folder is the index. Files are written when a checkpoint is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedkeel.core.messages import BadMessage, pack, unpack
from fedkeel.core.naming import file_name
from fedkeel.core.state import Tensors, nbytes
from fedkeel.engine.tasks import Remembered, fetched, fingerprint
from fedkeel.errors import StoreError
from fedkeel.files import explained, make_folder, sync
from fedkeel.stopping import WRITING, reached

HELD = 2**30  # bytes of what is in files that may be held in memory too


class Damaged(Exception):
    """What a checkpoint speaks of is not there as it was; the text says what."""


class ClientMemory:
    """What each client remembers between rounds. A federation of stateless clients remembers nothing.

    Of what is in the files, no more than `HELD` bytes are held in memory too: what was used last.
    """

    def __init__(self, folder: Path, *, stateless: bool = False) -> None:
        self.folder, self._stateless = folder, stateless
        self._held: dict[str, Remembered] = {}  # least recently used first
        self._bytes = 0  # of those
        self._changed: dict[str, None] = {}  # of those, the ones that are not in the files like this
        self._written: dict[str, None] = {}  # clients with a new file in the last checkpoint
        self._rounds: dict[str, list[int]] = {}  # of each client's files, by the name of its folder
        self._since = -1  # the round of the last checkpoint

    def look(self, client: str) -> Remembered:
        if client not in self._held:
            return self._read(client, self._rounds.get(file_name(client), ()))
        self._held[client] = self._held.pop(client)
        return self._held[client]

    def keep(self, client: str, memory: Remembered) -> None:
        """From now on the client remembers this."""
        if self._stateless or (not callable(memory) and not memory and client not in self):
            return
        self._bytes += _size(memory) - _size(self._held.pop(client, {}))
        self._held[client] = memory
        self._changed[client] = None

    def __contains__(self, client: str) -> bool:
        return client in self._held or file_name(client) in self._rounds

    def items(self) -> Iterator[tuple[str, Tensors]]:
        """The memories of those who have one, one at a time: of very many clients few may."""
        held = {file_name(client): client for client in self._held}
        for folder in sorted(held.keys() | self._rounds.keys()):
            if folder in held:
                yield held[folder], fetched(self._held[held[folder]])
            else:
                yield _content(self.folder / folder / _named(max(self._rounds[folder])))

    def _path(self, client: str, round: int) -> Path:
        return self.folder / file_name(client) / _named(round)

    def _write(self, client: str, round: int) -> None:
        memory, path = fetched(self._held[client]), self._path(client, round)
        with explained(path):
            make_folder(path.parent)
            path.write_bytes(pack({"client": client, "digest": fingerprint(memory).hex()}, memory=memory))
            reached(WRITING, path)
        rounds = self._rounds.setdefault(path.parent.name, [])
        rounds += [round] if round not in rounds else []

    def _read(self, client: str, rounds: Iterable[int]) -> Tensors:
        newest = max(rounds, default=None)
        return {} if newest is None else _content(self._path(client, newest), client)[1]

    # -- checkpoints -----------------------------------------------------------------------------------------
    def commit(self, round: int) -> dict[str, Any]:
        """Bring all changes to disk. Returns what a checkpoint must keep to know whether this state is still there."""
        for client in self._changed:
            self._write(client, round)
        with explained(self.folder):
            for client in self._changed:
                sync(self._path(client, round))
        self._written, self._changed = self._changed, {}
        while self._bytes > HELD:
            oldest = next(iter(self._held))
            self._bytes -= _size(self._held.pop(oldest))
        since, self._since = self._since, round
        return {"clients": len(self._rounds), "since": since, "written": len(self._written)}

    def release(self, oldest: int) -> None:
        """No checkpoint before round `oldest` is kept any more: remove what only those needed."""
        for client in self._written:
            rounds = self._rounds[file_name(client)]
            needed = max((round for round in rounds if round <= oldest), default=-1)
            for round in [round for round in rounds if round < needed]:
                rounds.remove(round)
                with suppress(OSError):  # it takes room, and no more
                    self._path(client, round).unlink(missing_ok=True)
        self._written = {}

    def check(self, reference: Mapping[str, Any], round: int) -> None:
        """Raise `Damaged` unless the files that a checkpoint of this round speaks of are there."""
        newest = {
            folder: max(before)
            for folder, rounds in _rounds_in(self.folder).items()
            if (before := [r for r in rounds if r <= round])
        }
        written = sum(last > reference["since"] for last in newest.values())  # by that checkpoint itself
        for there, said in ((len(newest), reference["clients"]), (written, reference["written"])):
            if there < said:
                raise Damaged(f"'{self.folder}' has the memories of {there} clients, not of {said}")

    def restore(self, round: int = -1) -> None:
        """Be as the checkpoint of this round was; whatever came after it is removed."""
        self._held, self._changed, self._written, self._bytes, self._since = {}, {}, {}, 0, round
        self._rounds = {}
        with explained(self.folder):
            for folder, rounds in _rounds_in(self.folder).items():
                for later in (r for r in rounds if r > round):
                    (self.folder / folder / _named(later)).unlink()
                if kept := [r for r in rounds if r <= round]:
                    self._rounds[folder] = kept

    def as_of(self, round: int) -> Callable[[str], Tensors]:
        """How to look up what each client remembered at a checkpoint; no file changes."""
        found = _rounds_in(self.folder)
        return lambda client: self._read(client, [r for r in found.get(file_name(client), ()) if r <= round])


def _named(round: int) -> str:
    return f"{round:06d}.safetensors"


def _size(memory: Remembered) -> int:
    return 0 if callable(memory) else nbytes(memory)


def _rounds_in(folder: Path) -> dict[str, list[int]]:
    """The rounds of each client's files, by the name of its folder."""
    inside = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ()
    return {path.name: sorted(int(file.stem) for file in path.glob("*.safetensors")) for path in inside}


def _content(path: Path, client: str | None = None) -> tuple[str, Tensors]:
    """Whose memory it is, and what they remember."""
    try:
        header, groups = unpack(path.read_bytes())
        memory, whose = groups.get("memory", {}), str(header.get("client"))
        problem = "" if header.get("digest") == fingerprint(memory).hex() else "its checksum does not match"
        if path.parent.name != file_name(whose) or client not in (None, whose):
            problem = "it is of another client"
    except OSError as error:
        problem = str(error.strerror)
    except BadMessage as bad:
        problem = str(bad)
    if problem:
        raise StoreError(
            f"What a client remembers cannot be read from '{path}' ({problem}): put the file back as it was, or start "
            "the run anew in another directory."
        )
    return whose, memory
