"""A round over the network, above the training itself: a server and three sites as processes on loopback, with TLS.

    python benchmarks/network.py [--rounds 10] [--repeats 3]

Every round trains `simple_cnn` at each site, which has 12 to 36 images of 16 px, and tests it there: two exchanges with
each site. What `serial` takes for the same training and tests in one process is taken off. The first round is left out:
in it sites build the network.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.deploy.real import SITES, Loopback, draw_images


def seconds(directory: Path) -> list[float]:
    """Of each round but the first."""
    lines = [json.loads(line) for line in (directory / "timing.jsonl").read_text().splitlines()]
    return [sum(line[phase] for phase in ("train", "aggregate", "evaluate")) for line in lines[1:]]


def above(over_network: Sequence[float], serial: Sequence[float]) -> list[float]:
    """Seconds of each round that the training and the tests of all sites, one after another, do not account for."""
    return [seconds - statistics.median(serial) for seconds in over_network]


def measure(rounds: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder, Loopback(Path(folder)) as loopback:
        draw_images(loopback.place / "images")
        loopback.server("run", rounds=rounds)
        loopback.until(lambda: (loopback.place / "kits/sites/west/local/comm_config.json").exists())
        for site in SITES:
            loopback.site(site)
        if loopback.finish():
            raise SystemExit(loopback.log("server"))
        torch.set_num_threads(1)  # as the sites do
        loopback.serial("serial", rounds=rounds)
        return above(seconds(loopback.place / "run"), seconds(loopback.place / "serial"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3, help="federations, one after another")
    options = parser.parse_args()
    taken = []
    for _ in range(options.repeats):
        load = os.getloadavg()[0]
        taken += measure(options.rounds)
        print(
            f"so far {len(taken)} rounds, median {statistics.median(taken):.2f} s (load {load:.1f} before)", flush=True
        )
    low, high = min(taken), max(taken)
    print(f"a round above the training itself: {statistics.median(taken):.2f} s ({low:.2f} to {high:.2f}), aim 1 s")


if __name__ == "__main__":
    main()
