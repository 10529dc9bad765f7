"""How evenly the domains are served: the spread of their accuracies and the worst of them.

The spread is the standard deviation over the domains that train, with n - 1, as the comparisons of FedHEAL report it;
unseen domains are shown and do not count. With one domain there is none.
"""

import statistics
from collections.abc import Collection

from fedkeel.analysis import Diagnostic, Objects, diagnostic
from fedkeel.analysis.figures import Figure, by_round, keyed, table
from fedkeel.config import from_one
from fedkeel.errors import FedkeelError
from fedkeel.runs.run import Run


def spread(accuracies: Collection[float]) -> float | None:
    """Standard deviation over domains (n - 1)."""
    return statistics.stdev(accuracies) if len(accuracies) > 1 else None


def unseen_domains(run: Run, objects: Objects) -> set[str]:
    if summary := run.summary:
        return set(summary["unseen_domains"])
    if objects.federation is not None:
        return {client.domain for client in objects.federation.unseen}
    return {name.strip() for name in run.config.unseen.split(",")}


@diagnostic("fairness")
class Fairness(Diagnostic):
    """Standard deviation of the accuracy over the training domains, and the accuracy of the worst and the best of them.
    A method can raise the average and still leave one domain behind."""

    title = "How evenly the domains are served"
    paper = "FedHEAL (Chen et al. 2024)"

    def of_run(self, run: Run, objects: Objects) -> list[Figure]:
        scores, unseen = run.evaluated(), unseen_domains(run, objects)
        rounds = {}
        for score in scores:
            known = {domain: value for domain, value in score["domains"].items() if value is not None}
            if known:
                rounds[score["round"]] = {d: a for d, a in known.items() if d not in unseen} or known
        if not rounds:
            raise FedkeelError(f"'{run.directory}' has no accuracy of any domain: let it train further.")
        extremes = {r: {"worst": min(d.values()), "best": max(d.values())} for r, d in rounds.items()}
        spreads = {r: {"standard deviation": spread(d.values())} for r, d in rounds.items()}
        last = max(rounds)
        final = next(score["domains"] for score in reversed(scores) if score["round"] == last)
        worst, lowest = min(rounds[last].items(), key=lambda item: item[1])
        rows = [[d, a and round(100 * a, 2), a and round(100 * (a - lowest), 2)] for d, a in final.items()]
        note = f"The worst training domain is {worst}."
        figures = [
            by_round("Spread over the domains", "standard deviation of accuracy (0 to 1)", spreads),
            by_round("Worst and best domain", "accuracy (0 to 1)", extremes),
            table(f"Round {from_one(last)}", ["domain", "accuracy, %", "above the worst, points"], rows, note=note),
        ]
        return keyed(figures, "spread over the domains", spread(rounds[last].values()), "low", percent=True)
