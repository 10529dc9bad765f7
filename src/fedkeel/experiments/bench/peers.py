"""The rows against other libraries. `benchmarks/cpu.py` of a checkout measures them, each in a virtual environment of
its own: none of them is a dependency of Fedkeel."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fedkeel.errors import FedkeelError
from fedkeel.experiments.bench.rows import Benchmark

SCRIPT = Path(__file__).resolve().parents[4] / "benchmarks" / "cpu.py"
FOLDERS = {"pfl": "pfl", "flower": "flwr"}
PLACE = "FEDKEEL_BENCH_ENVIRONMENTS"


def reason_to_skip(row: Benchmark) -> str:
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


def measure(row: Benchmark, *, quick: bool) -> list[dict[str, Any]]:
    """Fields of a `Result` for each thing that is compared, against the fastest way to use the other library."""
    command = [sys.executable, str(SCRIPT), row.peer, "--results", *(["--quick"] if quick else [])]
    command += ["--environments", str(environments())]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"work"')]
    if done.returncode or not results:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise FedkeelError(f"benchmarks/cpu.py {row.peer} did not finish: {last}")
    return [{**fields, "work": f"{row.model}, {fields['work']}"} for fields in results]
