"""Wall clock of the whole of HBN's CIFAR-10 cell: 500 rounds, 100 clients, 10 a round, batch 4, evaluation every 10.

    python benchmarks/hbn_cell.py [--method fedavg] [--rounds 500] [--data cifar10]

Without `--data cifar10` the images are random, of CIFAR-10's shapes and numbers, cut by the same Dirichlet partition:
time does not depend on what is in them. `fedkeel bench hbn-cell` is that.
"""

from __future__ import annotations

import argparse
import json

from fedkeel.experiments.bench.sides import run_cell


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--data", dest="data_set", default="random")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    print(json.dumps(run_cell(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
