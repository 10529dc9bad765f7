"""Tensors in memory that processes share: one writes, the others read without a copy.

A segment has no name. It is a file that only its descriptor leads to, inherited by the workers that are forked after
it was made: when the last process that has it is gone, killed or not, so is the memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedkeel.state import Tensors

ALIGNMENT = 64  # bytes: a cache line, and more than any element

Table = list[tuple[str, str, str, list[int], int]]
"""Group, name, dtype, shape and first byte of each tensor, in order: what a reader must know. JSON can hold it."""


class Segment:
    """Groups of named tensors; each `write` takes the place of the one before."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("fedkeel", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:  # without a name too, but on a disk
                self._file = os.dup(file.fileno())
        self._mapped: Tensor | None = None

    def __del__(self) -> None:
        os.close(self._file)

    def write(self, groups: Mapping[str, Mapping[str, Tensor]]) -> Table:
        """Copy the tensors in and say where they are; memory grows as they need it."""
        table: Table = []
        end = 0
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                start = -(-end // ALIGNMENT) * ALIGNMENT
                table.append((group, name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start))
                end = start + tensor.numel() * tensor.element_size()
        self._reserve(end)
        places = _views(self._shared(end), table)
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                # Always row by row, like a checkpoint: sums over tensors depend on the layout, and a resumed run
                # must compute the same bits.
                places[group][name].copy_(tensor.detach())
        return table

    def read(self, table: Table) -> dict[str, Tensors]:
        """Copies of what was written."""
        groups = _views(self._shared(_end(table)), table)
        return {group: {name: t.clone() for name, t in tensors.items()} for group, tensors in groups.items()}

    def look(self, table: Table) -> dict[str, Tensors]:
        """What was written, in place, good until the next `write`. Pages that the reader changes become its own."""
        size = _end(table)
        return _views(_as_bytes(mmap.mmap(self._file, size, access=mmap.ACCESS_COPY)) if size else None, table)

    def _reserve(self, size: int) -> None:
        if size <= os.fstat(self._file).st_size:
            return
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file, 0, size)  # a shortage is an error here and a crash later
        else:
            os.ftruncate(self._file, size)

    def _shared(self, size: int) -> Tensor | None:
        """All of the memory as bytes, if there is to be any."""
        if size and (self._mapped is None or len(self._mapped) < size):
            self._mapped = _as_bytes(mmap.mmap(self._file, os.fstat(self._file).st_size))
        return self._mapped


def _as_bytes(mapping: mmap.mmap) -> Tensor:
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _end(table: Table) -> int:
    return max((start + _nbytes(dtype, shape) for _, _, dtype, shape, start in table), default=0)


def _nbytes(dtype: str, shape: list[int]) -> int:
    kind: Any = getattr(torch, dtype)
    return int(torch.Size(shape).numel()) * int(kind.itemsize)


def _views(memory: Tensor | None, table: Table) -> dict[str, Tensors]:
    groups: dict[str, Tensors] = {}
    for group, name, dtype, shape, start in table:
        kind: torch.dtype = getattr(torch, dtype)
        size = _nbytes(dtype, shape)
        if size:
            assert memory is not None
            tensor = memory[start : start + size].view(kind).view(shape)
        else:
            tensor = torch.empty(shape, dtype=kind)
        groups.setdefault(group, {})[name] = tensor
    return groups
