"""Diagnostics while a run trains: an observer that measures at chosen rounds and keeps the files up to date.

Nothing of the run depends on it. A resumed run drops what was recorded of the rounds that it does again.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

from fedkeel.analysis.diagnostic import Diagnostic, Numbers, recorded, write
from fedkeel.analysis.gradients import StepNorms
from fedkeel.analysis.snapshot import of_round
from fedkeel.config import Config, from_one
from fedkeel.engine.local import Worker
from fedkeel.engine.setup import Setup
from fedkeel.errors import FedkeelError
from fedkeel.observer import Aggregated, Observer


class Recorder(Observer):
    """Measures the diagnostics in the first round, every so many and the last. No example: the option `record` of a run
    makes it."""

    def __init__(
        self, diagnostics: Sequence[Diagnostic], directory: Path, setup: Setup, note: Callable[[str], None]
    ) -> None:
        self._diagnostics, self._directory, self._setup, self._note = diagnostics, directory, setup, note
        config, worker = setup.config, setup.worker
        # A network of the same kind over the same images that shares nothing with the one that trains.
        model = copy.deepcopy(worker.model)
        self._own = Worker(config, worker.federation, worker.method, model, worker.device, worker.store)
        self._measured: dict[str, dict[int, Numbers]] = {}
        if any(diagnostic.steps for diagnostic in diagnostics):
            setup.worker.watch_steps(lambda model: StepNorms(model, self._is_due))

    def _is_due(self, round: int) -> bool:
        config = self._setup.config
        return round % config.record_every == 0 or round == config.rounds - 1

    def started(self, config: Config, first_round: int) -> None:
        for diagnostic in self._diagnostics:
            earlier = recorded(self._directory, diagnostic.name)
            self._measured[diagnostic.name] = {round: earlier[round] for round in earlier if round < first_round}

    def aggregated(self, state: Aggregated) -> None:
        if not self._is_due(state.sent.round):
            return
        snapshot = of_round(state, self._own, self._setup.held_out)
        for diagnostic in self._diagnostics:
            measured = self._measured[diagnostic.name]
            try:
                measured[snapshot.round] = diagnostic.measure(snapshot)
                write(self._directory, diagnostic.document(measured, recorded=True))
            except FedkeelError as error:
                # The run is worth more than this look at it.
                self._note(f"Round {from_one(snapshot.round)} has no record of '{diagnostic.name}': {error}")
