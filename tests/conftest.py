"""What the tests share: a tiny federation, a tiny model, and timm where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, settings

from fedkeel.data.federation import Federation
from fedkeel.models import Classifier
from tests import tiny

torch.set_num_threads(1)  # the tests run in several processes, and the tensors are small

# How long an example takes is a matter of the machine, not of what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

_LIBRARIES: list[torch.library.Library] = []


@pytest.fixture(autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command remembers for its user stays out of the home of whoever runs the tests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))


@pytest.fixture
def tiny_federation() -> Callable[..., Federation]:
    """Makes federations by hand: domains, missing classes, unequal sizes. See `tests.tiny.federation`."""
    return tiny.federation


@pytest.fixture
def tiny_model() -> Callable[..., Classifier]:
    """Makes a tiny network with batch norm. See `tests.tiny.model`."""
    return tiny.model


@pytest.fixture(scope="session")
def timm_ready() -> None:
    """timm imports torchvision, whose wheel may be built for another torch than the one here.

    Its operators are then missing and `import torchvision` fails; no model here needs them, so their schemas suffice.
    """
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
