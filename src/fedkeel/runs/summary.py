"""The result of a run: what `summary.json` holds, by the rule that its configuration names, and whether a file is
one that a run wrote: somebody may have been at it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fedkeel.config import from_one
from fedkeel.errors import FedkeelError

if TYPE_CHECKING:
    from fedkeel.runs.run import Run

RULES = {
    "last": "the last round",
    "mean-last-10": "the mean of the last ten rounds",
    "best-validation": "the round that was best on the validation data",
}
SHARES = ("accuracy", "balanced-accuracy", "recall", "precision", "f1", "auc", "ece")  # told in percent
# No run may choose these, but they can be looked at: the best by the test itself, as some papers count, and the mean of
# all, which is higher for what is there sooner.
BEST_ROUND, EVERY_ROUND = "best-round", "every-round"
SOURCES = {  # of the noise of private runs, the weakest first
    "seed": "noise from the run's seed, void against whoever knows it",
    "system": "noise from the server's own randomness",
    "sites": "noise from each site's own randomness",
}


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1 + 1e-9


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_known(value: Any) -> bool:
    return value is None or _is_number(value)


def _are_known(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_known, value.values()))


Kinds = dict[str, Callable[[Any], bool]]
RESULTS: Kinds = {
    "accuracy": _is_share,
    "domains": lambda value: isinstance(value, dict) and all(map(_is_share, value.values())),
    "result": lambda value: _is_text(value) and value in RULES,
}
SUMMARY: Kinds = {
    **RESULTS,
    "samples_accuracy": _is_share,
    "unseen": lambda value: value is None or _is_share(value),
    "unseen_domains": _are_names,
    **dict.fromkeys(("bytes_up", "bytes_down", "seconds"), _is_number),
    "executor": _is_text,
}
IF_THERE: Kinds = {
    **dict.fromkeys(("round", "rounds", "planned_rounds", "questions", "epsilon", "delta"), _is_number),
    **dict.fromkeys(("untested_domains", "diverged_domains"), _are_names),
    **dict.fromkeys(("method", "statistics", "device"), _is_text),
    "loss": _is_known,
    "dropped_updates": _is_number,
    "extended": lambda value: isinstance(value, list) and all(map(_is_number, value)),
    "randomness": lambda value: _is_text(value) and value in SOURCES,
    "evaluated_on": lambda value: value == "validation",
}
RECORDS: dict[str, Kinds] = {  # what every line of `metrics.jsonl` of this kind has
    "round": {
        **dict.fromkeys(("round", "clients", "bytes_up", "bytes_down", "questions", "dropped"), _is_number),
        "loss": _is_known,
    },
    "client": {"round": _is_number, "client": _is_text},
    "dropped": {"round": _is_number, "client": _is_text},
    "evaluation": {
        **dict.fromkeys(("round", "samples"), _is_number),
        **dict.fromkeys(("client", "domain", "split", "statistics"), _is_text),
        **dict.fromkeys(("accuracy", "loss"), _is_known),
    },
    "scores": {
        "round": _is_number,
        **dict.fromkeys(("split", "statistics"), _is_text),
        **dict.fromkeys(("average", "samples", "unseen", "loss"), _is_known),
        "domains": _are_known,
    },
}


MAY_LACK = {"clients", "dropped", "bytes_up", "bytes_down", "questions", "samples", "unseen", "loss"}


def is_record(found: Any) -> bool:
    """Whether this is a line of `metrics.jsonl` that a run wrote."""
    if not isinstance(found, dict) or not _is_text(found.get("kind")):
        return False
    kinds, metrics = RECORDS.get(found["kind"], {}), found.get("metrics", {})
    whole = all(sound(found[name]) if name in found else name in MAY_LACK for name, sound in kinds.items())
    return whole and isinstance(metrics, dict) and all(map(_is_averaged, metrics.values()))


def _is_averaged(metric: Any) -> bool:
    parts = isinstance(metric, dict) and _are_known(metric.get("domains"))
    return parts and _is_known(metric.get("average")) and _is_known(metric.get("unseen"))


def unsound(summary: Mapping[str, Any], *, whole: bool = True) -> str:
    """What of it cannot be shown, or nothing. `whole`: everything that is shown of a run, or its results alone."""
    needed = SUMMARY if whole else RESULTS
    for name, is_sound in {**SUMMARY, **IF_THERE}.items():
        if name not in summary and name in needed:
            return f"'{name}' is missing"
        if name in summary and not is_sound(summary[name]):
            return f"'{name}' is {str(summary[name])[:80]!r}"
    return ""


def weakest(private: Iterable[Mapping[str, Any]]) -> str | None:
    """What the noise of these rounds or runs rests on: the run's seed, if it does in one of them."""
    found = {str(given.get("randomness", "seed")) for given in private}
    return next((source for source in SOURCES if source in found), "seed") if found else None


def stopped_early(summary: Mapping[str, Any], patience: int) -> str:
    """One sentence of a run that has had fewer rounds than planned, of any other nothing."""
    if "planned_rounds" not in summary:
        return ""
    number, planned = summary["rounds"], summary["planned_rounds"]
    return f"Stopped after round {number} of {planned}: the validation was not better in {patience} evaluations."


def by_metric(run: Run, metric: str) -> dict[str, Any]:
    """The summary of a finished run with another measure in the place of accuracy; refused where it has none such."""
    summary = run.result()
    if metric == "accuracy":
        return summary
    found = {site: measure.value for site, measure in run.measure(metric).items()}
    known = {site: value for site, value in found.items() if math.isfinite(value)}
    if not known:
        raise FedkeelError(f"No site of '{run.directory}' has a number for '{metric}': choose another metric.")
    average, unseen = (run.measures.average(metric, unseen=unseen).value for unseen in (False, True))
    return {
        **summary,
        "accuracy": average,
        "unseen": unseen if math.isfinite(unseen) else None,
        "domains": known,
        "untested_domains": [*(summary.get("untested_domains") or ()), *(site for site in found if site not in known)],
        "result": "last" if summary["result"] == "mean-last-10" else summary["result"],  # one model is measured
    }


def summarise_run(
    run: Run, held_out: list[str], statistics: str | None = None, rule: str | None = None
) -> dict[str, Any]:
    """The result by a rule, the configured one by default, with what it cost; under the given statistics where both
    were evaluated."""
    scores, rule = run.scores(statistics=statistics), rule or run.config.result
    tested = {entry["round"] for entry in scores}
    good = run.how_good
    validation = [e for e in run.scores("validation") if e["round"] in tested and math.isfinite(good(e))]
    if rule == "best-validation" and not validation:
        rule = "last"  # those who have validation images never replied: the model is that of the last round too
    if rule == "best-validation":
        best = max(validation, key=lambda entry: (good(entry), -entry["round"]))["round"]
        counted = [entry for entry in scores if entry["round"] == best]
    elif rule == BEST_ROUND:
        what = "unseen" if held_out else "average"
        counted = [max(scores, key=lambda entry: (entry[what] or 0.0, -entry["round"]))]
    else:
        counted = scores[{"mean-last-10": -10, EVERY_ROUND: 0}.get(rule, -1) :]

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    where = {(entry["round"], "test", entry["statistics"]) for entry in counted}
    tests = (e for e in run.records("evaluation") if (e["round"], e["split"], e["statistics"]) in where)
    rounds = run.records("round")
    names = dict.fromkeys(name for entry in counted for name in entry["domains"])  # sites come and go
    privacy: dict[str, Any] = {}
    if "epsilon" in rounds[-1]:
        privacy = {"epsilon": rounds[-1]["epsilon"], "delta": run.config.dp_delta, "randomness": weakest(rounds)}
    return {
        "method": run.config.method,
        "result": rule,
        "round": counted[-1]["round"],
        "rounds": from_one(rounds[-1]["round"]),
        **({"planned_rounds": run.config.rounds} if from_one(rounds[-1]["round"]) < run.config.rounds else {}),
        **({"evaluated_on": run.config.evaluate_on} if run.config.evaluate_on != "test" else {}),
        "accuracy": mean(entry["average"] for entry in counted),
        "samples_accuracy": mean(entry["samples"] for entry in counted),
        "unseen": mean(entry["unseen"] for entry in counted),
        "domains": {name: mean(entry["domains"].get(name) for entry in counted) for name in names},
        "unseen_domains": held_out,
        "diverged_domains": list(dict.fromkeys(test["domain"] for test in tests if test["loss"] is None)),
        "loss": mean(entry["loss"] for entry in counted),
        "statistics": counted[-1]["statistics"],
        **{name: sum(record[name] for record in rounds) for name in ("bytes_up", "bytes_down", "questions")},
        "dropped_updates": sum(record["dropped"] for record in rounds),
        **privacy,
    }


def tested_images(run: Run) -> dict[str, int]:
    """How many images each domain was tested on, in the last round that was evaluated."""
    sizes: dict[str, int] = {}
    last = {(entry["round"], entry["split"], entry["statistics"]) for entry in run.scores()[-1:]}
    for record in run.records("evaluation") if last else ():
        if (record["round"], record.get("split"), record.get("statistics")) in last and "samples" in record:
            sizes[record["domain"]] = sizes.get(record["domain"], 0) + int(record["samples"])
    return sizes
