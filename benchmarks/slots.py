"""Any method and executor on the GPU rows of `gpu.py`, each against the usual loop, as lines of JSON.

    python benchmarks/slots.py [row ...] [--executors serial cuda] [--methods fedavg greg]

The usual loop is one client after another, eager PyTorch, data already on the GPU, the same model, batches and
optimiser. Every figure is client-steps per second, measured after two warm-up rounds, with the GPU synchronised.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import torch
from gpu import ROWS, Executed, Row, UsualLoop, made_up

from fedkeel.data.federation import Federation


def executor_speed(row: Row, federation: Federation, executor: str, **options: Any) -> dict[str, float]:
    side = Executed(row, federation, executor, **options)
    speed = side.speed()
    side.close()
    seconds = row.clients * row.steps / speed
    return {"steps_per_second": speed, "first_two_rounds": side.first_two_rounds, "round": seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", nargs="*", default=list(ROWS))
    parser.add_argument("--executors", nargs="+", default=["cuda"])
    parser.add_argument("--methods", nargs="+", default=["fedavg"])
    options = parser.parse_args()
    print(json.dumps({"device": torch.cuda.get_device_name(0), "torch": torch.__version__}), flush=True)
    for name in options.rows:
        row = ROWS[name]
        federation = made_up(row)
        usual = UsualLoop(row, federation).speed()
        print(json.dumps({"row": name, "usual_loop": round(usual)}), flush=True)
        for method in options.methods:
            for executor in options.executors:
                speed = executor_speed(replace(row, method=method), federation, executor)
                ratio = speed["steps_per_second"] / usual
                print(
                    json.dumps(
                        {"row": name, "method": method, "executor": executor, "ratio": round(ratio, 1)}
                        | {key: round(value, 3) for key, value in speed.items()}
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
