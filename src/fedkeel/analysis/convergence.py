"""Accuracy and loss by round: the convergence curves of every paper (FedWon, Figure 8; FedCoda, Figure 8)."""

from fedkeel.analysis import Diagnostic, Objects, diagnostic
from fedkeel.analysis.figures import Figure, by_round
from fedkeel.runs.run import Run


@diagnostic("convergence")
class Convergence(Diagnostic):
    """Test accuracy of the global model by round, of each domain and on average over the domains that train, and the
    mean training loss of the clients."""

    title = "Convergence"
    paper = "FedWon, Figure 8; FedCoda, Figure 8"

    def of_run(self, run: Run, objects: Objects) -> list[Figure]:
        scores = run.evaluated()
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
