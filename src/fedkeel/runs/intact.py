"""The files of a run directory, read only as they were written."""

import shlex
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError

from fedkeel.core import naming
from fedkeel.core.state import Tensors
from fedkeel.engine.executors.sites.roster import FILE as SITES
from fedkeel.engine.memory import Damaged
from fedkeel.errors import FedkeelError, nearest, quoted
from fedkeel.files import below, digest, read_sealed
from fedkeel.runs.store import CHECKSUMS, CONFIG, METRICS, SUMMARY, checkpoints, has_finished, read_header

MOST_NAMED = 20  # clients to choose from, in a sentence
HELD = {CONFIG: "a run", "comparison.json": "a comparison", "tuning.json": "a search"}


def refuse_to_hide(directory: Path, own: str = CONFIG, runs: Collection[Path] = ()) -> None:
    """Of a folder that holds several things, one would be looked at: nothing is begun in another's. `own`: the file
    that a folder of the kind has that is begun; `runs`: those that it takes for its own."""
    found = next((what for sign, what in HELD.items() if sign != own and (directory / sign).exists()), "")
    if not found and own in (CONFIG, "comparison.json") and not (directory / own).exists():
        found = "other runs" if {path.parent for path in below(directory, CONFIG)} - {*runs} else ""
    if found:
        raise FedkeelError(f"'{directory}' holds {found}, and one would hide the other: choose another directory.")


def how_to_continue(directory: str | Path) -> str:
    """The command that goes on with a run; one over a network needs what its server was started with besides."""
    place = shlex.quote(str(directory))
    if (Path(directory) / SITES).exists():
        return f"fedkeel server --config {place}/config.toml --out {place} --sites NAMES"
    return f"fedkeel resume {place}"


class Files:
    """What a run has written. A finished one has checksums of all its files, an unfinished one of its metrics up to the
    last checkpoint."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    @property
    def finished(self) -> bool:
        return has_finished(self.directory)

    def check(self) -> None:
        """An error for the first file of a finished run that is not as the run wrote it."""
        for name in self._checksums():
            self.intact(name)

    def intact(self, name: str) -> bytes:
        """What is in a file; an error where that is not what a finished run wrote, by its checksums."""
        path = self.directory / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise FedkeelError(f"'{path}' cannot be read ({error.strerror}): {self._remedy(name)}") from error
        if self._checksums().get(name, "") not in ("", digest(data)):
            raise self.changed(name, "checksum does not match")
        return data

    def checksums(self, names: Iterable[str]) -> dict[str, str]:
        """What these files are known by."""
        return {name: digest(self.intact(name)) for name in names}

    def tensors(self, name: str) -> Tensors:
        """What is in a file of tensors, such as `model.safetensors`."""
        try:
            return safetensors.torch.load(self.intact(name))
        except SafetensorError as error:
            raise self.changed(name, f"tensors cannot be read ({error})") from error

    def personal_file(self, client: str | None, method: str) -> str:
        """That has the layers that a method keeps on this client."""
        folder = self.directory / "personal"
        kept = [naming.name_of(path.stem) for path in sorted(folder.glob("*.safetensors"))]
        if client is None:
            raise FedkeelError(
                f"'{method}' keeps layers on its clients, so each has a model of its own: say whose with --client "
                f"(client=... in Python), one of {quoted(kept, MOST_NAMED, '{:,} others')}."
            )
        file = folder / f"{naming.file_name(client)}.safetensors"
        if not file.is_file():
            raise FedkeelError(f"There is no model of a client '{client}': {nearest(client, kept)}")
        return f"{folder.name}/{file.name}"

    def _checksums(self) -> dict[str, str]:
        """By file; of a run that is not finished there are none."""
        stored = read_sealed(self.directory / CHECKSUMS) if self.finished else None
        return dict(stored["sha256"]) if stored and isinstance(stored.get("sha256"), dict) else {}

    def changed(self, name: str, problem: str) -> FedkeelError:
        path = self.directory / name
        return FedkeelError(f"'{path}' was changed since the run wrote it, its {problem}: {self._remedy(name)}")

    def _remedy(self, name: str) -> str:
        again = f"write it again with '{how_to_continue(self.directory)}'"
        if name == SUMMARY:
            return f"remove it and {again}."
        if name.endswith((".safetensors", "measures.json", ".csv")):
            return f"put it back from a copy, or remove {SUMMARY} and {again}."
        return "put it back from a copy, or start the run anew in another directory."

    def metrics(self) -> bytes:
        """What is in `metrics.jsonl`, which up to the last checkpoint must be what was there then."""
        if METRICS in self._checksums():
            return self.intact(METRICS)
        header: dict[str, Any] = {}  # before the metrics, which may grow meanwhile
        for folder in checkpoints(self.directory):
            with suppress(Damaged):
                header = read_header(folder)
        data = self.intact(METRICS) if (self.directory / METRICS).exists() else b""
        end = header.get("metrics_bytes", 0)  # with fewer, the run is going back to an earlier checkpoint
        if header and len(data) >= end and digest(data[:end]) != header["metrics_sha256"]:
            raise self.changed(METRICS, "checksum does not match")
        return data
