"""How far the clients' weights have moved in a round, and how far apart (client drift)."""

from fedkeel.analysis import Numbers, Snapshot, diagnostic
from fedkeel.errors import FedkeelError


@diagnostic("client-drift", paper="SCAFFOLD (Karimireddy et al. 2020)", better="low")
def client_drift(run: Snapshot) -> Numbers:
    """How far the clients' weights have moved.

    The distance between the weights that a client was sent and those it sent back. Clients that drift disagree.
    """
    if not run.updates:
        raise FedkeelError("What clients sent is gone after the run: run with --record client-drift.")
    distances = {}
    for name, update in run.updates.items():
        moved = [update.weights[entry] - sent for entry, sent in run.sent.weights.items()]
        distances[name] = sum(float(difference.double().square().sum()) for difference in moved) ** 0.5
    return {"client drift": sum(distances.values()) / len(distances), "distance by client": distances}
