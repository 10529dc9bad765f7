"""Tensors on the way between processes of a Ray cluster: as arrays, which its object store keeps without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedkeel.core.state import Tensors

Parcel = tuple[list[tuple[str, str, str, list[int]]], list[Any]]
"""Group, name, dtype and shape of each tensor, in order; and their bytes, as arrays of NumPy."""


def packed(groups: Mapping[str, Mapping[str, Tensor]]) -> Parcel:
    table, arrays = [], []
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            table.append((group, name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
            arrays.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return table, arrays


def unpacked(parcel: Parcel) -> dict[str, Tensors]:
    """Copies: what lies in the object store is everybody's."""
    groups: dict[str, Tensors] = {}
    for (group, name, dtype, shape), array in zip(*parcel, strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        tensor.view(-1).view(torch.uint8).numpy()[:] = array
        groups.setdefault(group, {})[name] = tensor
    return groups


def nbytes(parcel: Parcel) -> int:
    return sum(array.nbytes for array in parcel[1])


def fetched(reference: Any) -> Any:
    """What lies in Ray's store, which has no better word than this error of a socket for a node that has just died."""
    import ray

    try:
        return ray.get(reference)
    except OSError as error:
        raise ray.exceptions.LocalRayletDiedError from error
