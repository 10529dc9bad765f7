"""The rows against other libraries. `benchmarks/cpu.py` of a checkout measures them, each in a virtual environment of
its own: none of them is a dependency of Fedkeel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fedkeel.errors import FedkeelError
from fedkeel.experiments.bench.rows import Row

SCRIPT = Path(__file__).resolve().parents[4] / "benchmarks" / "cpu.py"
FOLDERS = {"pfl": "pfl", "flower": "flwr"}
PLACE = "FEDKEEL_BENCH_ENVIRONMENTS"
STEPS = 125  # of a client in a round of the script's work at batch 4
ROUNDS = 20  # of a whole command
COMMAND_AIM, ROUND_AIM = 4.0, 2.0


def reason_to_skip(row: Row) -> str:
    """Why this row cannot be measured here; empty where it can."""
    if not SCRIPT.exists():
        return "it needs a checkout of the repository, whose benchmarks/cpu.py measures it"
    if not (environments() / FOLDERS[row.peer]).exists():
        return (
            "its virtual environment is not there: run 'python benchmarks/cpu.py --make-environments' in the "
            f"repository first, or set {PLACE} to where they are"
        )
    return ""


def environments() -> Path:
    return Path(os.environ.get(PLACE) or SCRIPT.parent / ".environments")


def measure(row: Row, *, quick: bool) -> list[dict[str, Any]]:
    """Fields of a `Result` for each thing that is compared, against the fastest way to use the other library."""
    effort = (
        ["--samples", "20", "--repeats", "1", "--commands", "1"] if quick else ["--repeats", "3", "--commands", "1"]
    )
    command = [sys.executable, str(SCRIPT), row.peer, "--batches", "4", "--rounds", "1", *effort]
    done = subprocess.run(
        [*command, "--environments", str(environments())], text=True, capture_output=True, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"row"')]
    if done.returncode or len(lines) < 2:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise FedkeelError(f"benchmarks/cpu.py {row.peer} did not finish: {last}")
    return compared(row, lines)


def compared(row: Row, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """From the script's figures: seconds of a round and, for whole commands, of the command."""
    ours, others = lines[0], lines[1:]
    results = []
    for what, seconds, ratio, rounds, aim in (
        ("a round", "round_s", "ratio", 1, row.aim),
        ("a round", "round_s", "ratio_of_round_s", 1, ROUND_AIM),
        (f"{ROUNDS} rounds from the command line", "command_s", "ratio_of_command_s", ROUNDS, COMMAND_AIM),
    ):
        sides = [side for side in others if ratio in side]
        if sides:
            fastest = min(sides, key=lambda side: float(side[ratio]))
            steps = row.clients * STEPS * rounds
            results.append(
                {
                    "work": f"{row.model}, {what}",
                    "other": fastest["side"],
                    "ours": "fedkeel",
                    "other_speed": steps / fastest[seconds],
                    "our_speed": steps / ours[seconds],
                    "ratio": fastest[ratio],
                    "ratios": (fastest.get("lowest", fastest[ratio]), fastest.get("highest", fastest[ratio])),
                    "aim": aim,
                }
            )
    return results
