"""A run directory: configuration, metrics, checkpoints, result. Nothing in it is pickled.

config.toml      every option; running it again repeats the run
federation.json  the data it was trained on in outline, and a fingerprint of them, see `fedkeel.data.outline`
origin.json      the code and the machine that it began with, see `fedkeel.runs.origin`
code/            copies of the user's own files with methods, models, ... to read, see `fedkeel.core.imports`
metrics.jsonl    a line per round, client and evaluation; no times, so two equal runs have equal files
timing.jsonl     seconds per phase and round, and per client where clients do not run side by side
live.json        how far it is at this moment, and what was noted, see `fedkeel.runs.live`
diagnostics/     what was recorded while training, or made of the run afterwards, see `fedkeel.analysis`
checkpoints/     the last good two, written aside and renamed, each with checksums
memory/          what clients remember, a file per client and round
extended.json    after how many rounds it was finished before, if it was extended
summary.json     the result, once the run is finished
measures.json    what its model does on every test set; with `--predictions`, of every image in predictions/
model.safetensors  the global model that the result speaks of
checksums.json   of the files that a finished run is read from
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

import safetensors.torch

from fedkeel import config as configuration
from fedkeel.config import Config
from fedkeel.core import imports
from fedkeel.core.messages import BadMessage, pack, unpack
from fedkeel.core.naming import file_name
from fedkeel.core.state import Tensors
from fedkeel.engine.checkpointing import Checkpoint
from fedkeel.engine.executors.sites.executor import STATUS
from fedkeel.engine.memory import ClientMemory, Damaged
from fedkeel.errors import StoreError
from fedkeel.files import (
    Unsealed,
    digest,
    explained,
    make_folder,
    plain,
    rename,
    seal,
    unseal,
    write_atomically,
    write_durably,
)
from fedkeel.runs import live
from fedkeel.runs.extension import extensions
from fedkeel.runs.timing import FILE as TIMING
from fedkeel.runs.timing import read_timing, seconds_of
from fedkeel.stopping import WRITING, reached

KEPT_CHECKPOINTS = 2
METRICS, MODEL = "metrics.jsonl", "model.safetensors"
SUMMARY, CHECKSUMS = "summary.json", "checksums.json"
TRACES = (METRICS, live.FILE, STATUS, ".lock")  # that may be there before anything is trained
Named = Iterable[tuple[str, bytes]]  # files


def fingerprint(config: Config) -> str:
    """The same for two configurations that give the same run."""
    return hashlib.sha256(json.dumps(config.decisive(), sort_keys=True).encode()).hexdigest()[:16]


def has_finished(directory: Path) -> bool:
    return (directory / SUMMARY).exists()


def numbered(name: str) -> Iterator[Path]:
    """`runs/<name>`, `runs/<name>-2`, ...: the first that its caller can use is taken."""
    return (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in range(1, 10_000))


_locks: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _let_go() -> None:
    for lock in _locks:
        lock.close()


# A worker that outlives a killed run for a moment must not keep the directory locked.
os.register_at_fork(after_in_child=_let_go)


class Store:
    """One run directory, held by one process at a time."""

    def __init__(self, directory: str | Path, config: Config) -> None:
        self.directory = Path(directory)
        self.config = config
        self.memory = ClientMemory(self.directory / "memory", stateless=config.stateless)
        self._metrics: IO[bytes] | None = None
        self._written = hashlib.sha256()  # of what is in the metrics
        self._lock: IO[bytes] | None = None
        self._made: list[Path] = []  # folders, innermost first
        self._begun: list[Path] = []  # files

    @classmethod
    def create(cls, directory: str | Path, config: Config, records: Mapping[str, bytes] | None = None) -> Store:
        """A new run directory, with these files in it besides; one that already holds a run is refused."""
        store = cls(directory, config)
        with explained(store.directory):
            store._made = make_folder(store.directory)
            store._take()
            try:
                if (store.directory / "config.toml").exists():
                    raise StoreError(
                        f"'{directory}' already holds a run: continue it with 'fedkeel resume {directory}', "
                        "or choose another directory."
                    )
                # The configuration last: with it the directory is a run's.
                own = imports.records(config)
                for name, data in {**own, **(records or {}), "config.toml": config.to_toml().encode()}.items():
                    store._made = [*make_folder((store.directory / name).parent), *store._made]
                    store._begun.append(store.directory / name)
                    write_atomically(store.directory / name, data)
            except BaseException:
                store.discard()
                raise
        return store

    @classmethod
    def open(cls, directory: str | Path) -> Store:
        store = cls(directory, read_config(directory))
        with explained(store.directory):
            store._take()
        return store

    def _take(self) -> None:
        self._lock = open(self.directory / ".lock", "wb")  # noqa: SIM115 (held as long as the run)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise StoreError(f"Another process is running '{self.directory}': wait for it or stop it.") from None
        _locks.add(self._lock)

    extended = property(lambda self: extensions(self.directory))

    @property
    def is_blank(self) -> bool:
        """Whether it was created here and nothing has happened in it yet."""
        return bool(self._begun) and self._metrics is None

    def discard(self) -> None:
        """Something was refused before anything was trained: be as if it had never been created."""
        self.close()
        for file in (*self._begun, *(self.directory / name for name in TRACES)) if self._begun else ():
            file.unlink(missing_ok=True)
        with suppress(OSError):  # something else is in there
            for folder in self._made:
                folder.rmdir()

    def close(self) -> None:
        for file in (self._metrics, self._lock):
            if file is not None:
                with suppress(OSError):  # a full disk: what could not be written was reported by `flush`
                    file.close()
        self._metrics = self._lock = None

    # -- metrics ---------------------------------------------------------------------------------------------
    def append(self, record: dict[str, Any]) -> None:
        path, line = self.directory / METRICS, json.dumps(plain(record)).encode() + b"\n"
        with explained(path):
            if self._metrics is None:
                self._metrics = open(path, "ab")  # noqa: SIM115
            self._metrics.write(line)
            self._written.update(line)

    def append_timing(self, record: dict[str, Any]) -> None:
        path = self.directory / TIMING
        if self._metrics is not None:
            with explained(self.directory / METRICS):
                self._metrics.flush()  # for whoever watches; `flush` brings it to disk
        with explained(path), open(path, "a") as file:
            file.write(json.dumps(record) + "\n")

    def seconds(self) -> float:
        """What the rounds so far took, in all starts of the run together; rounds that were done again count again."""
        return sum(map(seconds_of, read_timing(self.directory)))

    def truncate(self, size: int = 0) -> None:
        """Forget the records of rounds that were not completed."""
        path = self.directory / METRICS
        with explained(path):
            with open(path, "ab") as file:
                file.truncate(size)
            self._written = hashlib.sha256(path.read_bytes())

    # -- checkpoints -----------------------------------------------------------------------------------------
    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write aside, flush to disk, rename, then forget all but the last two.

        What clients remember is what their files hold at this moment.
        """
        folder = self.directory / "checkpoints"
        target = folder / f"round-{checkpoint.round:06d}"
        aside = folder / f".writing-{checkpoint.round:06d}"
        with explained(folder):
            self.flush()
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(target, ignore_errors=True)
            make_folder(aside)
            server = pack({}, **checkpoint.groups)
            write_durably(aside / "server.safetensors", server)
            metrics = self.directory / METRICS
            header = {
                "round": checkpoint.round,
                "fingerprint": fingerprint(self.config),
                "metrics_bytes": metrics.stat().st_size if metrics.exists() else 0,
                "metrics_sha256": self._written.hexdigest(),
                "best": checkpoint.best,
                "sha256": digest(server),
                "memory": self.memory.commit(checkpoint.round),
            }
            write_durably(aside / "checkpoint.json", seal(header))
            rename(aside, target)
            # A later one is of a future that was given up: `latest` found it damaged.
            there = checkpoints(self.directory)
            kept = [folder for folder in there if folder.name <= target.name][-KEPT_CHECKPOINTS:]
            for old in (folder for folder in reversed(there) if folder not in kept):
                shutil.rmtree(old, ignore_errors=True)
            self.memory.release(int(kept[0].name.removeprefix("round-")))

    def latest(self, note: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that is whole; damaged ones are passed over with a note. The memory files follow it."""
        folders, damaged_metrics = checkpoints(self.directory), False
        for folder in reversed(folders):
            try:
                header, checkpoint = read_checkpoint(folder)
                self.memory.check(header["memory"], checkpoint.round)
            except Damaged as damage:
                note(f"The checkpoint '{folder}' is damaged ({damage}): going back to the one before it.")
                continue
            lengths = (self.config.rounds, *self.extended.values())
            if header["fingerprint"] not in {fingerprint(self.config.replace(rounds=n)) for n in lengths}:
                raise StoreError(
                    f"The checkpoint '{folder}' is of another configuration than '{self.directory / 'config.toml'}': "
                    "put back the configuration it was made with, or start anew in another directory."
                )
            metrics = self.directory / METRICS
            if not metrics.exists() or metrics.stat().st_size < header["metrics_bytes"]:
                note(f"'{metrics}' is shorter than the checkpoint '{folder}' says: going back to the one before it.")
                continue
            if damaged_metrics := not are_metrics(metrics.read_bytes(), header):
                note(f"'{metrics}' is damaged before the checkpoint '{folder}': going back to the one before it.")
                continue
            self.truncate(header["metrics_bytes"])
            self.memory.restore(checkpoint.round)
            return checkpoint
        if damaged_metrics:  # all rounds again would be a high price for what may be one bit
            raise StoreError(
                f"'{self.directory / METRICS}' is damaged, its checksum is not the one in the checkpoints: put it back "
                "from a copy, or start the run anew in another directory."
            )
        if folders:
            note("No checkpoint is usable: starting again from the first round.")
        self.memory.restore()
        return None

    def flush(self) -> None:
        if self._metrics is not None:
            with explained(self.directory / METRICS):
                self._metrics.flush()
                reached(WRITING, self.directory / "metrics.jsonl")
                os.fsync(self._metrics.fileno())

    # -- the end ---------------------------------------------------------------------------------------------
    def finish(
        self, summary: dict[str, Any], model: Tensors, personal: Iterable[tuple[str, Tensors]], tables: Named = ()
    ) -> None:
        with explained(self.directory):
            self.flush()
            sums = {METRICS: self._written.hexdigest()}
            named = ((f"personal/{file_name(client)}.safetensors", tensors) for client, tensors in personal)
            packed = ((file, _file_of(tensors)) for file, tensors in chain([(MODEL, model)], named))
            for file, data in chain(packed, tables):
                make_folder((self.directory / file).parent)
                write_atomically(self.directory / file, data)
                sums[file] = digest(data)
            result = json.dumps(plain(summary), indent=1).encode() + b"\n"
            sums[SUMMARY] = digest(result)
            write_atomically(self.directory / CHECKSUMS, seal({"sha256": sums}))
            write_atomically(self.directory / SUMMARY, result)  # last: with it the run is finished


def are_metrics(found: bytes, header: Mapping[str, Any]) -> bool:
    """Whether these are the metrics that a checkpoint was made after; one of an earlier version does not say."""
    expected = header.get("metrics_sha256")
    return expected is None or digest(found[: header["metrics_bytes"]]) == expected


def read_config(directory: str | Path) -> Config:
    path = Path(directory) / "config.toml"
    if not path.exists():
        raise StoreError(
            f"'{directory}' is not a run directory (it has no config.toml): give one that 'fedkeel run' made."
        )
    return configuration.from_dict(configuration.read(path))


def checkpoints(directory: Path) -> list[Path]:
    """Their folders, the oldest first."""
    return sorted((directory / "checkpoints").glob("round-*"))


def read_header(folder: Path) -> dict[str, Any]:
    try:
        return unseal((folder / "checkpoint.json").read_bytes())
    except OSError as error:
        raise Damaged(str(error)) from error
    except Unsealed as error:
        raise Damaged(f"checkpoint.json: {error}") from error


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], Checkpoint]:
    try:
        header = read_header(folder)
        server = (folder / "server.safetensors").read_bytes()
        if digest(server) != header["sha256"]:
            raise Damaged("the checksum of server.safetensors does not match")
        _, groups = unpack(server)
        if "memory" not in header:
            raise Damaged("it does not say what clients remember")
        return header, Checkpoint(int(header["round"]), groups, header["best"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, BadMessage) as error:
        raise Damaged(str(error)) from error


def _file_of(tensors: Tensors) -> bytes:
    return safetensors.torch.save({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()})
