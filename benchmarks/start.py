"""How long a command takes to begin: `fedkeel --help`, and `fedkeel run` on embedded data to its first local step.

    python benchmarks/start.py [--repeats 5] [--data digits-shift]

Beside them what no command can be faster than: Python alone, and `import torch`. All take turns; the figures are
medians with the lowest and the highest, of the clock and of the CPU (a run's until it ends, its workers' among them).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
# Imported by the run, and inherited by its workers: notes when the first of them has its first gradients.
NOTING = """
import time
from pathlib import Path
from fedkeel import stopping

def note(point, path, done=Path({path!r})):
    if point == stopping.LOCAL_STEP:
        stopping.hook = None
        if not done.exists():
            done.write_text(str(time.perf_counter()))

stopping.hook = note
"""


def timed(command: Sequence[str], clock_of: Path | None = None) -> dict[str, float]:
    """Seconds until the command ends, or until the time in that file; and those of the CPU until it ends."""
    before, began = os.times(), time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, env=environment)
    ended, after = time.perf_counter(), os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": (float(clock_of.read_text()) if clock_of else ended) - began, "cpu": cpu}


def first_step(data: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as temporary:
        code, noted = Path(temporary) / "noting.py", Path(temporary) / "noted"
        code.write_text(NOTING.format(path=str(noted)))
        flags = ["--data", data, "--rounds", "1", "--import", str(code), "--out", str(Path(temporary) / "run")]
        return timed(["-m", "fedkeel", "run", "--quiet", *flags], noted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns of each command")
    parser.add_argument("--data", default="digits-shift")
    options = parser.parse_args()
    rows = {
        "python -c pass": lambda: timed(["-c", "pass"]),
        "fedkeel --help": lambda: timed(["-m", "fedkeel", "--help"]),
        "import torch": lambda: timed(["-c", "import torch"]),
        f"fedkeel run --data {options.data}, to the first step": lambda: first_step(options.data),
    }
    load = os.getloadavg()[0]
    taken = [{name: row() for name, row in rows.items()} for _ in range(options.repeats)]
    for name in rows:
        for clock in ("seconds", "cpu"):
            found = [turn[name][clock] for turn in taken]
            figures = {"median": statistics.median(found), "lowest": min(found), "highest": max(found)}
            rounded = {what: round(value, 3) for what, value in figures.items()}
            print(json.dumps({"command": name, "of": clock, **rounded, "load": load}), flush=True)


if __name__ == "__main__":
    main()
