"""What goes through the object store comes out as it was."""

from __future__ import annotations

import pickle

import pytest
import torch

from fedkeel.engine.executors.ray.parcels import nbytes, packed, unpacked

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
SHAPES = [(), (0,), (0, 3), (2, 0, 3), (1,), (5,), (2, 3, 4)]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, also of what is not a number."""
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and one.contiguous().reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    parcel = packed({"weights": {"w": tensor}})
    assert nbytes(parcel) == tensor.nbytes
    found = unpacked(pickle.loads(pickle.dumps(parcel)))
    assert same(tensor, found["weights"]["w"])


def test_numbers_that_are_none_keep_their_bits() -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    assert same(tensor, unpacked(packed({"g": {"t": tensor}}))["g"]["t"])


@pytest.mark.parametrize("view", ["t()", "[:, 1]", "[::2, 1:]", "expand"])
def test_what_does_not_lie_in_a_row(view: str) -> None:
    whole = torch.arange(12.0).view(3, 4)
    tensor = {"t()": whole.t(), "[:, 1]": whole[:, 1], "[::2, 1:]": whole[::2, 1:], "expand": torch.ones(1).expand(4)}
    parcel = packed({"g": {"t": tensor[view]}})
    assert nbytes(parcel) == 4 * tensor[view].numel()  # nothing of what it is a view of goes along
    found = unpacked(parcel)["g"]["t"]
    assert torch.equal(found, tensor[view])
    assert found.is_contiguous()


def test_the_order_is_kept() -> None:
    groups = {
        "weights": {"b": torch.ones(1), "a": torch.zeros(2), "same": torch.ones(3)},
        "extras": {"z": torch.ones(()), "same": torch.zeros(1)},
        "statistics": {"a": torch.arange(3)},
    }
    found = unpacked(packed(groups))
    assert {name: list(group) for name, group in found.items()} == {n: list(group) for n, group in groups.items()}
    assert list(found) == list(groups)
    assert all(same(t, found[group][name]) for group, tensors in groups.items() for name, t in tensors.items())


def test_what_is_unpacked_is_ones_own() -> None:
    """Arrays from the object store are everybody's, and cannot be written."""
    table, arrays = packed({"g": {"t": torch.ones(3)}})
    for array in arrays:
        array.flags.writeable = False
    found = unpacked((table, arrays))["g"]["t"]
    found += 1
    assert torch.equal(unpacked((table, arrays))["g"]["t"], torch.ones(3))


def test_gradients_stay_at_home() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert not unpacked(packed({"g": {"w": weight}}))["g"]["w"].requires_grad


def test_nothing_is_nothing() -> None:
    assert unpacked(packed({})) == {}
    assert nbytes(packed({"weights": {}})) == 0
