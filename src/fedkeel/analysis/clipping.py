"""How often gradients are clipped, and by how much (FedCoda, Lemma 1 and Proposition 1).

Of parameter i in a step, clipped to g~_i = delta_i g_i, the lemma bounds

    ||g~_i|| <= alpha gamma_i    (14)        ||g_i - g~_i|| <= max{||g_i|| - alpha gamma_i, 0}    (15)

A step counts as clipped if the gradient of any parameter became shorter. The bias of a step is that of Proposition 1,
||g~ - g|| = sqrt(sum_i (||g_i|| - ||g~_i||)^2), since clipping scales each g_i and does not turn it: so only norms are
needed. They are taken in every local step, beside those of `gradient-norms`, and averaged over a client's steps.
"""

from collections.abc import Callable

import numpy as np
from torch import nn

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic
from fedkeel.analysis.figures import Figure, by_round, keyed
from fedkeel.analysis.gradient_norms import CLIPPING, GradientNorms
from fedkeel.engine.local import WATCHED, StepWatch, Worker
from fedkeel.errors import FedkeelError

SCALING = ("fedcoda", "fixbn")  # what they do to gradients is this clipping and nothing else


@diagnostic("clipping")
class Clipping(Diagnostic):
    """The share of local steps in which a gradient was clipped, the share of all parameters' gradients, and the
    distance between the gradient as computed and as clipped. It shows what a switch of statistics does to training."""

    title = "How often gradients are clipped, and by how much"
    paper = "FedCoda, Lemma 1"

    def check(self, worker: Worker) -> None:
        parts = [part.name for part in worker.method.parts if part.overrides("gradients")]
        others = [name for name in parts if name not in SCALING]
        if others or not (parts or worker.config.clip_norm):
            why = f"'{others[0]}' changes them otherwise" if others else f"'{worker.method.name}' clips none"
            raise FedkeelError(f"'{self.name}' looks at clipped gradients, and {why}: use it with 'fedcoda'.")

    def watch(self, is_recorded: Callable[[int], bool]) -> Callable[[nn.Module], StepWatch]:
        return lambda model: GradientNorms(model, is_recorded)

    def measure(self, snapshot: Snapshot) -> Values:
        if not snapshot.updates:
            raise FedkeelError(f"The local steps are gone after the run: run with --record {self.name}.")
        told = {client: update.metrics for client, update in snapshot.updates.items()}
        return {
            kind: {client: metrics[WATCHED + name] for client, metrics in told.items() if WATCHED + name in metrics}
            for kind, name in CLIPPING.items()
        }

    def figures(self, measured: list[Measured]) -> list[Figure]:
        def means(values: Values, *kinds: str) -> dict[str, float | None]:
            return {kind: float(np.mean([*values[kind].values()])) if values[kind] else None for kind in kinds}

        shares = {entry.round: means(entry.values, "steps", "gradients") for entry in measured}
        figures = [
            by_round("Clipped, mean over the clients", "share (0 to 1)", shares),
            by_round("Clipping bias by client", "distance", {entry.round: entry.values["bias"] for entry in measured}),
        ]
        return keyed(figures, "share of clipped steps", means(measured[-1].values, "steps")["steps"], percent=True)
