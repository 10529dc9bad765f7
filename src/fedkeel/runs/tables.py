"""A run in a few lines, as a row, and its records as a pandas table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedkeel.core.readable import percent
from fedkeel.errors import FedkeelError

if TYPE_CHECKING:
    import pandas

    from fedkeel.runs.run import Run

MOST_SHOWN = 20  # domains


def shown(run: Run) -> tuple[str, list[Sequence[str]]]:
    """What it is, and its result for each domain as far as a screen has room."""
    summary = run.sound_summary(whole=False)
    result = f"{percent(summary['accuracy'])} %" if summary else "unfinished"
    domains = [(name, percent(value)) for name, value in (summary["domains"] if summary else {}).items()]
    more = [(f"and {len(domains) - MOST_SHOWN} more", "")] if len(domains) > MOST_SHOWN else []
    what = f"{named(run, 'method')} on {named(run, 'data')}"
    caption = f"Run('{run.directory}'): {what}, seed {run.config.seed}, {result}"
    return caption, [("domain", "accuracy %"), *domains[:MOST_SHOWN], *more] if domains else []


def named(run: Run, option: str) -> str:
    """What its method or its data are called, also where they were given in Python."""
    return run.given[option]["name"] if option in run.given else str(getattr(run.config, option))


def result_row(run: Run) -> dict[str, Any]:
    """The result: `accuracy`, `domains.NAME`, and of the same round the average of each metric, over the same sites."""
    result = run.sound_summary(whole=False) or {}
    tests = run.scores(statistics=result.get("statistics", "global"))
    metrics = [entry.get("metrics", {}) for entry in tests if entry["round"] == result["round"]]
    means = {name: found["average"] for entry in metrics for name, found in entry.items()}
    return {"accuracy": result["accuracy"], **{f"domains.{n}": v for n, v in result["domains"].items()}, **means}


def as_frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    pandas = need_pandas()
    # As pandas has no number, also where a column has none at all, e.g. the loss of a model that diverged.
    return pandas.DataFrame([{n: math.nan if value is None else value for n, value in row.items()} for row in rows])


def need_pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise FedkeelError("A table needs pandas, which is not installed: pip install 'fedkeel[notebook]'.") from None
    return pandas
