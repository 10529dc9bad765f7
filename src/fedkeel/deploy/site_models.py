"""What a site keeps of a run: the model that it ends with, with the layers that the method keeps here and, if the site
wants that, its own statistics mixed in (see docs/calibration.md). It lies in a folder of the site, itself a run
directory, and never travels; no server can ask for it or knows of it."""

from __future__ import annotations

import logging
import re
import shutil
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from fedkeel.core.evaluation import summarise
from fedkeel.core.messages import Broadcast
from fedkeel.core.state import Tensors
from fedkeel.data.outline import FILE as FEDERATION
from fedkeel.data.outline import Outline
from fedkeel.engine.local import Worker
from fedkeel.engine.rounds import EVALUATION_FIELDS
from fedkeel.errors import first_line
from fedkeel.files import seal
from fedkeel.nn.calibration import PRIOR, normalised_layers
from fedkeel.runs.run import Run
from fedkeel.runs.store import Store
from fedkeel.runs.summary import summarise_run

RUN = re.compile(r"[0-9a-f]{16}")  # the name of one
KEPT_RUNS = 3
MOST_IMAGES = 1000  # the server waits, and more would hardly change the statistics
log = logging.getLogger("fedkeel")


@dataclass
class SiteModels:
    """`folder/RUN`, of the latest few runs.

    Attributes:
        calibrate: whether the site wants its own statistics in them; without, it keeps what a personal method has made
            for it, as it is.
    """

    folder: Path
    calibrate: bool = True

    def keep(self, run: str, worker: Worker, broadcast: Broadcast, memory: Tensors) -> None:
        """Write the model of a broadcast, as it is tested here."""
        if not self.calibrate and not worker.method.is_personal:
            return
        try:
            forget_other_runs(self.folder / run)
            shutil.rmtree(self.folder / run, ignore_errors=True)
            self._write(self.folder / run, worker, broadcast, memory)
            log.info("The model for this site is in '%s'.", self.folder / run)
        except Exception as error:  # whatever it is, the server gets its reply
            log.warning("The model for this site is not kept: %s", first_line(error))

    def _write(self, folder: Path, worker: Worker, broadcast: Broadcast, memory: Tensors) -> None:
        """A run directory of one client."""
        stranger = worker.load_tested(broadcast, memory)
        (site,) = worker.federation
        if self.calibrate and normalised_layers(worker.model):
            prior = 0.0 if stranger else PRIOR
            site, done = worker.evaluator.calibrate(site, MOST_IMAGES, prior, always=stranger)
            log.info("Calibrated: %s", " ".join(done.sentences()))
        elif self.calibrate:
            log.info("The model has no running statistics to calibrate, and is kept as it is.")
        tested = worker.evaluator.evaluate(site, ["test"])
        scores = summarise(tested, []).record()
        local = {name: worker.entries[name] for name in worker.layout.local}
        shared = {name: value for name, value in worker.entries.items() if name not in local}
        outline = Outline.of(replace(worker.federation, clients=(site,), unseen=()))
        with closing(Store.create(folder, worker.config, {FEDERATION: seal(outline.to_dict())})) as store:
            at = {"round": broadcast.round}
            for one in tested:
                store.append({"kind": "evaluation", **at} | {name: getattr(one, name) for name in EVALUATION_FIELDS})
            store.append({"kind": "scores", **at, "split": "test", "statistics": "global"} | scores)
            nothing = dict.fromkeys(("clients", "dropped", "bytes_up", "bytes_down", "questions"), 0)
            store.append({"kind": "round", **at, **nothing, "loss": None})
            store.flush()
            made = {"executor": "sites", "device": str(worker.device), "seconds": 0.0}
            summary = summarise_run(Run(folder), []) | made
            store.finish(summary, shared, [(site.name, local)] if worker.method.is_personal else [])


def forget_other_runs(folder: Path) -> None:
    """Keep what is of the latest few runs; a site does not grow with every run it took part in."""
    others = [path for path in folder.parent.glob("*") if RUN.fullmatch(path.name) and path != folder]
    others.sort(key=lambda path: path.stat().st_mtime)
    for path in others[: max(0, len(others) - KEPT_RUNS + 1)]:
        shutil.rmtree(path, ignore_errors=True)
