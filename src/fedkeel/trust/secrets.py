"""Whose randomness the noise of differential privacy rests on.

Noise protects only from those who cannot draw it again. In a simulation it comes from the run's seed: the run can be
repeated, and who knows the seed can take the noise away. Over a network everybody is told the seed, so there it comes
from a secret of whoever adds it: of each site under `dp=local`, of the server under `dp=central`. The secret is made
from the system's randomness and kept in a file; the environment variable FEDKEEL_SECRET takes its place, in a
simulation too.

With a secret, the noise also depends on all that it is put upon: the model that was sent, the options, the data. The
same step done twice, as after a crash, gives the same message twice and tells nothing more. Two steps that differ in
anything have noise of their own; the same noise upon both would leave their difference bare.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fedkeel.errors import StoreError
from fedkeel.files import explained, rename
from fedkeel.seeds import Stream

SECRET = "FEDKEEL_SECRET"
FILE = "secret"
BYTES = 32


@dataclass(frozen=True)
class Randomness:
    """Where numbers come from that others must not know.

    `context`: what else decides what is computed, such as the options that a server sent.
    """

    secret: bytes = field(default=b"", repr=False)
    context: bytes = b""

    @staticmethod
    def here() -> Randomness:
        """Of a simulation: the run's seed, or the secret in the environment."""
        return Randomness(of_environment())

    @property
    def source(self) -> str:
        """What a run says its noise rests on: one of `tables.SOURCES`."""
        return "secret" if self.secret else "seed"

    def stream(self, seed: int, *purpose: object, seen: Iterable[bytes] = ()) -> Stream:
        """The numbers for one purpose. `seen`: fingerprints of the tensors that they hide or come with."""
        text = "\x1f".join(map(str, ("privacy", seed, *purpose)))
        key = hashlib.blake2b(text.encode(), digest_size=BYTES, key=self.secret)
        if self.secret:
            key.update(self.context)
            for one in seen:
                key.update(one)
        return Stream(key.digest())


def fingerprint(tensors: Mapping[str, Tensor]) -> bytes:
    """The same for the same names, shapes, kinds and bits."""
    whole = hashlib.blake2b(digest_size=BYTES)
    for name, tensor in tensors.items():
        whole.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        whole.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return whole.digest()


def of_environment() -> bytes:
    given = os.environ.get(SECRET, "")
    return hashlib.blake2b(given.encode(), digest_size=BYTES).digest() if given else b""


def kept_in(path: Path) -> bytes:
    """The secret in this file, or in the environment; the file is made, for its owner's eyes alone, where it is not."""
    given = of_environment()
    if given:
        return given
    with explained(path):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f".{path.name}.writing")
            aside.unlink(missing_ok=True)
            with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(os.urandom(BYTES))
                file.flush()
                os.fsync(file.fileno())
            rename(aside, path)  # a secret that a power cut takes back would be drawn anew, and the noise with it
        with suppress(OSError):
            path.chmod(0o600)
        secret = path.read_bytes()
    if len(secret) != BYTES or not any(secret):
        zero = "" if any(secret) else ", none above 0"
        raise StoreError(
            f"'{path}' has {len(secret)} bytes{zero}, and the secret that noise is drawn from has {BYTES}: put it back "
            "from a copy, or remove it and begin a new run."
        )
    return secret
