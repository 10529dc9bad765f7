"""How many samples of each class each client has (HBN, Figure 3): the partition that a run trained on."""

from fedkeel.analysis import Diagnostic, Objects, diagnostic
from fedkeel.analysis.figures import Figure, matrix
from fedkeel.analysis.snapshot import some_clients
from fedkeel.core import imports
from fedkeel.engine.setup import load_federation
from fedkeel.runs.origin import data_from_afar
from fedkeel.runs.run import Run


@diagnostic("label-distribution")
class LabelDistribution(Diagnostic):
    """Training images by client and class. Rows that look alike: the labels are spread evenly. Rows with few filled
    cells: clients see few classes, as under a small Dirichlet coefficient."""

    title = "How many samples of each class each client has"
    paper = "HBN, Figure 3"

    def of_run(self, run: Run, objects: Objects) -> list[Figure]:
        objects.refuse_missing(run, "data")
        imports.refuse_unknown_names(run.directory)
        federation = objects.federation or data_from_afar(run.directory, run.config) or load_federation(run.config)
        clients, total = some_clients(federation, run.config.seed), len(federation.clients)
        counts = [federation.labels[c.train].bincount(minlength=federation.num_classes).tolist() for c in clients]
        note = {"note": f"{len(clients)} of {total:,} clients, drawn at random."} if len(clients) < total else {}
        names = [client.name for client in clients]
        return [matrix("Training samples", names, federation.classes, counts, "class", "client", **note)]
