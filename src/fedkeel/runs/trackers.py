"""A run's curves in TensorBoard or MLflow, for those who already look there: `fedkeel run --track tensorboard`.

A tracker is an observer like the progress bar: it is told of each round as it ends. The run directory stays the
record of the run; nothing is ever read back from a tracker, and one that fails in the middle does not end the run.
Both packages are extras, imported when one is asked for. Of a comparison each run has a tracker of its own.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedkeel.config import from_one
from fedkeel.errors import FedkeelError, first_line, unknown
from fedkeel.observer import Observer, Observers
from fedkeel.stopping import Stopped

if TYPE_CHECKING:
    from fedkeel.config import Config
    from fedkeel.core.evaluation import Scores

Outcome = Literal["FINISHED", "KILLED", "FAILED"]  # MLflow's words for a run that is over
MLFLOW_RUN = "mlflow.txt"  # in the run directory: which run of MLflow a resumed run goes on with


class Tracker(Observer):
    """What trackers share: the values of a round by name, and what happens when one does not take them.

    A tracker writes in `open`, `log` and `close`. Whatever its package raises there, it is open no more.
    """

    kind = ""
    _open = False

    def __init__(self, directory: str | Path, name: str = "", observer: Observer | None = None) -> None:
        """Of the run in `directory`, under this name; a sentence for the user goes to the observer."""
        self.directory = Path(directory)
        self.name, self._note = name or self.directory.name, (observer or Observer()).note

    def started(self, config: Config, first_round: int) -> None:
        try:
            self.open(config, first_round)
        except Exception as error:  # the package's own, of whatever kind
            raise FedkeelError(f"{self.kind} does not take this run: {first_line(error)}.") from error
        self._open = True

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:
        self._try(self.log, from_one(round), values(scores, loss))

    def closed(self, outcome: Outcome) -> None:
        self._try(self.close, outcome)

    def _try(self, act: Callable[..., None], *given: Any) -> None:
        try:
            if self._open:
                act(*given)
        except Exception as error:
            self._open = False
            self._note(f"{self.kind} gets no more of this run, which goes on without it: {first_line(error)}.")

    def open(self, config: Config, first_round: int) -> None: ...

    def log(self, round: int, values: dict[str, float]) -> None:
        """`round` counts from 1, as people who look at the curves do."""

    def close(self, outcome: Outcome) -> None: ...


def values(scores: Scores | None, loss: float) -> dict[str, float]:
    """What is known of a round, by name; a number that is not finite is not."""
    found: dict[str, float | None] = {"train/loss": loss}
    if scores is not None:
        found |= {
            "test/accuracy": scores.average,
            "test/accuracy_samples": scores.samples,
            "test/loss": scores.loss,
            "test/accuracy_unseen": scores.unseen,
            **{f"test/domain/{name}": value for name, value in scores.domains.items()},
            **{f"test/{name}": found["average"] for name, found in scores.metrics.items()},
        }
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


class TensorBoard(Tracker):
    """Event files in the run directory: `tensorboard --logdir runs` shows all runs side by side."""

    kind = "TensorBoard"
    _writer: Any

    def open(self, config: Config, first_round: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What a stopped run wrote after its last checkpoint is done again.
        self._writer = SummaryWriter(str(self.directory / "tensorboard"), purge_step=from_one(first_round))
        if first_round == 0:
            self._writer.add_text("config", "\n".join(f"    {line}" for line in config.to_toml().splitlines()))

    def log(self, round: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self, outcome: Outcome) -> None:
        self._writer.close()


class MLflow(Tracker):
    """A run of MLflow with the options as parameters, wherever MLFLOW_TRACKING_URI and its kin point to."""

    kind = "MLflow"
    _mlflow: Any

    def open(self, config: Config, first_round: int) -> None:
        import mlflow

        self._mlflow = mlflow
        kept = self.directory / MLFLOW_RUN
        if first_round > 0 and kept.exists():
            mlflow.start_run(run_id=kept.read_text().strip())
            return
        run = mlflow.start_run(run_name=self.name)
        kept.write_text(run.info.run_id + "\n")
        # MLflow refuses empty values.
        mlflow.log_params({name: value for name, value in config.to_dict().items() if value != ""})
        mlflow.set_tag("fedkeel.directory", str(self.directory.resolve()))

    def log(self, round: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics({mlflow_name(name): value for name, value in values.items()}, step=round)

    def close(self, outcome: Outcome) -> None:
        self._mlflow.end_run(outcome)


def mlflow_name(name: str) -> str:
    """MLflow takes letters, digits and a few signs; a domain may be called anything."""
    kept = "".join(c if (c.isascii() and c.isalnum()) or c in "_-. /" else "_" for c in name)
    return "/".join(part if part.strip(". ") else "_" for part in kept.split("/"))[:250]


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def require(name: str | None) -> str | None:
    """The name as it is; an error in one sentence, before anything trains, where the tracker cannot be had."""
    if name is not None and name not in TRACKERS:
        raise FedkeelError(unknown("tracker", str(name), TRACKERS))
    if name is not None and importlib.util.find_spec(name) is None:
        raise FedkeelError(f"'--track {name}' needs {name}, which is not installed: pip install 'fedkeel[{name}]'.")
    return name


@contextmanager
def tracked(name: str | None, directory: str | Path, observer: Observer, title: str = "") -> Iterator[Observer]:
    """The observer, and beside it the tracker of that name; for None the observer alone.

    `title` is what the run is called in the tracker, by default as its directory is.
    """
    require(name)
    if name is None:
        yield observer
        return
    tracker = TRACKERS[name](directory, title, observer)
    outcome: Outcome = "FAILED"
    try:
        yield Observers([observer, tracker])
        outcome = "FINISHED"
    except (Stopped, KeyboardInterrupt):
        outcome = "KILLED"
        raise
    finally:
        tracker.closed(outcome)
