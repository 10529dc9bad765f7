"""What the figure of `network.py` is made of, on made-up rounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from network import above, seconds


def test_the_first_round_does_not_count_and_all_phases_of_the_others_do(tmp_path: Path) -> None:
    lines = [{"round": n, "train": 4.0 - n, "aggregate": 0.5, "evaluate": 1.0, "clients": {}} for n in range(3)]
    (tmp_path / "timing.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert seconds(tmp_path) == [4.5, 3.5]


def test_what_training_takes_is_taken_off() -> None:
    assert above([2.0, 3.0], [0.5, 0.4, 9.0]) == [1.5, 2.5]
