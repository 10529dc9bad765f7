"""Rows against other libraries: what is told where they are not there, and how the script's results are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkeel.errors import FedkeelError
from fedkeel.experiments.bench import peers
from fedkeel.experiments.bench.rows import ROWS


def test_without_its_environment_a_row_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.PLACE, str(tmp_path))
    assert "--make-environments" in peers.reason_to_skip(ROWS["pfl"])
    (tmp_path / "pfl").mkdir()
    assert peers.reason_to_skip(ROWS["pfl"]) == ""
    assert peers.reason_to_skip(ROWS["flower"]) != ""


def test_without_a_checkout_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SCRIPT", tmp_path / "benchmarks" / "cpu.py")
    assert "checkout" in peers.reason_to_skip(ROWS["pfl"])


def test_the_results_are_what_the_script_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "cpu.py"
    script.write_text(
        "import json, sys\n"
        "print('warming up')\n"
        "print(json.dumps({'work': 'a round', 'ratio': 2.0, 'ours': ' '.join(sys.argv[1:4])}))\n"
    )
    monkeypatch.setattr(peers, "SCRIPT", script)
    (result,) = peers.measure(ROWS["pfl"], quick=True)
    assert result == {"work": f"{ROWS['pfl'].model}, a round", "ratio": 2.0, "ours": "pfl --results --quick"}


def test_a_script_that_fails_is_a_reason_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "cpu.py"
    script.write_text("raise SystemExit('no ray here')")
    monkeypatch.setattr(peers, "SCRIPT", script)
    with pytest.raises(FedkeelError, match="did not finish: no ray here"):
        peers.measure(ROWS["flower"], quick=True)
