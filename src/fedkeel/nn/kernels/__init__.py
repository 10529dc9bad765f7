"""What a GPU needs of its own: Triton kernels in place of many small ones of PyTorch.

| kernel | what it computes | for |
|---|---|---|
| `standardise` | the standardised weight of a convolution, FedWon Eq. 3 | `nn.ScaledWSConv2d` |
| `hybrid` | HBN's mixture of statistics, Eq. 9, with the sums over the activation | `nn.HybridBatchNorm` |
| `paired` | batch norm of two halves of a batch, each with statistics of its own | GReg, `nn.paired_batch_norm` |

Beside each stands plain PyTorch code that says the same. It runs on a CPU, where Triton is missing or does not work,
under a compiler, and for what is not float32. `benchmarks/kernels.py` measures what each kernel gains.
"""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedkeel.errors import FedkeelError, first_line, nearest

log = logging.getLogger("fedkeel")
NAMES = ("standardise", "hybrid", "paired")
_off: set[str] = set()
_works: dict[int, bool] = {}  # by the index of a device


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Inside, these kernels are not launched, nor captured into graphs: plain PyTorch does what they do."""
    for name in names:
        if name not in NAMES:
            raise FedkeelError(f"There is no kernel '{name}': {nearest(name, NAMES)}")
    added = set(names) - _off
    _off.update(added)
    try:
        yield
    finally:
        _off.difference_update(added)


def is_on(name: str) -> bool:
    return name not in _off


def usable(name: str, first: Tensor, *others: Tensor | None) -> bool:
    """Whether this kernel can be launched for these tensors: all float32, on the current GPU, where Triton works."""
    device = first.device
    if not first.is_cuda or torch.compiler.is_compiling() or name in _off:
        return False
    if not all(t is None or (t.dtype == torch.float32 and t.device == device) for t in (first, *others)):
        return False
    return device.index == torch.cuda.current_device() and _launches(device)


def triton_kernels(module: str) -> Any:
    """The module of kernels of this name: imported only where it is used, for Triton may be missing."""
    return importlib.import_module(f"{__name__}.{module}")


def _launches(device: torch.device) -> bool:
    if device.index not in _works:
        if torch.cuda.is_current_stream_capturing():  # no place for a first try
            return False
        _works[device.index] = _try(device)
    return _works[device.index]


def _try(device: torch.device) -> bool:
    """Triton may be missing, and where it is not, it needs a C compiler and a GPU that is not too old."""
    try:
        weight, gain = torch.tensor([[-1.0, 1.0]], device=device), torch.ones(1, device=device)
        out, moments = torch.empty_like(weight), torch.empty(3, device=device)
        kernel = triton_kernels("triton_weights").standardise_forward
        kernel[(1,)](weight, gain, out, moments, 1, 2, 1e-4, BLOCK=32)
        return abs(float(out[0, 1]) - 0.5) < 1e-5
    except Exception as error:
        log.info("Triton kernels are not used (%s: %s).", type(error).__name__, first_line(error))
        return False
