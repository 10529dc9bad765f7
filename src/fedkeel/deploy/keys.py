"""The public keys of sites: who may come in, and under which name.

They are files, `NAME.pub`, in a folder at the server. Whoever adds one lets a site in, whoever removes one shuts it
out, also while a run goes on: the folder is looked at every few seconds.
"""

import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedkeel.errors import FedkeelError

INTERVAL = 2.0  # seconds from one look at the folder to the next

# Lets exactly these sites in, by name; says which node is whose.
Register = Callable[[Mapping[str, bytes]], dict[int, str]]


class Keys(UserDict[int, str]):
    """Which site each node's key was made for, as the folder is at the moment."""

    def __init__(self, folder: Path, register: Register) -> None:
        self.folder = folder
        self._register = register
        self._stamps, self._is_there = stamps(folder), True
        self._keys = read_keys(folder)
        self.data = register(self._keys)

    def look(self, note: Callable[[str], None]) -> None:
        """Take up what changed since the last look. A file that cannot be used leaves its site as it was, a folder that
        is gone (a disk that is not mounted) all of them."""
        was_there, self._is_there = self._is_there, self.folder.is_dir()
        if was_there and not self._is_there:
            note(f"The keys of the sites stay as they were: the folder '{self.folder}' is gone.")
        found = stamps(self.folder)
        if not self._is_there or found == self._stamps:
            return
        keys: dict[str, bytes] = {}
        problems: list[str] = []
        for name in sorted(found):
            try:
                keys[name] = read_key(self.folder / f"{name}.pub", keys)
            except (FedkeelError, OSError) as error:
                problems.append(str(error))
                if name in self._keys:
                    keys[name] = self._keys[name]
        if keys != self._keys:
            self.data = self._register(keys)  # replaced as a whole: others read it meanwhile
        before, self._keys, self._stamps = self._keys, keys, found
        for problem in problems:
            note(f"A key of a site is left aside: {problem}")
        for name in sorted({*before, *keys}):
            if name not in before:
                note(f"The key of '{name}' is new: this site is let in.")
            elif name not in keys:
                note(f"The key of '{name}' is gone: this site is shut out.")
            elif keys[name] != before[name]:
                note(f"The key of '{name}' is another one now: its old key is shut out.")

    @contextmanager
    def followed(self, note: Callable[[str], None], also: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Look again and again while the block runs, whatever the round is waiting for, and do something else then."""
        over = threading.Event()

        def follow() -> None:
            while not over.wait(INTERVAL):
                try:
                    self.look(note)
                    also()
                except Exception as error:  # Flower's process is busy or gone, and then whoever watches it says so
                    note(f"The keys of the sites could not be taken up ({type(error).__name__}): trying again.")

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(timeout=INTERVAL)


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """What tells that a file was changed, of each."""
    found = {}
    for path in folder.glob("*.pub"):
        with suppress(OSError):  # it went in this very moment
            known = path.stat()
            found[path.stem] = known.st_mtime_ns, known.st_size
    return found


def read_keys(folder: Path) -> dict[str, bytes]:
    """The public keys of sites by name, as Flower wants them."""
    keys: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.pub")):
        keys[path.stem] = read_key(path, keys)
    return keys


def read_key(path: Path, others: Mapping[str, bytes]) -> bytes:
    """The public key in this file, which must be none of the others."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise FedkeelError(f"'{path}' is not a public key in OpenSSH's format: {str(error).rstrip('.')}.") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FedkeelError(f"The key '{path}' is not of a NIST curve: make it with 'ssh-keygen -t ecdsa -b 384'.")
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    for name, other in others.items():
        if other == pem:
            raise FedkeelError(f"'{name}.pub' and '{path.name}' are the same key: each site needs one of its own.")
    return pem
