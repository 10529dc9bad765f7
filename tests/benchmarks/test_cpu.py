"""What `fedkeel bench` is told of a row against another library, from the figures of its sides."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from cpu import compared


def test_the_faster_way_to_use_the_other_library_counts() -> None:
    figures = {
        "fedkeel": {"round_s": 2.0},
        "pfl, 2 threads": {"round_s": 5.0, "ratio": 2.5, "lowest": 2.4, "highest": 2.6},
        "pfl, torchrun": {"round_s": 4.0, "ratio": 2.0, "lowest": 1.9, "highest": 2.2},
    }
    (result,) = compared(figures)
    assert (result["other"], result["ratio"], result["ratios"]) == ("pfl, torchrun", 2.0, [1.9, 2.2])
    assert (result["our_speed"], result["other_speed"]) == (625.0, 312.5)  # 10 clients of 125 steps
    assert result["aim"] == 1.5


def test_flower_is_compared_by_the_round_and_by_the_command() -> None:
    figures = {
        "fedkeel": {"round_s": 1.0, "command_s": 25.0},
        "flower": {"round_s": 3.0, "command_s": 200.0, "ratio_of_round_s": 3.0, "ratio_of_command_s": 8.0},
    }
    by_round, by_command = compared(figures)
    assert (by_round["ratio"], by_round["aim"]) == (3.0, 2.0)
    assert (by_command["ratio"], by_command["aim"]) == (8.0, 4.0)
    assert by_command["work"] == "20 rounds from the command line"
