from __future__ import annotations

import errno
import signal

import pytest
import torch

from fedkeel import cli
from fedkeel.errors import ShortageError, death, shortage, shortages_explained

SHORTAGES = [
    MemoryError("Unable to allocate 24.0 GiB for an array with shape (9, 9)"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 25769803776 bytes."),
    RuntimeError("[enforce fail] data. DefaultCPUAllocator: not enough memory: you tried to allocate 96 bytes."),
    RuntimeError("std::bad_alloc"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: str(error)[:30])
def test_too_little_memory_is_one_sentence_that_says_what_needs_less(error: Exception) -> None:
    sentence = shortage(error)
    assert sentence.startswith("The memory of this machine does not suffice, or that of its GPU: give")
    assert "--workers" in sentence
    assert "--batch-size" in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("you tried to allocate 5 bytes, which is not enough memory"),
        KeyError("out of memory"),
    ],
    ids=str,
)
def test_what_has_another_cause_stays_what_it_is(error: Exception) -> None:
    assert shortage(error) == ""
    with pytest.raises(type(error)) as caught, shortages_explained():
        raise error
    assert caught.value is error


def test_torch_itself_is_understood() -> None:
    with pytest.raises(ShortageError, match="does not suffice"), shortages_explained():
        torch.empty(2**60, dtype=torch.uint8)


def test_a_command_says_it_and_ends_with_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def too_much(*_: object) -> int:
        raise MemoryError

    monkeypatch.setattr("fedkeel.cli.run.run", too_much)
    assert cli.main(["run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fedkeel: The memory of this machine does not suffice")
    assert said.count("\n") == 1


def test_a_process_that_the_system_ended_may_have_had_too_much() -> None:
    assert death(-signal.SIGKILL, "--jobs") == "died (signal SIGKILL), as when memory runs out: give fewer --jobs"
    assert death(-signal.SIGBUS, "--workers").endswith("give fewer --workers")
    assert death(-signal.SIGSEGV, "--jobs") == "died (signal SIGSEGV)"
    assert death(3, "--jobs") == "died (exit code 3)"
