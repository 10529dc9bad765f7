"""The result of a run, by the rule that its configuration names."""

from __future__ import annotations

from typing import Any

from fedkeel.runs.run import Run
from fedkeel.runs.summary import weakest


def summarise_run(run: Run, held_out: list[str], statistics: str | None = None) -> dict[str, Any]:
    """The result by the configured rule, with what it cost; under the given statistics where both were evaluated."""
    scores, rule = run.scores(statistics=statistics), run.config.result
    tested = {entry["round"] for entry in scores}
    validation = [entry for entry in run.scores("validation") if entry["round"] in tested]
    if rule == "best-validation" and not validation:
        rule = "last"  # those who have validation images never replied: the model is that of the last round too
    if rule == "best-validation":
        best = max(validation, key=lambda entry: (entry["average"], -entry["round"]))["round"]
        chosen = [entry for entry in scores if entry["round"] == best]
    else:
        chosen = scores[-10:] if rule == "mean-last-10" else scores[-1:]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    where = {(entry["round"], "test", entry["statistics"]) for entry in chosen}
    tests = (e for e in run.records("evaluation") if (e["round"], e["split"], e["statistics"]) in where)
    losses = [entry["loss"] for entry in chosen if entry["loss"] is not None]

    rounds = run.records("round")
    names = dict.fromkeys(name for entry in chosen for name in entry["domains"])  # sites come and go
    unseen = [entry["unseen"] for entry in chosen if entry["unseen"] is not None]
    return {
        "method": run.config.method,
        "result": rule,
        "round": chosen[-1]["round"],
        "rounds": run.config.rounds,
        "accuracy": mean([entry["average"] for entry in chosen]),
        "samples_accuracy": mean([entry["samples"] for entry in chosen]),
        "unseen": mean(unseen) if unseen else None,
        "domains": {name: mean([e["domains"][name] for e in chosen if name in e["domains"]]) for name in names},
        "unseen_domains": held_out,
        "diverged_domains": list(dict.fromkeys(test["domain"] for test in tests if test["loss"] is None)),
        "loss": mean(losses) if losses else None,
        "statistics": chosen[-1]["statistics"],
        "bytes_up": sum(record["bytes_up"] for record in rounds),
        "bytes_down": sum(record["bytes_down"] for record in rounds),
        "questions": sum(record["questions"] for record in rounds),
        "dropped_updates": sum(record["dropped"] for record in rounds),
        **({"epsilon": rounds[-1]["epsilon"], "delta": run.config.dp_delta} if "epsilon" in rounds[-1] else {}),
        **({"randomness": weakest(rounds)} if "epsilon" in rounds[-1] else {}),
    }
