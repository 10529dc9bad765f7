"""How many images of each class each client has (HBN, Figure 3): the partition that a run trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedkeel.analysis.diagnostic import Diagnostic, diagnostic
from fedkeel.analysis.figures import Figure, matrix
from fedkeel.analysis.moment import Objects, some_clients
from fedkeel.data.federation import Client, Federation
from fedkeel.engine.setup import load_federation
from fedkeel.errors import FedkeelError
from fedkeel.runs.run import PYTHON_OBJECT, Run


def label_counts(federation: Federation, clients: Sequence[Client]) -> NDArray[np.int64]:
    """(K, C): training images of class c on client k."""
    counts = [np.bincount(federation.labels[c.train], minlength=federation.num_classes) for c in clients]
    return np.stack(counts).astype(np.int64)


@diagnostic("label-distribution")
class LabelDistribution(Diagnostic):
    """Training images by client and class."""

    title = "How many images of each class each client has"
    what = (
        "Training images by client and class. Rows that look alike: the labels are spread evenly. Rows with few filled "
        "cells: clients see few classes, as under a small Dirichlet coefficient."
    )
    paper = "HBN, Figure 3"
    of_records = True

    def of_run(self, run: Run, objects: Objects) -> list[Figure]:
        federation = objects.federation
        if federation is None:
            if run.config.data == PYTHON_OBJECT:
                raise FedkeelError(
                    f"The data of '{run.directory}' was given in Python, not by name: "
                    "use fedkeel.analysis.run(..., federation=...)."
                )
            federation = load_federation(run.config)
        clients, total = some_clients(federation, run.config.seed), len(federation.clients)
        note = {"note": f"{len(clients)} of {total:,} clients, drawn at random."} if len(clients) < total else {}
        names, counts = [client.name for client in clients], label_counts(federation, clients).tolist()
        return [matrix("Training images", names, federation.classes, counts, "class", "client", **note)]
