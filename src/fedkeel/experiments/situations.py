"""Which methods to try when, and what the ledger says of them: what `.ci/choose` and `fedkeel advise` go by.

What was measured is worked out from the ledger, for which the methods of its lines are tried out and which an installed
package does not have. So `.ci/choose` keeps it in `evidence.json` beside this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from glob import escape
from importlib import resources
from typing import NamedTuple

from fedkeel import experiments
from fedkeel.config import Config
from fedkeel.experiments.claims import Claim, judge
from fedkeel.experiments.difference import FEWEST
from fedkeel.experiments.recipes import PERCENT, RecipeColumn
from fedkeel.experiments.results_page import Block
from fedkeel.spec import parse, parse_sum

FILE = "evidence.json"
LABEL, FEATURE, UNSEEN = "Labels differ", "Images look different", "A domain that never trained"
BOTH = "Labels and looks differ"
LABEL_SKEW = ("dirichlet", "shards")


class Situation(NamedTuple):
    """The methods that their papers or pages recommend when this is the shift, and why these."""

    shift: str
    when: str
    methods: tuple[str, ...]
    why: str


SMALL_BATCHES = "one model for all, small batches"
SITUATIONS = (
    Situation(LABEL, "the model has batch norm", ("hbn", "fixbn"), "batch statistics of few classes mislead"),
    Situation(
        LABEL,
        "no batch norm, or clients keep nothing",
        ("univarfl", "fedprox"),
        "local training leads away from the others",
    ),
    Situation(FEATURE, "one model for all, batch norm", ("greg",), "predictions must hold under the statistics of all"),
    Situation(FEATURE, SMALL_BATCHES, ("fedwon", "gn"), "nothing depends on the batch"),
    Situation(FEATURE, "a model for each site", ("fedbn", "silobn"), "each site keeps what fits its images"),
    Situation(FEATURE, "no batch norm", ("fedrdn", "fedfa"), "each site must see the looks of the others"),
    Situation(
        BOTH,
        "one model for all",
        ("fedprox+greg", "fedprox+fedwon", "fedprox+fedrdn"),
        "drift and statistics are different moments of a round",
    ),
    Situation(UNSEEN, "batch norm", ("fedcoda", "greg"), "no site's statistics may be needed at the test"),
    Situation(UNSEEN, "few domains, some much larger", ("ga", "fedgma"), "the mean must not follow the largest"),
)
# Below so many samples in a step, the page of the method says, it has nothing to go by.
LEAST_BATCH = {"univarfl": 16}


@dataclass(frozen=True)
class Evidence:
    """A row of a paper's table beside FedAvg's, as it was run here: the difference in points."""

    shift: str
    row: str
    method: str  # as the recipe writes it
    title: str  # of the table
    data: str
    mean: float
    half_width: float | None  # of its 95 % interval, from two seeds on
    seeds: int
    verdict: str

    @property
    def text(self) -> str:
        return f"{self.points} ({self.count})"

    @property
    def sentence(self) -> str:
        return f"{self.where}: {self.row.lstrip('+')} {self.points} points over FedAvg, {self.count}, {self.verdict}"

    @property
    def points(self) -> str:
        spread = f" ±{self.half_width:.1f}" if self.half_width is not None and self.seeds >= FEWEST else ""
        return f"{self.mean:+.1f}{spread}"

    @property
    def count(self) -> str:
        return f"{self.seeds} seed{'s' * (self.seeds > 1)}"

    @property
    def where(self) -> str:
        return f"{self.title.partition(':')[0]}, {self.data}"

    def is_of(self, methods: Sequence[str]) -> bool:
        """Whether it is a row of one of these methods, whatever its options."""
        return "+".join(spec.name for spec in parse_sum(self.method)) in methods


def shift_of(config: Config) -> str:
    if config.unseen:
        return UNSEEN
    return LABEL if parse(config.partition).name in LABEL_SKEW else FEATURE


def evidence(blocks: Sequence[Block]) -> Iterator[Evidence]:
    """Of the tables that were run with the paper's rounds and settings and have a row of FedAvg, every other method, by
    the shift of the columns."""
    for block in blocks:
        if block.changes or not block.is_whole:
            continue
        recipe, cells, title = block.recipe, block.values(), block.reproduction().title
        base = next((row for row in recipe.rows if recipe.config(row, recipe.columns[0]).method == "fedavg"), None)
        over = (base.label,) if base else ()
        columns: dict[tuple[str, str, str], list[RecipeColumn]] = {}
        for row, column in recipe.cells() if base else ():
            config, reading = recipe.config(row, column), recipe.reading(row, column)
            if reading.get("read", "accuracy") not in PERCENT:
                continue
            # A calibrated model against one as it is would say nothing of the method.
            if config.method != "fedavg" and base and reading == recipe.reading(base, column):
                columns.setdefault((row.label, config.method, shift_of(config)), []).append(column)
        for (label, method, kind), chosen in columns.items():
            claim = Claim(label, recipe.name, label, over, tuple(escape(column.name) for column in chosen))
            found = judge(claim, recipe, cells).decisive
            if seeds := len(found.ours.by_seed):
                data = dict.fromkeys(column.group or column.name for column in chosen if column.name in found.columns)
                yield Evidence(
                    *(kind, label, method, title, ", ".join(data), round(found.ours.mean, 4)),
                    half_width=round(found.ours.half_width, 4) if seeds > 1 else None,
                    seeds=seeds,
                    verdict=found.ours.verdict,
                )


def stored(known: Sequence[Evidence]) -> str:
    """The text of `evidence.json`, a line for each."""
    return "[\n" + ",\n".join(json.dumps(asdict(one), ensure_ascii=False) for one in known) + "\n]\n"


def read_evidence() -> list[Evidence]:
    """What was measured when this version was made."""
    text = resources.files(experiments.__name__).joinpath(FILE).read_text(encoding="utf-8")
    return [Evidence(**one) for one in json.loads(text)]
