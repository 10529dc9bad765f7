"""How evenly the domains are served: the spread of their accuracies and the worst of them.

The spread is the standard deviation over the domains that train, with n - 1, as the comparisons of FedHEAL report it;
unseen domains are shown and do not count. With one domain there is none.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedkeel.analysis.convergence import evaluated
from fedkeel.analysis.diagnostic import Diagnostic, diagnostic
from fedkeel.analysis.figures import Figure, by_round, keyed, table
from fedkeel.analysis.moment import Objects
from fedkeel.config import from_one
from fedkeel.errors import FedkeelError
from fedkeel.runs.run import Run


def spread(accuracies: Mapping[str, float]) -> float | None:
    """Standard deviation over domains (n - 1)."""
    values = list(accuracies.values())
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def worst(accuracies: Mapping[str, float]) -> str:
    """The domain with the lowest accuracy, the first of equals."""
    return min(accuracies, key=lambda domain: accuracies[domain])


@diagnostic("fairness")
class Fairness(Diagnostic):
    """Spread over the domains and the worst domain, by round."""

    title = "How evenly the domains are served"
    what = (
        "Standard deviation of the accuracy over the training domains, and the accuracy of the worst and the best of "
        "them. A method can raise the average and still leave one domain behind."
    )
    paper = "FedHEAL (Chen et al. 2024)"
    of_records = True

    def of_run(self, run: Run, objects: Objects) -> list[Figure]:
        scores, summary = evaluated(run), run.summary
        if summary:
            unseen = set(summary["unseen_domains"])
        elif objects.federation is not None:
            unseen = {client.domain for client in objects.federation.unseen}
        else:
            unseen = {name.strip() for name in run.config.unseen.split(",")}
        rounds = {}
        for score in scores:
            known = {domain: value for domain, value in score["domains"].items() if value is not None}
            if known:
                rounds[score["round"]] = {d: a for d, a in known.items() if d not in unseen} or known
        if not rounds:
            raise FedkeelError(f"'{run.directory}' has no accuracy of any domain: let it train further.")
        extremes = {r: {"worst": min(d.values()), "best": max(d.values())} for r, d in rounds.items()}
        spreads = {r: {"standard deviation": spread(d)} for r, d in rounds.items()}
        last = max(rounds)
        final = next(score["domains"] for score in reversed(scores) if score["round"] == last)
        lowest = rounds[last][worst(rounds[last])]
        rows = [[domain, value, None if value is None else value - lowest] for domain, value in final.items()]
        note = f"The worst training domain is {worst(rounds[last])}."
        figures = [
            by_round("Spread over the domains", "standard deviation of accuracy (0 to 1)", spreads),
            by_round("Worst and best domain", "accuracy (0 to 1)", extremes),
            table(f"Round {from_one(last)}", ["domain", "accuracy", "above the worst"], rows, note=note),
        ]
        return keyed(figures, "spread over the domains", spread(rounds[last]), "low", percent=True)
