"""Do two versions of Fedkeel train to the same bits? For a rebuild that must not change a result.

    python tools/frozen.py digests > before.json        # with the package of one version on PYTHONPATH
    python tools/frozen.py compare before.json          # with that of the other: says what differs

Every method, compositions, optimisers, schedules and robust rules: four small rounds under `serial` of a federation
whose looks differ and of one whose labels do. Of each run the digests of its model and of its metrics are kept. Bits
hold for one machine and one build of torch, so digests are compared where they were made and are not committed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import fedkeel
from fedkeel.methods import METHODS

SMALL = "(train_transform='resize(size=16)+normalise', test_transform='resize(size=16)+normalise')"
LOOKS = {"data": f"digits-shift{SMALL}", "unseen": "street", "subsample": 40}
LABELS = {"data": f"digits-shift{SMALL}", "partition": "dirichlet(alpha=0.3, clients=6)"}
SETTINGS: dict[str, Any] = {
    "model": "simple_cnn(width=4)",
    "rounds": 4,
    "batch_size": 8,
    "participation": 0.75,
    "evaluate_with": "both",
    "executor": "serial",
    "threads": 1,
    "seed": 3,
}
COMPOSED = (
    *("fedprox+greg", "scaffold+hbn", "fedwon+hbn", "fedadam+fedprox"),
    *("fedbn+univarfl", "moon+gn", "fedplvm+greg", "fedavgm+silobn"),
)
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw", "learning_rate": 0.001},
    "rmsprop, cosine, clipped": {
        "optimizer": "rmsprop",
        "learning_rate": 0.001,
        "schedule": "cosine",
        "clip_norm": 1.0,
    },
    "exponential, drop_last": {"schedule": "exponential", "drop_last": True, "weight_decay": 1e-4},
    "warm-up, focal": {"schedule": "warmup(rounds=2, then=cosine)", "loss": "focal(gamma=2)"},
    "two epochs, uniform": {"local_epochs": 2, "weighting": "uniform", "batch_size": 1},
    "best validation": {"result": "best-validation", "evaluate_every": 2, "metrics": "auc"},
    "calibrated": {"evaluate_with": "all", "site_images": 16},
    "trimmed mean": {"robust": "trimmed-mean(share=0.34)"},
    "norm-clip and median": {"robust": "norm-clip+median"},
    "krum": {
        "robust": "krum",
        "participation": 1.0,
        "subsample": 0,
        "partition": "dirichlet(alpha=1, clients=6)",
        "unseen": "",
    },
    "mlp": {"model": "mlp"},
    "resnet": {"model": "resnet10", "rounds": 2},
}


def runs() -> dict[str, dict[str, Any]]:
    wanted = {
        f"{method}, {shift}": {"method": method, **data}
        for method in (*sorted(entry.name for entry in METHODS), *COMPOSED)
        for shift, data in (("looks", LOOKS), ("labels", LABELS))
    }
    for shift in ("looks", "labels"):
        wanted[f"central, {shift}"]["participation"] = 1.0
    return wanted | {name: {"method": "fedavg", **LOOKS, **options} for name, options in OPTIONS.items()}


def digest(options: dict[str, Any]) -> dict[str, str]:
    """Of what a run left, or the sentence with which it was refused."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = fedkeel.simulate(directory=f"{folder}/run", verbose=False, **{**SETTINGS, **options})
        except fedkeel.FedkeelError as error:
            return {"refused": str(error)}
        tensors = safetensors.torch.load_file(run.directory / "model.safetensors")
        model = b"".join(name.encode() + tensors[name].numpy().tobytes() for name in sorted(tensors))
        metrics = (run.directory / "metrics.jsonl").read_bytes()
        return {"model": hashlib.sha256(model).hexdigest()[:16], "metrics": hashlib.sha256(metrics).hexdigest()[:16]}


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("fedkeel").setLevel(logging.ERROR)
    before = json.loads(Path(sys.argv[2]).read_text()) if sys.argv[1] == "compare" else None
    now, differ = {}, 0
    for name, options in runs().items():
        if before is not None and name not in before:
            continue
        now[name] = digest(options)
        if before is not None and now[name] != before[name]:
            differ += 1
            print(f"{name}: {before[name]} -> {now[name]}", flush=True)
    if before is None:
        print(json.dumps(now, indent=1))
    else:
        print(f"{len(now) - differ} of {len(before)} runs have the same bits.")
        sys.exit(differ > 0)


if __name__ == "__main__":
    main()
