"""A run's curves in TensorBoard, MLflow or Weights & Biases, for those who already look there: `--track tensorboard`.

A tracker is an observer like the progress bar: it is told of each round as it ends. Nothing is ever read back from one,
and one that fails in the middle does not end the run. The packages are imported when one is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
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

Outcome = Literal["FINISHED", "KILLED", "FAILED"]
Log = Callable[[int, dict[str, float]], None]  # of a round, counted from 1
Close = Callable[[Outcome], Any]


class Tracker(Observer):
    """Tells a tracker of a run. Once its package has raised anything, it is told no more."""

    def __init__(self, name: str, directory: str | Path, title: str, note: Callable[[str], None]) -> None:
        self.name, self.directory, self.title, self._note = name, Path(directory), title or Path(directory).name, note
        self.kept = self.directory / f"{name}.txt"  # which run of the tracker's a resumed run goes on with
        self._acts: tuple[Log, Close] | None = None

    def before(self, first_round: int) -> str | None:
        return self.kept.read_text().strip() if first_round > 0 and self.kept.exists() else None

    def started(self, config: Config, first_round: int) -> None:
        try:
            self._acts = TRACKERS[self.name](self, config, first_round)
        except Exception as error:  # the package's own, of whatever kind
            raise FedkeelError(f"The tracker {self.name} does not take this run: {first_line(error)}.") from error

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:
        self._try(0, from_one(round), values(scores, loss))

    def closed(self, outcome: Outcome) -> None:
        self._try(1, outcome)

    def _try(self, act: int, *given: Any) -> None:
        try:
            if self._acts is not None:
                self._acts[act](*given)
        except Exception as error:
            self._acts = None
            self._note(f"The tracker {self.name} gets no more of this run, which goes on: {first_line(error)}.")


def values(scores: Scores | None, loss: float) -> dict[str, float]:
    """What is known of a round, by name; a number that is not finite is not."""
    found: dict[str, float | None] = {"train/loss": loss}
    if scores is not None:
        found |= {"test/accuracy": scores.average, "test/accuracy_samples": scores.samples, "test/loss": scores.loss}
        found |= {"test/accuracy_unseen": scores.unseen}
        found |= {f"test/domain/{name}": value for name, value in scores.domains.items()}
        found |= {f"test/{name}": metric["average"] for name, metric in scores.metrics.items()}
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def tensorboard(run: Tracker, config: Config, first_round: int) -> tuple[Log, Close]:
    """Event files in the run directory: `tensorboard --logdir runs` shows all runs side by side."""
    from torch.utils.tensorboard import SummaryWriter

    # What a stopped run wrote after its last checkpoint is done again.
    writer: Any = SummaryWriter(str(run.directory / "tensorboard"), purge_step=from_one(first_round))
    writer.add_text("config", "\n".join(f"    {line}" for line in config.to_toml().splitlines()))

    def log(round: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, round)
        writer.flush()

    return log, lambda _: writer.close()


def mlflow(run: Tracker, config: Config, first_round: int) -> tuple[Log, Close]:
    """A run of MLflow with the options as parameters, wherever MLFLOW_TRACKING_URI and its kin point to."""
    import mlflow

    if before := run.before(first_round):
        mlflow.start_run(run_id=before)
    else:
        run.kept.write_text(mlflow.start_run(run_name=run.title).info.run_id + "\n")
        # MLflow refuses empty values.
        mlflow.log_params({name: value for name, value in config.to_dict().items() if value != ""})
        mlflow.set_tag("fedkeel.directory", str(run.directory.resolve()))

    def log(round: int, values: dict[str, float]) -> None:
        mlflow.log_metrics({mlflow_name(name): value for name, value in values.items()}, step=round)

    return log, mlflow.end_run


def mlflow_name(name: str) -> str:
    """MLflow takes letters, digits and a few signs; a domain may be called anything."""
    return re.sub(r"(^|/)[. ]*(?=/|$)", r"\1_", re.sub(r"[^A-Za-z0-9_\-. /]", "_", name))[:250]


def wandb(run: Tracker, config: Config, first_round: int) -> tuple[Log, Close]:
    """A run of Weights & Biases with the options as its config; WANDB_MODE=offline keeps it in the run directory."""
    about = {"project": "fedkeel", "name": run.title, "config": config.to_dict(), "dir": str(run.directory)}
    made = importlib.import_module("wandb").init(id=run.before(first_round), resume="allow", **about)
    run.kept.write_text(f"{made.id}\n")

    def log(round: int, values: dict[str, float]) -> None:
        made.log(values, step=round)

    return log, lambda outcome: made.finish(exit_code=int(outcome != "FINISHED"))


TRACKERS = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}


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
    tracker = Tracker(name, directory, title, observer.note)
    outcome: Outcome = "FAILED"
    try:
        yield Observers([observer, tracker])
        outcome = "FINISHED"
    except (Stopped, KeyboardInterrupt):
        outcome = "KILLED"
        raise
    finally:
        tracker.closed(outcome)
