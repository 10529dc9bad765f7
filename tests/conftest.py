"""What the tests share: a tiny federation, a tiny model, and timm where it is installed."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:  # the process that hands out the tests runs none, and does not wait for torch
    import torch

    from fedkeel.data.federation import Federation
    from fedkeel.models import Classifier

# Tens of thousands of small files come and go: in memory, where there is room, nobody searches a disk for their inodes.
# In a folder there: beside it lies the memory that processes share, at which tests look.
MEMORY, ROOM = Path("/dev/shm"), 4 << 30
if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
    tempfile.tempdir = os.environ["TMPDIR"] = str(MEMORY / f"tests-{os.getuid()}")
    Path(tempfile.tempdir).mkdir(mode=0o700, exist_ok=True)

gc.disable()  # what is imported and collected stays: see `pytest_collection_modifyitems`

# How long an example takes is a matter of the machine, not of what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# No test pulls the plug: what has to reach a disk, and in which order, is asked of the calls (`tests/test_files.py`).
os.fsync = lambda _: None

_LIBRARIES: list[torch.library.Library] = []


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: some tests wait, for a browser, for Ray or for processes of their own."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 1


@pytest.hookimpl(trylast=True)  # after those that are not asked for are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each worker begins with files of slow tests, so that none is left with a long one when the others are done.

    A file stays in one piece, for what its tests share. Workers get equal shares of the list, one after another.
    """
    import torch

    torch.set_num_threads(1)  # the tests run in several processes, and the tensors are small
    gc.freeze()  # nobody looks again and again through thousands of tests, and a forked process copies no page of them
    gc.enable()
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where a machine has no shared memory, `processes` and Ray say so, and their tests are skipped."""
    report = yield
    said = [report.longreprtext, *(text for _, text in report.sections)]
    if report.failed and not MEMORY.is_dir() and any(str(MEMORY) in text for text in said):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: this machine has no {MEMORY}")
    return report


@pytest.fixture(autouse=True)
def own_state(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a command remembers for its user stays out of the home of whoever runs the tests, and a test that is not
    marked as one of a browser has none: else it would fail only where none is installed."""
    if not request.node.get_closest_marker("browser"):
        monkeypatch.setitem(sys.modules, "playwright.sync_api", None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / "state"))


@pytest.fixture
def tiny_federation() -> Callable[..., Federation]:
    """Makes federations by hand: domains, missing classes, unequal sizes. See `tests.tiny.federation`."""
    from tests import tiny

    return tiny.federation


@pytest.fixture
def tiny_model() -> Callable[..., Classifier]:
    """Makes a tiny network with batch norm. See `tests.tiny.model`."""
    from tests import tiny

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
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)  # an operator lives as long as the library that defined it
