"""What clients remember between rounds, however many there are: in a file per client and round.

`memory/<client>/<round>.safetensors` is what the client remembered after that round; the newest that a checkpoint knows
counts, so the folder is the index. Files are written when a checkpoint is; until then what is new is held in memory.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedkeel.core.messages import BadMessage, pack, unpack
from fedkeel.core.naming import file_name
from fedkeel.core.state import Tensors
from fedkeel.engine.tasks import Remembered, fetched, fingerprint
from fedkeel.errors import StoreError
from fedkeel.files import explained, make_folder, sync
from fedkeel.stopping import WRITING, reached


class Damaged(Exception):
    """What a checkpoint speaks of is not there as it was; the text says why."""


class ClientMemory:
    """What each client remembers between rounds. A federation of stateless clients remembers nothing."""

    def __init__(self, folder: Path, *, stateless: bool = False) -> None:
        self.folder, self._stateless = folder, stateless
        self._held: dict[str, Remembered] = {}  # what is not in the files, and handles, which take no room
        self._changed: dict[str, None] = {}  # clients whose newest is not in the files
        self._written: list[Path] = []  # folders with a new file in the last checkpoint
        self._folders: set[str] = set()  # of the clients that have files
        self._since = -1  # the round of the last checkpoint

    def look(self, client: str) -> Remembered:
        return self._held[client] if client in self._held else self._read(client)

    def keep(self, client: str, memory: Remembered) -> None:
        """From now on the client remembers this."""
        if self._stateless or (not callable(memory) and not memory and client not in self):
            return
        self._held[client], self._changed[client] = memory, None

    def __contains__(self, client: str) -> bool:
        return client in self._held or file_name(client) in self._folders

    def items(self) -> Iterator[tuple[str, Tensors]]:
        """The memories of those who have one, one at a time: of very many clients few may."""
        held = {file_name(client): client for client in self._held}
        for folder in sorted(held.keys() | self._folders):
            if folder in held:
                yield held[folder], fetched(self._held[held[folder]])
            else:
                yield _content(self.folder / folder / _named(max(_rounds_of(self.folder / folder))))

    def as_of(self, round: int) -> Callable[[str], Tensors]:
        """How to look up what each client remembered at a checkpoint."""
        return lambda client: self._read(client, round)

    def _read(self, client: str, most: float = float("inf")) -> Tensors:
        """What it remembered after the last round up to `most`."""
        folder = self.folder / file_name(client)
        newest = max((round for round in _rounds_of(folder) if round <= most), default=-1)
        return {} if newest < 0 else _content(folder / _named(newest), client)[1]

    # -- checkpoints -----------------------------------------------------------------------------------------
    def commit(self, round: int) -> dict[str, Any]:
        """Bring all changes to disk. Returns what a checkpoint must keep to know whether this state is still there."""
        paths = []
        for client in self._changed:
            memory = fetched(self._held[client])
            paths.append(path := self.folder / file_name(client) / _named(round))
            with explained(path):
                make_folder(path.parent)
                path.write_bytes(pack({"client": client, "digest": fingerprint(memory).hex()}, memory=memory))
                reached(WRITING, path)
            self._folders.add(path.parent.name)
        with explained(self.folder):
            for path in paths:
                sync(path)
        self._written, self._changed = [path.parent for path in paths], {}
        self._held = {client: memory for client, memory in self._held.items() if callable(memory)}
        since, self._since = self._since, round
        return {"clients": len(self._folders), "since": since, "written": len(self._written)}

    def release(self, oldest: int) -> None:
        """No checkpoint before round `oldest` is kept any more: remove what only those needed."""
        for folder in self._written:
            rounds = _rounds_of(folder)
            needed = max((round for round in rounds if round <= oldest), default=-1)
            for round in (round for round in rounds if round < needed):
                with suppress(OSError):  # it takes room, and no more
                    (folder / _named(round)).unlink()
        self._written = []

    def check(self, reference: Mapping[str, Any], round: int) -> None:
        """Raise `Damaged` unless the files that a checkpoint of this round speaks of are there."""
        before = [[r for r in _rounds_of(folder) if r <= round] for folder in self._listed()]
        newest = [max(rounds) for rounds in before if rounds]
        written = sum(last > reference["since"] for last in newest)  # by that checkpoint itself
        for there, said in ((len(newest), reference["clients"]), (written, reference["written"])):
            if there < said:
                raise Damaged(f"'{self.folder}' has the memories of {there} clients, not of {said}")

    def restore(self, round: int = -1) -> None:
        """Be as the checkpoint of this round was; whatever came after it is removed."""
        self._held, self._changed, self._written, self._folders, self._since = {}, {}, [], set(), round
        with explained(self.folder):
            for folder in self._listed():
                rounds = _rounds_of(folder)
                for later in (r for r in rounds if r > round):
                    (folder / _named(later)).unlink()
                if min(rounds, default=round + 1) <= round:
                    self._folders.add(folder.name)

    def _listed(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.is_dir()) if self.folder.is_dir() else []


def _named(round: int) -> str:
    return f"{round:06d}.safetensors"


def _rounds_of(folder: Path) -> list[int]:
    return [int(file.stem) for file in folder.glob("*.safetensors")]


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
