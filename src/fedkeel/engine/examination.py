"""The test after the last round: every test set in detail, under the model that is the result."""

from dataclasses import replace

from fedkeel.core.evaluation import Evaluation
from fedkeel.core.server import Server
from fedkeel.core.state import prefixed
from fedkeel.engine.local import LOCAL
from fedkeel.engine.rounds import Federated
from fedkeel.errors import TrainingError


def examine(federated: Federated, server: Server) -> list[Evaluation]:
    """Under the model of `server`, or that of the best round. Nothing where it cannot be tested any more, with a note.

    It is not a part of the last round, which may not be the best one: so a run that is stopped meanwhile has nothing to
    keep of it, and no round is slower for it.
    """
    best, note = federated.best_model, federated.observer.note
    if federated.config.result == "best-validation" and federated.best["round"] >= 0:
        # Of a method that keeps every layer at the clients, `best` is empty and all that counts is in `best_local`.
        if federated.method.is_personal and not federated.best_local and federated.best["round"] != server.round:
            note("There are no measures by site and class: the layers of the best round were not kept at the sites.")
            return []
        weights, statistics = ({name: best[name] for name in group} for group in (server.weights, server.statistics))
        server = replace(server, weights=weights, statistics=statistics)
        # Also of those who came later and had none: they were tested as clients without layers of their own.
        if federated.best_local:
            federated.evaluation.kept_as = lambda client, _: prefixed(federated.best_local.get(client, {}), LOCAL)
    try:
        return federated.evaluation.examine(server.broadcast(server.weights))
    except TrainingError as error:  # the sites have gone: what is trained is trained
        note(f"There are no measures by site and class: {error}")
        return []
