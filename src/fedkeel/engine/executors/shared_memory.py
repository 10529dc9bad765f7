"""Tensors in memory that processes share: one writes, the others read without a copy.

Such memory has no name. It is a file that only its descriptor leads to, inherited by the workers that are forked
after it was made: when the last process that has it is gone, killed or not, so is the memory. It begins with a line of
JSON that says what is where. So whoever reads it need not be told more than that it is ready, in a message so short
that it is never half sent.
"""

import json
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedkeel.core.state import Tensors

ALIGNMENT = 64  # bytes: a cache line, and more than any element
LENGTH = 8  # bytes in front, which hold that of the JSON

Table = list[tuple[str, str, str, list[int], int]]
"""Group, name, dtype, shape and first byte after the JSON of each tensor, in order."""
Content = tuple[dict[str, Any], dict[str, Tensors]]


class SharedTensors:
    """Groups of named tensors, and a header; each `write` takes the place of the one before."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("fedkeel", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:  # without a name too, but on a disk
                self._file = os.dup(file.fileno())
        self._mapping: mmap.mmap | None = None

    def __del__(self) -> None:
        os.close(self._file)

    def write(self, groups: Mapping[str, Mapping[str, Tensor]], **header: Any) -> None:
        """Copy the tensors in; memory grows as they need it. A shortage is a MemoryError."""
        table: Table = []
        end = 0
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                start = _aligned(end)
                table.append((group, name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start))
                end = start + tensor.numel() * tensor.element_size()
        text = json.dumps([header, table]).encode()
        size = _aligned(LENGTH + len(text)) + end
        with _lack_of_memory(size):
            self._reserve(size)
        mapping = self._shared()
        mapping[: LENGTH + len(text)] = len(text).to_bytes(LENGTH, "little") + text
        places = _views(mapping, LENGTH + len(text), table)
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                # Always row by row, like a checkpoint: sums over tensors depend on the layout, and a resumed run
                # must compute the same bits.
                places[group][name].copy_(tensor.detach())

    def read(self) -> Content:
        """The header, and copies of the tensors."""
        header, groups = _content(self._shared())
        return header, {group: {name: t.clone() for name, t in tensors.items()} for group, tensors in groups.items()}

    def look(self) -> Content:
        """What was written, in place, good until the next `write`. Pages that the reader changes become its own."""
        return _content(self._map(mmap.ACCESS_COPY))

    def _reserve(self, size: int) -> None:
        if size <= os.fstat(self._file).st_size:
            return
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file, 0, size)  # a shortage is an error here and a crash later
        else:
            os.ftruncate(self._file, size)

    def _shared(self) -> mmap.mmap:
        """All of the memory; another process may have made it larger."""
        if self._mapping is None or len(self._mapping) < os.fstat(self._file).st_size:
            self._mapping = self._map(mmap.ACCESS_WRITE)
        return self._mapping

    def _map(self, access: int) -> mmap.mmap:
        with _lack_of_memory(os.fstat(self._file).st_size):
            return mmap.mmap(self._file, 0, access=access)


@contextmanager
def _lack_of_memory(size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        shared = f"worker processes share memory, of which this needs {size} bytes"
        raise MemoryError(f"{shared}: {error.strerror}") from error


def _aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT


def _content(mapping: mmap.mmap) -> Content:
    """The header, and the tensors where they lie."""
    end = LENGTH + int.from_bytes(mapping[:LENGTH], "little")
    header, table = json.loads(mapping[LENGTH:end])
    return header, _views(mapping, end, table)


def _views(mapping: mmap.mmap, end: int, table: Table) -> dict[str, Tensors]:
    """The tensors of the table, which lie after the JSON that ends there."""
    memory, first = torch.frombuffer(mapping, dtype=torch.uint8), _aligned(end)
    groups: dict[str, Tensors] = {}
    for group, name, dtype, shape, start in table:
        kind: torch.dtype = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        if size:
            tensor = memory[first + start : first + start + size].view(kind).view(shape)
        else:
            tensor = torch.empty(shape, dtype=kind)
        groups.setdefault(group, {})[name] = tensor
    return groups
