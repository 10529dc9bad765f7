"""Freed memory stays with the process, where the C library can be told so."""

from __future__ import annotations

import ctypes
import resource
import subprocess
import sys

import pytest

from fedkeel.engine.executors.processes import keep_freed_memory

FAULTS = """
import resource, sys, torch
from fedkeel.engine.executors.processes import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep" and not keep_freed_memory():
    print("cannot")
    raise SystemExit

def step():
    tensors = [torch.ones(2 << 20) for _ in range(8)]  # 8 MiB each

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    if done.stdout.strip() == "cannot":
        pytest.skip("this C library has no mallopt")
    return int(done.stdout)


@pytest.mark.slow
def test_pages_of_freed_tensors_are_not_faulted_in_again() -> None:
    pages = 3 * 8 * (8 << 20) // resource.getpagesize()
    assert faults("keep") < pages / 10


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert keep_freed_memory() is False
