"""A small interpreter of Triton's language on the CPU, for the arithmetic of kernels where there is no GPU.

Blocks are tensors, programs run one after another, and a pointer is a tensor with a place in it. It says nothing about
what Triton's compiler accepts: the tests marked `gpu` do.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_program: dict[str, tuple[int, ...]] = {}


class Pointer:
    def __init__(self, memory: Tensor, place: Tensor | int = 0) -> None:
        self.memory, self.place = memory, place

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.place + offset)


def _memory(tensor: Tensor) -> Tensor:
    """From the tensor's first value to the end of its storage, as it lies there."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((size,), (1,))


def _inside(pointer: Pointer, mask: Any) -> tuple[Tensor, Tensor]:
    place = torch.as_tensor(pointer.place)
    return place, torch.ones_like(place, dtype=torch.bool) if mask is None else torch.broadcast_to(mask, place.shape)


def load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    place, inside = _inside(pointer, mask)
    values = pointer.memory[torch.where(inside, place, 0)]
    return torch.where(inside, values, torch.full_like(values, other))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    place, inside = _inside(pointer, mask)
    values = torch.broadcast_to(torch.as_tensor(value), place.shape)
    pointer.memory[place[inside]] = values[inside].to(pointer.memory.dtype)


def _pair(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


class Kernel:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            kwargs.pop("num_warps", None)
            given = inspect.signature(self.function).bind(*args, **kwargs).arguments
            compiled = {name for name in given if name.isupper()}
            values = {name: v if name in compiled else _argument(v) for name, v in given.items()}
            for program in product(*map(range, grid)):
                _program.update(place=program, grid=grid)
                self.function(**values)

        return launch


def _argument(value: Any) -> Any:
    return Pointer(_memory(value)) if isinstance(value, Tensor) else torch.tensor(value)


def jit(function: Any = None, **_: Any) -> Any:
    return Kernel if function is None else Kernel(function)


@contextmanager
def triton() -> Iterator[None]:
    """Inside, `import triton` finds this, and modules of kernels are imported anew."""
    language = ModuleType("triton.language")
    members: dict[str, Any] = {
        "constexpr": int,
        "float32": torch.float32,
        "int64": torch.int64,
        "program_id": lambda axis: torch.tensor(_program["place"][axis]),
        "num_programs": lambda axis: torch.tensor(_program["grid"][axis]),
        "arange": torch.arange,
        "zeros": torch.zeros,
        "load": load,
        "store": store,
        "sum": lambda x, axis: x.sum(dim=axis),
        "where": torch.where,
        "sqrt": torch.sqrt,
        "sigmoid": torch.sigmoid,
        "maximum": _pair(torch.maximum),
        "minimum": _pair(torch.minimum),
    }
    vars(language).update(members)
    package = ModuleType("triton")
    vars(package).update(jit=jit, language=language)
    kept = {name: module for name, module in sys.modules.items() if _is_of_kernels(name)}
    for name in kept:
        del sys.modules[name]
    sys.modules |= {"triton": package, "triton.language": language}
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_of_kernels(name)]:
            del sys.modules[name]
        sys.modules |= kept


def _is_of_kernels(name: str) -> bool:
    return name.partition(".")[0] == "triton" or name.startswith("fedkeel.nn.kernels.triton_")
