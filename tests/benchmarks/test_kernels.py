"""The measurement of kernels, as far as it goes without a GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedkeel import methods
from fedkeel.nn import kernels

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu import ROWS
from kernels import HEADER, USERS, line

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels.py"


def test_every_kernel_has_a_user_that_is_a_method() -> None:
    assert tuple(USERS) == kernels.NAMES
    assert set(USERS.values()) <= set(methods.METHODS.names())


def test_every_kernel_has_a_place_in_the_documentation() -> None:
    page = (SCRIPT.parents[1] / "docs" / "benchmarks.md").read_text()
    assert all(f"| `{kernel}` |" in page for kernel in kernels.NAMES)


def test_a_line_fits_the_header() -> None:
    row = replace(ROWS["epoch"], method="hbn")
    text = line("hybrid", row, (100.0, 150.0, 1.5))
    assert text == "| `hybrid` | `hbn`, resnet18, 224 px, batch 16, one client, tf32 | 100.0 | 150.0 | 1.50 |"
    assert {text.count("|")} == {part.count("|") for part in HEADER.splitlines()}


@pytest.mark.parametrize(
    ("arguments", "code", "said"), [(["--help"], 0, "--precisions"), (["hybird"], 1, "did you mean 'hybrid'")]
)
@pytest.mark.slow
def test_it_answers_without_a_gpu(arguments: list[str], code: int, said: str) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert said in done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.slow
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "torch sees none" in done.stderr
