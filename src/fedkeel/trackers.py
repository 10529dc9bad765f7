"""A run's curves in TensorBoard or MLflow, for those who already look there: `fedkeel run --track tensorboard`.

A tracker is an observer like the progress bar: it is told of each round as it ends. The run directory stays the
record of the run; nothing is ever read back from a tracker. Both packages are extras, imported when one is asked for.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeel.errors import FedkeelError, unknown
from fedkeel.observer import Observer, Observers

if TYPE_CHECKING:
    from fedkeel.config import Config
    from fedkeel.engine.evaluation import Scores

MLFLOW_RUN = "mlflow.txt"  # in the run directory: which run of MLflow a resumed run goes on with


class Tracker(Observer):
    """What trackers share: the values of a round by name."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:
        self.log(round, {name: value for name, value in values(scores, loss).items() if math.isfinite(value)})

    def log(self, round: int, values: dict[str, float]) -> None:
        raise NotImplementedError

    def note(self, text: str) -> None:
        """The progress tells it already."""

    def close(self, *, finished: bool) -> None:
        """The run is over, or was stopped."""


def values(scores: Scores | None, loss: float) -> dict[str, float]:
    found = {"train/loss": loss}
    if scores is not None:
        found |= {"test/accuracy": scores.average, "test/accuracy_samples": scores.samples, "test/loss": scores.loss}
        found |= {f"test/domain/{name}": value for name, value in scores.domains.items()}
        if scores.unseen is not None:
            found["test/accuracy_unseen"] = scores.unseen
    return found


class TensorBoard(Tracker):
    """Event files in the run directory: `tensorboard --logdir runs` shows all runs side by side."""

    def __init__(self, directory: str | Path) -> None:
        super().__init__(directory)
        self._writer: Any = None

    def started(self, config: Config, first_round: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What a stopped run wrote after its last checkpoint is done again.
        self._writer = SummaryWriter(str(self.directory / "tensorboard"), purge_step=first_round)
        if first_round == 0:
            self._writer.add_text("config", "\n".join(f"    {line}" for line in config.to_toml().splitlines()))

    def log(self, round: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self, *, finished: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class MLflow(Tracker):
    """A run of MLflow with the options as parameters, wherever MLFLOW_TRACKING_URI and its kin point to."""

    def __init__(self, directory: str | Path) -> None:
        super().__init__(directory)
        self._active = False

    def started(self, config: Config, first_round: int) -> None:
        import mlflow

        kept = self.directory / MLFLOW_RUN
        if first_round > 0 and kept.exists():
            mlflow.start_run(run_id=kept.read_text().strip())
        else:
            run = mlflow.start_run(run_name=self.directory.name)
            kept.write_text(run.info.run_id + "\n")
            # MLflow refuses empty values.
            mlflow.log_params({name: value for name, value in config.to_dict().items() if value != ""})
            mlflow.set_tag("fedkeel.directory", str(self.directory.resolve()))
        self._active = True

    def log(self, round: int, values: dict[str, float]) -> None:
        import mlflow

        mlflow.log_metrics({mlflow_name(name): value for name, value in values.items()}, step=round)

    def close(self, *, finished: bool) -> None:
        if self._active:
            import mlflow

            mlflow.end_run("FINISHED" if finished else "KILLED")


def mlflow_name(name: str) -> str:
    """MLflow takes letters, digits and a few signs; a domain may be called anything.

    >>> mlflow_name("test/domain/<real photos>")
    'test/domain/_real photos_'
    """
    kept = "".join(c if (c.isascii() and c.isalnum()) or c in "_-. /" else "_" for c in name)
    return "/".join(part if part.strip(". ") else "_" for part in kept.split("/"))[:250]


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def require(name: str | None) -> None:
    """An error in one sentence, before anything trains, where the tracker cannot be had."""
    if name is None:
        return
    if name not in TRACKERS:
        raise FedkeelError(unknown("tracker", name, TRACKERS))
    if importlib.util.find_spec(name) is None:
        raise FedkeelError(f"'--track {name}' needs {name}, which is not installed: pip install 'fedkeel[{name}]'.")


@contextmanager
def tracked(name: str | None, directory: str | Path, observer: Observer) -> Iterator[Observer]:
    """The observer, and beside it the tracker of that name; for None the observer alone."""
    require(name)
    if name is None:
        yield observer
        return
    tracker = TRACKERS[name](directory)
    finished = False
    try:
        yield Observers([observer, tracker])
        finished = True
    finally:
        tracker.close(finished=finished)
