"""The example of a diagnostic of one's own."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedkeel import FedkeelError, analysis
from fedkeel.registry import discover
from tests import tiny
from tests.analysis.by_hand import by_round, moved, recorded_run

CODE = (Path(__file__).parents[2] / "examples" / "add" / "client_drift.py").read_text()


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    assert "client-drift" not in analysis.DIAGNOSTICS
    yield
    del analysis.DIAGNOSTICS._entries["client-drift"]


def test_a_diagnostic_outside_of_the_package_is_recorded_and_shown(tmp_path: Path) -> None:
    exec(compile(CODE, "client_drift.py", "exec"), {"__name__": "client_drift"})
    run, seen = recorded_run(tmp_path / "run", "client-drift")
    document = analysis.run("client-drift", run)
    for round, found in by_round(document, "distance by client").items():
        kept = seen.rounds[round]
        assert found == pytest.approx({name: moved(kept.sent, update) for name, update in kept.updates.items()})
    assert document["figures"][0]["key"]["label"] == "client drift"
    stored = json.loads((run.directory / "diagnostics" / "client-drift.json").read_text())
    assert stored == document


def test_after_a_run_it_says_what_to_do(tmp_path: Path) -> None:
    exec(compile(CODE, "client_drift.py", "exec"), {"__name__": "client_drift"})
    run = tiny.run(tmp_path / "run", rounds=1)
    with pytest.raises(FedkeelError, match="--record client-drift"):
        analysis.run("client-drift", run, federation=tiny.federation(), model=tiny.model())


def test_the_file_in_a_folder_of_diagnostics_is_found_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a package that says of itself what `fedkeel.analysis` says: `discover(__name__)`."""
    folder = tmp_path / "more_diagnostics"
    folder.mkdir()
    (folder / "__init__.py").write_text("from fedkeel.registry import discover\n\ndiscover(__name__)\n")
    (folder / "client_drift.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("more_diagnostics")
    try:
        assert analysis.build("client-drift").title == "How far the clients' weights have moved"
    finally:
        for name in ("more_diagnostics", "more_diagnostics.client_drift"):
            sys.modules.pop(name, None)


def test_the_package_finds_its_own_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A further folder of `fedkeel.analysis` itself, with the file in it."""
    (tmp_path / "client_drift.py").write_text(CODE)
    monkeypatch.setattr(analysis, "__path__", [*analysis.__path__, str(tmp_path)])
    try:
        discover("fedkeel.analysis")
        assert "client-drift" in analysis.DIAGNOSTICS
    finally:
        sys.modules.pop("fedkeel.analysis.client_drift", None)
