"""Files that are whole or not there, that say when they are no longer what was written, and errors of the system as one
sentence."""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedkeel.errors import StoreError
from fedkeel.stopping import RENAMED, RENAMING, WRITING, reached


@contextmanager
def explained(path: Path, then: str = ", then resume") -> Iterator[None]:
    """Turn what the operating system says about a file into one sentence."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"'{error.filename or path}' cannot be written: {error.strerror or error}; "
            f"make room or choose another directory with --out{then}."
        ) from error


def write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        reached(WRITING, path)
        os.fsync(file.fileno())


def write_atomically(path: Path, data: bytes) -> None:
    """A reader sees the old file or the new one, never half of it."""
    aside = path.with_name(f".{path.name}.writing")
    write_durably(aside, data)
    rename(aside, path)


def write_to_show(path: Path, data: bytes) -> None:
    """For whoever looks at it meanwhile. Nothing depends on it: it is not brought to disk, which would take longer than
    what it tells of, and a full disk is told of by what a run needs."""
    aside = path.with_name(f".{path.name}.writing")
    with suppress(OSError):
        aside.write_bytes(data)
        os.replace(aside, path)


def rename(source: Path, target: Path) -> None:
    """Put a file or a folder in its place, at once."""
    reached(RENAMING, target)
    os.replace(source, target)
    reached(RENAMED, target)


def make_folder(path: Path) -> list[Path]:
    """Make a folder and those above it. Returns the ones that were not there, innermost first."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return made


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def below(directory: Path, name: str) -> list[Path]:
    """The files of this name in a folder and below it; what goes meanwhile, as checkpoints do, is passed over."""
    return sorted(Path(folder) / name for folder, _, files in os.walk(directory) if name in files)


def state_folder() -> Path:
    """Where this user's things are kept from one command to the next."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "fedkeel"


# -- what was written ------------------------------------------------------------------------------------------------
class Unsealed(ValueError):
    """These bytes are not the table that was sealed; the text says why."""


def plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are stored as null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list) else value


def parsed(data: bytes) -> Any:
    """JSON, with null for numbers that are not finite. A `ValueError` where it is none, or has numbers of very many
    digits, half a letter, or brackets without end."""
    try:
        found = json.loads(data, parse_constant=lambda _: None)
        if re.search(rb"\\u|e[+]?[0-9]{3}|E", data):
            found = plain(found)
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it has brackets without end") from error
    if re.search(rb"[\s\[,:-][0-9]{20}", data):
        raise ValueError("it has a number of very many digits")
    return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seal(table: Mapping[str, Any]) -> bytes:
    """A table as JSON that carries a checksum of itself."""
    return json.dumps({**table, "checksum": _checksum(table)}, indent=1).encode() + b"\n"


def unseal(data: bytes) -> dict[str, Any]:
    """What was sealed; raises `Unsealed` where a single bit of it that means anything is another."""
    try:
        table: dict[str, Any] = parsed(data)
        if table.pop("checksum") == _checksum(table):
            return table
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise Unsealed(str(error)) from error
    raise Unsealed("its checksum does not match")


def read_sealed(path: Path) -> dict[str, Any] | None:
    """The table in a file; None where there is no such file."""
    try:
        return unseal(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"'{path}' cannot be read: {error.strerror}.") from error
    except Unsealed as error:
        raise StoreError(
            f"'{path}' is damaged ({error}): put it back from a copy, or remove it to do without what it says."
        ) from error


def _checksum(table: Mapping[str, Any]) -> str:
    return digest(json.dumps(table, sort_keys=True).encode())
