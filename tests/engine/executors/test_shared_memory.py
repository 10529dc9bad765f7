from __future__ import annotations

import errno
import os

import pytest
import torch

from fedkeel.engine.executors.shared_memory import SharedTensors
from fedkeel.errors import shortage

GROUPS = {
    "weights": {
        "conv": torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "half": torch.randn(5).to(torch.bfloat16),
    },
    "statistics": {
        "counter": torch.tensor(2**53 + 1),
        "none": torch.empty(0, 3),
        "mask": torch.tensor([True, False, True]),
    },
    "extras": {"transposed": torch.randn(3, 5).double().t(), "expanded": torch.ones(1).expand(7)},
}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("how", ["read", "look"])
def test_every_bit_order_and_shape_comes_back(how: str) -> None:
    segment = SharedTensors()
    segment.write(GROUPS, client="ward", place=[0, 8])
    header, groups = getattr(segment, how)()
    assert header == {"client": "ward", "place": [0, 8]}
    assert list(groups) == list(GROUPS)
    for group, tensors in GROUPS.items():
        assert list(groups[group]) == list(tensors)
        for name, tensor in tensors.items():
            back = groups[group][name]
            assert (back.dtype, back.shape, bits(back)) == (tensor.dtype, tensor.shape, bits(tensor))
            assert back.is_contiguous()


def test_a_process_forked_before_the_first_write_reads_it_and_every_larger_one() -> None:
    segment = SharedTensors()
    (told, tell), (answered, answer) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        for _ in range(3):
            os.read(told, 1)
            groups = segment.look()[1]
            os.write(answer, str(int(groups["weights"]["w"].sum())).encode())
        os._exit(0)
    for size in (10, 10_000, 1_000_000):
        segment.write({"weights": {"w": torch.ones(size)}})
        os.write(tell, b".")
        assert int(os.read(answered, 100)) == size
    os.waitpid(child, 0)


def test_what_a_reader_writes_is_its_own() -> None:
    segment = SharedTensors()
    segment.write({"weights": {"w": torch.zeros(3)}})
    segment.look()[1]["weights"]["w"].fill_(1)
    segment.read()[1]["weights"]["w"].fill_(2)
    assert segment.look()[1]["weights"]["w"].tolist() == [0, 0, 0]


def test_copies_outlast_the_next_write() -> None:
    segment = SharedTensors()
    segment.write({"weights": {"w": torch.zeros(3)}})
    copy = segment.read()[1]["weights"]["w"]
    segment.write({"weights": {"w": torch.ones(3)}})
    assert copy.tolist() == [0, 0, 0]


def test_an_empty_message_is_a_message() -> None:
    segment = SharedTensors()
    segment.write({"memory": {}})
    assert segment.read() == ({}, {})


def test_a_longer_header_moves_the_tensors_behind_it() -> None:
    segment = SharedTensors()
    for length in (0, 55, 56, 57, 10_000):
        segment.write({"weights": {"w": torch.arange(5)}}, text="x" * length)
        header, groups = segment.read()
        assert (len(header["text"]), groups["weights"]["w"].tolist()) == (length, [0, 1, 2, 3, 4])


def test_no_room_is_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryError, match=r"of which this needs \d+ bytes: No space left") as caught:
        SharedTensors().write({"weights": {"w": torch.ones(2**20)}})
    assert "does not suffice for another 4.0 MiB: give fewer --workers" in shortage(caught.value)
