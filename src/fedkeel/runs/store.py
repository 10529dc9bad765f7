"""A run directory, written: configuration, metrics, checkpoints, result. Nothing in it is pickled.

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
checksums.json   of all files that a finished run is read from
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

import safetensors.torch
from filelock import FileLock, Timeout

from fedkeel import config as configuration
from fedkeel.config import Config
from fedkeel.core import imports
from fedkeel.core.messages import BadMessage, pack, unpack
from fedkeel.core.naming import file_name
from fedkeel.core.state import Tensors
from fedkeel.engine.checkpointing import Checkpoint
from fedkeel.engine.executors.sites.roster import FILE as SITES
from fedkeel.engine.memory import ClientMemory, Damaged
from fedkeel.errors import FedkeelError, StoreError
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
from fedkeel.runs.extension import FILE as EXTENDED
from fedkeel.runs.extension import extensions
from fedkeel.stopping import WRITING, reached

KEPT_CHECKPOINTS = 2
CONFIG, METRICS, MODEL = "config.toml", "metrics.jsonl", "model.safetensors"
SUMMARY, CHECKSUMS, TIMING = "summary.json", "checksums.json", "timing.jsonl"
TRACES = (METRICS, live.FILE, ".lock")  # that may be there before anything is trained
PATIENCE = 3  # seconds for a killed run's workers, who end a moment later, to let go of the directory
BEGUN = (CONFIG, "federation.json", "origin.json", SITES, EXTENDED, TIMING)  # there when a run ends, beside code/
Named = Iterable[tuple[str, bytes]]  # files


def fingerprint(config: Config) -> str:
    """The same for two configurations that give the same run."""
    return hashlib.sha256(json.dumps(config.decisive(), sort_keys=True).encode()).hexdigest()[:16]


def has_finished(directory: Path) -> bool:
    return (directory / SUMMARY).exists()


def numbered(name: str) -> Iterator[Path]:
    """`runs/<name>`, `runs/<name>-2`, ...: the first that its caller can use is taken."""
    return (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in range(1, 10_000))


class Store:
    """One run directory, held by one process at a time."""

    def __init__(self, directory: str | Path, config: Config) -> None:
        self.directory = Path(directory)
        self.config = config
        self.memory = ClientMemory(self.directory / "memory", stateless=config.stateless)
        self._metrics: IO[bytes] | None = None
        self._written = hashlib.sha256()  # of what is in the metrics
        self._lock = FileLock(self.directory / ".lock", timeout=PATIENCE, thread_local=False)
        self._made: list[Path] = []  # folders, innermost first
        self._begun: list[Path] = []  # files

    @classmethod
    def create(cls, directory: str | Path, config: Config, records: Mapping[str, bytes] | None = None) -> Store:
        """A new run directory, with these files in it besides; one that already holds a run is refused."""
        store = cls(directory, config)
        with explained(store.directory):
            store._made = make_folder(store.directory)
            store._take()
            if (store.directory / CONFIG).exists():
                store.close()
                raise StoreError(
                    f"'{directory}' already holds a run: continue it with 'fedkeel resume {directory}', "
                    "or choose another directory."
                )
            # The configuration last: with it the directory is a run's.
            for name, data in {**imports.records(config), **(records or {}), CONFIG: config.to_toml().encode()}.items():
                store._made = [*make_folder((store.directory / name).parent), *store._made]
                store._begun.append(store.directory / name)
                write_atomically(store.directory / name, data)
        return store

    @classmethod
    def open(cls, directory: str | Path) -> Store:
        store = cls(directory, read_config(directory))
        with explained(store.directory):
            store._take()
        return store

    def _take(self) -> None:
        try:
            self._lock.acquire()
        except Timeout:
            raise StoreError(f"Another process is running '{self.directory}': wait for it or stop it.") from None

    @property
    def extended(self) -> dict[int, int]:
        return extensions(self.directory)

    @property
    def is_blank(self) -> bool:
        """Whether it was created here and nothing has happened in it yet."""
        return bool(self._begun) and self._metrics is None

    def discard(self) -> None:
        """Something was refused before anything was trained: be as if it had never been created."""
        self.close()
        for file in (*self._begun, *(self.directory / name for name in TRACES)):
            file.unlink(missing_ok=True)
        with suppress(OSError):  # something else is in there
            for folder in self._made:
                folder.rmdir()

    def close(self) -> None:
        if self._metrics is not None:
            with suppress(OSError):  # a full disk: what could not be written was reported by `flush`
                self._metrics.close()
        self._metrics = None
        self._lock.release()

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

    def truncate(self, size: int = 0) -> None:
        """Forget the records of rounds that were not completed."""
        path = self.directory / METRICS
        with explained(path):
            with open(path, "ab") as file:
                file.truncate(size)
            self._written = hashlib.sha256(path.read_bytes())

    def flush(self) -> None:
        if self._metrics is not None:
            with explained(self.directory / METRICS):
                self._metrics.flush()
                reached(WRITING, self.directory / METRICS)
                os.fsync(self._metrics.fileno())

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
        folders, metrics = checkpoints(self.directory), self.directory / METRICS
        records, damaged = metrics.read_bytes() if metrics.exists() else b"", False
        for folder in reversed(folders):
            try:
                header, checkpoint = read_checkpoint(folder)
                self.memory.check(header["memory"], checkpoint.round)
                self._refuse_another(folder, header)
                damaged = len(records) >= header["metrics_bytes"]
                if digest(records[: header["metrics_bytes"]]) != header["metrics_sha256"]:
                    raise Damaged(f"'{metrics}' is not what it was then")
            except Damaged as damage:
                note(f"The checkpoint '{folder}' is damaged ({damage}): going back to the one before it.")
                continue
            self.truncate(header["metrics_bytes"])
            self.memory.restore(checkpoint.round)
            return checkpoint
        if damaged:  # all rounds again would be a high price for what may be one bit
            raise StoreError(
                f"'{metrics}' is damaged, its checksum is not the one in the checkpoints: put it back from a copy, or "
                "start the run anew in another directory."
            )
        if folders:
            note("No checkpoint is usable: starting again from the first round.")
        self.memory.restore()
        return None

    def _refuse_another(self, folder: Path, header: Mapping[str, Any]) -> None:
        lengths = (self.config.rounds, *self.extended.values())
        if header["fingerprint"] not in {fingerprint(self.config.replace(rounds=n)) for n in lengths}:
            raise StoreError(
                f"The checkpoint '{folder}' is of another configuration than '{self.directory / CONFIG}': "
                "put back the configuration it was made with, or start anew in another directory."
            )

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
            for path in (*(self.directory / name for name in BEGUN), *imports.copies(self.directory)):
                if path.exists():
                    sums[path.relative_to(self.directory).as_posix()] = digest(path.read_bytes())
            result = json.dumps(plain(summary), indent=1).encode() + b"\n"
            sums[SUMMARY] = digest(result)
            write_atomically(self.directory / CHECKSUMS, seal({"sha256": sums}))
            write_atomically(self.directory / SUMMARY, result)  # last: with it the run is finished


def read_config(directory: str | Path) -> Config:
    path = Path(directory) / CONFIG
    if not path.exists():
        raise StoreError(
            f"'{directory}' is not a run directory (it has no {CONFIG}): give one that 'fedkeel run' made."
        )
    try:
        return configuration.from_dict(configuration.read(path))
    except FedkeelError as error:
        raise StoreError(f"'{path}' is not what a run wrote: {error}") from error


def checkpoints(directory: Path) -> list[Path]:
    """Their folders, the oldest first."""
    return sorted((directory / "checkpoints").glob("round-*"))


HEADER = {"round": int, "fingerprint": str, "metrics_bytes": int, "metrics_sha256": str, "best": dict, "memory": dict}


def read_header(folder: Path) -> dict[str, Any]:
    try:
        header = unseal((folder / "checkpoint.json").read_bytes())
    except OSError as error:
        raise Damaged(str(error)) from error
    except Unsealed as error:
        raise Damaged(f"checkpoint.json: {error}") from error
    for name, kind in HEADER.items():
        if not isinstance(header.get(name), kind):
            raise Damaged(f"checkpoint.json: its '{name}' is {str(header.get(name))[:40]!r}")
    return header


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], Checkpoint]:
    try:
        header = read_header(folder)
        server = (folder / "server.safetensors").read_bytes()
        if digest(server) != header["sha256"]:
            raise Damaged("the checksum of server.safetensors does not match")
        return header, Checkpoint(int(header["round"]), unpack(server)[1], header["best"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, BadMessage) as error:
        raise Damaged(str(error)) from error


def _file_of(tensors: Tensors) -> bytes:
    return safetensors.torch.save({name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()})
