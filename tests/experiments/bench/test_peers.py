"""Rows against other libraries: what is told where they are not there, and how the script's figures are read."""

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


def test_the_faster_way_to_use_the_other_library_counts() -> None:
    lines = [
        {"side": "fedkeel", "round_s": 2.0},
        {"side": "pfl, 2 threads", "round_s": 5.0, "ratio": 2.5, "lowest": 2.4, "highest": 2.6},
        {"side": "pfl, torchrun", "round_s": 4.0, "ratio": 2.0, "lowest": 1.9, "highest": 2.2},
    ]
    (result,) = peers.compared(ROWS["pfl"], lines)
    assert (result["other"], result["ratio"], result["ratios"]) == ("pfl, torchrun", 2.0, (1.9, 2.2))
    assert (result["our_speed"], result["other_speed"]) == (625.0, 312.5)  # 10 clients of 125 steps
    assert result["aim"] == 1.5


def test_flower_is_compared_by_the_round_and_by_the_command() -> None:
    lines = [
        {"side": "fedkeel", "round_s": 1.0, "command_s": 25.0},
        {"side": "flower", "round_s": 3.0, "command_s": 200.0, "ratio_of_round_s": 3.0, "ratio_of_command_s": 8.0},
    ]
    by_round, by_command = peers.compared(ROWS["flower"], lines)
    assert (by_round["ratio"], by_round["aim"]) == (3.0, 2.0)
    assert (by_command["ratio"], by_command["aim"]) == (8.0, 4.0)
    assert "20 rounds from the command line" in by_command["work"]


def test_a_script_that_fails_is_a_reason_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "cpu.py"
    script.write_text("raise SystemExit('no ray here')")
    monkeypatch.setattr(peers, "SCRIPT", script)
    with pytest.raises(FedkeelError, match="did not finish: no ray here"):
        peers.measure(ROWS["flower"], quick=True)
