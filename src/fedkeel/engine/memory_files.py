"""What clients remember, on disk.

00000042.safetensors    one version of one client's memory; never changed once it is written
index-000007.jsonl      which version is which client's, a line for each change; begun in round 7

A checkpoint refers to an index and says up to which byte it counts. So it costs what changed since the last one, and
not what all clients remember; and one that is older still finds the versions it speaks of, because these are removed
only when no checkpoint is left that does. Whatever a killed run left beyond that is removed when it is resumed.
"""

import hashlib
import json
import os
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedkeel.core.messages import BadMessage, pack, unpack
from fedkeel.core.state import Tensors
from fedkeel.errors import StoreError
from fedkeel.files import explained, make_folder, sync, write_durably
from fedkeel.stopping import WRITING, reached

SPARE_LINES = 1000  # of an index, beyond two for each client, before a new one is begun

Reference = dict[str, Any]  # to a part of an index: "file", "since", "bytes", "sha256"


class Damaged(Exception):
    """What a reference speaks of is not there as it was; the text says what."""


class Version(NamedTuple):
    number: int
    digest: bytes

    @property
    def file(self) -> str:
        return f"{self.number:08d}.safetensors"


class MemoryFiles:
    """A folder with the memories of clients; without a path, a temporary one that is removed in the end."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._begin({})

    def _begin(self, current: dict[str, Version]) -> None:
        self._current = current
        self._next = self._first_new = 1 + max((version.number for version in current.values()), default=-1)
        self._changed: dict[str, None] = {}  # clients, since the last commit, which knows versions before `_first_new`
        self._replaced: list[str] = []  # files that the last commit knows and the next one will not
        self._outdated: deque[tuple[int, str]] = deque()  # such files, and the round of the commit without them
        self._index = ""
        self._lines, self._since, self._bytes, self._hash = 0, 0, 0, hashlib.sha256()

    @property
    def folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedkeel-memory-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def __contains__(self, client: object) -> bool:
        return client in self._current

    def __iter__(self) -> Iterator[str]:
        return iter(self._current)

    # -- one client ------------------------------------------------------------------------------------------
    def put(self, client: str, tensors: Tensors) -> None:
        data = pack({"client": client}, memory=tensors)
        version = Version(self._next, _digest(data))
        with explained(self.folder):
            make_folder(self.folder)
            (self.folder / version.file).write_bytes(data)
            reached(WRITING, self.folder / version.file)
        self._next += 1
        self.forget(client)
        self._current[client] = version
        self._changed[client] = None

    def get(self, client: str) -> Tensors:
        version = self._current[client]
        path = self.folder / version.file
        try:
            return _read(path, client, version)
        except Damaged as damage:
            raise StoreError(
                f"What the client '{client}' remembers cannot be read ({damage}): put '{path}' back as it was, or "
                "start the run anew in another directory."
            ) from damage

    def forget(self, client: str) -> None:
        old = self._current.pop(client, None)
        if old is None:
            return
        self._changed[client] = None
        if old.number >= self._first_new:
            self._remove([old.file])
        else:
            self._replaced.append(old.file)

    # -- checkpoints -----------------------------------------------------------------------------------------
    def commit(self, round: int) -> Reference:
        """Bring all changes to disk. Returns what a checkpoint must keep to find this state again."""
        if self._changed:
            with explained(self.folder):
                for client in self._changed:
                    if client in self._current:
                        sync(self.folder / self._current[client].file)
                if not self._index or self._lines > 2 * len(self._current) + SPARE_LINES:
                    self._begin_index(round)
                self._since = self._bytes
                self._append(self._changed)
                sync(self.folder)
        self._outdated += [(round, file) for file in self._replaced]
        self._changed, self._replaced, self._first_new = {}, [], self._next
        return {"file": self._index, "since": self._since, "bytes": self._bytes, "sha256": self._hash.hexdigest()}

    def release(self, oldest: int) -> None:
        """No checkpoint before round `oldest` is kept any more: remove what only those needed."""
        while self._outdated and self._outdated[0][0] <= oldest:
            self._remove([self._outdated.popleft()[1]])

    def _begin_index(self, round: int) -> None:
        if self._index:
            self._replaced.append(self._index)
        self._index = f"index-{round:06d}.jsonl"
        self._lines, self._bytes, self._hash = 0, 0, hashlib.sha256()
        write_durably(self.folder / self._index, b"")
        self._append(client for client in self._current if client not in self._changed)

    def _append(self, clients: Iterable[str]) -> None:
        lines = []
        for client in clients:
            version = self._current.get(client)
            entry = [client, None, ""] if version is None else [client, version.number, version.digest.hex()]
            lines.append(json.dumps(entry).encode() + b"\n")
        path, data = self.folder / self._index, b"".join(lines)
        with open(path, "ab") as file:
            file.write(data)
        reached(WRITING, path)
        sync(path)
        self._lines += len(lines)
        self._bytes += len(data)
        self._hash.update(data)

    # -- going on --------------------------------------------------------------------------------------------
    def check(self, reference: Reference) -> None:
        """Raise `Damaged` unless what it speaks of is there: all files, and those of its own commit as they were."""
        current, content = self._replay(reference)
        latest = {json.loads(line)[0] for line in content[reference["since"] :].splitlines()}
        there = {path.name for path in self._files()}
        for client, version in current.items():
            if version.file not in there:
                raise Damaged(f"'{self.folder / version.file}' is missing")
            if client in latest:
                _read(self.folder / version.file, client, version)

    def as_of(self, reference: Reference) -> Callable[[str], Tensors]:
        """How to look up what each client remembered at a checkpoint; no file changes."""
        current, _ = self._replay(reference)

        def look(client: str) -> Tensors:
            version = current.get(client)
            return {} if version is None else _read(self.folder / version.file, client, version)

        return look

    def restore(self, reference: Reference | None, round: int = -1, others: Iterable[Reference] = ()) -> None:
        """Be as a checkpoint of this round was; keep what the `others` speak of, and remove everything else."""
        current, content = self._replay(reference) if reference else ({}, b"")
        spared: set[str] = set()
        for other in others:
            with suppress(Damaged):
                spared |= {version.file for version in self._replay(other)[0].values()} | {other["file"]}
        self._begin(current)
        needed = {version.file for version in current.values()}
        with explained(self.folder):
            if reference and reference["file"]:
                self._index, self._since, self._bytes = reference["file"], reference["since"], len(content)
                self._lines = content.count(b"\n")
                self._hash.update(content)
                needed.add(self._index)
                os.truncate(self.folder / self._index, self._bytes)
            numbers = [int(path.stem) for path in self._files() if path.suffix == ".safetensors"]
            self._next = self._first_new = max([self._next, *(1 + number for number in numbers)])
            self._remove(path.name for path in self._files() if path.name not in needed | spared)
        self._outdated = deque((round, file) for file in sorted(spared - needed) if file)

    def _replay(self, reference: Reference) -> tuple[dict[str, Version], bytes]:
        """The versions that a reference speaks of, and its part of the index."""
        if not reference["file"]:
            return {}, b""
        path = self.folder / reference["file"]
        try:
            with open(path, "rb") as file:
                content = file.read(reference["bytes"])
        except OSError as error:
            raise Damaged(f"'{path}' cannot be read: {error.strerror}") from error
        if hashlib.sha256(content).hexdigest() != reference["sha256"]:
            raise Damaged(f"the checksum of '{path}' does not match")
        current: dict[str, Version] = {}
        for client, number, digest in map(json.loads, content.splitlines()):
            current.pop(client, None)
            if number is not None:
                current[client] = Version(number, bytes.fromhex(digest))
        return current, content

    def _files(self) -> list[Path]:
        if self._folder is None or not self._folder.exists():
            return []
        return [path for path in self._folder.iterdir() if path.suffix in (".safetensors", ".jsonl")]

    def _remove(self, files: Iterable[str]) -> None:
        for file in files:
            with suppress(OSError):  # it takes room, and no more
                (self.folder / file).unlink(missing_ok=True)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _read(path: Path, client: str, version: Version) -> Tensors:
    try:
        data = path.read_bytes()
        if _digest(data) != version.digest:
            raise Damaged(f"the checksum of '{path}' does not match")
        header, groups = unpack(data)
    except OSError as error:
        raise Damaged(f"'{path}': {error.strerror}") from error
    except BadMessage as error:
        raise Damaged(f"'{path}': {error}") from error
    if header.get("client") != client:
        raise Damaged(f"'{path}' is of another client")
    return groups.get("memory", {})
