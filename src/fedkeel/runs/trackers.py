"""A run's curves in TensorBoard or MLflow, for those who already look there: `fedkeel run --track tensorboard`.

A tracker is an observer like the progress bar: it is told of each round as it ends. The run directory stays the
record of the run; nothing is ever read back from a tracker, and one that fails in the middle does not end the run.
Both packages are extras, imported when one is asked for. Of a comparison each run has a tracker of its own.
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fedkeel.config import from_one
from fedkeel.errors import FedkeelError, unknown
from fedkeel.observer import Observer, Observers
from fedkeel.stopping import Stopped

if TYPE_CHECKING:
    from fedkeel.config import Config
    from fedkeel.core.evaluation import Scores

Outcome = Literal["FINISHED", "KILLED", "FAILED"]  # MLflow's words for a run that is over
_NOBODY = Observer()  # what it is told goes to the log
MLFLOW_RUN = "mlflow.txt"  # in the run directory: which run of MLflow a resumed run goes on with


class Tracker(Observer):
    """What trackers share: the values of a round by name, and what happens when it does not take them.

    Args:
        directory: of the run.
        name: what the run is called in the tracker.
        tell: where a sentence for the user goes.
    """

    kind: ClassVar[str] = ""

    def __init__(self, directory: str | Path, name: str = "", tell: Callable[[str], None] = _NOBODY.note) -> None:
        self.directory = Path(directory)
        self.name, self._tell = name or self.directory.name, tell
        self._open = False

    def started(self, config: Config, first_round: int) -> None:
        try:
            self.open(config, first_round)
        except Exception as error:  # the package's own, of whatever kind
            raise FedkeelError(f"{self.kind} does not take this run: {first_line(error)}") from error
        self._open = True

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:
        if self._open:
            known = {name: value for name, value in values(scores, loss).items() if math.isfinite(value)}
            self._try(lambda: self.log(from_one(round), known))

    def closed(self, outcome: Outcome) -> None:
        """The run is over."""
        if self._open:
            self._try(lambda: self.close(outcome))

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._open = False
            self._tell(f"{self.kind} gets no more of this run, which goes on without it: {first_line(error)}")

    def note(self, text: str) -> None:
        """The progress tells it already."""

    # -- what a tracker writes -------------------------------------------------------------------------------
    @staticmethod
    def share() -> None:
        """Make what several runs have in common, if there is such a thing."""

    def open(self, config: Config, first_round: int) -> None:
        raise NotImplementedError

    def log(self, round: int, values: dict[str, float]) -> None:
        """`round` counts from 1, as people who look at the curves do."""
        raise NotImplementedError

    def close(self, outcome: Outcome) -> None:
        raise NotImplementedError


def first_line(error: Exception) -> str:
    """
    >>> first_line(ValueError("no such host\\nTraceback ..."))
    'no such host.'
    """
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return text.rstrip(".") + "."


def values(scores: Scores | None, loss: float) -> dict[str, float]:
    found = {"train/loss": loss}
    if scores is not None:
        found |= {"test/accuracy": scores.average, "test/accuracy_samples": scores.samples}
        if scores.loss is not None:
            found["test/loss"] = scores.loss
        found |= {f"test/domain/{name}": value for name, value in scores.domains.items()}
        if scores.unseen is not None:
            found["test/accuracy_unseen"] = scores.unseen
    return found


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

    @staticmethod
    def share() -> None:
        import mlflow

        mlflow.MlflowClient().search_experiments(max_results=1)  # a new database gets its tables

    def open(self, config: Config, first_round: int) -> None:
        import mlflow

        kept = self.directory / MLFLOW_RUN
        if first_round > 0 and kept.exists():
            mlflow.start_run(run_id=kept.read_text().strip())
        else:
            run = mlflow.start_run(run_name=self.name)
            kept.write_text(run.info.run_id + "\n")
            # MLflow refuses empty values.
            mlflow.log_params({name: value for name, value in config.to_dict().items() if value != ""})
            mlflow.set_tag("fedkeel.directory", str(self.directory.resolve()))

    def log(self, round: int, values: dict[str, float]) -> None:
        import mlflow

        mlflow.log_metrics({mlflow_name(name): value for name, value in values.items()}, step=round)

    def close(self, outcome: Outcome) -> None:
        import mlflow

        mlflow.end_run(outcome)


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
        raise FedkeelError(unknown("tracker", str(name), TRACKERS))
    if importlib.util.find_spec(name) is None:
        raise FedkeelError(f"'--track {name}' needs {name}, which is not installed: pip install 'fedkeel[{name}]'.")


def prepare(name: str | None) -> None:
    """Before several runs at once: what they share is made a single time, since they would trip over each other.

    In a process of its own, so that no connection of it is inherited by the runs' processes.
    """
    if name is None:
        return
    require(name)
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_share, args=(name, there))  # type: ignore[attr-defined]
    process.start()
    there.close()
    try:
        problem = here.recv_bytes().decode()
    except EOFError:
        problem = "its process died."
    process.join()
    if problem:
        raise FedkeelError(f"{TRACKERS[name].kind} does not take these runs: {problem}")


def _share(name: str, pipe: Connection) -> None:
    try:
        TRACKERS[name].share()
        problem = ""
    except Exception as error:
        problem = first_line(error)
    pipe.send_bytes(problem.encode())


@contextmanager
def tracked(name: str | None, directory: str | Path, observer: Observer, title: str = "") -> Iterator[Observer]:
    """The observer, and beside it the tracker of that name; for None the observer alone.

    `title` is what the run is called in the tracker, by default as its directory is.
    """
    require(name)
    if name is None:
        yield observer
        return
    tracker = TRACKERS[name](directory, title, observer.note)
    outcome: Outcome = "FAILED"
    try:
        yield Observers([observer, tracker])
        outcome = "FINISHED"
    except (Stopped, KeyboardInterrupt):
        outcome = "KILLED"
        raise
    finally:
        tracker.closed(outcome)
