"""Lines of a ledger, by hand, for a small recipe."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedkeel.experiments.recipes import Recipe, parse

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from ledger import Line, version_of

RECIPE = """
paper = "HBN"
table = "Table 0"
caption = "Two methods on two domains"
measure = "Accuracy in %"
protocol = "Section 0"
seeds = [0, 1, 2]
columns = [
    { group = "digits", label = "scan", domain = "scan" },
    { group = "digits", label = "paper", domain = "paper" },
    { group = "digits", label = "Avg.", average = true },
]
rows = [{ label = "FedAvg", method = "fedavg" }, { label = "GN", method = "gn" }]
[base]
data = "digits-shift"
rounds = 2
subsample = 10
batch_size = 5
model = "simple_cnn(width=2)"
device = "cpu"
[published]
FedAvg = "10.0 20.0 15.0"
GN     = "30.0 40.0 35.0"
"""


def small(text: str = RECIPE) -> Recipe:
    return parse("small", text)


def line(row: str, column: str, seed: int, value: float, recipe: Recipe | None = None, **other: Any) -> Line:
    recipe = recipe or small()
    place = next((r, c) for r, c in recipe.cells() if (r.label, c.name) == (row, column))
    config = recipe.config(*place)
    made = Line(
        recipe=recipe.name,
        row=row,
        column=column,
        seed=seed,
        rounds=config.rounds,
        of=config.rounds,
        rule="last",
        results={"last": value, "best-round": value + 1},
        version=version_of(recipe, *place),
        seconds=10.0,
        device="a card",
        torch="2",
        date="2026-01-01",
    )
    return replace(made, **other)
