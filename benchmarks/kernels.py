"""What each hand-written GPU kernel gains from end to end: one client's local epoch with it and without.

    python benchmarks/kernels.py [kernel ...] [--row epoch] [--precisions tf32 bf16] [--cycles 5]

One local epoch runs through the executor `cuda`, with the method that uses the kernel. The two
sides are warm and take turns; the figures are their median milliseconds and the median of the ratios of neighbouring
turns. Prints a Markdown table, the rows of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace

import torch
from gpu import ROWS, Executed, Row, made_up

from fedkeel.errors import unknown
from fedkeel.nn import kernels

USERS = {"standardise": "fedwon", "hybrid": "hbn", "paired": "greg"}
HEADER = "| kernel | user | on, ms | off, ms | gain |\n|---|---|---:|---:|---:|"


def compare(kernel: str, row: Row, cycles: int) -> tuple[float, float, float]:
    """Milliseconds of a local epoch with the kernel and without, and the second over the first."""
    federation = made_up(row)
    on = Executed(row, federation, "cuda")
    with kernels.without(kernel):  # what a side has captured stays as it is
        off = Executed(row, federation, "cuda")
    turns = []
    for _ in range(cycles):
        with_it = 1000 * on.round()
        with kernels.without(kernel):
            turns.append((with_it, 1000 * off.round()))
    on.close()
    off.close()
    with_it, without_it = (statistics.median(times) for times in zip(*turns, strict=True))
    return with_it, without_it, statistics.median(second / first for first, second in turns)


def line(kernel: str, row: Row, measured: tuple[float, float, float]) -> str:
    on, off, gain = measured
    return f"| `{kernel}` | `{row.method}`, {row.work} | {on:.1f} | {off:.1f} | {gain:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", default=list(USERS), metavar="kernel", help=", ".join(USERS))
    parser.add_argument("--row", default="epoch", help="a row of `gpu.py` (default: %(default)s)")
    parser.add_argument("--precisions", nargs="+", default=["tf32", "bf16"], help="default: tf32 bf16")
    parser.add_argument("--cycles", type=int, default=5, help="turns of each side (default: %(default)s)")
    options = parser.parse_args()
    for what, name, known in (*(("kernel", name, USERS) for name in options.kernels), ("row", options.row, ROWS)):
        if name not in known:
            sys.exit(unknown(what, name, known))
    if not torch.cuda.is_available():
        sys.exit("Kernels are measured on a GPU, and torch sees none on this machine.")
    if not kernels.usable("standardise", torch.ones(1, device="cuda")):
        sys.exit("Triton does not run here, so there are no kernels to measure.")
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}\n\n{HEADER}", flush=True)
    for kernel in options.kernels:
        for precision in options.precisions:
            row = replace(ROWS[options.row], method=USERS[kernel], precision=precision)
            print(line(kernel, row, compare(kernel, row, options.cycles)), flush=True)


if __name__ == "__main__":
    main()
