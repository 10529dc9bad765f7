"""What a run comes to after its last round: the model that is the result, what clients keep of it, its test in detail.

The test is not a part of the last round, which may not be the best one: so no round is slower for it, and a run that is
stopped meanwhile has nothing to keep of it.
"""

from collections.abc import Iterable
from dataclasses import replace

from fedkeel.core.evaluation import Evaluation
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors, prefixed
from fedkeel.engine.local import LOCAL
from fedkeel.engine.rounds import Federated
from fedkeel.errors import TrainingError

NOTHING = "There are no measures by site and class"


def model_of(run: Federated, server: Server) -> Tensors:
    """Of the best round where that is the result, else of `server`, as it was tested after the last."""
    # What every client has of its own was never trained here, and must not pass for a part of a model.
    initial = {} if run.method.is_personal else run.setup.worker.initial_local
    return {**initial, **(run.best.model or {**server.weights, **server.statistics})}


def personal_of(run: Federated) -> Iterable[tuple[str, Tensors]]:
    """What each client keeps of that model, one client at a time."""
    return run.best.local.items() or run.local_layers()


def examine(run: Federated, server: Server) -> list[Evaluation]:
    """Every test set in detail; nothing, with a note, where that model cannot be tested any more."""
    best, look, note = run.best, run.memory.look, run.observer.note
    if best.is_result:
        # Of a method that keeps every layer at the clients `best.model` is empty, and all that counts is in `local`.
        if run.method.is_personal and not best.local and best.round != server.round:
            note(f"{NOTHING}: the layers of the best round were not kept at the sites.")
            return []
        weights, statistics = (
            {name: best.model[name] for name in group} for group in (server.weights, server.statistics)
        )
        server = replace(server, weights=weights, statistics=statistics)
        if best.local:  # clients that came later have none, and were tested so

            def look(client: str) -> Tensors:
                return prefixed(best.local.get(client, {}), LOCAL)

    try:
        return run.evaluation.examine(server.broadcast(server.weights), look)
    except TrainingError as error:  # the sites have gone: what is trained is trained
        note(f"{NOTHING}: {error}")
        return []
