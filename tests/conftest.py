"""What the tests share: a tiny federation, a tiny model, and timm where it is installed."""

from __future__ import annotations

import importlib.util
import os
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

# No test pulls the plug: what has to reach a disk, and in which order, is asked of the calls (`tests/test_files.py`).
os.fsync = lambda _: None

_LIBRARIES: list[torch.library.Library] = []


@pytest.hookimpl(trylast=True)  # after those that are not asked for are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each worker begins with files of slow tests, so that none is left with a long one when the others are done.

    A file stays in one piece, for what its tests share. Workers get equal shares of the list, one after another.
    """
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    files: dict[object, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    slow = [file for file in files.values() if any(item.get_closest_marker("slow") for item in file)]
    quick = [item for file in files.values() if file not in slow for item in file]
    shares = [[item for file in slow[worker::workers] for item in file] for worker in range(workers)]
    size = -(-len(items) // workers)
    items[:] = []
    for share in shares:
        room = max(size - len(share), 0)
        items += [*share, *quick[:room]]
        del quick[:room]
    items += quick


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
