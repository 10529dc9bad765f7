"""timm imports torchvision, whose wheel may be built for another torch than the one here.

Its operators are then missing and `import torchvision` fails; no model here needs them, so their schemas suffice.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

_LIBRARIES: list[torch.library.Library] = []


@pytest.fixture(scope="session")
def timm_ready() -> None:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision, which timm needs, is not installed")
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)  # an operator lives as long as the library that defined it
