"""Run directories made by hand, with numbers that a test can compute again, and a diagnostic of each kind of figure."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from fedkeel.config import Config

DOMAINS = ("photo", "sketch", "clipart")


def accuracy(method: str, seed: int, domain: int, round: int, rounds: int) -> float:
    """Rises with the rounds; different for each method, seed and domain."""
    level = (
        0.55 + 0.3 * random.Random(method).random() - 0.06 * domain + 0.02 * random.Random(f"{method} {seed}").random()
    )
    wave = 0.012 * math.sin(1.7 * round + seed)
    return max(0.0, min(1.0, level * (1 - math.exp(-4 * (round + 1) / rounds)) + wave))


def make_run(
    directory: Path,
    method: str = "fedavg",
    *,
    seed: int = 0,
    rounds: int = 8,
    done: int | None = None,
    domains: tuple[str, ...] = DOMAINS,
    unseen: tuple[str, ...] = (),
    skipped: tuple[int, ...] = (),
    **options: Any,
) -> Path:
    """A run of `rounds` rounds, finished unless it was stopped after `done`; `skipped` rounds were not recorded."""
    directory.mkdir(parents=True)
    config = Config(method=method, seed=seed, rounds=rounds, **{"data": "digits-shift", **options})
    (directory / "config.toml").write_text(config.to_toml())
    lines: list[dict[str, Any]] = []
    scores: dict[str, Any] = {}
    for round in range(rounds if done is None else done):
        if round in skipped:
            continue
        values = {name: accuracy(method, seed, i, round, rounds) for i, name in enumerate(domains)}
        seen = [value for name, value in values.items() if name not in unseen]
        average = sum(seen) / len(seen)
        scores = {
            "domains": values,
            "average": average,
            "samples": average,
            "unseen": sum(values[name] for name in unseen) / len(unseen) if unseen else None,
            "loss": 2.3 * (1 - average),
        }
        lines.append({"kind": "scores", "round": round, "split": "test", "statistics": "global", **scores})
        traffic = {"bytes_up": 500_000, "bytes_down": 500_000, "questions": 0}
        lines.append(
            {"kind": "round", "round": round, "clients": 3, "dropped": 0, "loss": 2.5 * (1 - average), **traffic}
        )
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done is None:
        summary = {
            "method": method,
            "result": "last",
            "round": rounds - 1,
            "rounds": rounds,
            "accuracy": scores["average"],
            "samples_accuracy": scores["samples"],
            "unseen": scores["unseen"],
            "domains": scores["domains"],
            "unseen_domains": list(unseen),
            "loss": scores["loss"],
            "statistics": "global",
            "bytes_up": 500_000 * rounds,
            "bytes_down": 500_000 * rounds,
            "questions": 0,
            "dropped_updates": 0,
            "executor": "serial",
            "device": "cpu",
            "seconds": 12.5 + seed,
        }
        (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def make_comparison(directory: Path, methods: tuple[str, ...], seeds: int = 2, **options: Any) -> Path:
    """A directory as `fedkeel compare` leaves it."""
    runs = [
        {"method": m, "seed": s, "directory": f"row{i}/seed{s}"} for i, m in enumerate(methods) for s in range(seeds)
    ]
    for run in runs:
        make_run(directory / str(run["directory"]), str(run["method"]), seed=int(str(run["seed"])), **options)
    (directory / "comparison.json").write_text(json.dumps({"runs": runs}))
    return directory


def add_diagnostics(directory: Path, seed: int = 0, points: int = 120) -> None:
    """One file with a figure of each kind, and one whose lines are on a logarithmic axis."""
    chance = random.Random(seed)
    rounds = list(range(8))
    layers = ("layer1.0.bn1", "layer2.0.bn1", "layer3.0.bn1")
    classes, domains = ("dog", "horse", "house", "person"), DOMAINS
    angle = {name: 2 * math.pi * i / len(classes) for i, name in enumerate(classes)}
    chosen = [(chance.choice(classes), chance.choice(domains)) for _ in range(points)]
    every_kind = {
        "name": "every-kind",
        "title": "A figure of every kind",
        "what": "One of each, so that a reader of this page can see what they look like.",
        "paper": "GReg, Figure 1",
        "figures": [
            {
                "kind": "lines",
                "title": "How far the clients' statistics lie apart",
                "x_label": "round",
                "y_label": "distance",
                "series": [
                    {
                        "name": name,
                        "x": rounds,
                        "y": [None if r == 3 and i == 1 else 1 / (r + 1 + i) + 0.02 * chance.random() for r in rounds],
                    }
                    for i, name in enumerate(layers)
                ],
            },
            {
                "kind": "bars",
                "title": "Accuracy under two kinds of statistics",
                "y_label": "accuracy, %",
                "categories": list(domains),
                "series": [
                    {"name": "global", "values": [71.0, 64.2, 55.5], "spread": [1.2, 0.8, 2.4]},
                    {"name": "batch", "values": [78.3, None, 66.1], "spread": None},
                ],
            },
            {
                "kind": "matrix",
                "title": "Similarity of the clients' updates",
                "x_label": "client",
                "y_label": "client",
                "rows": list(domains),
                "columns": list(domains),
                "values": [[1.0, 0.31, -0.42], [0.31, 1.0, None], [-0.42, 0.12, 1.0]],
            },
            {
                "kind": "points",
                "title": "Features in two dimensions",
                "x_label": "first component",
                "y_label": "second component",
                "x": [3 * math.cos(angle[c]) + 0.5 * domains.index(d) + chance.gauss(0, 0.5) for c, d in chosen],
                "y": [3 * math.sin(angle[c]) + 0.5 * domains.index(d) + chance.gauss(0, 0.5) for c, d in chosen],
                "class": [c for c, _ in chosen],
                "domain": [d for _, d in chosen],
            },
            {
                "kind": "table",
                "title": "The largest shifts",
                "note": "From the last round.",
                "columns": ["layer", "channel", "shift"],
                "rows": [["layer1.0.bn1", 3, 0.81], ["layer2.0.bn1", 12, 0.4], ["layer3.0.bn1", 7, 1.25]],
            },
        ],
    }
    norms = [{"name": "client", "x": rounds, "y": [10.0 ** (-r / 2) for r in rounds]}]
    logarithmic = {
        "name": "gradient-norms",
        "title": "Norms of the gradients",
        "what": "They fall by powers of ten.",
        "paper": "FedCoda, Figure 3",
        "figures": [
            {
                "kind": "lines",
                "title": "Norm",
                "x_label": "round",
                "y_label": "norm",
                "log_y": True,
                "series": norms,
                "key": {"label": "gradient norm", "value": 0.01 * (1 + seed), "better": "low"},
            }
        ],
    }
    folder = directory / "diagnostics"
    folder.mkdir(exist_ok=True)
    for document in (every_kind, logarithmic):
        (folder / f"{document['name']}.json").write_text(json.dumps(document))


def add_cost(directory: Path) -> None:
    """What the report counts among the circumstances, which it folds."""
    bars = {"kind": "bars", "title": "MB of a round", "y_label": "MB", "categories": ["up", "down"]}
    figure = {**bars, "series": [{"name": "MB", "values": [1.5, 4.5]}]}
    document = {"name": "cost", "title": "What was sent", "what": "By direction.", "figures": [figure]}
    (directory / "diagnostics" / "cost.json").write_text(json.dumps(document))
