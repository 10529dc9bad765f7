"""Accuracy and loss by round: the convergence curves of every paper (FedWon, Figure 8; FedCoda, Figure 8)."""

from typing import Any

from fedkeel.analysis import Diagnostic, Objects, diagnostic
from fedkeel.analysis.figures import Figure, by_round
from fedkeel.errors import FedkeelError
from fedkeel.runs.run import Run


def evaluated(run: Run) -> list[dict[str, Any]]:
    """The test scores of a run that has been evaluated at least once."""
    scores = run.scores()
    if not scores:
        raise FedkeelError(f"'{run.directory}' has no evaluated round yet: let it train further.")
    return scores


@diagnostic("convergence")
class Convergence(Diagnostic):
    """Test accuracy of the global model by round, of each domain and on average over the domains that train, and the
    mean training loss of the clients."""

    title = "Convergence"
    paper = "FedWon, Figure 8; FedCoda, Figure 8"
    of_records = True

    def of_run(self, run: Run, objects: Objects) -> list[Figure]:
        scores = evaluated(run)
        averages = {s["round"]: {"average": s["average"], "all samples": s.get("samples")} for s in scores}
        for score in scores:
            if score.get("unseen") is not None:
                averages[score["round"]]["unseen domains"] = score["unseen"]
        losses = {record["round"]: {"training": record.get("loss")} for record in run.records("round")}
        for score in scores:
            losses.setdefault(score["round"], {})["test"] = score.get("loss")
        return [
            by_round("Accuracy", "accuracy (0 to 1)", averages),
            by_round("Accuracy by domain", "accuracy (0 to 1)", {s["round"]: s["domains"] for s in scores}),
            by_round("Loss", "cross-entropy", dict(sorted(losses.items()))),
        ]
