"""The norm of the gradient of the global objective at the global model (UniVarFL, Theorem 1).

    min_{t < T} E ||grad L(theta^t)||^2 <= C / sqrt(T E),        L = sum_k n_k / N L_k

L_k is the mean over the client's training images, without augmentation, in batches of `batch_size` normalised with
their own statistics as in training, of the loss that the run trains on and of the terms of methods that depend on a
batch alone, such as UniVarFL's. Terms that need the rest of a round (extras, a client's memory) are left out: FedProx's
has no gradient here. What clients keep to themselves is not of the global model, and is no part of theta.
"""

from contextlib import nullcontext

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic
from fedkeel.analysis.figures import Figure, by_round, keyed
from fedkeel.analysis.gradient_norms import gradient_norm
from fedkeel.analysis.snapshot import some_clients
from fedkeel.core.state import prefixed
from fedkeel.engine.local import LOCAL, Worker
from fedkeel.errors import FedkeelError
from fedkeel.nn.surgery import batch_statistics

OF_A_ROUND = ("start", "finish", "extras", "before_training")


@diagnostic("global-gradient")
class GlobalGradient(Diagnostic):
    """The squared norm of the gradient of all clients' loss together at the global model, and the smallest so far,
    which goes to zero as 1/sqrt(T E) where the theorem holds. Training has come to rest where it is small."""

    title = "Norm of the global gradient"
    paper = "UniVarFL, Theorem 1"
    of_every_model = True

    def check(self, worker: Worker) -> None:
        if not worker.layout.weights:
            raise FedkeelError(f"Nothing travels in '{worker.method.name}': '{self.name}' looks at a global model.")

    def measure(self, snapshot: Snapshot) -> Values:
        worker, model = snapshot.worker, snapshot.worker.model.eval()
        sites = some_clients(snapshot.federation, worker.config.seed)
        samples = sum(site.samples for site in sites)
        parts = [part for part in worker.method.parts if part.overrides("loss")]
        terms = [part for part in parts if not any(map(part.overrides, OF_A_ROUND))]
        model.zero_grad(set_to_none=True)
        for site in sites:
            client = worker.arrive(site.name, snapshot.model, prefixed(snapshot.kept(site.name), LOCAL))
            for batch in snapshot.batches(site, site.train, worker.config.batch_size):
                with batch_statistics(model) if len(batch.y) > 1 else nullcontext():
                    output = model(batch.x)
                loss = worker.task_loss(output.logits, batch.y)
                for part in terms:
                    loss = loss + part.loss(client, batch, output)
                (loss * (len(batch.y) / samples)).backward()  # type: ignore[no-untyped-call]
        entries = dict(model.named_parameters())
        norm = float(gradient_norm(entries[name] for name in worker.layout.weights if name in entries))
        model.zero_grad(set_to_none=True)
        return {"squared norm": norm**2}

    def figures(self, measured: list[Measured]) -> list[Figure]:
        found, least = dict[int, dict[str, float | None]](), float("inf")
        for entry in measured:
            least = min(least, entry.values["squared norm"])
            found[entry.round] = {"at the global model": entry.values["squared norm"], "smallest so far": least}
        figures = [by_round(self.title, "squared norm", found, log_y=True)]
        return keyed(figures, "smallest squared norm of the global gradient", least, "low")
