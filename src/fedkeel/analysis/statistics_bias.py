"""How far the aggregated batch-norm statistics lie from the ideal ones (HBN, Eqs. 5, 13 and 14).

    |mu_g - mu^_g|,    mu^_g = 1/N sum_k sum_i f(w_g, x_k^i)        and likewise |sigma_g^2 - sigma^_g^2|

The aggregated ones are those that the global model is tested with; the ideal ones are the moments of what each layer
gets of all clients' training data under the same weights. Averaged statistics of clients' own models are not these, and
the less so the more the clients differ; those that HBN collects on the broadcast weights are, up to its moving average.

The paper leaves open what the layers before normalise with, and what is done over channels: here they normalise as in
testing, so that each layer's own fault is seen, and the distance is the mean over channels. The variance is that of the
population (Eq. 13 divides by N - 1).
"""

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic, over_rounds
from fedkeel.analysis.figures import Figure, bars, keyed
from fedkeel.analysis.snapshot import RUNNING, some_clients
from fedkeel.engine.local import Worker
from fedkeel.errors import FedkeelError


@diagnostic("statistics-bias")
class StatisticsBias(Diagnostic):
    """The distance of each layer's aggregated mean and variance from those over all clients' training data under the
    global weights, averaged over channels. Zero is what an evaluation needs."""

    title = "How far the aggregated batch-norm statistics are from the ideal ones"
    paper = "HBN, Eq. 14"
    needs = "batch-norm statistics"

    def check(self, worker: Worker) -> None:
        super().check(worker)
        if not any(name.endswith("running_mean") for name in worker.layout.statistics):
            raise FedkeelError(
                f"'{self.name}' looks at statistics that the server makes, and '{worker.method.name}' leaves them on "
                "its clients: choose 'statistics-divergence'."
            )

    def measure(self, snapshot: Snapshot) -> Values:
        ideal = snapshot.input_moments(some_clients(snapshot.federation, snapshot.worker.config.seed))
        aggregated, found = snapshot.model.statistics, dict[str, dict[str, float]]()
        for kind, entry in RUNNING.items():
            names = {layer: f"{layer}.{entry}" if layer else entry for layer in ideal}
            found[kind] = {
                layer: float((aggregated[name].double().cpu() - ideal[layer][kind]).abs().mean())
                for layer, name in names.items()
            }
        return found

    def figures(self, measured: list[Measured]) -> list[Figure]:
        figures = list[Figure]()
        for kind in RUNNING:
            label = f"distance of the {kind}s"
            figures += over_rounds(f"{kind.capitalize()}s", label, measured, kind, log_y=True)
            by_layer = {"aggregated": measured[-1].values[kind]}
            figures.append(bars(f"{kind.capitalize()}s by depth, {measured[-1]}", label, by_layer, "layer", log_y=True))
        last = list(measured[-1].values["mean"].values())
        return keyed(figures, "distance of batch-norm means from the ideal", sum(last) / len(last), "low")
